"""Tensors packed into the buckets that collectives send, and unpacked again.

A bucket is [rows, width]: one large tensor in rows, or several *flat* ones, [n] each, side by side
in rows of lanes. Unpacked tensors are copies, as views would keep the whole bucket alive.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.shard_layout import LANES
from xla_fsdp.distributed.xla import ops

TILE = 16 * LANES
"""Elements of a TPU tile of 16-bit elements, of which flat tensors fill a multiple per rank: the
TPU compiler turns the reduce-scatter of a 1-D array, or of fewer rows, into a full all-reduce and a
slice."""

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)  # by identity: plans are kept, and their buckets are keys
class Bucket:
    """Which tensors one collective sends.

    Args:
        numbers: of the tensors in it.
        shapes: of one rank's shards, [n] or [rows, width].
        dtype: in which they travel.
    """

    numbers: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def in_rows(self) -> bool:
        """Whether it holds one tensor in rows."""
        return len(self.shapes[0]) > 1

    @property
    def sizes(self) -> list[int]:
        """Elements of the shards of flat tensors."""
        return [size for (size,) in self.shapes]

    def pack(self, shards: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """Copy the shards of all tensors, by number and of any shapes, to [rows, width]."""
        if self.in_rows:
            return ops.copied(shards[self.numbers[0]], self.shapes[0])
        pairs = zip(self.numbers, self.shapes, strict=True)
        return self.pack_flat([ops.shaped(shards[at], shape) for at, shape in pairs])

    def pack_gathered(self, gathered: Mapping[int, Tensor]) -> Tensor:
        """Pack the shards of all ranks, [num_shards, n] or rows, to [num_shards * rows, width]."""
        if self.in_rows:
            return gathered[self.numbers[0]]
        return self.pack_flat([gathered[at] for at in self.numbers])

    def pack_flat(self, flat: Sequence[Tensor]) -> Tensor:
        """Lay flat tensors side by side, [..., n] each, and pad them to [rows, width]."""
        joined = torch.cat(list(flat), dim=-1)
        missing = -joined.shape[-1] % TILE
        return (F.pad(joined, (0, missing)) if missing else joined).reshape(-1, LANES)

    def unpack(self, rows: Tensor, num_shards: int | None = None) -> list[Tensor]:
        """Return what ``pack`` was given, in ``shapes``; with ``num_shards``, ``pack_gathered``."""
        if self.in_rows:
            return [rows]
        flat = rows.reshape(-1) if num_shards is None else rows.reshape(num_shards, -1)
        sizes = self.sizes
        if not flat.numel():
            return [flat for _ in sizes]
        padding = flat.shape[-1] - sum(sizes)
        return ops.pieces(flat, [*sizes, padding] if padding else sizes)[: len(sizes)]


def plan_buckets(
    shapes: Mapping[int, Shape], dtypes: Mapping[int, torch.dtype], limit: float, copies: int = 1
) -> tuple[Bucket, ...]:
    """Return as few buckets as possible: one for each tensor in rows, and others for flat ones of a
    dtype. Empty tensors have one each, of which nothing is sent.

    Args:
        shapes: in which shards travel, by number of the tensor.
        dtypes: likewise.
        limit: bytes of consecutive tensors that may share a bucket; one tensor may be larger.
        copies: how many shards of each tensor count towards it.
    """
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for number in shapes:
        by_dtype[dtypes[number]].append(number)
    return tuple(
        Bucket(tuple(packed), tuple(shapes[at] for at in packed), dtype)
        for dtype, numbers in by_dtype.items()
        for run in _runs(numbers, shapes, limit / (dtype.itemsize * copies))
        for packed in _flat_together(run, shapes)
    )


def buckets_for(tensors: Mapping[int, Tensor], limit: float = math.inf) -> tuple[Bucket, ...]:
    """Return buckets for tensors, by number, that travel as they are; with several dims in rows."""
    shapes = {
        number: (each.shape[:-1].numel(), each.shape[-1]) if each.dim() > 1 else tuple(each.shape)
        for number, each in tensors.items()
    }
    return plan_buckets(shapes, {number: each.dtype for number, each in tensors.items()}, limit)


def by_number(
    buckets: Iterable[Bucket], unpacked: Callable[[Bucket], list[Tensor]]
) -> dict[int, Tensor]:
    """Return by number the tensors into which ``unpacked`` turns each bucket."""
    return {
        number: result
        for bucket in buckets
        for number, result in zip(bucket.numbers, unpacked(bucket), strict=True)
    }


def _runs(numbers: Sequence[int], shapes: Mapping[int, Shape], limit: float) -> list[list[int]]:
    """Return runs of tensors that hold at most ``limit`` elements, but at least one tensor."""
    runs: list[list[int]] = []
    size = 0.0
    for number in numbers:
        numel = math.prod(shapes[number])
        if not runs or size + numel > limit:
            runs.append([])
            size = 0.0
        runs[-1].append(number)
        size += numel
    return runs


def _flat_together(run: Sequence[int], shapes: Mapping[int, Shape]) -> list[list[int]]:
    """Return the flat tensors of a run together, and each that is in rows, or empty, alone."""
    flat = [at for at in run if len(shapes[at]) < 2 and 0 not in shapes[at]]
    alone = [[number] for number in run if number not in flat]
    return [flat, *alone] if flat else alone
