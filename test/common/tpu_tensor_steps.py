"""A tensor-parallel transformer's training step, for tests that ask the TPU compiler.

Wide enough for activations and logits to be what memory goes to: the batch is long, the vocabulary
large, the model not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp.distributed.mesh import Mesh

WIDTH, HEAD, VOCABULARY, ROWS, LENGTH = 1024, 256, 32768, 16, 1024


class Block(nn.Module):
    """Pre-norm attention and MLP, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm1(x)
        query, key, value = (
            layer(before).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2) * HEAD**-0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan_of(*, sequence: bool, loss: bool) -> dict[str, Any]:
    """How it is cut."""
    from xla_fsdp.tensor_parallel import (
        ColwiseParallel,
        Replicate,
        RowwiseParallel,
        SequenceParallel,
        Shard,
    )

    between = Shard(1) if sequence else Replicate()
    logits = Shard(-1) if loss else Replicate()
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=logits, use_local_output=not loss
        ),
    }
    cut = ColwiseParallel(input_layouts=between)
    plan |= {f"blocks.*.{name}": cut for name in ("query", "key", "value", "up")}
    plan |= {f"blocks.*.{n}": RowwiseParallel(output_layouts=between) for n in ("out", "down")}
    norms = ("blocks.*.norm1", "blocks.*.norm2", "norm")
    return plan | dict.fromkeys(norms, SequenceParallel()) if sequence else plan


def build(
    mesh: Mesh, depth: int = 2, sequence: bool = True, loss: bool = True, remat: bool = True
) -> Callable[[], Any]:
    """A step of the model, cut over the mesh's axis ``tensor`` and sharded over the others, in
    bf16.

    Args:
        mesh: ``shard`` and ``tensor``.
        depth: number of blocks.
        sequence: sequence parallel, too.
        loss: loss parallel, too.
        remat: whether blocks are recomputed in backward.
    """
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module
    from xla_fsdp.tensor_parallel import loss_parallel, parallelize_module

    model: Any = Transformer(depth)
    plan = plan_of(sequence=sequence, loss=loss)
    parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
    options: dict[str, Any] = {"mesh": mesh["shard"], "compute_dtype": torch.bfloat16}
    for index, block in enumerate(model.blocks):
        unit = checkpoint_module(block) if remat else block
        model.blocks[index] = XlaFullyShardedDataParallel(unit, **options)
    model = XlaFullyShardedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long).to(torch_xla.device())

    def step() -> float:
        with loss_parallel() if loss else nullcontext():
            result = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        result.backward()
        value = result.detach()
        del result  # what autograd keeps for it would be outputs of the program
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return value.item()

    return step
