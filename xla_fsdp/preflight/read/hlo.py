"""Parse the text of an HLO module: computations, instructions, and how often each is executed."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip

KERNEL = "tpu_custom_call"  # target of calls of Pallas kernels

# The compiler's value for cycles that it cannot estimate, as of some large sums.
NO_ESTIMATE = 2**63 - 1

_KERNEL_FLOPS = r'"cost_estimate":\{[^}]*"flops":"?(\d+)'

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)(?::([^}]*))?\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{\s*$")
_START = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|body|true_computation|false_computation|branch_computations|to_apply)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)


class Array(NamedTuple):
    """One array of a shape, in the text's own notation."""

    dtype: str
    sizes: str
    order: str = ""  # dims, minor first
    layout: str = ""

    @property
    def dims(self) -> tuple[int, ...]:
        """Sizes of the dims."""
        return _ints(self.sizes)

    @property
    def is_in_hbm(self) -> bool:
        """Whether it lies in HBM, not on the chip."""
        return re.search(r"S\([1-9]", self.layout) is None

    @property
    def nbytes(self) -> int:
        """Bytes without padding; 0 of what is no array."""
        return math.prod(self.dims) * BITS.get(self.dtype, 0) // 8

    @property
    def padded_nbytes(self) -> int:
        """Bytes, with the dims padded to whole tiles."""
        dims, minor = list(self.dims), _ints(self.order)
        if (tile := re.search(r"T\(([\d,]+)\)", self.layout)) and minor:
            for axis, width in zip(minor, reversed(_ints(tile.group(1))), strict=False):
                dims[axis] = -(-dims[axis] // width) * width
        return math.prod(dims) * BITS.get(self.dtype, 0) // 8


@dataclass(frozen=True)
class Instruction:
    """One line: ``name = shape opcode(operands), attributes``."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str  # for a constant its value, for a parameter its number
    is_root: bool

    def find(self, pattern: str) -> str:
        """Return the first group of ``pattern`` where it matches the attributes, else ""."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else ""

    def attribute(self, key: str) -> str:
        """Return the name or word after ``key=``, "" if there is none."""
        return self.find(rf"\b{key}=%?([\w.\-]+)")

    @property
    def origin(self) -> str:
        """Name of the instruction before optimization, if the compiler has noted it."""
        return self.find(r'op_name="([^"]*)"') or self.name

    @property
    def cycles(self) -> int:
        """The compiler's estimate of its cycles; 0 without one."""
        return 0 if self.has_no_estimate else self._cycles

    @property
    def has_no_estimate(self) -> bool:
        """Whether the compiler tried, but failed, to estimate its cycles, or it is a kernel that
        does not state its operations."""
        unknown_kernel = self._is_kernel and not self._cycles and not self.kernel_flops
        return self._cycles == NO_ESTIMATE or unknown_kernel

    @property
    def kernel_flops(self) -> int:
        """Operations that a kernel states; 0 for others."""
        return int((self._is_kernel and self.find(_KERNEL_FLOPS)) or 0)

    @property
    def _is_kernel(self) -> bool:
        return self.opcode == "custom-call" and bool(self.find(f'({KERNEL})"'))

    @property
    def _cycles(self) -> int:
        return int(self.find(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the result."""
        return [Array(*each) for each in _ARRAY.findall(self.shape)]

    @property
    def nbytes(self) -> int:
        """Bytes of the result, without padding."""
        return sum(each.nbytes for each in self.arrays)

    @property
    def dtypes(self) -> list[str]:
        """Element types of the result, each once."""
        return list(dict.fromkeys(each.dtype for each in self.arrays if each.dtype in BITS))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the (first) array of the result."""
        return self.arrays[0].dims if self.arrays else ()


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
        """The instructions that read a value, by the value's name."""
        users: dict[str, list[Instruction]] = defaultdict(list)
        for each in self.instructions:
            for operand in each.operands:
                users[operand].append(each)
        return users

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((each for each in self.instructions if each.is_root), self.instructions[-1])


@dataclass(frozen=True)
class Execution:
    """A computation called by one instruction, or the entry computation."""

    computation: Computation
    times: int  # per run of the module, with the trip counts of the loops around it
    caller: Instruction | None = None
    caller_computation: Computation | None = None  # the computation of the caller
    caller_in_entry: int | None = None  # index of the entry's instruction that (indirectly) calls

    def index_in_entry(self, index: int) -> int:
        """Return the index, in the entry, of the instruction that is or contains number ``index``
        of this computation."""
        return index if self.caller_in_entry is None else self.caller_in_entry


class Module:
    """A parsed module.

    Args:
        text: text of the module, as the compiler or torch_xla prints it.

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
        self.num_devices = math.prod(map(int, counts))
        self.unknown_trips: list[str] = []  # names of loops; appended to by ``executions``

    @cached_property
    def executions(self) -> list[Execution]:
        """All calls of computations, including those inside fusions."""
        return list(self._visit(Execution(self.entry, 1)))

    def _visit(self, execution: Execution) -> Iterator[Execution]:
        yield execution
        inside = execution.computation
        for index, each in enumerate(inside.instructions):
            times = execution.times * self._trips(inside, each)
            for name in _called(each):
                if (called := self.computations.get(name)) is not None:
                    at = execution.index_in_entry(index)
                    yield from self._visit(Execution(called, times, each, inside, at))

    def _trips(self, inside: Computation, each: Instruction) -> int:
        if each.opcode != "while":
            return 1
        count = _trip_count(self.computations, inside, each)
        if count is None:
            self.unknown_trips.append(f"{inside.name}/{each.name}")
        return 1 if count is None else count


def _called(each: Instruction) -> list[str]:
    """Return the names of the computations that an instruction runs (not its reducers)."""
    found = _CALLED.findall(each.attributes)
    wanted = [names for key, names in found if key != "to_apply" or each.opcode == "call"]
    return [name for names in wanted for name in _NAME.findall(names)]


# ---------------------------------------------------------------- parsing


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
    depth = 0
    for index in range(opens, len(line)):
        depth += {"(": 1, ")": -1}.get(line[index], 0)
        if depth == 0:
            return index + 1
    return len(line)


def _ints(sizes: str) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes.split(",") if size)


# ---------------------------------------------------------------- trip counts of loops
# A loop's counter is the value of its carry that the condition compares with a bound, and to which
# the body adds a constant step. An unknown start is assumed to be 0.


def _trip_count(
    computations: Mapping[str, Computation], inside: Computation, loop: Instruction
) -> int | None:
    condition = computations.get(loop.attribute("condition"))
    body = computations.get(loop.attribute("body"))
    if condition is None or body is None:
        return None
    lines = [each for each in condition.instructions if each.opcode == "get-tuple-element"]
    if len(read := {int(each.attribute("index")) for each in lines}) != 1:
        return None
    [counter] = read

    def result(of: Computation, count: int) -> int | None:
        numbers = _Integers(computations, of, lambda _, index: count if index == counter else None)
        return numbers.value(of.root.name, counter)

    start = _Integers(computations, inside, lambda *_: None).value(loop.operands[0], counter) or 0
    distance, step = result(condition, start), result(body, 0)
    if distance is None or not step or step < 0 or result(body, 1) != step + 1:
        return None
    return max(0, math.ceil(distance / step))


@dataclass(frozen=True)
class _Integers:
    """Integers that a computation makes of constants and parameters."""

    computations: Mapping[str, Computation]
    inside: Computation
    parameter: Callable[[int, int], int | None]  # value of one by its number, or of its part

    def value(self, name: str, index: int = 0) -> int | None:
        """Return the value of an instruction, or of a tuple that of this index; of ``a < b`` how
        far ``a`` is from ``b``; None if it is not known."""
        each = self.inside.by_name.get(name)
        if each is None:
            return None
        if each.opcode == "constant":
            return int(each.attributes) if each.attributes.isdigit() else None
        if each.opcode == "parameter":
            return self.parameter(int(each.attributes), index)
        if each.opcode == "get-tuple-element":
            return self.value(each.operands[0], int(each.attribute("index")))
        if each.opcode == "tuple":
            return self.value(each.operands[index])
        if each.opcode in ("bitcast", "copy", "reshape", "convert"):
            return self.value(each.operands[0], index)
        if each.opcode == "fusion":
            fused = self.computations[each.attribute("calls")]
            inner = replace(
                self, inside=fused, parameter=lambda n, at: self.value(each.operands[n], at)
            )
            return inner.value(fused.root.name, index)
        if each.opcode == "add" or each.attribute("direction") == "LT":
            first, second = map(self.value, each.operands)
            if first is not None and second is not None:
                return first + second if each.opcode == "add" else second - first
        return None
