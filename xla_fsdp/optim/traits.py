"""Properties of optimizers: elementwise steps, and options that matter on XLA devices.

An optimizer is *elementwise* if a step on slices of a parameter gives the same as on the parameter.
Unknown optimizers count as not elementwise: results are right, only memory is not saved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

# Not Adafactor and Muon (rows, columns and norms of a matrix), nor LBFGS (inner products).
ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)

SYNCFREE = "torch_xla.amp.syncfree"

STEPS_SLICES_OF = "steps_slices_of"
"""Attribute of a copy of an optimizer, which steps slices of parameters: the optimizer."""


class StepWatch:
    """A hook of optimizers' steps that changes nothing, so that loops may step slices as without
    it; it calls ``note`` with the optimizer."""

    def __init__(self, note: Callable[[optim.Optimizer], None]) -> None:
        self._note = note

    def __call__(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._note(optimizer)


def params_of(optimizer: optim.Optimizer) -> list[Any]:
    """Return the parameters in the groups of an optimizer, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def device_options(optimizer_class: Callable[..., optim.Optimizer]) -> dict[str, Any]:
    """Return options with which an optimizer's step is traced as one program."""
    # Rprop otherwise selects elements by a mask, and ASGD reads its rate and its counts; both need
    # values, so XLA would run the program.
    return {"capturable": True} if optimizer_class in (optim.ASGD, optim.Rprop) else {}


def is_elementwise(optimizer_class: Callable[..., optim.Optimizer], options: Mapping) -> bool:
    """Return whether ``optimizer_class(params, **options)`` is elementwise.

    A class of another package can define a static method ``is_elementwise(options)``.
    """
    if isinstance(optimizer_class, partial):
        return is_elementwise(optimizer_class.func, {**optimizer_class.keywords, **options})
    own: Any = getattr(optimizer_class, "is_elementwise", None)
    if own is not None:
        return bool(own(options))
    module = getattr(optimizer_class, "__module__", "")
    return optimizer_class in ELEMENTWISE or module.startswith(SYNCFREE)


def steps_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return whether ``optimizer``, or the one that it wraps (``inner``), is elementwise."""
    inner = getattr(optimizer, "inner", optimizer)
    return is_elementwise(type(inner), inner.defaults)


def acts_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return whether steps on a tensor are those on its halves, tried out in host memory by new
    optimizers of the same class and options.

    For classes that are not known; False if one cannot be made so, or cannot step such tensors.
    """
    while (inner := getattr(optimizer, "inner", None)) is not None:
        optimizer = inner
    try:
        return all(
            _steps_halves_alike(type(optimizer), group, scale)
            for group in optimizer.param_groups
            for scale in (1.0, 1e-5)  # norms on both sides of what an optimizer clips them at
        )
    except Exception:  # whatever a foreign class raises for a tensor like this one
        return False


def _steps_halves_alike(
    optimizer_class: type[optim.Optimizer], group: Mapping[str, Any], scale: float
) -> bool:
    # Elements grow, so that the halves differ in every norm.
    values = scale * 1.5 ** torch.arange(24.0)
    values[::3] *= -1
    whole = _after_steps(optimizer_class, group, values.reshape(4, 6)).flatten()
    halves = [_after_steps(optimizer_class, group, half) for half in values.chunk(2)]
    return torch.allclose(whole, torch.cat(halves), rtol=1e-4)


def _after_steps(
    optimizer_class: type[optim.Optimizer], group: Mapping[str, Any], value: Tensor
) -> Tensor:
    """Return ``value`` after some steps with the options of ``group``, and gradients of its own."""
    param = torch.nn.Parameter(value.clone())
    options = {name: option for name, option in group.items() if name != "params"}
    if "lr" in options:
        options["lr"] = 0.1  # a scheduler may begin at 0
    taken = inspect.signature(optimizer_class).parameters.keys() & options.keys()
    # Not a copy of the user's optimizer: that may hold its parameters, or another optimizer.
    optimizer = optimizer_class([param], **{name: options[name] for name in taken})
    optimizer.param_groups[0].update(options)
    step = inspect.unwrap(optimizer_class.step)  # without the hooks that torch calls
    with torch.no_grad():
        for factor in (1.0, 1e-3, 10.0):
            param.grad = factor * (value + value.abs().sqrt())
            step(optimizer)
    return param.detach()


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` needs a closure, as that of LBFGS, which calls it as often
    as the values that it has seen ask for."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` takes ``found_inf``, a tensor on the device that says
    whether to skip the step. An optimizer around another one has a property of this name."""
    own = getattr(optimizer, "takes_found_inf", None)
    return "found_inf" in inspect.signature(optimizer.step).parameters if own is None else own
