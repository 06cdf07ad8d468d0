"""The host's numbers of optimizers: options of groups, and counts of steps.

They are sources of ``host_numbers``: a program takes numbers computed from them as inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from xla_fsdp.compile.host_numbers import Expression, HostNumbers, expression_of, plain

Key = tuple[Any, ...]
Begin = tuple[int, float]
"""Number of an optimizer, and with what its counts begin a step."""


@dataclass
class OptionChanges:
    """What a traced step has done to options of groups.

    Attributes:
        updates: how to compute the new number, of each option that was computed from old numbers.
        problem: what is wrong if an option got another value; "" if none did.
    """

    updates: dict[Key, Expression] = field(default_factory=dict)
    problem: str = ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) or (
        isinstance(value, Tensor) and value.device.type == "cpu" and not value.dim()
    )


@dataclass
class Count:
    """A number in the state of a parameter, which most steps raise by one.

    Args:
        optimizer: the number of the optimizer that has it.
    """

    state: dict[str, Any]
    name: str
    optimizer: int

    @property
    def begin(self) -> Begin:
        """What counts have in common that are one source: the number that it has now."""
        return self.optimizer, self.read()

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
        found = {id(value): (key, options[key]) for key, value in self._values() if key in options}
        for count in self.counts():
            found[id(count.state[count.name])] = keys[count.begin], count.read()
        return found

    @contextmanager
    def traced(self, numbers: HostNumbers, keys: dict[Begin, Key]) -> Iterator[OptionChanges]:
        """Let optimizers compute with traced numbers inside the block.

        Args:
            numbers: gets the expressions.
            keys: of counts, ``keys_of``.

        Yields:
            What the block has done to options, filled in when it ends.
        """
        changes = OptionChanges()
        placed: list[tuple[Key | None, dict[str, Any], str, Any]] = []
        for number, group, name, value in self._groups():
            key = ("option", number, name)
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
            yield changes
        finally:
            for option, mapping, name, before in placed:
                value = mapping.get(name)
                if option is not None and value is not before:
                    self._note_change(changes, option, value)
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

    def _note_change(self, changes: OptionChanges, key: Key, value: Any) -> None:
        if isinstance(value, tuple):  # of another group, from which an optimizer around it copies
            for number, each in enumerate(value):
                self._note_change(changes, (*key, number), each)
        elif plain(value) is not value:
            changes.updates[key] = expression_of(value)
        else:
            changes.problem = (
                f"the step sets {key[2]} of the optimizer's group {key[1]}; set it before the step"
            )

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

    def _values(self) -> Iterator[tuple[Key, Any]]:
        for number, _, name, value in self._groups():
            yield ("option", number, name), value

    def _all_groups(self) -> list[dict[str, Any]]:
        # Each once: an optimizer around another one has the same.
        groups = (group for each in self._optimizers for group in each.param_groups)
        return list({id(group): group for group in groups}.values())

    def _groups(self) -> Iterator[tuple[int, dict[str, Any], str, Any]]:
        for number, group in enumerate(self._all_groups()):
            for name, value in list(group.items()):
                if name != "params":
                    yield number, group, name, value


class Counts:
    """Some counts, which are read and advanced at once.

    Args:
        counts: all of them.
        groups: positions of counts that are expected to be equal, for each such number.
        deltas: what a step adds to each count.
    """

    def __init__(
        self, counts: Sequence[Count], groups: Sequence[Sequence[int]], deltas: Sequence[float]
    ) -> None:
        values = [count.state[count.name] for count in counts]
        # A tensor's memory: reading one by one through torch takes ten times as long.
        found = [(each, _memory(value)) for each, value in zip(counts, values, strict=True)]
        reads = [each.read if array is None else array.item for each, array in found]
        writes = [each.write if array is None else array.fill for each, array in found]
        self._reads = [[reads[at] for at in group] for group in groups]
        self._writes = [
            [(delta, [writes[at] for at in group if deltas[at] == delta]) for delta in {*deltas}]
            for group in groups
        ]
        held = [each for each, value in zip(counts, values, strict=True) if _is_tensor(value)]
        self._states = [each.state for each in held]
        self._names = [each.name for each in held]
        self._tensors = [value for value in values if _is_tensor(value)]

    def are_held(self) -> bool:
        """Return whether optimizers still hold the same tensors."""
        found = map(dict.get, self._states, self._names)
        return all(map(operator.is_, found, self._tensors))

    def read(self) -> list[set[float]]:
        """Return the numbers of each group, which is one if they are equal."""
        # Never all of them: memory for a thousand numbers is all over a large process, and slow.
        return [{read() for read in reads} for reads in self._reads]

    def advance(self, numbers: Sequence[float]) -> None:
        """Add the deltas to the numbers of the groups."""
        for number, parts in zip(numbers, self._writes, strict=True):
            for delta, writes in parts:
                advanced = number + delta
                for write in writes:
                    write(advanced)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _memory(value: Any) -> Any:
    """Return the memory of a tensor as a numpy array; None for a number, or if numpy has no such
    dtype."""
    try:
        return value.detach().numpy() if _is_tensor(value) else None
    except TypeError:
        return None
