"""Gradients of gradients, and the transforms of ``torch.func``.

With ``create_graph=True`` autograd runs backward in grad mode, and what a node computes there must
have a graph of its own. Here are nodes whose backward is a linear map, which has one, and a
decorator for backwards that have none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Linear = Callable[[Sequence[Tensor | None]], list[Tensor | None]]
"""A linear map of some tensors to others; None stands for zero."""


def linear(
    compute: Linear, tensors: Sequence[Tensor | None], again: Linear, adjoint: Linear
) -> list[Tensor | None]:
    """Return ``compute(tensors)``, with a graph that may be differentiated any number of times.

    Args:
        compute: the map, called once, without grad mode and with tensors that have no graph.
        tensors: its arguments.
        again: the same map, without side effects.
        adjoint: the map from gradients of the results to those of ``tensors``.
    """
    with torch.no_grad():
        results = compute([None if each is None else each.detach() for each in tensors])
    return list(_LinearMap.apply(results, again, adjoint, *tensors))


class _LinearMap(torch.autograd.Function):
    """Return ``results``, which the caller has computed from ``tensors``."""

    @staticmethod
    def forward(
        ctx: Any,
        results: list[Tensor | None],
        compute: Linear,
        adjoint: Linear,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.compute, ctx.adjoint = compute, adjoint
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        back = ctx.adjoint
        found = linear(back, grads, back, ctx.compute) if torch.is_grad_enabled() else back(grads)
        pairs = zip(found, ctx.needs_input_grad[3:], strict=True)
        return (None, None, None, *(grad if need else None for grad, need in pairs))


def mapped(
    x: Tensor,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
    known: Tensor | None = None,
) -> Tensor:
    """Return ``forward(x)``, of two linear maps each of which is the backward of the other.

    ``known`` is its value if that has been computed, of which this makes a copy.
    """
    with torch.no_grad():
        result = forward(x) if known is None else known.clone()
    [found] = _LinearMap.apply([result], _of_each(forward), _of_each(backward), x)
    return found


def _of_each(move: Callable[[Tensor], Tensor]) -> Linear:
    return lambda tensors: [None if each is None else move(each) for each in tensors]


def differentiable_once(instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark the backward of an autograd function, which returns a tuple: differentiating its results
    raises RuntimeError.

    torch's ``once_differentiable`` returns constants, without an error, where the incoming
    gradients are constants, as they are after the last operation.

    Args:
        instead: says what cannot be differentiated twice, and what the user should do.
    """

    def mark(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def marked(ctx: Any, *grads: Tensor | None) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return results
            return _Refusal.apply(instead, torch.empty(0, requires_grad=True), *results)

        return marked

    return mark


class _Refusal(torch.autograd.Function):
    """Copies of tensors that raise when they are differentiated."""

    @staticmethod
    def forward(
        ctx: Any, instead: str, anchor: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.instead = instead
        return tuple(None if each is None else each.clone() for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"a gradient was differentiated again. {ctx.instead}")


# ---------------------------------------------------------------- transforms


def explain_hooks(error: BaseException) -> None:
    """Raise RuntimeError with what to do, if ``error`` says that a transform was called where
    autograd's saved tensors go through hooks."""
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        raise RuntimeError(
            "a transform of torch.func (grad, vjp, jacrev or hessian) was called in the forward of "
            "a checkpointed module, or of an FSDP unit that frees its parameters after forward, "
            "which needs hooks on what autograd saves; transforms allow none. Call "
            "torch.autograd.grad(..., create_graph=True) there; or call the transform outside, "
            "checkpoint no module around it, and shard such units with reshard_after_forward=False"
        ) from error


in_transform = torch._C._are_functorch_transforms_active
"""Returns whether the caller runs inside a transform of ``torch.func`` (grad, vmap, ...)."""


def in_forward_mode() -> bool:
    """Return whether the caller runs inside ``jvp`` or what is made of it (jacfwd, hessian)."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(each.key() == torch._C._functorch.TransformType.Jvp for each in stack)


def outside_transforms() -> AbstractContextManager[Any]:
    """Compute inside the block as if no transform of ``torch.func`` was active; use no tensor of a
    transform there."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()
