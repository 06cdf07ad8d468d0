"""Ranks laid out on named axes, and the replica groups along them.

By convention axes are called, outermost first, ``replica`` (ranks hold equal shards), ``shard``
(ranks share parameters, FSDP), ``context`` (ranks share sequences, and parameters as well),
``expert`` (ranks share experts, and all other parameters as well) and ``tensor`` (ranks share
layers, tensor parallelism).
Invariants: a mesh lays out every rank of the job once. A mesh sliced out of it still knows all
ranks: a collective needs the groups of the whole job, not only the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

from xla_fsdp.distributed.topology import Coords, Groups, rank_order

REPLICA, SHARD, CONTEXT, TENSOR = "replica", "shard", "context", "tensor"
EXPERT = "expert"


def init_mesh(
    shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    world_size: int | None = None,
    coords: Coords | None = None,
) -> Mesh:
    """Lay all ranks out on named axes.

        mesh = init_mesh((2, 4), ("replica", "shard"))
        mesh["shard"].groups()  # [[0, 1, 2, 3], [4, 5, 6, 7]] where there is no torus

    On a TPU the last axis is laid along whole axes of the torus where possible, so that its
    collectives run along rings; then the axis before it, and so on. Slices, if there are several,
    end up on the first axis. Without a torus, ranks fill the mesh row-major.

    Args:
        shape: size of each axis, outermost first.
        axis_names: their names.
        world_size: the number of ranks (default: that of the running job).
        coords: coordinates of every rank on the torus (default: those of the running job; none if
            ``world_size`` is given). For a job that is not running:
            ``xla_fsdp.preflight.topologies.find_topology("v5e:4x4").coords``.

    Raises:
        ValueError: if sizes and names do not fit each other or the number of ranks; all problems in
            one message.
    """
    shape, axis_names = tuple(shape), tuple(axis_names)
    if world_size is None and coords is None:
        from xla_fsdp.xla import ops  # here, as a mesh can be made without torch_xla

        world_size, coords = ops.world_size(), ops.runtime().torus_coords()
    elif world_size is None:
        world_size = len(coords or ())
    problems = find_problems(shape, axis_names, world_size)
    if coords and len(coords) != world_size:
        problems.append(f"coords are those of {len(coords)} ranks, not of {world_size}")
    if problems:
        raise ValueError(f"no mesh {shape} of axes {axis_names}: " + "; ".join(problems))
    return mesh_of(rank_order(shape, coords or ()), shape, axis_names)


def mesh_of(ranks: Sequence[int], shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """Return the mesh of these ranks, which fill ``shape`` row-major."""
    axes = tuple(
        Axis(name, size, (dim,))
        for dim, (name, size) in enumerate(zip(axis_names, shape, strict=True))
    )
    return Mesh(axes, Layout(tuple(shape), tuple(ranks)))


def find_problems(shape: Sequence[int], axis_names: Sequence[str], world_size: int) -> list[str]:
    """Return why there is no mesh of this ``shape``, one line each."""
    problems = []
    if not shape or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        problems.append("every axis has a size, a whole number of 1 or more")
    elif math.prod(shape) != world_size:
        found = f"{' x '.join(map(str, shape))} = {math.prod(shape)}"
        problems.append(f"{found} ranks, but the job has {world_size}; the two must be equal")
    if len(shape) != len(axis_names):
        problems.append(f"{len(shape)} sizes and {len(axis_names)} names; give each axis both")
    if not all(isinstance(name, str) and name for name in axis_names):
        problems.append("a name is a text that is not empty")
    twice = sorted({str(name) for name in axis_names if list(axis_names).count(name) > 1})
    if twice:
        problems.append(f"{', '.join(twice)}: several axes of one name; give each its own")
    return problems


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh: one dim of the layout, or several flattened (row-major)."""

    name: str
    size: int
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """All ranks of the job, which fill ``shape`` row-major."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """Some axes of a layout of all ranks; made by ``init_mesh`` and by slicing."""

    axes: tuple[Axis, ...]
    layout: Layout

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole job."""
        return len(self.layout.ranks)

    def size(self, axis: str | None = None) -> int:
        """Size of one axis, or of all together.

        Raises:
            ValueError: if there is no such axis.
        """
        return math.prod(self.shape) if axis is None else self._axis(axis).size

    def groups(self, *axes: str) -> Groups:
        """Return all groups of ranks that differ on some axes only (default: all of this mesh).

        Within a group, ranks are row-major over the axes in the order in which they are named.

        Raises:
            ValueError: if there is no such axis.
        """
        along = self._dims(axes)
        ranks = np.array(self.layout.ranks).reshape(self.layout.shape)
        last = np.moveaxis(ranks, along, range(-len(along), 0))
        return last.reshape(-1, math.prod(ranks.shape[dim] for dim in along)).tolist()

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the index of a rank along each axis of this mesh.

        Raises:
            ValueError: if there is no such rank.
        """
        return tuple(self.local_rank(rank, name) for name in self.axis_names)

    def local_rank(self, rank: int, *axes: str) -> int:
        """Return the index of a rank in its group along some axes (default: all of this mesh).

        Raises:
            ValueError: if there is no such rank or axis.
        """
        layout, index = self.layout, 0
        if rank not in layout.ranks:
            raise ValueError(f"rank {rank} is not one of the mesh's {len(layout.ranks)} ranks")
        at = np.unravel_index(layout.ranks.index(rank), layout.shape)
        for dim in self._dims(axes):
            index = index * layout.shape[dim] + int(at[dim])
        return index

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """Return the mesh of some axes: ``mesh["shard"]``, ``mesh["replica", "shard"]``.

        Raises:
            ValueError: if there is no such axis, or one is named twice.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if len(set(wanted)) != len(wanted) or not wanted:
            raise ValueError(f"{wanted}: name one axis or several different ones")
        return replace(self, axes=tuple(self._axis(name) for name in wanted))

    def flatten(self, name: str) -> Mesh:
        """Return the mesh of a single axis called ``name``: all axes of this mesh, row-major."""
        return replace(self, axes=(Axis(name, self.size(), tuple(self._dims(()))),))

    def without(self, other: Mesh) -> Mesh:
        """Return the mesh with axes that have no dims of ``other``: flattened ones lose these."""
        lost = set(other._dims(()))
        axes = []
        for axis in self.axes:
            dims = tuple(dim for dim in axis.dims if dim not in lost)
            size = math.prod(self.layout.shape[dim] for dim in dims)
            axes.append(Axis(axis.name, size, dims))
        return replace(self, axes=tuple(axes))

    def covers(self, other: Mesh) -> bool:
        """Return whether the axes of ``other`` are among the dims of these."""
        return self.layout == other.layout and set(other._dims(())) <= set(self._dims(()))

    def unsharded(self) -> Mesh:
        """Return the mesh on which nothing is sharded: all ranks of a group are replicas."""
        replicas = self.flatten(REPLICA)
        return replace(self, axes=(*replicas.axes, Axis(SHARD, 1, ())))

    def _axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ValueError(f"the mesh has no axis {name!r}; it has {', '.join(self.axis_names)}")

    def _dims(self, names: Sequence[str]) -> list[int]:
        axes = [self._axis(name) for name in names] or list(self.axes)
        return [dim for axis in axes for dim in axis.dims]


