"""Each collective of tensor parallelism with its gradient: named forward and backward pairs.

Words: a tensor is *replicated* if all ranks of the axis hold the same, *cut* along a dim if each
holds a slice, *partial* if the sum over the ranks is meant.
Always true: the gradient of a replicated tensor is replicated, that of a cut one is cut the same
way, that of a partial one is replicated. Only between a pair that says so (``copied``,
``gathered_for_use``, ``regathered``) and the product of a cut layer are gradients partial.
No pair saves a tensor, and none returns its input itself (on several ranks), so they may be shared,
recomputed, and traced as the body of a loop. Which pair is used where is decided by ``layouts`` and
``uses``.
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


class _Pair(Function):
    """One way there, another one back for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class _Regathered(Function):
    """See ``regathered``."""

    @staticmethod
    def forward(ctx: Any, cut: Tensor, gathered: Tensor, back: Move) -> Tensor:
        ctx.back = back
        return gathered.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def copied(x: Tensor, axis: AxisComm) -> Tensor:
    """Replicated to what cut layers take. Forward: the same. Backward: all-reduce."""
    return _pair(x, _copy, axis.all_reduce)


def summed(x: Tensor, axis: AxisComm) -> Tensor:
    """Partial to replicated. Forward: all-reduce. Backward: the same."""
    return _pair(x, axis.all_reduce, _copy)


def summed_and_cut(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Partial to cut. Forward: reduce-scatter. Backward: all-gather."""
    return _pair(x, partial(axis.reduce_scatter, dim=dim), partial(axis.all_gather, dim=dim))


def gathered(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Cut to replicated. Forward: all-gather. Backward: this rank's slice."""
    return _pair(x, partial(axis.all_gather, dim=dim), partial(axis.own_slice, dim=dim))


def gathered_for_use(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Cut to what cut layers take. Forward: all-gather. Backward: reduce-scatter."""
    return _pair(x, partial(axis.all_gather, dim=dim), partial(axis.reduce_scatter, dim=dim))


def regathered(x: Tensor, full: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """As ``gathered_for_use`` of ``x`` that has been gathered already, as ``full``. Forward: that.
    Backward: reduce-scatter, to ``x``."""
    return _Regathered.apply(x, full.detach(), partial(axis.reduce_scatter, dim=dim))


def cut(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Replicated to cut. Forward: this rank's slice. Backward: all-gather."""
    return _pair(x, partial(axis.own_slice, dim=dim), partial(axis.all_gather, dim=dim))


def recut(x: Tensor, axis: AxisComm, old: int, new: int) -> Tensor:
    """Cut along one dim to cut along another. Forward: all-to-all. Backward: the way back."""
    there = partial(axis.all_to_all, split_dim=new, concat_dim=old)
    return _pair(x, there, partial(axis.all_to_all, split_dim=old, concat_dim=new))


def _pair(x: Tensor, there: Move, back: Move) -> Tensor:
    return _Pair.apply(x, there, back)


def _copy(x: Tensor) -> Tensor:
    return x.clone()
