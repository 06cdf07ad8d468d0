"""Collectives of activations along one axis of a mesh; they are not differentiable.

Invariants: every rank traces the same program: the local rank is an input of it, never a constant.
Along an axis of one rank nothing is done.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.collectives import check_mesh
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.xla import ops


class AxisComm:
    """Communication of this rank with the others along an axis.

    Args:
        mesh: a mesh of one axis, laid out on the ranks of this job.

    Raises:
        ValueError: if the mesh has several axes, or lays out other ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has the axes {', '.join(mesh.axis_names)}; give one of them: "
                f"mesh[{mesh.axis_names[-1]!r}]"
            )
        check_mesh(mesh)
        self.mesh = mesh
        self.name = mesh.axis_names[0]
        self.size = mesh.size()
        self.groups = mesh.groups()
        self.local_rank = mesh.local_rank(ops.rank())
        self._on_device: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_on_device": None}  # device tensors are neither copied nor pickled

    @property
    def key(self) -> Hashable:
        """Equal for objects that communicate among the same ranks."""
        return (self.name, repr(self.groups))

    @property
    def local_rank_on_device(self) -> Tensor:
        """The index of this rank along the axis, int64 [1]; an input of programs that use it."""
        if self._on_device is None:
            self._on_device = ops.upload(torch.tensor([self.local_rank]))
        return self._on_device

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine ``x`` over the ranks by ``op``, "sum" or "max"."""
        return x if self.size == 1 else ops.all_reduce(op, x, self.groups)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate the slices of all ranks along ``dim``."""
        return x if self.size == 1 else ops.all_gather(x, self.groups, dim % x.dim())

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice, along ``dim``, of the sum over the ranks."""
        if self.size == 1:
            return x
        return ops.reduce_scatter(x, self.size, self.groups, dim % x.dim())

    def send(self, x: Tensor, ahead: int = 1) -> Tensor:
        """Send ``x`` to the rank so far ahead, around the axis; return what this one has got."""
        if ahead % self.size == 0:
            return x
        sends = [
            (rank, ring[(at + ahead) % self.size])
            for ring in self.groups
            for at, rank in enumerate(ring)
        ]
        return ops.collective_permute(x, sends)

    def own_slice(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice, along ``dim``, of a tensor that is the same on all ranks."""
        if self.size == 1:
            return x
        dim %= x.dim()
        slices = x.unflatten(dim, (self.size, x.shape[dim] // self.size))
        return slices.index_select(dim, self.local_rank_on_device).squeeze(dim)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Turn slices along dim ``concat_dim`` into slices along dim ``split_dim``."""
        if self.size == 1:
            return x
        return ops.all_to_all(x, split_dim % x.dim(), concat_dim % x.dim(), self.size, self.groups)