UNNAMED = {1: (SHARD,), 2: (REPLICA, SHARD)}


def as_mesh(given: Any) -> Mesh:
    """Return a ``Mesh`` for a ``Mesh`` or a ``torch.distributed.device_mesh.DeviceMesh``.

    A DeviceMesh may be sliced or flattened. Its process groups are not used.

    Raises:
        TypeError: for anything else.
        ValueError: for a DeviceMesh without names that has more than two dims.
    """
    if isinstance(given, Mesh):
        return given
    if not isinstance(given, DeviceMesh):
        raise TypeError(f"a mesh is made by xla_fsdp.init_mesh, got a {type(given).__name__}")
    root = _mesh_resources.get_root_mesh(given)
    names = root.mesh_dim_names or UNNAMED.get(root.mesh.ndim)
    if names is None:
        raise ValueError(
            f"the DeviceMesh has {root.mesh.ndim} dims without names; give it mesh_dim_names"
        )
    mesh = mesh_of(root.mesh.flatten().tolist(), root.mesh.shape, names)
    if given is root:
        return mesh
    flattened = _mesh_resources.flatten_name_to_root_dims.get(root, {})
    axes: list[Axis] = []
    for name in given.mesh_dim_names or ():
        if (dims := flattened.get(name)) is None:
            part = mesh[name]
        else:
            part = mesh[tuple(mesh.axis_names[dim] for dim in dims)].flatten(name)
        axes += part.axes
    return Mesh(tuple(axes), mesh.layout)


def as_fsdp_mesh(given: Any) -> Mesh:
    """Return ``as_mesh`` for FSDP, which shards parameters over ``shard`` and ``context`` or
    ``expert`` together: these two axes are joined.

    Raises:
        TypeError, ValueError: as ``as_mesh``.
    """
    mesh = as_mesh(given)
    sharding = tuple(name for name in mesh.axis_names if name != REPLICA)
    if not {CONTEXT, EXPERT} & set(sharding) or len(sharding) != 2:
        return mesh
    # Ranks of one part of the experts are neighbours, as files of shards have them.
    sharding = tuple(sorted(sharding, key=EXPERT.__ne__))
    replicas = tuple(axis for axis in mesh.axes if axis.name == REPLICA)
    return Mesh((*replicas, *mesh[sharding].flatten(SHARD).axes), mesh.layout)
