"""Grouped products by JAX's megablox kernels, on a TPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.shard_layout import LANES
from xla_fsdp.nn.experts.products import Implementation
from xla_fsdp.xla.kernels import call_jax, has_jax

DTYPES = (torch.bfloat16, torch.float32)
HEIGHTS = (512, 256, 128, 64)
"""Rows of a tile. A tile in which several experts have rows is computed once for each."""
MOST_TWICE = 0.1
"""The share of rows that may be computed again by this, unless the lowest tiles have more."""
BLOCK_BYTES = 2 * 2**20
"""Of an operand's tile: two of each of three are in vector memory, 16 MiB, with one of sums."""


def problem(rows: Tensor) -> str | None:
    """Return what the kernel cannot take; None if nothing."""
    if not has_jax():
        return "JAX is not installed (pip install 'torch_xla[pallas]')"
    if rows.dtype not in DTYPES:
        return f"it takes bfloat16 and float32, not {rows.dtype}"
    return None


def implementation(*, interpret: bool = False) -> Implementation:
    """Return products by the kernels, or by an interpreter of them that runs on CPU."""

    def multiply(
        rows: Tensor, weight: Tensor, sizes: Tensor, transposed: bool, total: int
    ) -> Tensor:
        function = _Multiply(transposed, total, interpret)
        [result] = call_jax(function, [rows, weight, sizes], interpret=interpret)
        return result

    def outer(left: Tensor, right: Tensor, sizes: Tensor, total: int) -> Tensor:
        [result] = call_jax(_Outer(total, interpret), [left, right, sizes], interpret=interpret)
        return result

    return Implementation(multiply, outer)


MEGABLOX = implementation()


def _count(rows: Tensor, weight: Tensor, sizes: Tensor, transposed: bool, total: int) -> Tensor:
    width = weight.shape[1 if transposed else 2]
    _ = torch.empty(rows.shape, device="meta") @ torch.empty(rows.shape[1], width, device="meta")
    return rows.new_zeros(len(rows), width)


COUNTED = Implementation(
    _count,
    lambda left, right, sizes, total: left.new_zeros(len(sizes), left.shape[1], right.shape[1]),
)
"""Computes zeros, with a product of the kernel's operations for those who count them."""


def height_of(num_rows: int, num_experts: int) -> int:
    """Return the rows of a tile: the most of ``HEIGHTS`` with which at most ``MOST_TWICE`` of the
    rows of so many experts are computed again."""
    most = MOST_TWICE * num_rows
    fitting = (each for each in HEIGHTS if (num_experts - 1) * each <= most)
    return next(fitting, HEIGHTS[-1])


def width_of(size: int, most: int) -> int:
    """Return the width of a tile, at most ``most``: all of ``size``, or else the widest of whole
    lanes by which ``size`` is padded by less than an eighth; ``LANES`` if none does."""
    if size <= most:
        return size
    candidates = range(most // LANES * LANES, 0, -LANES)
    return next((each for each in candidates if -size % each * 8 < size), LANES)


# ---------------------------------------------------------------- in JAX


@dataclass(frozen=True)
class _Multiply:
    transposed: bool
    total: int
    interpret: bool

    def __call__(self, rows: Any, weight: Any, sizes: Any) -> Any:
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        count, inner = rows.shape
        height = height_of(count * len(sizes) // self.total, len(sizes))
        most = BLOCK_BYTES // rows.dtype.itemsize
        depth = width_of(inner, most // height)
        width = width_of(weight.shape[1 if self.transposed else 2], most // depth)
        result = gmm(
            _padded(rows, height),
            weight,
            sizes,
            rows.dtype,
            (height, depth, width),
            transpose_rhs=self.transposed,
            interpret=self.interpret,
        )[:count]
        if self.total > len(sizes):  # the kernel writes nothing to rows of no expert
            result = jnp.where((jnp.arange(count) < sizes.sum())[:, None], result, 0)
        return (result,)


@dataclass(frozen=True)
class _Outer:
    total: int
    interpret: bool

    def __call__(self, left: Any, right: Any, sizes: Any) -> Any:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        height = height_of(len(left) * len(sizes) // self.total, len(sizes))
        most = BLOCK_BYTES // left.dtype.itemsize
        depth = width_of(left.shape[1], min(1024, most // height))
        tiling = height, depth, width_of(right.shape[1], most // max(depth, height))
        left, right = _padded(left, height), _padded(right, height)
        return (tgmm(left.T, right, sizes, left.dtype, tiling, interpret=self.interpret),)


def _padded(rows: Any, height: int) -> Any:
    import jax.numpy as jnp

    return jnp.pad(rows, [(0, -len(rows) % height), (0, 0)])
