"""Python numbers that blocks compute with: record them, and replace those that differ.

A number such as the rate of a drop path, or a factor that depends on a layer's index, is a constant
of a traced program. Blocks that differ in such numbers alone run in one loop if the numbers are
inputs of it. They are told by their order: the n-th number that a block hands to an operation of
``_PLACES``, wherever it comes from (an attribute, a config, an argument, arithmetic in Python).

Invariant: a number anywhere else stays a constant, so that blocks with other numbers there have
another program, and are not taken for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ARITHMETIC = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "mul", "rmul", "imul", "multiply",
    "div", "rdiv", "idiv", "divide", "true_divide", "truediv", "rtruediv", "itruediv", "pow",
    "rpow", "ipow", "floor_divide", "floordiv", "rfloordiv", "remainder", "fmod", "eq", "ne",
    "lt", "le", "gt", "ge",
)  # fmt: skip

# By name of the operation, without underscores around it: where it takes a number, by position or
# by keyword.
_PLACES: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(_ARITHMETIC, (0, 1, "other")),
    "where": (1, 2),
    "masked_fill": (2, "value"),
    "bernoulli": (1, "p"),
    "dropout": (1, "p"),
}


@dataclass(frozen=True)
class Number:
    """A number that a block hands to an operation.

    Args:
        operation: its name.
        dtype: of the tensor that can replace the number.
        value: the number.
    """

    operation: str
    dtype: torch.dtype
    value: float


class Numbers:
    """Records the numbers of one run of a block in ``found``; replaces some by tensors.

    Args:
        given: tensors without dims, by the index of the number that each replaces.
    """

    def __init__(self, given: Mapping[int, Tensor]) -> None:
        self.found: list[Number] = []
        self._given = given

    def call(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)``, where ``name`` is the name of ``func``."""
        found = _numbers(name.strip("_"), args, kwargs)
        tensors = {place: self._next(name, value, operand) for place, value, operand in found}
        replaced: dict[Any, Tensor]
        replaced = {place: tensor for place, tensor in tensors.items() if tensor is not None}
        if not replaced:
            return func(*args, **kwargs)
        args = [replaced.get(at, each) for at, each in enumerate(args)]
        kwargs = {key: replaced.get(key, each) for key, each in kwargs.items()}
        return _WITH_TENSOR.get(name, func)(*args, **kwargs)

    def _next(self, name: str, value: float, operand: torch.dtype | None) -> Tensor | None:
        self.found.append(Number(name, _dtype_for(value, operand), value))
        given = self._given.get(len(self.found) - 1)
        # A tensor without dims changes the dtype of another such tensor; a number does not.
        keeps = operand is None or given is None or not _converts(operand, given.dtype)
        return given if given is None or keeps else given.to(operand)


def _numbers(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[int | str, float, torch.dtype | None]]:
    """Yield (place, value, dtype of the first tensor) of each number that can be replaced."""
    for place in _PLACES.get(name, ()):
        if isinstance(place, str):
            value = kwargs.get(place)
        else:
            value = args[place] if place < len(args) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            tensors = (each for each in args if isinstance(each, Tensor))
            of_values = (each.dtype for each in tensors if each.dtype != torch.bool)
            yield place, value, next(of_values, None)


def _dtype_for(value: float, operand: torch.dtype | None) -> torch.dtype:
    if operand == torch.float64:
        return torch.float64
    floating = isinstance(value, float) or (operand is not None and operand.is_floating_point)
    return torch.float32 if floating else torch.int64


def _converts(operand: torch.dtype, number: torch.dtype) -> bool:
    return operand.is_floating_point or not number.is_floating_point


def _dropout(
    x: Tensor, p: float | Tensor = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training:
        return x
    keeps = _bernoulli(x, 1 - p)
    scaled = keeps / torch.where(keeps > 0, 1 - p, 1)
    return x.mul_(scaled) if inplace else x * scaled


def _bernoulli(like: Tensor, p: float | Tensor = 0.5) -> Tensor:
    """Return zeros and ones, which have probability ``p``."""
    return (torch.rand(like.shape, device=like.device) < p).to(like.dtype)


def _bernoulli_(x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return x.copy_(_bernoulli(x, p))


# Operations that take no tensor for a number, or would read its value.
_WITH_TENSOR: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
}
