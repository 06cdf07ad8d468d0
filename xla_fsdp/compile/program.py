"""One program of a step: where its inputs come from, and where its results go.

A program is built from a traced step and confirmed by the next one that traces the same. Only then
is it known which of the host's numbers change from step to step, and it may be replayed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.compile.host_numbers import Expression, evaluate, sources_of
from xla_fsdp.compile.optimizer_numbers import Counts, Key, OptimizerNumbers
from xla_fsdp.compile.seen import Operation
from xla_fsdp.compile.slots import Entry, Slot, SlotReader, kind
from xla_fsdp.fsdp.engine.schedule import Schedule
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.xla import ops, programs
from xla_fsdp.xla.host import execute_pending

Reference = tuple[Any, ...]
"""Where an input comes from, or a result goes: ("argument", n), ("slot", n), ("host", n),
("result", n); ("seed", n) is the random number state after n drawings."""

FIRST_CHECK = 2

# In C, as there are a thousand tensors in each step.
_REFERENT: Callable[[Any], Any] = weakref.ref.__call__
_SIZE = operator.attrgetter("shape")
_DTYPE = operator.attrgetter("dtype")


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

    @property
    def sources(self) -> frozenset[Any]:
        """Keys of the numbers that the candidates are computed from."""
        return frozenset().union(*(sources_of(each) for each in self.candidates if each))

    def same_constant(self, other: HostInput) -> bool:
        """Return whether both had the same value when they were traced, to the bit."""
        return _same(self.traced, other.traced)


def _same(first: Tensor, second: Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    # By their bytes: NaN is a constant, too.
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (first, second)))


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
    facts: list[Any]
    slots: list[Slot]
    kinds: list[tuple[Any, ...] | None]
    inputs: list[Reference]
    hosts: list[HostInput]
    outputs: list[list[Reference]]
    new: set[int]
    emptied: list[int]
    returned: Returned
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
    _counts: Counts | None = None
    _counted: list[float] = field(default_factory=list)
    _known: dict[Key, float] = field(default_factory=dict)
    _used: Mapping[Key, float] = field(default_factory=dict)
    _computed: list[tuple[frozenset[Any], HostInput]] = field(default_factory=list)

    def compact(self) -> Program:
        """Return the program without slots that it does not use."""
        leaves = self.returned.leaves
        references = [*self.inputs, *(goal for goals in self.outputs for goal in goals), *leaves]
        used = {reference[1] for reference in references if reference[0] == "slot"}
        order = sorted(used.union(self.emptied, self.new), key=lambda n: (kind(self.slots[n]), n))
        number = {old: new for new, old in enumerate(order)}

        def renumbered(reference: Reference) -> Reference:
            return ("slot", number[reference[1]]) if reference[0] == "slot" else reference

        return dataclasses.replace(
            self,
            slots=[self.slots[old] for old in order],
            kinds=[self.kinds[old] for old in order],
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
            and self.returned == other.returned
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
        self._tensors, self._counts, self._used = [], None, {}
        self._computed = [(host.sources, host) for host in self.hosts if host.sources]
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

    @functools.cached_property
    def _reader(self) -> SlotReader:
        return SlotReader(self.slots)

    def _slots_differ(self) -> str:
        held = self._reader.read()
        # A shard would answer for the whole parameter; it is its data that can be replaced.
        with torch._C.DisableTorchFunctionSubclass():
            return self._differing(held)

    def _differing(self, held: list[Any]) -> str:
        if not self._are_known(held):
            for value, old, slot in zip(held, self.kinds, self.slots, strict=True):
                if kind_of(value) != old:
                    return f"a tensor {old} ({type(slot).__name__}) is now {kind_of(value)}"
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
                and all(map(operator.eq, map(_SIZE, kept), self._sizes))
                and all(map(operator.is_, map(_DTYPE, kept), self._dtypes))
                and all(kind_of(held[number]) == self.kinds[number] for number in self._replaced)
            )
        except AttributeError:  # a tensor is gone, and its slot holds None as its reference does
            return False

    @functools.cached_property
    def _kept(self) -> list[int]:
        """The slots whose tensors the program does not replace."""
        return [n for n, each in enumerate(self.kinds) if each and n not in self.new]

    @functools.cached_property
    def _sizes(self) -> list[torch.Size]:
        return [each[0] for each in map(self.kinds.__getitem__, self._kept) if each]

    @functools.cached_property
    def _dtypes(self) -> list[torch.dtype]:
        return [each[1] for each in map(self.kinds.__getitem__, self._kept) if each]

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
        if self._counts is None or not self._counts.are_held():
            counts = numbers.counts()
            if not len(counts) == len(old.deltas) == sum(map(len, old.members)):
                return "the number of counts in optimizer states"
            self._counts = Counts(counts, old.members, old.deltas)
        read = self._counts.read()
        if any(len(found) != 1 for found in read):
            return "counts of steps that were equal differ"
        self._counted = [found.pop() for found in read]
        self._known = options | dict(zip(old.keys, self._counted, strict=True))
        return self._host_inputs_differ(self._known)

    def _host_inputs_differ(self, known: Mapping[Any, float]) -> str:
        """Compute host inputs from numbers, unless these are what they were the last time."""
        used, self._used = self._used, {}
        changed = {key for key, value in known.items() if not _is_equal(value, used.get(key))}
        for compared, outcome in self.numbers.outcomes.items():
            if evaluate(compared, known) != outcome:
                return "a comparison of numbers of the optimizer has another outcome"
        affected = [host for sources, host in self._computed if not changed.isdisjoint(sources)]
        for host in affected:
            first, *others = [
                host.value if each is None else _number(each, known, host.value)
                for each in host.candidates
            ]
            if not all(_same(first, each) for each in others):
                return "numbers that were equal differ"
            host.value = first
        on_device = ops.upload_all([host.value for host in affected])
        for host, value in zip(affected, on_device, strict=True):
            host.device_value = value
        self._used = known
        return ""

    @functools.cached_property
    def _read_and_new(self) -> list[int]:
        return [n for n in (*self.emptied, *self.new) if ("slot", n) in self.inputs]

    # ------------------------------------------------------------ a replay

    def replay(self, arguments: Sequence[Any], numbers: OptimizerNumbers) -> list[Any]:
        """Run the program after ``why_not``; return the leaves of what the step returns.

        Not in a thread that an interrupt ends, or it may part what is donated from what takes its
        place.

        Raises:
            programs.ProgramGoneError: if it has to be traced again; nothing has changed then.
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
        replaced = [(self.slots[number], self.slots[number].get()) for number in self._read_and_new]
        for number in self.emptied:
            self.slots[number].set(None)
        for number in self.new:  # old gradients are freed before the step
            self.slots[number].free()
        try:
            results = programs.run_again(self.code, inputs)
        except programs.ProgramGoneError:
            for slot, value in replaced:
                slot.set(value)
            raise
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
        if self._counts is not None:
            self._counts.advance(self._counted)
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
        held = self._reader.read()
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
        """How many of them are counted."""
        return sum(self._is_counted(at) for at, _ in self._changed_at)

    def _is_counted(self, at: int) -> bool:
        slot = self.slots[at] if at < len(self.slots) else None
        return not isinstance(slot, Entry) or slot.is_counted

    @functools.cached_property
    def _new_at(self) -> list[tuple[Slot, int]]:
        """Slots that get a new tensor, each with the number of its result."""
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
        return [self._leaf(leaf, results, arguments) for leaf in self.returned.leaves]

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


def _is_equal(first: float, second: float | None) -> bool:
    """Return whether both are the same number; zeros differ by their sign."""
    return first == second and math.copysign(1, first) == math.copysign(1, second)


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
