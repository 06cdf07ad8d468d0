"""An all-gather of activations with the gradient of the whole batch, for contrastive losses."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from xla_fsdp.distributed.collectives import check_mesh
from xla_fsdp.distributed.higher_order import mapped
from xla_fsdp.distributed.mesh import as_mesh
from xla_fsdp.xla import ops


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
    how: dict[str, Any] = {"groups": None, "dim": dim % x.dim()}
    size = ops.world_size()
    if mesh is not None:
        own = as_mesh(mesh)
        check_mesh(own)
        how["groups"], size = own.groups(), own.size()
    if size == 1:
        return x
    gather, scatter = partial(ops.all_gather, **how), partial(ops.reduce_scatter, **how)
    return mapped(x, gather, partial(scatter, shard_count=size))
