"""How a tensor is divided into shards. Pure arithmetic: no tensors, no device, no I/O.

Invariants: all shards of a layout have the same length, a multiple of ``multiple``. Concatenated in
rank order they are the flattened tensor followed by padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

LANES = 128
"""Width of a TPU vector register row: shards are padded to whole rows (github.com/pytorch/xla
issue 3510 measured the all-gather of ragged shards to be several times slower)."""

ROWS = 8
"""Rows of a TPU tile."""

LARGE = 2 * ROWS * LANES
"""Elements from which on a shard may be sent as a matrix of whole tiles; smaller ones are flat."""


MOST_PADDING = 1 / 8
"""Share by which padding to whole rows, or rows to whole lanes, may enlarge a parameter."""


def shard_multiple(shape: Sequence[int], num_shards: int) -> int:
    """Return the number of elements to whose multiple each shard of a parameter is padded.

    It is ``LANES``, or for a large matrix whose shards would end within a row, ``ROWS`` whole rows,
    unless that makes the matrix more than ``MOST_PADDING`` larger. Then its gathered shards need no
    new layout, which for the 50 million elements of a vocabulary took the TPU compiler over 400 s.
    A stack of matrices, as experts have, is taken for one with all of their rows if its own are too
    few.

    Args:
        shape: shape of the unsharded parameter.
        num_shards: number of ranks that share it.
    """
    numel = math.prod(shape)
    vector = ShardLayout((numel,), num_shards)
    for width in row_numels(shape):
        if not fills_lanes(shape, width):
            return LANES
        rows = ShardLayout((numel,), num_shards, width * ROWS)
        if vector.shard_numel % (width * ROWS) == 0 or rows.shard_numel < LARGE:
            return LANES
        if _pads_little(rows):
            return width * ROWS
    return LANES


def fills_lanes(shape: Sequence[int], width: int) -> bool:
    """Return whether rows of ``width`` elements are whole lanes; those of a matrix may nearly be,
    as it lies in memory with padded rows anyway."""
    return width > 0 and -width % LANES <= (width * MOST_PADDING if len(shape) == 2 else 0)


def row_numels(shape: Sequence[int]) -> list[int]:
    """Return how many elements rows have: slices of dim 0, then of the first two dims, ..."""
    return [math.prod(shape[at:]) for at in range(1, len(shape))]


def has_few_rows(shape: Sequence[int], num_shards: int) -> bool:
    """Return whether a stack of matrices has too few of them for whole ones on each rank, as 8
    experts on 64 ranks, and rows of whole lanes."""
    if len(shape) < 3 or not shape[0] or shape[-1] % LANES:
        return False
    return not _pads_little(ShardLayout((shape[0],), num_shards, 1))


def _pads_little(layout: ShardLayout) -> bool:
    return layout.padded_numel <= (1 + MOST_PADDING) * layout.numel


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


def rows_layout(shape: Sequence[int], num_shards: int, dim: int = 0) -> ShardLayout:
    """Return the layout of whole rows: of slices of ``dim`` of a tensor of that shape.

    Shards of a large matrix along dim 0 have a multiple of ``ROWS`` of them, unless that makes it
    more than ``MOST_PADDING`` larger.
    """
    size, row = (math.prod(shape),), math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    tiles = ShardLayout(size, num_shards, max(1, row) * ROWS)
    is_matrix = dim == 0 and len(shape) == 2 and fills_lanes(shape, row)
    is_large = is_matrix and tiles.shard_numel >= LARGE
    return tiles if is_large and _pads_little(tiles) else ShardLayout(size, num_shards, max(1, row))


@lru_cache(maxsize=4096)
def layout_of(
    shapes: tuple[tuple[int, ...], ...],
    num_shards: int,
    asked: int | None,
    flat: bool,
    on_dim_0: bool,
) -> tuple[ShardLayout, bool]:
    """Return the layout of one shard of parameters that are joined end to end, and whether it has
    the shape of whole rows; else it is [n].

    Args:
        shapes: of the parameters.
        num_shards: number of ranks that share them.
        asked: the dim to cut; None for dim 0, unless that has too few rows.
        flat: whether parameters are joined.
        on_dim_0: whether shards are whole rows.
    """
    first, dim = shapes[0], asked or 0
    by_rows = on_dim_0 and not flat
    if asked is None and len(shapes) == 1 and has_few_rows(first, num_shards):
        by_rows = False
    row_shape = (*first[:dim], *first[dim + 1 :])
    if (by_rows or dim) and first and math.prod(row_shape) > 0:
        return rows_layout(first, num_shards, dim), True
    multiple = LANES if flat else shard_multiple(first, num_shards)
    return ShardLayout((sum(map(math.prod, shapes)),), num_shards, multiple), False


def row_numel(shapes: Sequence[Sequence[int]], layout: ShardLayout, dim: int) -> int:
    """Return the number of elements of a row, of which shards of ``shapes`` along ``dim`` consist:
    of a slice of ``dim``, or for a stack of matrices of a row of these; 0 without dims."""
    first = shapes[0]
    if not first:
        return 0
    slice_numel = math.prod(first[:dim]) * math.prod(first[dim + 1 :])
    lengths = row_numels(first)
    if dim or len(shapes) > 1 or not lengths or not fills_lanes(first, lengths[-1]):
        return slice_numel
    tiled = (each for each in lengths if layout.shard_numel % (each * ROWS) == 0)
    return next(tiled, slice_numel)


def sent_shape(shapes: Sequence[Sequence[int]], layout: ShardLayout, width: int) -> tuple[int, ...]:
    """Return the shape in which a shard is sent, whose rows have ``width`` elements: [rows, width],
    or flat [n]."""
    # Whole rows if a shard consists of such, so that the gathered tensor is the parameter without a
    # change of layout. That change for 50 million elements takes the TPU compiler minutes, and the
    # program as much code as 20 transformer blocks.
    size = layout.shard_numel
    is_wide = len(shapes) == 1 and fills_lanes(shapes[0], width)
    if not is_wide or size % (width * ROWS) or size < LARGE:
        return (size,)
    return (size // width, width)


def join_name(prefix: str, name: str) -> str:
    """Return ``prefix.name``; ``name`` alone for a root, whose prefix is empty."""
    return f"{prefix}.{name}" if prefix else name
