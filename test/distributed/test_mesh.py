"""Meshes: the groups along their axes, slices of them, and how they follow a torus."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_fsdp import init_mesh
from xla_fsdp.distributed.mesh import Mesh, as_fsdp_mesh
from xla_fsdp.distributed.topology import reduction_steps
from xla_fsdp.preflight.topologies import find_topology

HSDP = ("replica", "shard")
ALL = ("replica", "shard", "tensor")


def mesh_of(*shape: int) -> Mesh:
    return init_mesh(shape, ALL[: len(shape)], world_size=math.prod(shape))


def on(topology: str, *shape: int) -> Mesh:
    return init_mesh(shape, ALL[: len(shape)], coords=find_topology(topology).coords)


def slices(count: int, *sizes: int) -> list[tuple[int, ...]]:
    """Places in several slices: [core, x, y, z, slice]."""
    x, y = sizes
    places = itertools.product(range(count), range(y), range(x))
    return [(0, place[2], place[1], 0, place[0]) for place in places]


def test_groups_by_name() -> None:
    mesh = init_mesh((2, 4), HSDP, world_size=8)
    assert mesh.shape == (2, 4)
    assert mesh.axis_names == HSDP
    assert mesh.groups("shard") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups("replica") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups() == [list(range(8))]
    assert mesh.groups("shard", "replica") == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert mesh.coordinate(6) == (1, 2)
    assert (mesh.size(), mesh.size("shard"), mesh.ndim, mesh.world_size) == (8, 4, 2, 8)


def test_a_slice_knows_the_groups_of_the_whole_job() -> None:
    mesh = mesh_of(2, 2, 2)
    assert mesh["shard"].groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    inner = mesh["replica", "shard"]
    assert inner.axis_names == HSDP
    assert inner.groups("replica") == mesh.groups("replica")
    assert inner.groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert inner.world_size == 8
    assert mesh["shard"].coordinate(7) == (1,)
    assert inner["shard"] == mesh["shard"]


def test_flatten_joins_axes() -> None:
    flat = mesh_of(2, 2, 2)["replica", "shard"].flatten("data")
    assert flat.axis_names == ("data",)
    assert flat.shape == (4,)
    assert flat.groups("data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [flat.local_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.data())
def test_groups_hold_every_rank_once_and_differ_on_their_axes_only(
    shape: list[int], data: st.DataObject
) -> None:
    mesh = mesh_of(*shape)
    names = data.draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    groups = mesh[tuple(names)].groups()
    assert sorted(rank for group in groups for rank in group) == list(range(math.prod(shape)))
    others = [name for name in mesh.axis_names if name not in names]
    for group in groups:
        assert len(group) == math.prod(mesh.size(name) for name in names)
        assert [mesh.local_rank(rank, *names) for rank in group] == list(range(len(group)))
        places = {tuple(mesh.local_rank(rank, name) for name in others) for rank in group}
        assert len(places) == 1


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 3), HSDP, "2 x 3 = 6 ranks, but the job has 8"),
        ((2, 4), ("shard",), "2 sizes and 1 names"),
        ((2, 4), ("shard", "shard"), "shard: several axes of one name"),
        ((2, 0), HSDP, "whole number of 1 or more"),
        ((), (), "whole number of 1 or more"),
        ((8,), ("",), "a text that is not empty"),
    ],
)
def test_meshes_that_are_none(shape: tuple[int, ...], names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        init_mesh(shape, names, world_size=8)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)12 ranks.*several axes") as error:
        init_mesh((3, 4), ("a", "a"), world_size=8, coords=[(0, 0)])
    assert "coords are those of 1 ranks" in str(error.value)


def test_unknown_axes_and_ranks() -> None:
    mesh = mesh_of(2, 2)
    for call in (lambda: mesh["tensor"], lambda: mesh.groups("tensor"), lambda: mesh.size("x")):
        with pytest.raises(ValueError, match=r"no axis .*; it has replica, shard"):
            call()
    with pytest.raises(ValueError, match="different ones"):
        mesh["shard", "shard"]
    with pytest.raises(ValueError, match="rank 4 is not one"):
        mesh.coordinate(4)


# ---------------------------------------------------------------- on a torus


def test_the_shard_axis_takes_whole_axes_of_the_torus() -> None:
    mesh = on("v5e:4x8", 4, 8)
    assert mesh.groups("shard")[0] == list(range(0, 32, 4))  # one ring along y
    assert mesh.groups("replica")[0] == [0, 1, 2, 3]  # one along x


def test_a_larger_shard_axis_is_a_box_reduced_axis_by_axis() -> None:
    coords = find_topology("v5e:4x4").coords
    groups = on("v5e:4x4", 2, 8).groups("shard")
    assert groups == [list(range(8)), list(range(8, 16))]
    assert [len(step[0]) for step in reduction_steps(groups, coords)] == [2, 4]


def test_replicas_lie_across_slices() -> None:
    coords = slices(2, 4, 4)
    mesh = init_mesh((2, 16), HSDP, coords=coords)
    assert mesh.groups("shard") == [list(range(16)), list(range(16, 32))]
    assert mesh.groups("replica")[3] == [3, 19]
    # Also where a slice would fit the shard axis as it is.
    for group in init_mesh((16, 2), HSDP, coords=coords).groups("shard"):
        assert len({coords[rank][4] for rank in group}) == 1


def test_ranks_that_are_not_numbered_along_the_torus() -> None:
    coords = [(0, 0), (0, 1), (1, 0), (1, 1)]  # y first
    assert init_mesh((2, 2), HSDP, coords=coords).groups("shard") == [[0, 2], [1, 3]]


@pytest.mark.parametrize("coords", [[], [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (7, 7)]])
def test_without_a_torus_ranks_keep_their_order(coords: list[tuple[int, ...]]) -> None:
    mesh = init_mesh((2, 3), HSDP, world_size=6, coords=coords)
    assert mesh.groups("shard") == [[0, 1, 2], [3, 4, 5]]


DIVISIBLE = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None, max_examples=80)
@given(st.lists(DIVISIBLE, min_size=1, max_size=3), st.integers(1, 2), st.data())
def test_every_axis_can_be_reduced_along_the_torus(
    sizes: list[int], num_slices: int, data: st.DataObject
) -> None:
    x, y, z = (*sizes, 1, 1)[:3]
    places = itertools.product(range(num_slices), range(z), range(y), range(x))
    coords = [(0, px, py, pz, at) for at, pz, py, px in places]
    tensor = data.draw(st.sampled_from([n for n in (1, 2, 4) if len(coords) % n == 0]))
    rest = len(coords) // tensor
    shard = data.draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if rest % n == 0]))
    mesh = init_mesh((rest // shard, shard, tensor), ALL, coords=coords)
    assert sorted(mesh.layout.ranks) == list(range(len(coords)))
    for name in ALL:
        if mesh.size(name) > 1:
            steps = reduction_steps(mesh.groups(name), coords)
            assert math.prod(len(step[0]) for step in steps) == mesh.size(name)
    if shard * tensor <= len(coords) // num_slices:
        for group in mesh.groups("shard", "tensor"):
            assert len({coords[rank][4] for rank in group}) == 1


def test_parameters_are_sharded_over_a_context_as_well() -> None:
    mesh = init_mesh((2, 2, 2), (*HSDP, "context"), world_size=8)
    joined = as_fsdp_mesh(mesh)
    assert joined.axis_names == HSDP
    assert joined.groups("shard") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert joined["replica"] == mesh["replica"]
    assert as_fsdp_mesh(mesh["shard", "context"]) == joined["shard"]
    for axes in ("shard", "context", HSDP, ("replica", "context")):
        assert as_fsdp_mesh(mesh[axes]) == mesh[axes]
