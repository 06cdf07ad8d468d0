"""How a tensor is divided into shards. Pure arithmetic: no tensors, no device, no I/O.

Invariants: all shards of a layout have the same length, a multiple of ``multiple``. Concatenated in
rank order they are the flattened tensor followed by padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

LANES = 128
"""Width of a TPU vector register row: shards are padded to whole rows (github.com/pytorch/xla
issue 3510 measured the all-gather of ragged shards to be several times slower)."""

ROWS = 8
"""Rows of a TPU tile."""

LARGE = 2 * ROWS * LANES
"""Elements from which on a shard may be sent as a matrix of whole tiles; smaller ones are flat."""


def shard_multiple(shape: Sequence[int], num_shards: int) -> int:
    """Return the number of elements to whose multiple each shard of a parameter is padded.

    It is ``LANES``, or for a large matrix whose shards would end within a row, ``ROWS`` whole rows,
    unless that makes the matrix more than an eighth larger. Then its gathered shards need no new
    layout, which for the 50 million elements of a vocabulary took the TPU compiler over 400 s.

    Args:
        shape: shape of the unsharded parameter.
        num_shards: number of ranks that share it.
    """
    numel, width = math.prod(shape), math.prod(shape[1:]) if len(shape) > 1 else 0
    if not width or width % LANES:
        return LANES
    vector = ShardLayout((numel,), num_shards)
    rows = ShardLayout((numel,), num_shards, width * ROWS)
    if vector.shard_numel % (width * ROWS) == 0 or rows.shard_numel < LARGE:
        return LANES
    return width * ROWS if 8 * rows.padded_numel <= 9 * numel else LANES


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor of ``shape``, flattened, is cut into ``num_shards`` equal slices.

    Args:
        shape: sizes of the unsharded tensor; ``()`` is a scalar.
        num_shards: number of ranks that share it, at least 1.
        multiple: every shard's length is rounded up to a multiple of this.

    Raises:
        ValueError: if a size is negative, or ``num_shards`` or ``multiple`` is below 1.
    """

    shape: tuple[int, ...]
    num_shards: int
    multiple: int = LANES

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {self.shape} has a negative size")
        if self.num_shards < 1 or self.multiple < 1:
            raise ValueError(
                f"num_shards and multiple must be at least 1, "
                f"got {self.num_shards} and {self.multiple}"
            )

    @cached_property
    def numel(self) -> int:
        """Number of elements of the unsharded tensor."""
        return math.prod(self.shape)

    @cached_property
    def shard_numel(self) -> int:
        """Number of elements of one shard, padding included."""
        per_rank = -(-self.numel // self.num_shards)
        return -(-per_rank // self.multiple) * self.multiple

    @cached_property
    def padded_numel(self) -> int:
        """Number of elements of all shards together, padding included."""
        return self.shard_numel * self.num_shards

    def slice_for(self, rank: int) -> slice:
        """Return the slice of the flattened tensor that ``rank`` holds, without padding.

        Raises:
            ValueError: if ``rank`` is not in ``range(num_shards)``.
        """
        if not 0 <= rank < self.num_shards:
            raise ValueError(f"rank {rank} is not one of the {self.num_shards} shards")
        start = min(rank * self.shard_numel, self.numel)
        return slice(start, min(start + self.shard_numel, self.numel))


def join_name(prefix: str, name: str) -> str:
    """Return ``prefix.name``; ``name`` alone for a root, whose prefix is empty."""
    return f"{prefix}.{name}" if prefix else name
