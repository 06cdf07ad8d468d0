"""What a block is called with, taken apart into the tensor that goes from block to block, other
tensors, and plain values.

Words: the *stream* is the first tensor among the arguments, which a block turns into the next
one's; *others* are the remaining tensors; *plain* values are numbers, text, None and the like, and
what they stand in (tuples, lists, dicts).
Always true: arguments put together again from the same tensors are those that were taken apart;
anything that is neither tensor nor plain is told by name, since a loop cannot see what a block does
to it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True)
class Slot:
    """Stands for tensor ``number``."""

    number: int


@dataclass(frozen=True)
class Arguments:
    """Arguments taken apart.

    Args:
        form: (args, kwargs) with a ``Slot`` for each tensor.
        tensors: the stream, then the others.
        places: what the tensors are called.
        plain: name and value of everything else, in order; comparable and hashable.
        opaque: names and types of what cannot be taken apart.
    """

    form: Any
    tensors: tuple[Tensor, ...]
    places: tuple[str, ...]
    plain: tuple[tuple[str, Any], ...]
    opaque: tuple[str, ...]

    @classmethod
    def of(cls, tree: Any) -> Arguments:
        """Take ``tree`` apart: (args, kwargs), or what a block returned."""
        tensors: list[Tensor] = []
        places: list[str] = []
        plain: list[tuple[str, Any]] = []
        opaque: list[str] = []

        def visit(leaf: Any, place: str) -> Any:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                places.append(place)
                return Slot(len(tensors) - 1)
            if isinstance(leaf, PLAIN):
                plain.append((place, leaf))
            else:
                opaque.append(f"{place} ({type(leaf).__name__})")
            return leaf

        form = _walk(visit, tree, "")
        return cls(form, tuple(tensors), tuple(places), tuple(plain), tuple(opaque))

    @property
    def key(self) -> Any:
        """Equal for arguments that differ in tensors alone."""
        return self.places, self.plain

    def with_tensors(self, tensors: Sequence[Tensor]) -> Arguments:
        """The same with other tensors."""
        return replace(self, tensors=tuple(tensors))

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """The arguments, with these tensors."""

        def visit(leaf: Any, place: str) -> Any:
            return tensors[leaf.number] if isinstance(leaf, Slot) else leaf

        return _walk(visit, self.form, "")

    def first_difference(self, other: Arguments) -> str | None:
        """What tells ``other`` from this, apart from the stream; None for nothing."""
        if self.places != other.places:
            return f"its tensors are {_listed(other.places)}, not {_listed(self.places)}"
        for place, mine, theirs in zip(self.places, self.tensors, other.tensors, strict=True):
            if mine is not theirs and place != self.places[0]:
                return f"its {place} is another tensor"
        for (_, value), (place, its) in zip(self.plain, other.plain, strict=False):
            if value != its:
                return f"its {place} is {its!r}, not {value!r}"
        return None if len(self.plain) == len(other.plain) else "it has other arguments"


def _walk(visit: Callable[[Any, str], Any], tree: Any, place: str) -> Any:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        named = zip(tree._fields, tree, strict=True)
        return type(tree)(*(_walk(visit, each, _join(place, name)) for name, each in named))
    if type(tree) in (tuple, list):
        return type(tree)(_walk(visit, e, _join(place, str(at))) for at, e in enumerate(tree))
    if type(tree) is dict:
        return {key: _walk(visit, each, _join(place, str(key))) for key, each in tree.items()}
    return visit(tree, _as_argument(place))


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _as_argument(place: str) -> str:
    """``0.2`` and ``1.mask`` are positions in (args, kwargs)."""
    kind, _, name = place.partition(".")
    if not name:
        return place
    return f"argument {name}" if kind in "01" else place


def _listed(places: tuple[str, ...]) -> str:
    return ", ".join(places) or "none"
