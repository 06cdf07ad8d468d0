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
from torch import optim

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


def device_options(optimizer_class: Callable[..., optim.Optimizer]) -> dict[str, Any]:
    """Return options with which an optimizer's step is traced as one program."""
    # Rprop otherwise selects elements by a mask; that needs values, so XLA would run the program.
    return {"capturable": True} if optimizer_class is optim.Rprop else {}


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


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` takes ``found_inf``, a tensor on the device that says
    whether to skip the step. An optimizer around another one has a property of this name."""
    own = getattr(optimizer, "takes_found_inf", None)
    return "found_inf" in inspect.signature(optimizer.step).parameters if own is None else own
