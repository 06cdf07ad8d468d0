"""Take torch's ``DeviceMesh`` for a mesh.

Always true: the result lays out the ranks as the DeviceMesh does, with the groups of the whole job,
also for one that was sliced or flattened. No process group of it is used.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

from xla_fsdp.mesh import REPLICA, SHARD, Mesh, mesh_of

UNNAMED = {1: (SHARD,), 2: (REPLICA, SHARD)}


def as_mesh(given: Any) -> Mesh:
    """``given``, a ``Mesh`` or a ``torch.distributed.device_mesh.DeviceMesh``, as a mesh.

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
    joined = _mesh_resources.flatten_name_to_root_dims.get(root, {})
    parts = [_axis(mesh, name, joined.get(name)) for name in given.mesh_dim_names or ()]
    return Mesh(tuple(axis for part in parts for axis in part.axes), mesh.layout)


def _axis(mesh: Mesh, name: str, joined: tuple[int, ...] | None) -> Mesh:
    """One axis, perhaps joined of several dims."""
    if joined is None:
        return mesh[name]
    return mesh[tuple(mesh.axis_names[dim] for dim in joined)].flatten(name)
