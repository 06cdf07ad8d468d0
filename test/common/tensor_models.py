"""Transformers for tensor parallelism, and the plans that cut them.

Sizes are such that 2 and 4 ranks divide them. ``Gpt`` has biases, learned positions and a head tied
to its embedding; ``Llama`` grouped-query attention, rotary positions, and a gated MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp import attention

VOCABULARY, LENGTH, WIDTH, HEADS, KV_HEADS, DEPTH = 24, 8, 32, 8, 4, 2
HEAD = WIDTH // HEADS


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [rows, heads, length, head]; [rows, length, heads * head]."""
    length = query.shape[-2]
    scores = query @ key.transpose(-1, -2) * HEAD**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
    return mixed.transpose(1, 2).flatten(2)


def in_heads(x: Tensor) -> Tensor:
    """[rows, heads, length, head], of as many heads as there are."""
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


class Attention(nn.Module):
    """Of several heads; query, key and value projections take one tensor."""

    def __init__(self, kv_heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.key = nn.Linear(WIDTH, kv_heads * HEAD, bias=bias)
        self.value = nn.Linear(WIDTH, kv_heads * HEAD, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.groups = HEADS // kv_heads
        self.fused = False  # by the package's function, on XLA

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        query, key, value = (in_heads(layer(x)) for layer in (self.query, self.key, self.value))
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        if self.fused and x.device.type == "xla":
            mixed = attention(query, key, value, is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2))
        key, value = (t.repeat_interleave(self.groups, 1) for t in (key, value))
        return self.out(attended(query, key, value))


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Pairs of features turned by the angles in ``rotation``, [length, head / 2, 2]."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class GptBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """GPT-2 in small."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([GptBlock() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RmsNorm(nn.Module):
    """As in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


class FeedForward(nn.Module):
    """Gated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Pre-norm grouped-query attention and gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(), RmsNorm()
        self.attention = Attention(KV_HEADS, bias=False)
        self.mlp = FeedForward()

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Llama in small."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([LlamaBlock() for _ in range(DEPTH)])
        self.norm = RmsNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** -(torch.arange(HEAD // 2) / 2))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()], -1))

    def forward(self, ids: Tensor) -> Tensor:
        x, rotation = self.tokens(ids), self.rotation[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


class FusedLlama(Llama):
    """By the package's attention."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.fused = True


def plan_of(model: str, *, sequence: bool = False, loss: bool = False) -> dict[str, Any]:
    """How ``model`` ("Gpt" or "Llama") is cut.

    Args:
        model: name of the class.
        sequence: activations between the cut layers are cut along the sequence.
        loss: logits stay cut, for ``loss_parallel``.
    """
    from xla_fsdp.tensor_parallel import (
        ColwiseParallel,
        PrepareModuleInput,
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
    plan |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan["blocks.*.attention.out"] = RowwiseParallel(output_layouts=between)
    if model == "Gpt":
        plan["blocks.*.up"] = ColwiseParallel(input_layouts=between)
        plan["blocks.*.down"] = RowwiseParallel(output_layouts=between)
    else:
        plan |= {f"blocks.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan["blocks.*.mlp.down"] = RowwiseParallel(output_layouts=between)
    if sequence:
        plan |= {name: SequenceParallel() for name in ("blocks.*.norm1", "blocks.*.norm2", "norm")}
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        if model == "Gpt":
            plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
            plan["blocks.*.attention"] = PrepareModuleInput(**whole)
        else:
            both = {key: (*value, None) for key, value in whole.items()}
            plan["blocks.*.attention"] = PrepareModuleInput(**both)
            plan["blocks.*.mlp"] = PrepareModuleInput(**whole)
    return plan
