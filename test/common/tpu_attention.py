"""Steps with attention kernels, for tests that ask the TPU compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp import Mesh, attention

WIDTH, LENGTH = 256, 4096

# (heads, key heads, size, dtype, length, options of ``attention``)
KINDS: dict[str, tuple[int, int, int, torch.dtype, int, dict[str, Any]]] = {
    "llama": (8, 2, 128, torch.bfloat16, 4096, {"is_causal": True}),
    "gemma": (4, 2, 256, torch.bfloat16, 4096, {"is_causal": True, "soft_cap": 50, "window": 700}),
    "packed": (4, 4, 64, torch.bfloat16, 4096, {"is_causal": True, "boundaries": (0, 77, 500)}),
    "both_sides": (4, 1, 128, torch.bfloat16, 1000, {"window": 99}),
    "odd": (2, 2, 80, torch.bfloat16, 77, {}),
    "wide": (8, 4, 128, torch.bfloat16, 4096, {"is_causal": True}),
    "float32": (2, 1, 256, torch.float32, 4096, {"is_causal": True, "scale": 0.1}),
}


class Layer(nn.Module):
    """Adds attention of one kind."""

    def __init__(self, kind: str = "llama") -> None:
        super().__init__()
        self.heads, self.key_heads, self.size, self.dtype, _, self.options = KINDS[kind]
        self.qkv = nn.Linear(WIDTH, (self.heads + 2 * self.key_heads) * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2).to(self.dtype)
        parts = heads.split([self.heads, self.key_heads, self.key_heads], 1)
        options = dict(self.options)
        if "boundaries" in options:
            options["boundaries"] = torch.tensor(options["boundaries"], device=x.device)
        mixed = attention(*parts, **options)
        return x + self.out(mixed.transpose(1, 2).flatten(2).to(x.dtype))


class FlashLayer(Layer):
    """By torch_xla's own function."""

    def forward(self, x: Tensor) -> Tensor:
        from torch_xla.experimental.custom_kernel import flash_attention

        heads = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.key_heads, self.key_heads], 1)
        key, value = (
            each.repeat_interleave(self.heads // self.key_heads, 1) for each in (key, value)
        )
        mixed = flash_attention(query, key, value, causal=True, sm_scale=self.size**-0.5)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class SplashLayer(Layer):
    """By torch_xla's other function, whose mesh is that of the device of this rank."""

    def forward(self, x: Tensor) -> Tensor:
        from torch_xla.distributed.spmd import Mesh as SpmdMesh
        from torch_xla.experimental.splash_attention import SplashAttentionConfig, splash_attention

        _stand_in_for_flax()
        heads = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.key_heads, self.key_heads], 1)
        key, value = (
            each.repeat_interleave(self.heads // self.key_heads, 1) for each in (key, value)
        )
        mesh = str(SpmdMesh([0], (1, 1), ("data", "fsdp")))
        sizes = [each.name for each in fields(SplashAttentionConfig) if "_block_" in each.name]
        config = SplashAttentionConfig(mesh=mesh, **dict.fromkeys(sizes, 512)).to_json()
        mixed = splash_attention(query * self.size**-0.5, key, value, config)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def _stand_in_for_flax() -> None:
    """torch_xla's function imports flax, for checkpoints, and does not install it."""
    if "flax" not in sys.modules and find_spec("flax") is None:
        for name in ("flax", "flax.training", "flax.training.checkpoints"):
            module: Any = sys.modules.setdefault(name, ModuleType(name))
        sys.modules["flax.training"].checkpoints = module  # type: ignore[attr-defined]


class PlainLayer(Layer):
    """By torch, with all scores."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.key_heads, self.key_heads], 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class EveryKind(nn.Module):
    """Layers of all kinds, each on as many tokens as its kind has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(kind) for kind in KINDS])

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.layers, KINDS.values(), strict=True)
        return sum(layer(x[:, : kind[4]]).sum(1, keepdim=True) for layer, kind in pairs)


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "every": lambda: [EveryKind()],
    "loop": lambda: [Layer(), Layer()],
    "wide": lambda: [Layer("wide"), Layer("wide")],
    "flash": lambda: [FlashLayer(), FlashLayer()],
    "splash": lambda: [SplashLayer(), SplashLayer()],
    "plain": lambda: [PlainLayer(), PlainLayer()],
}


def build(
    kind: str = "loop",
    length: int = LENGTH,
    remat: str = "",
    method: str = "auto",
    layers: str = "scanned",
    mesh: Mesh | None = None,
) -> Callable[[], Any]:
    """A step of sharded layers.

    Args:
        kind: "every" (one of all ``KINDS``), or two layers: "loop", "wide" (more key heads),
            "flash" or "splash" (by torch_xla's own functions) or "plain" (by torch's).
        length: of the sequence.
        remat: name of what a scanned layer keeps.
        method: of ``context_parallel``.
        layers: "scanned", if there are two, "checkpointed", or "units" that keep what they compute.
        mesh: with an axis ``context``, over which the sequence is cut; default: of all ranks.
    """
    import torch_xla

    from xla_fsdp import (
        XlaFullyShardedDataParallel,
        checkpoint_module,
        context_parallel,
        scan_blocks,
    )

    options = {"compute_dtype": torch.bfloat16, "mesh": mesh}
    modules = LAYERS[kind]()
    if layers == "checkpointed":
        modules = [checkpoint_module(each) for each in modules]
    blocks = [XlaFullyShardedDataParallel(each, **options) for each in modules]
    model = XlaFullyShardedDataParallel(nn.Sequential(*blocks), **options)
    if layers == "scanned" and len(blocks) > 1:
        scan_blocks(blocks, remat=[remat] if remat else "full")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(1, length, WIDTH).to(torch_xla.device())

    def context() -> AbstractContextManager[None]:
        if mesh is None:
            return nullcontext()
        cut = {"buffers": [x, torch.arange(length, device=x.device)], "buffer_seq_dims": [1, 0]}
        return context_parallel(mesh["context"], **cut, method=method)

    def step() -> None:
        optimizer.zero_grad()
        with context():
            model(x).float().square().mean().backward()
        optimizer.step()
        torch_xla.sync()

    return step
