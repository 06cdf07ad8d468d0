"""How often a loop of an HLO module runs, where the compiler has not noted it.

Words: the *counter* is the one value of the loop's state that its condition reads; it is compared
with the *bound*, and the body adds the *step*.
Always true: the answer is None unless bound and step are constants that can be found, also inside
fusions. A counter whose start cannot be seen starts at 0.

Read the text of an HLO module: computations, instructions, how often each of them runs.

Words: a *computation* is a function of the module; a *caller* is the instruction that runs it; its
*executions* are how often it runs in one run of the module, loop trips included.
Always true: reading is by structure (balanced brackets), never by line order. Nothing here knows
about collectives; those are found by ``traffic``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

_SAME = ("bitcast", "copy", "reshape", "convert")

Computations = Mapping[str, "Computation"]


def trips(computations: Computations, inside: Computation, loop: Instruction) -> int | None:
    """Iterations of ``loop``, an instruction of ``inside``, that counts up to a constant."""
    condition = computations.get(loop.attribute("condition"))
    body = computations.get(loop.attribute("body"))
    if condition is None or body is None:
        return None
    bound, counter = _bound(computations, condition), _counter(condition)
    if bound is None or counter is None:
        return None
    step = _step(computations, body, counter)
    if not step or step < 0:
        return None
    return max(0, math.ceil((bound - _start(inside, loop, counter)) / step))


def _bound(computations: Computations, condition: Computation) -> int | None:
    """The constant that a condition wants its counter to be less than, in it or what it calls."""
    inner = [computations.get(each.attribute("calls")) for each in condition.instructions]
    lines = [each for part in (condition, *inner) if part for each in part.instructions]
    directions = {each.attribute("direction") for each in lines if each.opcode == "compare"}
    bounds = {value for each in lines if (value := _constant(each)) is not None}
    return bounds.pop() if directions == {"LT"} and len(bounds) == 1 else None


def _counter(condition: Computation) -> int | None:
    """Which value of the state a condition reads, if it is one."""
    read = {
        each.attribute("index")
        for each in condition.instructions
        if each.opcode == "get-tuple-element"
    }
    return int(read.pop()) if len(read) == 1 else None


def _step(computations: Computations, body: Computation, counter: int) -> int | None:
    if body.root.opcode != "tuple" or counter >= len(body.root.operands):
        return None
    added = _behind(body, body.root.operands[counter])
    place = 0
    if added is not None and added.opcode == "get-tuple-element":
        place = int(added.attribute("index"))
        added = _behind(body, added.operands[0])
    if added is None or added.opcode != "fusion":
        return None if added is None else _added(body, added, {})
    fused = computations[added.attribute("calls")]
    given = {str(number): body.by_name.get(name) for number, name in enumerate(added.operands)}
    root = fused.root
    if root.opcode == "tuple":
        root = fused.by_name[root.operands[place]]
    return _added(fused, root, given)


def _added(
    inside: Computation, each: Instruction, given: Mapping[str, Instruction | None]
) -> int | None:
    """The constant that an addition adds, which may be a parameter of a fusion."""
    if each.opcode != "add":
        return None
    terms = [_behind(inside, name) for name in each.operands]
    seen = [
        given.get(term.attributes) if term is not None and term.opcode == "parameter" else term
        for term in terms
    ]
    constants = [value for term in seen if term and (value := _constant(term)) is not None]
    return constants[0] if len(constants) == 1 else None


def _start(inside: Computation, loop: Instruction, counter: int) -> int:
    state = inside.by_name.get(loop.operands[0])
    if state is None or state.opcode != "tuple":
        return 0
    first = _behind(inside, state.operands[counter])
    return (_constant(first) if first else None) or 0


def _behind(inside: Computation, name: str) -> Instruction | None:
    """The instruction that makes a value, copies and the like left out."""
    each = inside.by_name.get(name)
    while each is not None and each.opcode in _SAME:
        each = inside.by_name.get(each.operands[0])
    return each


def _constant(each: Instruction) -> int | None:
    return int(each.attributes) if each.opcode == "constant" and each.attributes.isdigit() else None


BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{\s*$")

_START = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")

_NAME = re.compile(r"%([\w.\-]+)")

NO_ESTIMATE = 2**63 - 1

"""What the compiler writes for cycles that it cannot estimate, as of some large sums."""


@dataclass(frozen=True)
class Instruction:
    """One line: ``name = shape opcode(operands), attributes``."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def attribute(self, key: str) -> str:
        """The name or word after ``key=``, "" if there is none."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else ""

    @property
    def cycles(self) -> int:
        """The compiler's estimate of the cycles that it takes, 0 where it gives none."""
        return 0 if self.has_no_estimate else self._cycles

    @property
    def has_no_estimate(self) -> bool:
        """Whether the compiler tried to estimate its cycles, and could not."""
        return self._cycles == NO_ESTIMATE

    @property
    def _cycles(self) -> int:
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found.group(1)) if found else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return sum(_array_bytes(*array) for array in _ARRAY.findall(self.shape))

    @property
    def dtypes(self) -> list[str]:
        """Element types of the result, each once."""
        found = (dtype for dtype, _ in _ARRAY.findall(self.shape) if dtype in BITS)
        return list(dict.fromkeys(found))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the (first) array of the result."""
        found = _ARRAY.search(self.shape)
        return tuple(int(size) for size in found.group(2).split(",") if size) if found else ()


@dataclass
class Computation:
    """A function of the module."""

    name: str
    is_entry: bool
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {each.name: each for each in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Which instructions read one."""
        users: dict[str, list[Instruction]] = defaultdict(list)
        for each in self.instructions:
            for operand in each.operands:
                users[operand].append(each)
        return users

    @cached_property
    def root(self) -> Instruction:
        """What the computation returns."""
        return next((each for each in self.instructions if each.is_root), self.instructions[-1])


