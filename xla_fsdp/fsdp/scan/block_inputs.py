"""What decides what a block computes, apart from its parameters: the arguments that it is called
with, and the tensors and settings that its modules hold.

Invariants: tensors are inputs of the loop, so their values may change from step to step. Where
anything else changes, the loop is traced again. What is neither a tensor nor a plain value is
refused by name, as a loop cannot see what a block does to it.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)

# ---------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Slot:
    """Stands for tensor ``number``."""

    number: int


@dataclass(frozen=True)
class Arguments:
    """Arguments, or what a block returned, taken apart."""

    form: Any  # (args, kwargs) with a ``Slot`` for each tensor
    # in order; the first is the input that a block turns into the next one's
    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]  # of the tensors
    # name and value of everything else, in order; comparable and hashable
    plain: tuple[tuple[str, Any], ...]
    opaque: tuple[str, ...]  # names and types of what cannot be taken apart

    @classmethod
    def of(cls, tree: Any) -> Arguments:
        """Take ``tree`` apart: (args, kwargs), or what a block returned."""
        tensors: list[Tensor] = []
        names: list[str] = []
        plain: list[tuple[str, Any]] = []
        opaque: list[str] = []

        def visit(leaf: Any, name: str) -> Any:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                names.append(name)
                return Slot(len(tensors) - 1)
            if isinstance(leaf, PLAIN):
                plain.append((name, leaf))
            else:
                opaque.append(f"{name} ({type(leaf).__name__})")
            return leaf

        form = _map_leaves(visit, tree, "")
        return cls(form, tuple(tensors), tuple(names), tuple(plain), tuple(opaque))

    @property
    def key(self) -> Any:
        """Equal for arguments that differ in tensors alone."""
        return self.names, self.plain

    def without_tensors(self) -> Arguments:
        """Return the same without keeping tensors alive."""
        return replace(self, tensors=())

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """Return the arguments with these tensors."""

        def visit(leaf: Any, name: str) -> Any:
            return tensors[leaf.number] if isinstance(leaf, Slot) else leaf

        return _map_leaves(visit, self.form, "")

    def first_difference(self, other: Arguments) -> str | None:
        """Describe how ``other`` differs, apart from the first tensor; None if it does not."""
        if self.names != other.names:
            own, found = (", ".join(each.names) or "none" for each in (self, other))
            return f"its tensors are {found}, not {own}"
        for name, mine, theirs in zip(self.names, self.tensors, other.tensors, strict=True):
            if mine is not theirs and name != self.names[0]:
                return f"its {name} is another tensor"
        for (_, value), (name, its) in zip(self.plain, other.plain, strict=False):
            if value != its:
                return f"its {name} is {its!r}, not {value!r}"
        return None if len(self.plain) == len(other.plain) else "it has other arguments"


def _map_leaves(visit: Callable[[Any, str], Any], tree: Any, name: str) -> Any:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = zip(tree._fields, tree, strict=True)
        return type(tree)(*(_map_leaves(visit, each, _join(name, key)) for key, each in fields))
    if type(tree) in (tuple, list):
        return type(tree)(
            _map_leaves(visit, each, _join(name, str(at))) for at, each in enumerate(tree)
        )
    if type(tree) is dict:
        return {key: _map_leaves(visit, each, _join(name, str(key))) for key, each in tree.items()}
    return visit(tree, _argument_name(name))


def _argument_name(name: str) -> str:
    """``0.2`` and ``1.mask`` are positions in (args, kwargs)."""
    kind, _, rest = name.partition(".")
    return f"argument {rest}" if rest and kind in "01" else name


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


# ---------------------------------------------------------------- what modules hold

_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class BlockState:
    """The buffers of a block and the plain values that are attributes of its modules."""

    names: tuple[str, ...]  # of the tensors
    tensors: tuple[Tensor, ...]  # buffers, and tensors that are attributes
    # (module, name, value) of numbers, texts and the like (an epsilon, a dropout rate, whether it
    # trains), also in lists and dicts
    settings: tuple[Any, ...]
    hooked: tuple[str, ...]  # names of modules with hooks
    _objects: tuple[Any, ...]
    _places: tuple[tuple[dict[str, Any], str], ...]
    _holders: tuple[tuple[str, dict[str, Any]], ...]

    @classmethod
    def of(cls, block: nn.Module) -> BlockState:
        """Return that of ``block`` as it is now."""
        names: list[str] = []
        places: list[tuple[dict[str, Any], str]] = []
        settings: list[Any] = []
        hooked: list[str] = []
        objects: list[Any] = []
        holders: list[tuple[str, dict[str, Any]]] = []
        for prefix, module in block.named_modules():
            fields = vars(module)
            if any(fields[kind] for kind in _HOOKS):
                hooked.append(prefix or type(module).__name__)
            for holder in (module._buffers, fields):
                holders.append((prefix, holder))
                for key, value in holder.items():
                    if isinstance(value, Tensor):
                        names.append(_join(prefix, key))
                        places.append((holder, key))
                    elif key not in _OF_ANY_MODULE:
                        settings += ((prefix, *each) for each in _plain_values(key, value))
                        if hasattr(value, "__dict__") and not callable(value):
                            objects.append(value)
        tensors = [holder[key] for holder, key in places]
        parts: tuple[list[Any], ...]
        parts = (names, tensors, settings, hooked, objects, places, holders)
        return cls(*map(tuple, parts))

    def without_tensors(self) -> BlockState:
        """Return the same names and settings, without keeping anything alive."""
        return replace(self, tensors=(), _objects=(), _places=(), _holders=())

    @contextlib.contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the block hold these tensors instead of its own.

        Raises:
            ValueError: if the block assigns others meanwhile.
        """
        original = [dict(holder) for _, holder in self._holders]
        for (holder, key), tensor in zip(self._places, tensors, strict=True):
            holder[key] = tensor
        lent = [dict(holder) for _, holder in self._holders]
        try:
            yield
            if assigned := [_join(prefix, key) for prefix, _, key, _ in self._assigned(lent)]:
                raise ValueError(
                    f"a scanned block assigns a tensor to its {', '.join(assigned)}; it would be "
                    f"lost, as blocks run as one loop. Return it as a part of what goes from "
                    f"block to block, or do not scan these blocks"
                )
        finally:
            for _, holder, key, at in list(self._assigned(original)):
                if key in original[at]:
                    holder[key] = original[at][key]
                else:
                    del holder[key]

    def _assigned(
        self, before: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[str, dict[str, Any], str, int]]:
        """Yield where a tensor has come or gone since holders had these items: the module's name,
        the holder, the key and the holder's number."""
        for at, ((prefix, holder), items) in enumerate(zip(self._holders, before, strict=True)):
            for key in [*items, *(key for key in holder if key not in items)]:
                then, now = items.get(key), holder.get(key)
                if then is not now and (isinstance(then, Tensor) or isinstance(now, Tensor)):
                    yield prefix, holder, key, at


