"""Unsharded weights with which some functions of torch are computed another way, and whether they
are: ``with_whole_weights`` keeps all of them whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn


class ForwardWeight(Tensor):
    """An unsharded weight, until its unit reshards.

    What is made of it computes as any tensor does: ``weight.detach()``, which has this class all
    the same, and ``nn.Parameter(weight)``, copies and files, which do not.
    """

    _computed_by: Mapping[Any, Callable[..., Tensor]] = MappingProxyType({})  # by function of torch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kwargs = kwargs or {}
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            # Only there: another argument, the input say, may be such a weight, too.
            if isinstance(weight, ForwardWeight):
                func = weight._computed_by.get(func, func)
            result = func(*args, **kwargs)
            if func is Tensor.detach:
                result.__class__ = cls  # ``nn.Parameter(weight)`` refuses another class
            return result

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """Become a plain parameter: ``nn.Parameter(weight)`` sets this on what it has detached."""
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self.__class__ = Tensor  # type: ignore[assignment]  # torch wants clones of the same class
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = ForwardWeight

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def compute_by(weight: Tensor, function: Any, compute: Callable[..., Tensor]) -> None:
    """Turn ``weight`` into a ``ForwardWeight``, or let it compute another function, too.

    Args:
        weight: an unsharded parameter.
        function: a function of torch whose second argument is called ``weight``.
        compute: computes it where that is ``weight``; has the same arguments.
    """
    known = weight._computed_by if isinstance(weight, ForwardWeight) else {}
    marked: Any = weight
    marked.__class__ = ForwardWeight
    marked._computed_by = {**known, function: compute}


_whole: ContextVar[bool] = ContextVar("_whole", default=False)
"""Whether no weight is used in pieces, for ``with_whole_weights``."""


def weights_are_whole() -> bool:
    """Return whether ``with_whole_weights`` is in force."""
    return _whole.get()


@contextmanager
def with_whole_weights() -> Iterator[None]:
    """Compute with whole weights inside, whose products can be counted: those in a loop cannot."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)
