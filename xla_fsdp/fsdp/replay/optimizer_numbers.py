"""The host's numbers of optimizers: options of groups, and counts of steps.

They are sources of ``host_numbers``: a program takes numbers computed from them as inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from xla_fsdp.fsdp.replay.host_numbers import HostNumbers, plain

Key = tuple[Any, ...]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) or (
        isinstance(value, Tensor) and value.device.type == "cpu" and not value.dim()
    )


@dataclass
class Count:
    """A number in the state of a parameter, which most steps raise by one."""

    state: dict[str, Any]
    name: str

    def read(self) -> float:
        value = self.state[self.name]
        return value.item() if isinstance(value, Tensor) else plain(value)

    def write(self, number: float) -> None:
        value = self.state[self.name]
        if isinstance(value, Tensor):
            value.fill_(number)
        else:
            self.state[self.name] = number


class OptimizerNumbers:
    """Reads, replaces and advances the numbers of optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)

    def options(self) -> dict[Key, float]:
        """Return the numbers in the groups of parameters, also those in tuples, by key."""
        found: dict[Key, float] = {}
        for key, value in self._values():
            if isinstance(value, tuple | list):
                found.update({(*key, n): each for n, each in enumerate(value) if _is_number(each)})
            elif _is_number(value):
                found[key] = value
            elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
                found[key] = value.item()
        return found

    def counts(self) -> list[Count]:
        """Return all counts, in one order."""
        return [
            Count(state, name)
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict)
            for name, value in state.items()
            if _is_count(value)
        ]

    @contextmanager
    def traced(self, numbers: HostNumbers, keys: dict[float, Key]) -> Iterator[None]:
        """Let optimizers compute with traced numbers inside the block.

        Args:
            numbers: gets the expressions.
            keys: the key of counts that begin with a number.
        """
        replaced: list[tuple[dict[str, Any], str]] = []
        for number, group, name, value in self._groups():
            key = ("option", number, name)
            if isinstance(value, tuple):
                parts = (numbers.source((*key, n), e) for n, e in enumerate(value))
                group[name] = tuple(parts)
            elif _is_number(value):
                group[name] = numbers.source(key, value)
            else:
                continue
            replaced.append((group, name))
        for count in self.counts():
            value = count.state[count.name]
            if not isinstance(value, Tensor):
                count.state[count.name] = numbers.source(keys[value], value)
                replaced.append((count.state, count.name))
        try:
            yield
        finally:
            for mapping, name in replaced:
                value = mapping.get(name)
                mapping[name] = tuple(map(plain, value)) if type(value) is tuple else plain(value)

    def _values(self) -> Iterator[tuple[Key, Any]]:
        for number, _, name, value in self._groups():
            yield ("option", number, name), value

    def _groups(self) -> Iterator[tuple[int, dict[str, Any], str, Any]]:
        groups = [group for each in self._optimizers for group in each.param_groups]
        for number, group in enumerate(groups):
            for name, value in list(group.items()):
                if name != "params":
                    yield number, group, name, value


def add_to_all(counts: Sequence[Count], deltas: Sequence[float]) -> None:
    """Add to each count its delta."""
    by_delta: dict[float, list[Tensor]] = {}
    for count, delta in zip(counts, deltas, strict=True):
        value = count.state[count.name]
        if not delta:
            continue
        if isinstance(value, Tensor):
            by_delta.setdefault(delta, []).append(value)
        else:
            count.state[count.name] = value + delta
    for delta, tensors in by_delta.items():
        torch._foreach_add_(tensors, delta)