@dataclass(frozen=True)
class Execution:
    """How often a computation runs, and what runs it (None for the entry).

    Args:
        computation: what runs.
        times: how often.
        caller: the instruction that runs it.
        inside: the computation that holds the caller.
        place: index of the entry's instruction that it is a part of; None for the entry itself.
    """

    computation: Computation
    times: int
    caller: Instruction | None
    inside: Computation | None
    place: int | None

    def place_of(self, index: int) -> int:
        """Index in the entry of the computation's instruction number ``index``, or of what it is a
        part of."""
        return index if self.place is None else self.place


class Module:
    """A parsed module.

    Args:
        text: what the compiler or torch_xla prints.

    Raises:
        ValueError: if the text holds no entry computation.
    """

    def __init__(self, text: str) -> None:
        self.computations = {each.name: each for each in _computations(text)}
        entries = [each for each in self.computations.values() if each.is_entry]
        if len(entries) != 1:
            raise ValueError(f"not the text of one HLO module: {len(entries)} entry computations")
        self.entry = entries[0]
        counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", text.partition("\n")[0])
        self.num_devices = 1
        for count in counts:
            self.num_devices *= int(count)
        self.unknown_trips: list[str] = []

    @cached_property
    def executions(self) -> list[Execution]:
        """Every run of a computation, those inside fusions included."""
        return list(self._visit(Execution(self.entry, 1, None, None, None)))

    def _visit(self, execution: Execution) -> Iterator[Execution]:
        yield execution
        computation = execution.computation
        for index, each in enumerate(computation.instructions):
            rounds = self._trips(computation, each) if each.opcode == "while" else 1
            place = execution.place_of(index)
            for name in _called(each):
                if (called := self.computations.get(name)) is not None:
                    times = execution.times * rounds
                    yield from self._visit(Execution(called, times, each, computation, place))

    def _trips(self, computation: Computation, loop: Instruction) -> int:
        found = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes)
        times = int(found.group(1)) if found else trips(self.computations, computation, loop)
        if times is None:
            self.unknown_trips.append(f"{computation.name}/{loop.name}")
        return 1 if times is None else times


def _called(each: Instruction) -> list[str]:
    """Computations that an instruction runs once each time (not the reducers of a reduction)."""
    keys = {
        "fusion": ("calls",),
        "while": ("body",),
        "call": ("to_apply",),
        "async-start": ("calls",),
        "conditional": ("true_computation", "false_computation"),
    }.get(each.opcode, ())
    names = [each.attribute(key) for key in keys]
    branches = re.search(r"branch_computations=\{([^}]*)\}", each.attributes)
    if each.opcode == "conditional" and branches:
        names += _NAME.findall(branches.group(1))
    return [name for name in names if name]


def _computations(text: str) -> Iterator[Computation]:
    current: Computation | None = None
    for line in text.splitlines():
        if current is None:
            header = None if line.startswith("HloModule") else _HEADER.match(line)
            if header:
                current = Computation(header.group(2), bool(header.group(1)))
        elif line.startswith("}"):
            yield current
            current = None
        elif start := _START.match(line):
            current.instructions.append(_instruction(line, start))


def _instruction(line: str, start: re.Match[str]) -> Instruction:
    begin = start.end()
    end = _closing(line, begin) if line[begin] == "(" else line.index(" ", begin)
    opens = line.index("(", end)
    closes = _closing(line, opens)
    opcode, arguments = line[end:opens].strip(), line[opens + 1 : closes - 1]
    is_value = opcode in ("constant", "parameter")
    return Instruction(
        name=start.group(2),
        shape=line[begin:end],
        opcode=opcode,
        operands=() if is_value else tuple(_NAME.findall(arguments)),
        attributes=arguments if is_value else line[closes:],
        is_root=bool(start.group(1)),
    )


def _closing(line: str, opens: int) -> int:
    """Index just behind the bracket that closes the one at ``opens``."""
    depth = 0
    for index in range(opens, len(line)):
        depth += {"(": 1, ")": -1}.get(line[index], 0)
        if depth == 0:
            return index + 1
    return len(line)


def _array_bytes(dtype: str, sizes: str) -> int:
    count = 1
    for size in sizes.split(","):
        count *= int(size) if size else 1
    return count * BITS.get(dtype, 0) // 8
