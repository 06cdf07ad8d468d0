"""A small transformer and its training step, for tests that ask the TPU compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp import LinearCrossEntropy
from xla_fsdp.distributed.mesh import Mesh

WIDTH, HEADS, VOCABULARY, LENGTH = 128, 2, 512, 128


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query @ key.transpose(-1, -2) * (width // HEADS) ** -0.5).softmax(-1)
        mixed = (weights @ value).transpose(1, 2).reshape(rows, length, width)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, depth: int, width: int = WIDTH, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(
    depth: int = 2,
    width: int = WIDTH,
    mesh: Mesh | None = None,
    replicas: int = 0,
    barriers: bool = True,
    one_step: bool = False,
    fp32_reduce_scatter: bool = False,
    meta: bool = False,
    scan: bool = False,
    offload: bool = False,
    rows: int = 2,
    cut: bool = False,
    vocabulary: int = VOCABULARY,
    fails: str = "",
) -> Callable[[], Any]:
    """A step of the wrapped model, its blocks rematerialized, in bf16.

    Args:
        depth: number of blocks.
        width: of the model.
        mesh: replicas and shards (default: shards alone).
        replicas: shard inside so many groups of ranks, and average over them; 0 for one group.
        barriers: whether units are fenced.
        one_step: reduce over all ranks at once, whatever the torus.
        fp32_reduce_scatter: reduce gradients in fp32.
        meta: build the model on the meta device, so that one unit is in memory at a time.
        scan: run the blocks as one loop.
        offload: and let what they keep wait in the host's memory.
        rows: of the batch.
        cut: make two programs of a step, which ends the first one after the forward.
        vocabulary: rows of the embedding and of the head.
        fails: "build" or "step": raise there, as a user's code may; "nothing": return None.
    """
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module, init_mesh, scan_blocks
    from xla_fsdp.distributed.collectives import XlaCollectives
    from xla_fsdp.xla import ops

    if fails == "build":
        raise ValueError("no model\nof that name")
    if fails == "nothing":
        return None  # type: ignore[return-value]
    everyone = [list(range(ops.world_size()))]
    options: dict[str, Any] = {
        "compute_dtype": torch.bfloat16,
        "fp32_reduce_scatter": fp32_reduce_scatter,
        "optimization_barrier_in_forward": barriers,
        "optimization_barrier_in_backward": barriers,
    }
    if replicas:
        mesh = init_mesh((replicas, len(everyone[0]) // replicas), ("replica", "shard"))
    if mesh is not None:
        options["mesh"] = mesh
    if one_step:
        options["collectives"] = XlaCollectives(None, 0, len(everyone[0]), [everyone])
    with torch.device("meta") if meta else contextlib.nullcontext():
        model: Any = Transformer(depth, width, vocabulary)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = XlaFullyShardedDataParallel(checkpoint_module(block), **options)
    model = XlaFullyShardedDataParallel(model, **options)
    if scan:
        scan_blocks(model.blocks, offload_activations=offload)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long).to(torch_xla.device())

    def step() -> float:
        if fails == "step":
            raise ValueError("the batch does not fit the mask")
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        if cut:
            torch_xla.sync()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return loss.item()

    return step


class Classifier(nn.Module):
    """A small embedding and one block, before a head of many classes."""

    def __init__(self, width: int, classes: int, pieces: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.block = Block(width)
        self.head = LinearCrossEntropy(width, classes, pieces=pieces)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(x)), target)


def build_streamed(
    pieces: int = 0, width: int = 512, classes: int = 65536, rows: int = 1024
) -> Callable[[], Any]:
    """A step of a model whose head computes the loss, in bf16.

    Args:
        pieces: in how many the head streams; 0 for as many as it thinks best.
        width: of the model.
        classes: of the head.
        rows: with a target each.
    """
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "shard_param_on_dim_0": True}
    model: Any = Classifier(width, classes, pieces or None)
    model.block = XlaFullyShardedDataParallel(checkpoint_module(model.block), **options)
    model.head = XlaFullyShardedDataParallel(model.head, **options)
    model = XlaFullyShardedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(rows // LENGTH, LENGTH, dtype=torch.long).to(torch_xla.device())

    def step() -> float:
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return loss.item()

    return step


def build_in_place(depth: int = 3, prefetch: int = 0, reduce: str = "bf16") -> Callable[[], Any]:
    """The same by ``fully_shard``, without rematerialization.

    Args:
        depth: number of blocks.
        prefetch: how many blocks ahead each one gathers, in forward and backward.
        reduce: dtype of gradients on the wire, "bf16" or "f32"; "hook" for bf16 by a hook.
    """
    import torch_xla

    from xla_fsdp import MixedPrecisionPolicy, comm_hooks, fully_shard

    reduce_dtype = torch.bfloat16 if reduce == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    model: Any = Transformer(depth)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks if prefetch else []):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(index - prefetch, 0) : index][::-1])
    if reduce == "hook":
        model.register_comm_hook(comm_hooks.DefaultState(), comm_hooks.bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, LENGTH, dtype=torch.long).to(torch_xla.device())

    def step() -> float:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return loss.item()

    return step
