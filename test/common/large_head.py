"""A model with a head whose weight is used in pieces, and a step of it for virtual chips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, BATCH, LENGTH = 128, 2, 8


class Model(nn.Module):
    """An embedding, two blocks that are units, and a head."""

    def __init__(self, classes: int, *, bias: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=bias)

    def forward(self, tokens: Tensor, *targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x), *targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, targets.flatten(), label_smoothing=0.1)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = torch.randint(0, 130, (2, BATCH, LENGTH), generator=generator)
    return made[0], made[1]


def build_step(plain: int = 0) -> Callable[[], Tensor]:
    """Return a step; for ``plain``, of the plain model on the batches of so many ranks."""
    classes, width, rows = 9088, 256, 192
    torch.manual_seed(0)
    model: Any = Model(classes, bias=True, width=width)
    places = range(plain)
    if not plain:
        from xla_fsdp import XlaFullyShardedDataParallel
        from xla_fsdp.nn import large_weights
        from xla_fsdp.xla import ops

        large_weights.LEAST_BYTES = 2**16
        large_weights.PIECE_BYTES = ops.world_size() * rows * 4 * width
        for index, block in enumerate(model.blocks):
            model.blocks[index] = XlaFullyShardedDataParallel(block)
        model = XlaFullyShardedDataParallel(model)
        places = range(ops.rank(), ops.rank() + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    number = 0

    def step() -> Tensor:
        nonlocal number
        device = next(model.parameters()).device
        batches = [[each.to(device) for each in batch(rank, number)] for rank in places]
        number += 1
        loss = torch.stack([loss_of(model(tokens), goal) for tokens, goal in batches]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Two loops over the head, and the number of the first row of the rank's part of the table.
        if not plain and len(model._fsdp_unit.loops.made) != 3:
            raise AssertionError("the head is not used in pieces, or no rows are sent")
        return loss

    return step


def step_of(kind: str) -> Callable[[], Tensor]:
    """Return a step of the model in units, "plain" or with a loss by "cross entropy"."""
    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.nn.chunked import LinearCrossEntropy
    from xla_fsdp.xla import ops

    model: Any = Model(3072)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = XlaFullyShardedDataParallel(block)
    if kind == "cross entropy":
        model.head = XlaFullyShardedDataParallel(LinearCrossEntropy(WIDTH, 3072))
    model = XlaFullyShardedDataParallel(model)
    tokens, targets = (each.to(ops.device()) for each in batch(0, 0))

    def step() -> Tensor:
        output = model(tokens, *([targets] if kind == "cross entropy" else []))
        loss = output.mean() if kind == "cross entropy" else loss_of(output, targets)
        loss.backward()
        return loss.detach()

    return step
