"""Groups of ranks that suit a torus, and reductions over them in one step per axis. Pure.

The TPU compiler makes a reduce-scatter over a ring as such, but one over several axes of a torus as
a full all-reduce and a slice, with twice the traffic. Coordinates are numbered fastest axis first;
the fifth is the slice (slices have no torus in common).
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
"""Which coordinate is the number of the slice."""


def reduction_steps(groups: Groups, coords: Coords) -> list[Groups]:
    """Return the rings, one axis of the torus after the other, by which ``groups`` can be reduced.

    Reducing and scattering by all steps in order, slowest axis first, leaves every rank with the
    same slice as one reduce-scatter over its whole group would.

    Args:
        groups: replica groups of one size.
        coords: of every rank, by rank.

    Returns:
        No steps if a group is no box on the torus, or is not numbered along its axes (the first
        axis fastest); then reduce in one.
    """
    if any(rank >= len(coords) for group in groups for rank in group):
        return []
    shapes = {_box(group, coords) for group in groups}
    if len(shapes) != 1 or not (shape := shapes.pop()):
        return []
    return [_along(groups, shape, axis) for axis in range(len(shape)) if shape[axis] > 1]


def _box(group: Sequence[int], coords: Coords) -> tuple[int, ...]:
    """Return the sizes of the box that a group fills in order, slowest axis first, or ()."""
    found = [tuple(reversed(coords[rank])) for rank in group]
    values = [sorted(set(axis)) for axis in zip(*found, strict=True)]
    fills = found == list(itertools.product(*values))
    return tuple(len(axis) for axis in values) if fills else ()


def _along(groups: Groups, shape: tuple[int, ...], axis: int) -> Groups:
    """Return the rings of ranks of a group whose coordinates differ on that axis alone."""
    boxes = np.array(groups).reshape(-1, *shape)
    return np.moveaxis(boxes, 1 + axis, -1).reshape(-1, shape[axis]).tolist()


# ---------------------------------------------------------------- meshes


def rank_order(shape: Sequence[int], coords: Coords) -> list[int]:
    """Return the ranks of a mesh of this ``shape``, row-major, so that its axes follow the torus.

    The last axis, along which most is sent, is given its part of the torus first: whole axes if
    some have that size, else a box; then the one before it. Slices are taken when nothing else is
    left, so they end up on the first axis.

    Args:
        shape: sizes that multiply to the number of ranks.
        coords: of every rank, by rank.

    Returns:
        All ranks once; in their own order if they are no box or cannot be divided so.
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
    # Within a part, too, the fastest piece comes first, as reduction_steps wants it.
    offsets = [_offsets(part) for part in parts]
    return [by_coords[sum(each)] for each in itertools.product(*offsets)]


@dataclass(frozen=True)
class _Piece:
    """A torus axis, or what is left of one that was split: ``size`` ranks, ``stride`` apart."""

    stride: int
    size: int
    is_slice: bool = False

    def split(self, size: int) -> tuple[_Piece, _Piece]:
        """Return its first ``size`` ranks, and how often they repeat."""
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
    """Take ``size`` ranks out of ``left``, within a slice if possible; None if there are none."""
    within = [piece for piece in left if not piece.is_slice]
    part = _unsplit(within, size) or _split(within, size)
    part = part or _unsplit(left, size) or _split(left, size)
    for index, piece in enumerate(left if part else ()):
        taken = math.prod(each.size for each in part or () if each.stride == piece.stride)
        left[index] = piece.split(taken)[1]
    left[:] = [piece for piece in left if piece.size > 1]
    return part


def _unsplit(pieces: Sequence[_Piece], size: int) -> list[_Piece] | None:
    """Return as few whole pieces as make ``size`` ranks, the fastest ones."""
    for count in range(1, len(pieces) + 1):
        for chosen in itertools.combinations(pieces, count):
            if math.prod(piece.size for piece in chosen) == size:
                return list(chosen)
    return None


def _split(pieces: Sequence[_Piece], size: int) -> list[_Piece] | None:
    """Return ``size`` ranks out of the fastest pieces, each giving what divides the rest."""
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
