"""Lay groups of ranks along the axes of a torus, and reduce over them one axis at a time. Pure.

The TPU compiler turns a reduce-scatter over several axes of a torus into an all-reduce and a slice,
with twice the traffic; over a ring it does not. A rank's coordinates are [core, x, y, z, slice],
fastest axis first; slices (of several TPU slices) have no torus in common.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Groups = list[list[int]]
Coords = Sequence[Sequence[int]]

SLICE = 4
"""Index of the slice among a rank's coordinates."""


def reduction_steps(groups: Groups, coords: Coords) -> list[Groups]:
    """Split a reduce-scatter over ``groups`` into one per axis of the torus.

    The consecutive reduce-scatters, slowest axis first, leave every rank with the same slice as one
    reduce-scatter over its group.

    Args:
        groups: replica groups of one size.
        coords: coordinates of every rank, by rank.

    Returns:
        The replica groups (rings) of each reduce-scatter; none if a group is no box on the torus or
        is not numbered along its axes. Then use a single reduce-scatter.
    """
    if any(rank >= len(coords) for group in groups for rank in group):
        return []
    shapes = {_box(group, coords) for group in groups}
    if len(shapes) != 1 or not (shape := shapes.pop()):
        return []
    boxes = np.array(groups).reshape(-1, *shape)
    return [
        np.moveaxis(boxes, 1 + axis, -1).reshape(-1, size).tolist()
        for axis, size in enumerate(shape)
    ]


def _box(group: Sequence[int], coords: Coords) -> tuple[int, ...]:
    """Return how many ranks a group counts before it goes on along another axis, slowest first; ()
    if it does not count along axes.

    A group may take axes in any order, and one in several parts: every fourth rank of a row, then
    columns, then the rows between.
    """
    found = np.array([coords[rank] for rank in group]) - np.array(coords[group[0]])
    counts: list[int] = []
    counted = np.zeros_like(found[:1])  # places of the ranks so far, if there are only these counts
    while len(counted) < len(found):
        ahead = found[:: len(counted)]
        axes = np.flatnonzero(ahead[1])
        if len(axes) != 1 or ahead[1, axes[0]] < 0:
            return ()
        along, others = ahead[:, axes[0]], np.delete(ahead, axes[0], axis=1)
        ends = np.flatnonzero((np.diff(along) <= 0) | others[1:].any(axis=1))
        counts.insert(0, 1 + int(ends[0]) if len(ends) else len(ahead))
        counted = (ahead[: counts[0], None] + counted).reshape(-1, counted.shape[1])
    return tuple(counts) if np.array_equal(counted, found) else ()


# ---------------------------------------------------------------- meshes


def rank_order(shape: Sequence[int], coords: Coords) -> list[int]:
    """Return the ranks of a mesh of this ``shape``, row-major, so that its axes follow the torus.

    The last axis, along which most is sent, is assigned first: to whole axes of the torus if some
    have that size, else to a box; then the one before it. Slices are assigned last, so they end up
    on the first axis.

    Args:
        shape: sizes that multiply to the number of ranks.
        coords: coordinates of every rank, by rank.

    Returns:
        All ranks; in ascending order if they are no box on the torus or it cannot be divided so.
    """
    everyone = list(range(math.prod(shape)))
    if len(coords) != len(everyone):
        return everyone
    by_coords = sorted(everyone, key=lambda rank: tuple(reversed(coords[rank])))
    left = _pieces(_box(by_coords, coords), [each[SLICE:] for each in coords])
    parts: list[list[_Piece]] = []
    for size in reversed(shape):
        part = _take(left, size)
        if part is None:
            return everyone
        parts.insert(0, part)
    # Within a part, too, the fastest piece comes first, as reduction_steps expects.
    offsets = [_offsets(part) for part in parts]
    return [by_coords[sum(each)] for each in itertools.product(*offsets)]


@dataclass(frozen=True)
class _Piece:
    """A torus axis, or what is left of one that was split: ``size`` ranks, ``stride`` apart."""

    stride: int
    size: int
    is_slice: bool = False

    def split(self, size: int) -> tuple[_Piece, _Piece]:
        """Return the first ``size`` ranks as a piece, and the piece of their repetitions."""
        rest = _Piece(self.stride * size, self.size // size, self.is_slice)
        return _Piece(self.stride, size, self.is_slice), rest


def _pieces(box: Sequence[int], slices: Sequence[Sequence[int]]) -> list[_Piece]:
    """Return one piece for each axis of a box, which is given slowest first."""
    several_slices = len({tuple(each) for each in slices}) > 1
    pieces, stride = [], 1
    for size in reversed(box):
        pieces.append(_Piece(stride, size))
        stride *= size
    if pieces and several_slices:
        pieces[-1] = _Piece(pieces[-1].stride, pieces[-1].size, is_slice=True)
    return [piece for piece in pieces if piece.size > 1]


def _take(left: list[_Piece], size: int) -> list[_Piece] | None:
    """Remove ``size`` ranks from ``left``, within a slice if possible; None if not possible."""
    within = [piece for piece in left if not piece.is_slice]
    part = _unsplit(within, size) or _split(within, size)
    part = part or _unsplit(left, size) or _split(left, size)
    for index, piece in enumerate(left if part else ()):
        taken = math.prod(each.size for each in part or () if each.stride == piece.stride)
        left[index] = piece.split(taken)[1]
    left[:] = [piece for piece in left if piece.size > 1]
    return part


def _unsplit(pieces: Sequence[_Piece], size: int) -> list[_Piece] | None:
    """Return the fewest, and among them the fastest, unsplit pieces of ``size`` ranks together."""
    for count in range(1, len(pieces) + 1):
        for chosen in itertools.combinations(pieces, count):
            if math.prod(piece.size for piece in chosen) == size:
                return list(chosen)
    return None


def _split(pieces: Sequence[_Piece], size: int) -> list[_Piece] | None:
    """Return parts of ``pieces``, fastest first, that have ``size`` ranks together."""
    part = []
    for piece in pieces:
        if (common := math.gcd(piece.size, size)) > 1:
            part.append(piece.split(common)[0])
            size //= common
    return part if size == 1 else None


def _offsets(part: Sequence[_Piece]) -> list[int]:
    """Return the offsets of all ranks of a part, the first piece fastest."""
    slowest_first = [range(0, piece.stride * piece.size, piece.stride) for piece in part[::-1]]
    return [sum(each) for each in itertools.product(*slowest_first)]