def settings_of(states: Sequence[BlockState]) -> Any:
    """Return the settings of blocks, and of the objects there that hold plain values only, such as
    a model's config; equal where these are."""
    objects = {id(each): each for state in states for each in state._objects}
    configs = (vars(each) for each in objects.values() if _is_plain(vars(each)))
    return (
        tuple(state.settings for state in states),
        tuple(tuple(_plain_values("", config)) for config in configs),
    )


def _plain_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, PLAIN):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, each in _items(value):
            yield from _plain_values(_join(name, str(key)), each)
    elif isinstance(value, set | frozenset) and _is_plain(list(value)):
        yield name, frozenset(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return all(_is_plain(each) for _, each in _items(value))
    return isinstance(value, PLAIN) or (
        isinstance(value, set | frozenset) and _is_plain(list(value))
    )


def _items(value: dict[Any, Any] | Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


MAX_COMPARISONS = 4
"""How often values are compared, which means to run what has been traced so far."""


class SharedTensors:
    """Finds out which of the tensors that blocks hold are the same in all of them."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, int]] = []
        self._shared: frozenset[int] = frozenset()
        self._left = MAX_COMPARISONS

    def of(self, states: Sequence[BlockState]) -> frozenset[int]:
        """Return their numbers.

        Values are compared where tensors are new, or were changed in place. Where that goes on,
        only tensors that are one and the same object count.
        """
        now = [(each, _version(each)) for state in states for each in state.tensors]
        if not _same_tensors(now, self._seen):
            by_number = enumerate(zip(*(state.tensors for state in states), strict=True))
            equal = _all_equal if self._left else _all_same
            self._shared = frozenset(at for at, (first, *rest) in by_number if equal(first, rest))
            self._seen = now
            self._left = max(0, self._left - 1)
        return self._shared


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same_tensors(a: Sequence[tuple[Tensor, int]], b: Sequence[tuple[Tensor, int]]) -> bool:
    return len(a) == len(b) and all(
        x is y and version == seen for (x, version), (y, seen) in zip(a, b, strict=True)
    )


def _all_same(first: Tensor, rest: Sequence[Tensor]) -> bool:
    return all(each is first for each in rest)


def _all_equal(first: Tensor, rest: Sequence[Tensor]) -> bool:
    if _all_same(first, rest):
        return True
    value = first.cpu()
    return all(each.dtype == value.dtype and torch.equal(each.cpu(), value) for each in rest)
