"""One program of a step: where its inputs come from, and where its results go.

A program is built from a traced step and confirmed by the next one that traces the same. Only then
is it known which of the host's numbers change from step to step, and it may be replayed.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.xla import ops, programs
from xla_fsdp.distributed.xla.host import settle
from xla_fsdp.fsdp.engine.state import FSDPContext, FSDPState
from xla_fsdp.fsdp.replay.host_numbers import Expression, evaluate, sources_of
from xla_fsdp.fsdp.replay.optimizer_numbers import Count, Key, OptimizerNumbers, add_to_all
from xla_fsdp.fsdp.replay.watch import Slot

Reference = tuple[Any, ...]
"""Where an input comes from, or a result goes: ("argument", n), ("slot", n), ("object", n),
("host", n), ("result", n); ("seed", n) is the random number state after n drawings."""


@dataclass
class HostInput:
    """An input that the host made while the step was traced.

    Args:
        value: the number or tensor, on the host.
        device_value: the same on the device.
        candidates: expressions that gave this number in every trace; None stands for a constant.
    """

    value: Tensor
    device_value: Tensor
    candidates: set[Expression | None]

    def same_constant(self, other: HostInput) -> bool:
        """Return whether both have the same value, to the bit."""
        return _same(self.value, other.value)


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


@dataclass(frozen=True)
class Returned:
    """What a step returns: leaves of a tree, each a reference or ("plain", value)."""

    leaves: list[tuple[Any, ...]]
    tree: Any


@dataclass
class Numbers:
    """The host's numbers when a program was last traced.

    Args:
        options: of optimizers' groups.
        members: positions of the counts that began with the same number, for each such number.
        begins: these numbers.
        deltas: what the step added to each count.
        outcomes: of comparisons between them.
    """

    options: dict[Key, float]
    members: list[list[int]]
    begins: list[float]
    deltas: list[float]
    outcomes: dict[Expression, bool]


@dataclass
class Program:
    """A traced step.

    Args:
        code: the program of ``distributed.xla.programs``.
        facts: of ``Watched``, before the step.
        slots: places that held tensors before the step, or do after it.
        shapes: of their tensors before the step; None where there was none.
        inputs: where each input of the program comes from.
        hosts: inputs that the host made.
        outputs: where each result of the program goes; a slot that gets a new tensor is in ``new``.
        emptied: slots that hold nothing after the step.
        objects: tensors that are held in no known place.
        last_seed: the random number state from which the next step's is computed: ("draws", n)
            after n drawings, or ("constant", state).
        unreduced: units of each context with unreduced gradients after the step.
    """

    code: bytes
    facts: list[Any]
    slots: list[Slot]
    shapes: list[tuple[Any, ...] | None]
    inputs: list[Reference]
    hosts: list[HostInput]
    outputs: list[list[Reference]]
    new: set[int]
    emptied: list[int]
    objects: list[weakref.ref[Tensor]]
    returned: Returned
    numbers: Numbers
    collectives: tuple[str, ...]
    last_seed: tuple[str, int]
    unreduced: list[tuple[FSDPContext, list[FSDPState]]]
    confirmed: bool = False
    varied: set[Key] = field(default_factory=set)
    _ids: list[int] = field(default_factory=list)
    _counts: list[Count] = field(default_factory=list)

    def compact(self) -> Program:
        """Return the program without slots that it does not use."""
        leaves = self.returned.leaves
        references = [*self.inputs, *(goal for goals in self.outputs for goal in goals), *leaves]
        used = {reference[1] for reference in references if reference[0] == "slot"}
        order = sorted(used.union(self.emptied, self.new))
        number = {old: new for new, old in enumerate(order)}

        def renumbered(reference: Reference) -> Reference:
            return ("slot", number[reference[1]]) if reference[0] == "slot" else reference

        return dataclasses.replace(
            self,
            slots=[self.slots[old] for old in order],
            shapes=[self.shapes[old] for old in order],
            inputs=[*map(renumbered, self.inputs)],
            outputs=[[*map(renumbered, goals)] for goals in self.outputs],
            new={number[old] for old in self.new},
            emptied=[number[old] for old in self.emptied],
            returned=Returned([*map(renumbered, leaves)], self.returned.tree),
        )

    # ------------------------------------------------------------ confirmation

    def is_same(self, other: Program) -> bool:
        """Return whether another trace gave the same program with the same places."""
        return (
            self.code == other.code
            and self.facts == other.facts
            and self.last_seed == other.last_seed
            and self.inputs == other.inputs
            and self.outputs == other.outputs
            and [slot.where for slot in self.slots] == [slot.where for slot in other.slots]
            and (self.shapes, self.new, self.emptied) == (other.shapes, other.new, other.emptied)
        )

    def confirm(self, other: Program) -> list[int]:
        """Take what another trace of the same program shows; it is confirmed unless this returns
        positions of host inputs that no expression explains."""
        unknown = []
        for number, (mine, new) in enumerate(zip(self.hosts, other.hosts, strict=True)):
            both = mine.candidates & new.candidates
            if not mine.same_constant(new):
                both -= {None}
            if not both:
                unknown.append(number)
            mine.candidates = both
            mine.value, mine.device_value = new.value, new.device_value
        old = self.numbers.options
        self.varied |= {key for key, value in other.numbers.options.items() if old[key] != value}
        self.numbers, self.objects = other.numbers, other.objects
        self.collectives, self._ids = other.collectives, []
        self.confirmed = not unknown
        return unknown

    # ------------------------------------------------------------ before a replay

    def why_not(self, numbers: OptimizerNumbers) -> str:
        """Return why the program cannot be replayed now, "" if it can; facts are the same."""
        if not self.confirmed:
            return "a second trace shows what changes from step to step"
        return self._slots_differ() or self._numbers_differ(numbers)

    def _slots_differ(self) -> str:
        held = [slot.get() for slot in self.slots]
        ids = [*map(id, held)]
        if ids == self._ids:
            return "an object that a tensor was in is gone" if self._lost() else ""
        for slot, shape, value in zip(self.slots, self.shapes, held, strict=True):
            if _shape(value) != shape:
                return f"a tensor {shape} ({type(slot).__name__}) is now {_shape(value)}"
        self._ids = ids
        return "an object that a tensor was in is gone" if self._lost() else ""

    def _lost(self) -> bool:
        return any(reference() is None for reference in self.objects)

    def _numbers_differ(self, numbers: OptimizerNumbers) -> str:
        old, options = self.numbers, numbers.options()
        for key, value in options.items():
            if old.options.get(key) != value and key not in self.varied:
                return f"{key[2]} of group {key[1]} changed for the first time"
        counts = numbers.counts()
        if len(counts) != len(old.deltas):
            return "the number of counts in optimizer states"
        read = [count.read() for count in counts]
        known: dict[Key, float] = dict(options)
        for number, members in enumerate(old.members):
            found = {read[at] for at in members}
            if len(found) != 1:
                return "counts of steps that were equal differ"
            known["count", number] = found.pop()
        self._counts = counts
        return self._host_inputs_differ(known)

    def _host_inputs_differ(self, known: Mapping[Any, float]) -> str:
        for compared, outcome in self.numbers.outcomes.items():
            if bool(evaluate(compared, known)) != outcome:
                return "a comparison of numbers of the optimizer has another outcome"
        for host in self.hosts:
            if host.candidates == {None}:
                continue
            values = [
                host.value if each is None else _number(each, known, host.value)
                for each in host.candidates
            ]
            if not all(_same(values[0], each) for each in values[1:]):
                return "numbers that were equal differ"
            if not _same(values[0], host.value):
                host.value, host.device_value = values[0], ops.upload(values[0])
        return ""

    @functools.cached_property
    def _read_and_new(self) -> list[int]:
        return [n for n in (*self.emptied, *self.new) if ("slot", n) in self.inputs]

    # ------------------------------------------------------------ a replay

    def replay(self, arguments: Sequence[Any]) -> list[Any]:
        """Run the program; return the leaves of what the step returns.

        Raises:
            programs.ProgramGoneError: if it has to be traced again; nothing has changed then.
        """
        # What the caller has traced between steps may read buffers that the program donates.
        if ops.runtime().traced_collectives():
            settle()
        else:
            programs.run_pending()
        inputs = [self._input(reference, arguments) for reference in self.inputs]
        ops.runtime().repeat_collectives(self.collectives)
        replaced = [(self.slots[number], self.slots[number].get()) for number in self._read_and_new]
        for number in (*self.emptied, *self.new):  # old gradients are freed before the step
            self.slots[number].set(None)
        self._ids = []
        try:
            results = programs.run_again(self.code, inputs)
        except programs.ProgramGoneError:
            for slot, value in replaced:
                slot.set(value)
            raise
        del inputs, replaced
        programs.count_change(self.place(results, arguments))
        self._advance_seed()
        add_to_all(self._counts, self.numbers.deltas)
        for context, units in self.unreduced:
            context.unreduced[:] = units
        return self.leaves(results, arguments)

    def _advance_seed(self) -> None:
        on = ops.device()
        kind, number = self.last_seed
        last = number
        if kind == "draws":
            last = programs.seed_after(ops.get_rng_state(on), number)
        ops.set_rng_state(programs.next_seed(last), on)

    def place(self, results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Tensor]:
        """Put the results of the program where they belong; return what has changed in place."""
        changed: list[Tensor] = []
        values: list[Tensor] = []
        for result, goals in zip(results, self.outputs, strict=True):
            for goal in goals:
                if goal[0] == "slot" and goal[1] in self.new:
                    self.slots[goal[1]].set(result)
                elif goal[0] != "result":
                    changed.append(self._input(goal, arguments))
                    values.append(result)
        programs.put(changed, values)
        return changed

    def leaves(self, results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Any]:
        """Return the leaves of what the step returns."""
        return [self._leaf(leaf, results, arguments) for leaf in self.returned.leaves]

    def _leaf(self, leaf: tuple[Any, ...], results: Sequence[Tensor], arguments: Any) -> Any:
        if leaf[0] == "plain":
            return leaf[1]
        if leaf[0] == "result":
            return results[leaf[1]]
        return self._input(leaf, arguments)

    def _input(self, reference: Reference, arguments: Sequence[Any]) -> Any:
        kind = reference[0]
        if kind == "slot":
            return self.slots[reference[1]].get()
        if kind == "argument":
            return arguments[reference[1]]
        if kind == "host":
            return self.hosts[reference[1]].device_value
        if kind == "object":
            return self.objects[reference[1]]()
        return programs.seed_value(
            programs.seed_after(ops.get_rng_state(ops.device()), reference[1])
        )


def _shape(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape), value.dtype, value.device


def _number(expression: Expression, known: Mapping[Any, float], like: Tensor) -> Tensor:
    return torch.tensor(evaluate(expression, known), dtype=like.dtype)


def candidates_of(value: Tensor, found: Mapping[Expression, float]) -> set[Expression | None]:
    """Return the expressions whose number is ``value``, and None for a constant."""
    if value.dim():
        return {None}
    equal = {
        expression
        for expression, number in found.items()
        if sources_of(expression) and _fits(number, value)
    }
    return {None, *equal}


def _fits(number: float, value: Tensor) -> bool:
    try:
        return _same(torch.tensor(number, dtype=value.dtype), value)
    except (OverflowError, RuntimeError, TypeError):
        return False
