"""One program of a step: where its inputs come from, and where its results go.

A program is built from a traced step and confirmed by the next one that traces the same. Only then
is it known which of the host's numbers change from step to step, and it may be replayed.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.compile.host_numbers import Expression, evaluate, sources_of
from xla_fsdp.compile.optimizer_numbers import Count, Key, OptimizerNumbers
from xla_fsdp.compile.seen import Operation
from xla_fsdp.compile.slots import Slot
from xla_fsdp.compile.state import Facts
from xla_fsdp.fsdp.engine.schedule import Schedule
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.xla import ops, programs
from xla_fsdp.xla.host import execute_pending

Reference = tuple[Any, ...]
"""Where an input or a returned leaf comes from, or a result goes: ("argument", n), ("slot", n),
("host", n), ("result", n), ("plain", value); ("seed", n) is the random number state after n
drawings."""

FIRST_CHECK = 2

# In C, as there are a thousand tensors in each step.
_REFERENT: Callable[[Any], Any] = weakref.ref.__call__
_SHAPE_AND_DTYPE = operator.attrgetter("shape", "dtype")


@dataclass
class HostInput:
    """An input that the host made while the step was traced.

    Args:
        value: the number or tensor, on the host.
        traced: what it was when the program was last traced.
        device_value: the same on the device.
        candidates: expressions that gave this number in every trace; None stands for a constant.
    """

    value: Tensor
    traced: Tensor
    device_value: Tensor
    candidates: set[Expression | None]

    def same_constant(self, other: HostInput) -> bool:
        """Return whether both had the same value when they were traced, to the bit."""
        return _same(self.traced, other.traced)


def _same(first: Tensor, second: Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    # By their bytes: NaN is a constant, too.
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (first, second)))


@dataclass
class Numbers:
    """The host's numbers when a program was last traced.

    Args:
        options: of optimizers' groups.
        counts: in states of optimizers.
        members: positions of the counts of one optimizer that began with the same number, for each.
        keys: of these numbers.
        deltas: what the step added to each count.
        outcomes: of comparisons between them.
        updates: of options that the step computes from numbers.
    """

    options: dict[Key, float]
    counts: list[float]
    members: list[list[int]]
    keys: list[Key]
    deltas: list[float]
    outcomes: dict[Expression, Any]
    updates: dict[Key, Expression]


@dataclass
class Program:
    """A traced step.

    Args:
        code: the program of ``xla.programs``.
        facts: of ``State``, before the step.
        slots: places that held tensors before the step, or do after it.
        kinds: ``kind_of`` what they held before the step.
        inputs: where each input of the program comes from.
        hosts: inputs that the host made.
        outputs: where each result of the program goes; a slot that gets a new tensor is in ``new``.
        emptied: slots that hold nothing after the step.
        returned: the leaves of what the step returns, a ``tree``.
        last_seed: the random number state from which the next step's is computed: ("draws", n)
            after n drawings, or ("constant", state).
        unreduced: units of each context with unreduced gradients after the step.
        compiled: ``programs.compiled()`` when it last ran.
        arguments: the tensors among the step's arguments, None for others.
        operations: the functions of torch that the step called when it was last traced.
        next_check: before which replay, counted from 1, the program is checked by default.
        varied_arguments: those that were other tensors in another trace. Before that, the step may
            as well have got the tensor from somewhere else.
    """

    code: bytes
    facts: Facts
    slots: list[Slot]
    kinds: list[tuple[Any, ...] | None]
    inputs: list[Reference]
    hosts: list[HostInput]
    outputs: list[list[Reference]]
    new: set[int]
    emptied: list[int]
    returned: list[Reference]
    tree: Any
    numbers: Numbers
    collectives: tuple[str, ...]
    last_seed: tuple[str, int]
    unreduced: list[tuple[Schedule, list[FSDPState]]]
    compiled: int
    arguments: list[weakref.ref[Tensor] | None]
    operations: list[Operation]
    replays: int = 0
    next_check: int = FIRST_CHECK
    varied_arguments: set[int] = field(default_factory=set)
    confirmed: bool = False
    varied: set[Key] = field(default_factory=set)
    _tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    _held: list[Any] = field(default_factory=list)
    _memories: list[int] = field(default_factory=list)
    _sharing: list[int] = field(default_factory=list)
    _counts: list[Count] | None = None
    _known: dict[Key, float] = field(default_factory=dict)

    # ------------------------------------------------------------ confirmation

    def is_same(self, other: Program) -> bool:
        """Return whether another trace gave the same program with the same places."""
        return (
            self.code == other.code
            and self.facts == other.facts
            and self.last_seed == other.last_seed
            and self.inputs == other.inputs
            and self.outputs == other.outputs
            and self.numbers.updates == other.numbers.updates
            and self.numbers.members == other.numbers.members
            and [slot.where for slot in self.slots] == [slot.where for slot in other.slots]
            and (self.kinds, self.new, self.emptied) == (other.kinds, other.new, other.emptied)
        )

    def does_the_same(self, other: Program) -> bool:
        """Return whether another trace, with the optimizers' numbers of the last one, gave the same
        program, with the same places and numbers."""
        return (
            self.is_same(dataclasses.replace(other, last_seed=self.last_seed))
            and all(map(HostInput.same_constant, self.hosts, other.hosts))
            and (self.returned, self.tree) == (other.returned, other.tree)
            and self.numbers.deltas == other.numbers.deltas
            and self.collectives == other.collectives
        )

    def counts_otherwise(self, other: Program) -> str:
        """Return what is wrong if another trace of the same program counted by other amounts."""
        pairs = zip(self.numbers.deltas, other.numbers.deltas, strict=False)
        for first, second in pairs:
            if first != second:
                return (
                    f"a number in the state of an optimizer grew by {first:g}, and then by "
                    f"{second:g}; the optimizer's option capturable=True keeps it on the device"
                )
        return ""

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
            mine.value = mine.traced = new.traced
            mine.device_value = new.device_value
        old = self.numbers.options
        self.varied |= {key for key, value in other.numbers.options.items() if old[key] != value}
        pairs = enumerate(zip(self.arguments, other.arguments, strict=True))
        self.varied_arguments |= {n for n, (a, b) in pairs if a and b and a() is not b()}
        self.arguments = other.arguments
        self.numbers, self.operations = other.numbers, other.operations
        self.collectives, self.compiled = other.collectives, other.compiled
        self._tensors, self._counts = [], None
        self.confirmed = not unknown
        return unknown

    # ------------------------------------------------------------ before a replay

    def why_not(self, arguments: Sequence[Any], numbers: OptimizerNumbers) -> str:
        """Return why the program cannot be replayed now, "" if it can; facts are the same."""
        if not self.confirmed:
            return "a second trace shows what changes from step to step"
        if programs.may_be_gone(self.compiled):
            return "torch_xla may have dropped the program"
        reason = (
            self._slots_differ()
            or self._arguments_differ(arguments)
            or self._numbers_differ(numbers)
        )
        if reason:
            self._held = []  # or it would keep them alive
        return reason

    def held(self) -> list[Any]:
        """Return what is in the slots."""
        return [slot.get() for slot in self.slots]

    def _slots_differ(self) -> str:
        held = self.held()
        # A shard would answer for the whole parameter; it is its data that can be replaced.
        with torch._C.DisableTorchFunctionSubclass():
            return self._differing(held)

    def _differing(self, held: list[Any]) -> str:
        if not self._are_known(held):
            for value, old in zip(held, self.kinds, strict=True):
                if kind_of(value) != old:
                    return f"a tensor {old} is now {kind_of(value)}"
            self._tensors = [weakref.ref(held[number]) for number in self._kept]
        memories = self._memories_of(held)
        if memories != self._memories and _sharing(memories) != self._sharing:
            return "which tensors of the state share memory"
        self._held, self._memories = held, memories
        return ""

    def _memories_of(self, held: Sequence[Any]) -> list[int]:
        """Return ``ops.memory_of`` of the tensors in ``_kept``; numbers below 0 where there is none
        any more."""
        memory_of = torch._C._storage_id  # type: ignore[attr-defined]
        tensors = ((number, held[number]) for number in self._kept)
        return [memory_of(t) if isinstance(t, Tensor) else -1 - number for number, t in tensors]

    def _are_known(self, held: Sequence[Any]) -> bool:
        """Return whether these are the tensors of the last time, or of their shapes."""
        kept = [held[number] for number in self._kept]
        # In a tensor that is known, only these can change (``tensor.data = other``).
        try:
            return (
                len(self._tensors) == len(kept)
                and all(map(operator.is_, kept, map(_REFERENT, self._tensors)))
                and all(map(operator.eq, map(_SHAPE_AND_DTYPE, kept), self._shapes_and_dtypes))
                and all(kind_of(held[number]) == self.kinds[number] for number in self._replaced)
            )
        except AttributeError:  # a tensor is gone, and its slot holds None as its reference does
            return False

    @functools.cached_property
    def _kept(self) -> list[int]:
        """The slots whose tensors the program does not replace."""
        return [n for n, each in enumerate(self.kinds) if each and n not in self.new]

    @functools.cached_property
    def _shapes_and_dtypes(self) -> list[tuple[Any, ...]]:
        return [each[:2] for each in map(self.kinds.__getitem__, self._kept) if each]

    @functools.cached_property
    def _replaced(self) -> list[int]:
        """The other slots."""
        return sorted({*range(len(self.slots))}.difference(self._kept))

    def _arguments_differ(self, arguments: Sequence[Any]) -> str:
        for number, reference in enumerate(self.arguments):
            if reference is None:
                continue
            if number not in self.varied_arguments:
                if arguments[number] is not reference():
                    return f"argument {number} is another tensor for the first time"
            elif any(arguments[number] is each for each in self._held):
                return f"argument {number} is a tensor of the model"
            elif ops.memory_of(arguments[number]) in self._memories:
                return f"argument {number} shares memory with the state"
        return ""

    def _numbers_differ(self, numbers: OptimizerNumbers) -> str:
        old, options = self.numbers, numbers.options()
        for key, value in options.items():
            if old.options.get(key) != value and key not in self.varied:
                return f"{key[2]} of group {key[1]} changed for the first time"
        if self._counts is None or not all(map(Count.is_held, self._counts)):
            self._counts = numbers.counts()
            if not len(self._counts) == len(old.deltas) == sum(map(len, old.members)):
                self._counts = None
                return "the number of counts in optimizer states"
        read = [{self._counts[at].read() for at in group} for group in old.members]
        if any(len(found) != 1 for found in read):
            return "counts of steps that were equal differ"
        counted = [found.pop() for found in read]
        self._known = options | dict(zip(old.keys, counted, strict=True))
        return self._host_inputs_differ(self._known)

    def _host_inputs_differ(self, known: Mapping[Any, float]) -> str:
        """Compute host inputs from numbers."""
        for compared, outcome in self.numbers.outcomes.items():
            if evaluate(compared, known) != outcome:
                return "a comparison of numbers of the optimizer has another outcome"
        changed: list[tuple[HostInput, Tensor]] = []
        for host in self.hosts:
            first, *others = [
                host.value if each is None else _number(each, known, host.value)
                for each in host.candidates
            ]
            if not all(_same(first, each) for each in others):
                return "numbers that were equal differ"
            if not _same(first, host.value):
                changed.append((host, first))
        on_device = ops.upload_all([value for _, value in changed])
        for (host, value), device_value in zip(changed, on_device, strict=True):
            host.value, host.device_value = value, device_value
        return ""

    # ------------------------------------------------------------ a replay

    def replay(self, arguments: Sequence[Any], numbers: OptimizerNumbers) -> list[Any]:
        """Run the program after ``why_not``; return the leaves of what the step returns.

        Not in a thread that an interrupt ends, or it may part what is donated from what takes its
        place.
        """
        pool = self._pool(self._held, arguments)
        changed = [pool[at] for at, _ in self._changed_at]
        # What the caller has traced between steps may read buffers that the program donates.
        if ops.runtime().traced_collectives():
            execute_pending()
        programs.separate(changed)
        seeds = self._seeds()
        inputs = [pool[at] if at >= 0 else seeds[at] for at in self._read_at]
        self._held = pool = []
        ops.runtime().repeat_collectives(self.collectives)
        return self._run(inputs, changed, arguments, numbers)

    def _run(
        self,
        inputs: list[Tensor],
        changed: Sequence[Tensor],
        arguments: Sequence[Any],
        numbers: OptimizerNumbers,
    ) -> list[Any]:
        """Run the program and change all that a step changes; empties ``inputs``."""
        for number in self.emptied:
            self.slots[number].set(None)
        for number in self.new:  # old gradients are freed before the step
            self.slots[number].free()
        results = programs.run_again(self.code, inputs)
        inputs.clear()
        self._put_new(results)
        values = [results[number] for _, number in self._changed_at]
        split = self._num_counted
        programs.put(changed[:split], values[:split])
        programs.own_buffers(changed[:split])
        programs.put_alone(changed[split:], values[split:])
        programs.count_change(changed)
        self.compiled = programs.compiled()
        self.replays += 1
        self._advance_seed()
        self._advance_numbers(numbers)
        for context, units in self.unreduced:
            context.unreduced[:] = units
        return self.leaves(results, arguments)

    def _advance_numbers(self, numbers: OptimizerNumbers) -> None:
        for count, delta in zip(self._counts or (), self.numbers.deltas, strict=True):
            count.write(count.read() + delta)
        updates = self.numbers.updates.items()
        numbers.write_options({key: evaluate(each, self._known) for key, each in updates})

    def _advance_seed(self) -> None:
        on = ops.device()
        kind, number = self.last_seed
        last = number
        if kind == "draws":
            last = programs.seed_after(ops.get_rng_state(on), number)
        ops.set_rng_state(programs.next_seed(last), on)

    def place(self, results: Sequence[Tensor], arguments: Sequence[Any]) -> None:
        """Put the results of the program where they belong."""
        held = self.held()
        self._sharing = _sharing(self._memories_of(held))
        pool = self._pool(held, arguments)
        self._put_new(results)
        changed = [pool[at] for at, _ in self._changed_at]
        programs.put(changed, [results[number] for _, number in self._changed_at])
        programs.own_buffers(changed)

    def _put_new(self, results: Sequence[Tensor]) -> None:
        for slot, number in self._new_at:
            slot.set(results[number])

    # Positions are those in the pool: what slots hold, arguments, host inputs.

    def _pool(self, held: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        hosts = [host.device_value for host in self.hosts]
        return [*held, *arguments, *hosts]

    def _at(self, reference: Reference) -> int:
        kind, number = reference
        before = {"slot": 0, "argument": len(self.slots)}
        before["host"] = before["argument"] + len(self.arguments)
        return before[kind] + int(number)

    @functools.cached_property
    def _changed_at(self) -> list[tuple[int, int]]:
        """Where the tensors are that change in place, each with the number of its result; first
        those whose changes are counted."""
        found = [
            (self._at(goal), number)
            for number, goals in enumerate(self.outputs)
            for goal in goals
            if goal[0] != "result" and not self._is_new(goal)
        ]
        return sorted(found, key=lambda each: not self._is_counted(each[0]))

    @functools.cached_property
    def _num_counted(self) -> int:
        return sum(self._is_counted(at) for at, _ in self._changed_at)

    def _is_counted(self, at: int) -> bool:
        return at >= len(self.slots) or self.slots[at].is_counted

    @functools.cached_property
    def _new_at(self) -> list[tuple[Slot, int]]:
        return [
            (self.slots[goal[1]], number)
            for number, goals in enumerate(self.outputs)
            for goal in goals
            if self._is_new(goal)
        ]

    def _is_new(self, goal: Reference) -> bool:
        return goal[0] == "slot" and goal[1] in self.new

    @functools.cached_property
    def _draws(self) -> list[int]:
        """After how many drawings the program takes a random number state."""
        return sorted({number for kind, number in self.inputs if kind == "seed"})

    @functools.cached_property
    def _read_at(self) -> list[int]:
        """Where each input is; of a random number state, from the end of ``_seeds``."""
        return [
            self._draws.index(reference[1]) - len(self._draws)
            if reference[0] == "seed"
            else self._at(reference)
            for reference in self.inputs
        ]

    def _seeds(self) -> list[Tensor]:
        if not self._draws:
            return []
        now = ops.get_rng_state(ops.device())
        return [programs.seed_value(programs.seed_after(now, draws)) for draws in self._draws]

    def leaves(self, results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Any]:
        """Return the leaves of what the step returns."""
        return [self._leaf(leaf, results, arguments) for leaf in self.returned]

    def _leaf(self, leaf: tuple[Any, ...], results: Sequence[Tensor], arguments: Any) -> Any:
        if leaf[0] == "plain":
            return leaf[1]
        if leaf[0] == "result":
            return results[leaf[1]]
        if leaf[0] == "slot":
            return self.slots[leaf[1]].get()
        return arguments[leaf[1]]


def _sharing(memories: Sequence[int]) -> list[int]:
    """Return for each memory the first place where it is."""
    first: dict[int, int] = {}
    return [first.setdefault(each, number) for number, each in enumerate(memories)]


def kind_of(value: Any) -> tuple[Any, ...] | None:
    """Return what a program depends on of a tensor in a slot, but its values: the shape that this
    rank holds of it, its dtype and device, and how it is a view; None for no tensor."""
    if not isinstance(value, Tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():  # a shard answers for the whole parameter
        return value.shape, value.dtype, value.device, *programs.views_of(value)


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
