"""Reducing along the axes of a torus must leave every rank with its own slice."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_fsdp.distributed.topology import Coords, Groups, reduction_steps


def torus(*sizes: int) -> list[tuple[int, ...]]:
    """Places in rank order, x fastest."""
    slowest_first = [range(size) for size in reversed(sizes)]
    return [tuple(reversed(place)) for place in itertools.product(*slowest_first)]


def reduce_in(steps: list[Groups], held: dict[int, list[set[int]]]) -> dict[int, list[set[int]]]:
    """Every rank holds slices, each the set of ranks summed up in it; each step scatters them."""
    for step in steps:
        after = {}
        for ring in step:
            for place, rank in enumerate(ring):
                width = len(held[rank]) // len(ring)
                mine = slice(place * width, (place + 1) * width)
                parts = zip(*(held[member][mine] for member in ring), strict=True)
                after[rank] = [set().union(*slices) for slices in parts]
        held = after
    return held


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 2), st.randoms())
def test_every_rank_gets_its_slice_of_the_whole_sum(
    sizes: list[int], num_groups: int, random: Random
) -> None:
    """Whatever the order in which the groups are numbered along the axes of the torus."""
    coords = torus(*sizes, num_groups)
    size, axes = len(coords) // num_groups, random.sample(range(len(sizes)), len(sizes))
    groups = [
        sorted(range(start, start + size), key=lambda rank: [coords[rank][at] for at in axes])
        for start in range(0, len(coords), size)
    ]
    steps = reduction_steps(groups, coords)
    assert [len(step[0]) for step in steps] == [sizes[at] for at in axes if sizes[at] > 1]
    # A slice is told by which one it is: rank r starts with {r} in each of ``size`` slices.
    tagged = {r: [{(r, place)} for place in range(size)] for g in groups for r in g}
    after = reduce_in(steps, tagged)  # type: ignore[arg-type]
    for group in groups:
        for place, rank in enumerate(group):
            assert after[rank] == [{(member, place) for member in group}]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(2, 3)), min_size=1, max_size=4), st.randoms()
)
def test_an_axis_may_be_counted_in_parts(parts: list[tuple[int, int]], random: Random) -> None:
    """Each part is an axis and how many ranks it has, of those with the parts of it before."""
    sizes, strides = [1, 1, 1], []
    for axis, size in parts:
        strides.append(sizes[axis])
        sizes[axis] *= size
    coords = torus(*sizes)
    place = {each: rank for rank, each in enumerate(coords)}
    order = random.sample(range(len(parts)), len(parts))
    group = [
        place[
            tuple(
                sum(
                    digit * strides[at]
                    for at, digit in zip(order, digits, strict=True)
                    if parts[at][0] == axis
                )
                for axis in range(3)
            )
        ]
        for digits in itertools.product(*(range(parts[at][1]) for at in order))
    ]
    steps = reduction_steps([group], coords)
    assert steps
    assert all(
        sum(len({coords[rank][axis] for rank in ring}) > 1 for axis in range(3)) == 1
        for step in steps
        for ring in step
    )
    tagged = {rank: [{(rank, at)} for at in range(len(group))] for rank in group}
    after = reduce_in(steps, tagged)  # type: ignore[arg-type]
    assert after == {rank: [{(r, at) for r in group}] for at, rank in enumerate(group)}


def test_groups_along_one_axis_are_one_ring_each() -> None:
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert reduction_steps(rows, torus(4, 2)) == [rows]


def test_a_box_inside_the_torus_has_its_own_axes() -> None:
    boxes = [[0, 1, 4, 5], [2, 3, 6, 7]]
    steps = reduction_steps(boxes, torus(4, 2))
    assert steps == [[[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1], [4, 5], [2, 3], [6, 7]]]


@pytest.mark.parametrize(
    ("groups", "coords"),
    [
        ([[0, 1, 2, 5]], torus(3, 2)),  # no box
        ([[0, 2, 3, 1]], torus(2, 2)),  # numbered around
        ([[3, 2, 1, 0]], torus(4)),  # backwards
        ([[0, 1, 2, 3], [4, 6, 8, 10]], torus(4, 3)),  # one is no box
        ([[0, 1, 2, 3, 4, 5], [6, 8, 10, 7, 9, 11]], torus(2, 6)),  # boxes of different shapes
        ([[0, 1, 2, 3]], torus(2)),  # ranks without a place
        ([[0, 1]], []),  # no torus
    ],
)
def test_other_groups_have_no_steps(groups: Groups, coords: Coords) -> None:
    assert reduction_steps(groups, coords) == []
