"""Split a reduction over a torus of ranks into one step per axis. Pure arithmetic on lists.

Words: *coords* are the place of every rank on the torus, the axis numbered fastest first; a *step*
is a list of replica groups, rings along one axis.
Always true: reducing and scattering by all steps in order leaves every rank with the same slice as
one reduce-scatter over its whole group would. Where that is not possible there are no steps.
Why: the TPU compiler makes a reduce-scatter over a ring as such, but one over several axes of a
torus as a full all-reduce and a slice, with twice the traffic. Made use of by ``collectives``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

Groups = list[list[int]]
Coords = Sequence[Sequence[int]]


def reduction_steps(groups: Groups, coords: Coords) -> list[Groups]:
    """The steps, slowest axis first, by which ``groups`` can be reduced.

    Args:
        groups: replica groups of one size.
        coords: place of every rank, by rank.

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
    """Sizes of the box that a group fills in order, slowest axis first; () if it does not."""
    places = [tuple(reversed(coords[rank])) for rank in group]
    values = [sorted(set(axis)) for axis in zip(*places, strict=True)]
    expected: list[tuple[int, ...]] = [()]
    for axis in values:
        expected = [(*place, value) for place in expected for value in axis]
    return tuple(len(axis) for axis in values) if places == expected else ()


def _along(groups: Groups, shape: tuple[int, ...], axis: int) -> Groups:
    """Rings along one axis: ranks of a group whose places differ on that axis alone."""
    stride = 1
    for size in shape[axis + 1 :]:
        stride *= size
    rings: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        for place, rank in enumerate(group):
            rings[number, place // (stride * shape[axis]), place % stride].append(rank)
    return list(rings.values())
