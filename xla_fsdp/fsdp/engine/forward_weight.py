"""Unsharded weights with which some functions of torch are computed another way in a forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


class ForwardWeight(Tensor):
    """An unsharded weight in the forward of its unit, until the unit reshards."""

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
                # As ``nn.Parameter(weight)`` refuses another class. It computes as any tensor does.
                result.__class__ = cls
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def compute_by(weight: Tensor, function: Any, compute: Callable[..., Tensor]) -> None:
    """Turn ``weight`` into a ``ForwardWeight``.

    Args:
        weight: an unsharded parameter.
        function: a function of torch whose second argument is called ``weight``.
        compute: computes it where that is ``weight``; has the same arguments.
    """
    marked: Any = weight
    marked.__class__ = ForwardWeight
    marked._computed_by = {function: compute}
