"""An all-gather of activations with the gradient of the whole batch, for contrastive losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from xla_fsdp.distributed.collectives import check_mesh
from xla_fsdp.distributed.mesh import as_mesh
from xla_fsdp.xla import ops


class _AllGather(Function):
    """Gather slices along ``dim``; backward: the sum over the ranks of their slices' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, groups: ops.Groups, size: int) -> Tensor:
        ctx.dim, ctx.groups, ctx.size = dim, groups, size
        return ops.all_gather(x, groups, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _ReduceScatter.apply(grad, ctx.dim, ctx.groups, ctx.size), None, None, None


class _ReduceScatter(Function):
    """The backward of ``_AllGather``, which is its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, groups: ops.Groups, size: int) -> Tensor:
        ctx.dim, ctx.groups, ctx.size = dim, groups, size
        return ops.reduce_scatter(x, size, groups, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllGather.apply(grad, ctx.dim, ctx.groups, ctx.size), None, None, None


def all_gather(x: Tensor, dim: int = 0, mesh: Any = None) -> Tensor:
    """Concatenate ``x`` of all ranks, in rank order; every rank gets the result and its gradient.

    A loss that each rank computes of its own rows against those of all ranks has gradients with
    respect to other ranks' rows. Backward sums them over the ranks (a reduce-scatter), so that a
    mean over ranks, such as FSDP's of gradients, is the gradient of the mean of the ranks' losses.

    Args:
        x: activations of this rank, [..., n, ...] with n along ``dim``; of one shape on all ranks.
        dim: the dim to concatenate along.
        mesh: a ``Mesh`` or ``DeviceMesh``: gather along all of its axes (default: from all ranks).

    Returns:
        [..., ranks * n, ...], of the dtype of ``x``.

    Raises:
        ValueError: if the mesh is not one of this job's ranks.
        IndexError: if ``x`` has no such dim.
    """
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"x has {x.dim()} dims, and no dim {dim}")
    groups, size = _groups(mesh)
    return x if size == 1 else _AllGather.apply(x, dim % x.dim(), groups, size)


def _groups(mesh: Any) -> tuple[ops.Groups, int]:
    if mesh is None:
        return None, ops.world_size()
    own = as_mesh(mesh)
    check_mesh(own)
    return own.groups(), own.size()
