"""Slots: the places that hold tensors.

A program reads its inputs from slots and puts its results into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Way = tuple[tuple[str, Any], ...]
"""How to get from an object to a value inside: ("attribute", name) and ("item", key) in turn."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a dict that the state always keeps.

    Args:
        is_counted: whether somebody may ask ``num_changes`` of it: not of parameters and
            states of optimizers.
    """

    mapping: dict[Any, Any]
    key: Any
    is_counted: bool = True

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.mapping), self.key

    def get(self) -> Any:
        return self.mapping.get(self.key)

    def set(self, value: Tensor | None) -> None:
        if value is None:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value

    def free(self) -> None:
        if self.key in self.mapping:
            self.mapping[self.key] = None


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter."""

    param: Tensor

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.param), "grad"

    def get(self) -> Any:
        return self.param.grad

    def set(self, value: Tensor | None) -> None:
        self.param.grad = value

    def free(self) -> None:
        self.param.grad = None


@dataclass(frozen=True)
class Inside:
    """A tensor somewhere inside of an object, whose parts may be replaced by others."""

    root: Any
    way: Way

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.root), self.way

    def get(self) -> Any:
        value = self.root
        for kind, key in self.way:
            try:
                value = value[key] if kind == "item" else object.__getattribute__(value, key)
            except (AttributeError, LookupError, TypeError):  # it is not there any more
                return None
        return value

    def set(self, value: Any) -> None:
        holder, (_, key) = Inside(self.root, self.way[:-1]).get(), self.way[-1]
        if value is None and isinstance(holder, dict):
            holder.pop(key, None)
        else:
            self._put(value)

    def free(self) -> None:
        if self.get() is not None:
            self._put(None)

    def _put(self, value: Any) -> None:
        around = Inside(self.root, self.way[:-1])
        holder, (kind, key) = around.get(), self.way[-1]
        if kind == "attribute":
            object.__setattr__(holder, key, value)
        elif isinstance(holder, tuple):
            items = (*holder[:key], value, *holder[key + 1 :])
            make = getattr(type(holder), "_make", type(holder))  # a named tuple's, or tuple itself
            around.set(make(items))
        else:
            holder[key] = value


Slot = Entry | Gradient | Inside
"""``set`` to None empties a slot; ``free`` lets go of its tensor, but not of its place in a dict,
whose order shows in state dicts."""
