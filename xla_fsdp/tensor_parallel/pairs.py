"""Each collective of tensor parallelism with its gradient: named forward and backward pairs.

Words: a tensor is *replicated* if all ranks of the axis hold the same, *cut* along a dim if each
holds a slice, *partial* if the sum over the ranks is meant.
Always true: the gradient of a replicated tensor is replicated, that of a cut one is cut the same
way, that of a partial one is replicated. Only between a pair that says so (``Copied``,
``GatheredForUse``, ``Regathered``) and the product of a cut layer are gradients partial.
No pair saves a tensor, and none returns its input itself, so they may be shared, recomputed, and
traced as the body of a loop. Which pair is used where is decided by ``layouts`` and ``uses``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from xla_fsdp.mesh_axis import MeshAxis


class Copied(Function):
    """Replicated to what cut layers take. Forward: the same. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(grad), None


class Summed(Function):
    """Partial to replicated. Forward: all-reduce. Backward: the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        return axis.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clone(), None


class SummedAndCut(Function):
    """Partial to cut. Forward: reduce-scatter. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(grad, ctx.dim), None, None


class Gathered(Function):
    """Cut to replicated. Forward: all-gather. Backward: this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.own_slice(grad, ctx.dim), None, None


class GatheredForUse(Function):
    """Cut to what cut layers take. Forward: all-gather. Backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.reduce_scatter(grad, ctx.dim), None, None


class Regathered(Function):
    """As ``GatheredForUse`` of a tensor that has been gathered already. Forward: what was gathered.
    Backward: reduce-scatter, to the tensor that it was gathered from."""

    @staticmethod
    def forward(ctx: Any, cut: Tensor, gathered: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gathered.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.reduce_scatter(grad, ctx.dim), None, None, None


class Cut(Function):
    """Replicated to cut. Forward: this rank's slice. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.own_slice(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(grad, ctx.dim), None, None


class Recut(Function):
    """Cut along one dim to cut along another. Forward: all-to-all. Backward: the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, old: int, new: int) -> Tensor:
        ctx.axis, ctx.old, ctx.new = axis, old, new
        return axis.all_to_all(x, new, old)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_to_all(grad, ctx.old, ctx.new), None, None, None
