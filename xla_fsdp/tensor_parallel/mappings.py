"""The collectives of tensor parallelism with their gradients, as pairs of forward and backward.

A tensor is replicated if all ranks of the axis hold the same, sharded along a dim if each holds a
slice of the global tensor, partial if the global tensor is the sum over the ranks.

Invariants: the gradient of a replicated or partial tensor is replicated, that of a sharded one is
sharded the same way. Only between a mapping whose name ends in ``to_parallel`` and the product of a
parallel layer are gradients partial. No mapping saves a tensor, and none returns its input itself
(on several ranks), so they may be shared, recomputed, and traced as the body of a loop.

Source: the mappings of Megatron-LM (arXiv 1909.08053, and for sequences 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from xla_fsdp.distributed.mesh_axis import AxisComm

Move = Callable[[Tensor], Tensor]


class _Mapping(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.move_grad = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.move_grad(grad), None, None


class _Regather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, backward: Move) -> Tensor:
        ctx.move_grad = backward
        return gathered.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.move_grad(grad), None, None


def copy_to_parallel(x: Tensor, axis: AxisComm) -> Tensor:
    """Replicated to what parallel layers take. Forward: a copy. Backward: all-reduce."""
    return _Mapping.apply(x, Tensor.clone, axis.all_reduce)


def gather_to_parallel(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Sharded to what parallel layers take. Forward: all-gather. Backward: reduce-scatter."""
    gather, scatter = partial(axis.all_gather, dim=dim), partial(axis.reduce_scatter, dim=dim)
    return _Mapping.apply(x, gather, scatter)


def regather_to_parallel(x: Tensor, gathered: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """As ``gather_to_parallel`` of ``x`` that has been gathered already. Forward: a copy of
    ``gathered``. Backward: reduce-scatter, to ``x``."""
    return _Regather.apply(x, gathered.detach(), partial(axis.reduce_scatter, dim=dim))


def all_reduce(x: Tensor, axis: AxisComm) -> Tensor:
    """Partial to replicated. Forward: all-reduce. Backward: a copy."""
    return _Mapping.apply(x, axis.all_reduce, Tensor.clone)


def reduce_scatter(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Partial to sharded. Forward: reduce-scatter. Backward: all-gather."""
    scatter, gather = partial(axis.reduce_scatter, dim=dim), partial(axis.all_gather, dim=dim)
    return _Mapping.apply(x, scatter, gather)


def all_gather(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Sharded to replicated. Forward: all-gather. Backward: this rank's slice."""
    gather, own = partial(axis.all_gather, dim=dim), partial(axis.own_slice, dim=dim)
    return _Mapping.apply(x, gather, own)


def own_slice(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Replicated to sharded. Forward: this rank's slice. Backward: all-gather."""
    own, gather = partial(axis.own_slice, dim=dim), partial(axis.all_gather, dim=dim)
    return _Mapping.apply(x, own, gather)


def all_to_all(x: Tensor, axis: AxisComm, old: int, new: int) -> Tensor:
    """Sharded along one dim to sharded along another. Forward and backward: all-to-all."""
    there = partial(axis.all_to_all, cut=new, joined=old)
    back = partial(axis.all_to_all, cut=old, joined=new)
    return _Mapping.apply(x, there, back)
