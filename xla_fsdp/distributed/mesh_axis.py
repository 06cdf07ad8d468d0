"""Collectives of activations along one axis of a mesh: dims of tensors are gathered, summed, cut.

Words: see ``mesh``; a rank's *place* is its index among the ranks along the axis.
Always true: every rank traces the same program: where a result depends on the place, the place is
an input of the program, never a constant in it. Along an axis of one rank nothing is done.
Nothing here is differentiable; gradients are ``tensor_parallel.pairs``' business. Collectives of
parameters are in ``collectives``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.xla import ops


class AxisComm:
    """This rank among those along an axis.

    Args:
        mesh: of one axis, laid out on the ranks of this job.

    Raises:
        ValueError: if the mesh has several axes, or lays out other ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has the axes {', '.join(mesh.axis_names)}; give one of them: "
                f"mesh[{mesh.axis_names[-1]!r}]"
            )
        if mesh.world_size != ops.world_size():
            raise ValueError(
                f"the mesh lays out {mesh.world_size} ranks, but the job has "
                f"{ops.world_size()}; make it by init_mesh on the ranks that train"
            )
        self.mesh = mesh
        self.name = mesh.axis_names[0]
        self.size = mesh.size()
        self.groups = mesh.groups()
        self.place = mesh.place(ops.rank())
        self._on_device: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copied and pickled without what is on the device."""
        return {**vars(self), "_on_device": None}

    @property
    def key(self) -> Hashable:
        """Equal for objects that join the same ranks."""
        return (self.name, repr(self.groups))

    @property
    def place_on_device(self) -> Tensor:
        """The place, int64 [1]; an input of programs that use it."""
        if self._on_device is None:
            self._on_device = ops.upload(torch.tensor([self.place]))
        return self._on_device

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """``x`` combined over the ranks by ``op``, "sum" or "max"."""
        return x if self.size == 1 else ops.all_reduce(op, x, self.groups)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The slices of all ranks joined along ``dim``."""
        return x if self.size == 1 else ops.all_gather(x, self.groups, dim % x.dim())

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice, along ``dim``, of the sum over the ranks."""
        if self.size == 1:
            return x
        return ops.reduce_scatter(x, self.size, self.groups, dim % x.dim())

    def own_slice(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice of what all ranks have, along ``dim``."""
        if self.size == 1:
            return x
        dim %= x.dim()
        stack = x.unflatten(dim, (self.size, x.shape[dim] // self.size))
        return stack.index_select(dim, self.place_on_device).squeeze(dim)

    def all_to_all(self, x: Tensor, cut: int, joined: int) -> Tensor:
        """From slices along dim ``joined`` to slices along ``cut``: each rank sends every other one
        the part that is to be its own."""
        if self.size == 1:
            return x
        return ops.all_to_all(x, cut % x.dim(), joined % x.dim(), self.size, self.groups)
