"""The host's numbers of optimizers: options of groups, and counts of steps.

They are sources of ``host_numbers``: a program takes numbers computed from them as inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from xla_fsdp.compile.host_numbers import HostNumbers, expression_of, plain

Key = tuple[Any, ...]
Begin = tuple[int, float]
"""Number of an optimizer, and with what its counts begin a step."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) or (
        isinstance(value, Tensor) and value.device.type == "cpu" and not value.dim()
    )


class Count:
    """A number in the state of a parameter, which most steps raise by one.

    Args:
        state: that of the parameter.
        name: of the number in it.
        optimizer: the number of the optimizer that has it.

    Attributes:
        read: returns the number.
        write: sets it.
    """

    def __init__(self, state: dict[str, Any], name: str, optimizer: int) -> None:
        self.state, self.name, self.optimizer = state, name, optimizer
        self._held = held = state[name]
        self.read: Callable[[], float]
        self.write: Callable[[float], Any]
        if not isinstance(held, Tensor):
            self.read = lambda: plain(state[name])
            self.write = partial(state.__setitem__, name)
        elif held.dtype == torch.bfloat16:  # unknown to numpy
            self.read, self.write = held.item, held.fill_
        else:  # reading the memory one by one through torch takes ten times as long
            memory = held.detach().numpy()
            self.read, self.write = memory.item, memory.fill

    @property
    def begin(self) -> Begin:
        """What counts have in common that are one source: the number that it has now."""
        return self.optimizer, self.read()

    def is_held(self) -> bool:
        """Return whether the state still holds the same tensor, if it is one."""
        return not isinstance(self._held, Tensor) or self.state.get(self.name) is self._held


def _note_change(numbers: HostNumbers, key: Key, value: Any) -> None:
    if isinstance(value, tuple):  # of another group, from which an optimizer around it copies
        for number, each in enumerate(value):
            _note_change(numbers, (*key, number), each)
    elif plain(value) is not value:
        numbers.updates[key] = expression_of(value)
    else:
        numbers.problem = (
            f"the step sets {key[2]} of the optimizer's group {key[1]}; set it before the step"
        )


class OptimizerNumbers:
    """Reads, replaces and advances the numbers of optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)

    def options(self) -> dict[Key, float]:
        """Return the numbers in the groups of parameters, also those in tuples, by key."""
        found: dict[Key, float] = {}
        for key, _, value in self._held():
            if isinstance(value, tuple | list):
                found.update({(*key, n): each for n, each in enumerate(value) if _is_number(each)})
            elif _is_number(value):
                found[key] = value
            elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
                found[key] = value.item()
        return found

    def counts(self) -> list[Count]:
        """Return all counts, in one order."""
        states: dict[int, tuple[dict[str, Any], int]] = {}
        for number, optimizer in enumerate(self._optimizers):
            for state in optimizer.state.values():
                if isinstance(state, dict):  # one around another optimizer has the same
                    states.setdefault(id(state), (state, number))
        return [
            Count(state, name, number)
            for state, number in states.values()
            for name, value in state.items()
            if _is_count(value)
        ]

    @staticmethod
    def keys_of(begins: Sequence[Begin]) -> dict[Begin, Key]:
        """Return the key of each begin; that of one optimizer does not depend on others, which may
        have stepped more often or less."""
        known = list(dict.fromkeys(begins))  # in the order of parameters, whichever has more steps
        within = [sum(each[0] == one[0] for each in known[:n]) for n, one in enumerate(known)]
        return {one: ("count", one[0], number) for one, number in zip(known, within, strict=True)}

    def tensors(self, keys: dict[Begin, Key]) -> dict[int, tuple[Key, float]]:
        """Return key and number of each host tensor that is an option or a count, by its ``id``.

        Args:
            keys: as of ``traced``.
        """
        options = self.options()
        found = {id(held): (key, options[key]) for key, _, held in self._held() if key in options}
        for count in self.counts():
            found[id(count.state[count.name])] = keys[count.begin], count.read()
        return found

    @contextmanager
    def traced(self, numbers: HostNumbers, keys: dict[Begin, Key]) -> Iterator[None]:
        """Let optimizers compute with traced numbers inside the block.

        Args:
            numbers: gets the expressions, and what the block has done to options.
            keys: of counts, ``keys_of``.
        """
        placed: list[tuple[Key | None, dict[str, Any], str, Any]] = []
        for key, group, value in self._held():
            name = key[2]
            if isinstance(value, tuple):
                parts = (numbers.source((*key, n), e) for n, e in enumerate(value))
                group[name] = tuple(parts)
            elif _is_number(value):
                group[name] = numbers.source(key, value)
            else:
                continue
            placed.append((key, group, name, group[name]))
        for count in self.counts():
            value = count.state[count.name]
            if not isinstance(value, Tensor):
                count.state[count.name] = numbers.source(keys[count.begin], value)
                placed.append((None, count.state, count.name, None))
        try:
            yield
        finally:
            for option, mapping, name, before in placed:
                value = mapping.get(name)
                if option is not None and value is not before:
                    _note_change(numbers, option, value)
                mapping[name] = tuple(map(plain, value)) if type(value) is tuple else plain(value)

    @contextmanager
    def set_to(self, options: Mapping[Key, float], counts: Sequence[float]) -> Iterator[None]:
        """Give options and counts these numbers inside the block."""
        own_options, own_counts = self.options(), [count.read() for count in self.counts()]
        self._write(options, counts)
        try:
            yield
        finally:
            self._write(own_options, own_counts)

    def _write(self, options: Mapping[Key, float], counts: Sequence[float]) -> None:
        self.write_options(options)
        for count, number in zip(self.counts(), counts, strict=True):
            count.write(number)

    def write_options(self, values: Mapping[Key, float]) -> None:
        """Set options to numbers, by key."""
        groups = self._all_groups()
        for (_, number, name, *part), value in values.items():
            held = groups[number][name]
            if isinstance(held, Tensor):
                held.fill_(value)
            elif part:
                groups[number][name] = (*held[: part[0]], value, *held[part[0] + 1 :])
            else:
                groups[number][name] = value

    def _all_groups(self) -> list[dict[str, Any]]:
        # Each once: an optimizer around another one has the same.
        groups = (group for each in self._optimizers for group in each.param_groups)
        return list({id(group): group for group in groups}.values())

    def _held(self) -> Iterator[tuple[Key, dict[str, Any], Any]]:
        for number, group in enumerate(self._all_groups()):
            for name, value in list(group.items()):
                if name != "params":
                    yield ("option", number, name), group, value
