"""What the autograd nodes of this package have in common.

Words: a *node* is an ``autograd.Function`` that takes tensors and returns as many. Always true:
only tensors on an XLA device go through a node; others pass by untouched, as there is nothing to
order or recompute for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from xla_fsdp.tree import replace_tensors, tensors_in


def through(node: Callable[..., tuple[Tensor, ...]], tree: Any) -> Any:
    """``tree`` with its device tensors replaced by ``node(*device_tensors)``."""
    given = tensors_in(tree)
    moved = iter(node(*filter(on_device, given)))
    return replace_tensors(tree, [next(moved) if on_device(t) else t for t in given])


def on_device(tensor: Tensor) -> bool:
    """Whether ``tensor`` is lazy, on an XLA device."""
    return tensor.device.type == "xla"


def mark_constants(ctx: Any, outputs: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
    """Declare outputs whose inputs need no gradient to need none either; one input that needs a
    gradient would otherwise make every output of the node need one."""
    constants = [out for out, needed in zip(outputs, needs_grad, strict=True) if not needed]
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)


def present(items: Sequence[Tensor | None]) -> list[Tensor]:
    """The items that are there."""
    return [item for item in items if item is not None]
