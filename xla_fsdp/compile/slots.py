"""Slots: the places that hold tensors.

A program reads its inputs from slots and puts its results into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Way = tuple[tuple[str, Any], ...]
"""How to get from an object to a value inside: ("attribute", name) and ("item", key) in turn."""


@dataclass(frozen=True)
class Slot:
    """A place inside of an object, whose parts may be replaced by others.

    Args:
        root: the object, which the state always keeps.
        way: the way from there; not empty.
        is_counted: whether somebody may ask ``num_changes`` of what is there: not of parameters and
            states of optimizers.
    """

    root: Any
    way: Way
    is_counted: bool = True

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.root), self.way

    def get(self) -> Any:
        """Return what is there, None if nothing is."""
        return _value(self.root, self.way)

    def set(self, value: Any) -> None:
        """Put a value there; None empties the slot."""
        holder, key = _value(self.root, self.way[:-1]), self.way[-1][1]
        if value is None and isinstance(holder, dict):
            holder.pop(key, None)
        else:
            _put(self.root, self.way, value)

    def free(self) -> None:
        """Let go of the tensor, but not of its place in a dict, whose order shows in state
        dicts."""
        if self.get() is not None:
            _put(self.root, self.way, None)


def _value(root: Any, way: Way) -> Any:
    value = root
    try:
        for kind, key in way:
            value = value[key] if kind == "item" else object.__getattribute__(value, key)
    except (AttributeError, LookupError, TypeError):  # it is not there any more
        return None
    return value


def _put(root: Any, way: Way, value: Any) -> None:
    *before, (kind, key) = way
    holder = _value(root, tuple(before))
    if kind == "attribute":
        object.__setattr__(holder, key, value)
    elif isinstance(holder, tuple):
        items = (*holder[:key], value, *holder[key + 1 :])
        make = getattr(type(holder), "_make", type(holder))  # a named tuple's, or tuple itself
        _put(root, tuple(before), make(items))
    else:
        holder[key] = value
