"""Which optimizers treat every element of a parameter by itself, so that slices can be stepped.

An optimizer that is not known counts as one that needs whole parameters: the result is right then,
and only memory is not saved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import optim

# Not: Adafactor and Muon (rows, columns and norms of a matrix), LBFGS (products of all).
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
    """Return options that keep an optimizer from reading values in the middle of its step."""
    # Rprop otherwise picks elements by a mask, which on XLA runs the program up to there.
    return {"capturable": True} if optimizer_class is optim.Rprop else {}


def is_elementwise(optimizer_class: Callable[..., optim.Optimizer], options: Mapping) -> bool:
    """Whether ``optimizer_class(params, **options)`` steps slices as it steps whole parameters.

    A class of another package says so by a static method ``is_elementwise(options)``.
    """
    if isinstance(optimizer_class, partial):
        return is_elementwise(optimizer_class.func, {**optimizer_class.keywords, **options})
    own: Any = getattr(optimizer_class, "is_elementwise", None)
    if own is not None:
        return bool(own(options))
    module = getattr(optimizer_class, "__module__", "")
    return optimizer_class in ELEMENTWISE or module.startswith(SYNCFREE)


def steps_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether ``optimizer``, or the one that it steps (``inner``), is elementwise."""
    inner = getattr(optimizer, "inner", optimizer)
    return is_elementwise(type(inner), inner.defaults)


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step(found_inf=...)`` decides on the device whether to step. An optimizer
    that hands it on to another one says so by a property of this name."""
    own = getattr(optimizer, "takes_found_inf", None)
    return "found_inf" in inspect.signature(optimizer.step).parameters if own is None else own
