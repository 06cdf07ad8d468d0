"""What besides parameters and arguments decides what a block computes: buffers, and plain settings.

Words: a block's *tensors* are its buffers and the tensors that are attributes of its modules; its
*settings* are numbers, texts and the like there (an epsilon, a dropout rate, whether it trains),
also in lists and dicts; *configs* are objects there that hold nothing else.
Always true: tensors go into a loop as inputs, so their values may change from step to step; where
settings change, the loop is traced again. A block that is traced assigns no tensors, or says so:
they would have no values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.fsdp.scan.arguments import PLAIN

_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class BlockState:
    """One block's tensors and settings, and where the tensors are kept."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    settings: tuple[Any, ...]
    hooked: tuple[str, ...]
    _objects: tuple[Any, ...]
    _places: tuple[tuple[dict[str, Any], str], ...]
    _holders: tuple[tuple[str, dict[str, Any]], ...]

    @classmethod
    def of(cls, block: nn.Module) -> BlockState:
        """Those of ``block`` as it is now."""
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
                        names.append(_joined(prefix, key))
                        places.append((holder, key))
                    elif key not in _OF_ANY_MODULE:
                        settings += ((prefix, *each) for each in _plain(key, value))
                        if hasattr(value, "__dict__") and not callable(value):
                            objects.append(value)
        tensors = tuple(holder[key] for holder, key in places)
        return cls(
            tuple(names),
            tensors,
            tuple(settings),
            tuple(hooked),
            tuple(objects),
            tuple(places),
            tuple(holders),
        )

    def without_tensors(self) -> BlockState:
        """The same names and settings, without keeping anything alive."""
        return replace(self, tensors=(), _objects=(), _places=(), _holders=())

    @contextlib.contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the block hold these instead of its own.

        Raises:
            ValueError: if it holds others in the end.
        """
        original = [dict(holder) for _, holder in self._holders]
        for (holder, key), tensor in zip(self._places, tensors, strict=True):
            holder[key] = tensor
        lent = [dict(holder) for _, holder in self._holders]
        try:
            yield
            if assigned := [_joined(prefix, key) for prefix, _, key, _ in self._assigned(lent)]:
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
        """Where a tensor has come or gone since holders had these items: the module's name, the
        holder, the key and the holder's number."""
        for at, ((prefix, holder), items) in enumerate(zip(self._holders, before, strict=True)):
            for key in [*items, *(key for key in holder if key not in items)]:
                then, now = items.get(key), holder.get(key)
                if then is not now and (isinstance(then, Tensor) or isinstance(now, Tensor)):
                    yield prefix, holder, key, at


def settings_of(states: Sequence[BlockState]) -> Any:
    """Settings and configs of blocks; equal where these are."""
    objects = {id(each): each for state in states for each in state._objects}
    configs = (vars(each) for each in objects.values() if _is_plain(vars(each)))
    return (
        tuple(state.settings for state in states),
        tuple(tuple(_plain("", config)) for config in configs),
    )


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Plain values in ``value``, with their names."""
    if isinstance(value, PLAIN):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, each in _items(value):
            yield from _plain(_joined(name, str(key)), each)
    elif isinstance(value, set | frozenset) and _is_plain(list(value)):
        yield name, frozenset(value)


def _is_plain(value: Any) -> bool:
    """Whether it holds plain values only."""
    if isinstance(value, dict | list | tuple):
        return all(_is_plain(each) for _, each in _items(value))
    return isinstance(value, PLAIN) or (
        isinstance(value, set | frozenset) and _is_plain(list(value))
    )


def _items(value: dict[Any, Any] | Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


COMPARISONS = 4

"""How often values are compared: it means running what has been traced so far."""


class SharedTensors:
    """Finds out which of the tensors that blocks hold are the same in all of them."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, int]] = []
        self._shared: frozenset[int] = frozenset()
        self._left = COMPARISONS

    def of(self, states: Sequence[BlockState]) -> frozenset[int]:
        """Their numbers. Values are compared where tensors are new, or were changed; where that
        goes on, tensors are only shared if they are one and the same."""
        now = [(each, _version(each)) for state in states for each in state.tensors]
        if not _same_tensors(now, self._seen):
            by_number = enumerate(zip(*(state.tensors for state in states), strict=True))
            equal = _all_equal if self._left else _all_one
            self._shared = frozenset(at for at, (first, *rest) in by_number if equal(first, rest))
            self._seen = now
            self._left = max(0, self._left - 1)
        return self._shared


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same_tensors(a: Sequence[tuple[Tensor, int]], b: Sequence[tuple[Tensor, int]]) -> bool:
    return len(a) == len(b) and all(
        x is y and version == seen for (x, version), (y, seen) in zip(a, b, strict=True)
    )


def _all_one(first: Tensor, rest: Sequence[Tensor]) -> bool:
    return all(each is first for each in rest)


def _all_equal(first: Tensor, rest: Sequence[Tensor]) -> bool:
    if _all_one(first, rest):
        return True
    value = first.cpu()
    return all(each.dtype == value.dtype and torch.equal(each.cpu(), value) for each in rest)
