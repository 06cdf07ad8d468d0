"""Estimate which buffers a program holds over its schedule, and its peak, by purpose.

The text of the schedule shows neither which buffers share addresses nor scratch space; exact totals
are those of ``compiler.Buffers``. A loop counts as its carry and the peak of its body.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xla_fsdp.preflight.read.hlo import Array, Computation, Instruction, Module

GATHERED, OTHER = "gathered parameters", "activations and temporaries"

# Index of an instruction, and the bytes by purpose that are held from there on.
Level = tuple[int, dict[str, int]]


@dataclass(eq=False)
class _Buffer:
    """An array that an instruction makes; it lives until the last instruction that reads it."""

    made: int
    last_read: int
    array: Array
    nbytes: int
    purpose: str
    maker: Instruction


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is held; the program's inputs do not count."""

    by_purpose: dict[str, int]
    largest: tuple[tuple[int, str, str], ...]  # bytes, shape and origin of the largest buffers

    @property
    def total(self) -> int:
        """Bytes of all buffers together."""
        return sum(self.by_purpose.values())


def fullest_moment(module: Module) -> Peak:
    """Find when the entry computation of a scheduled module holds most bytes in HBM."""
    return _peak_of(_buffers(module, module.entry, _hbm_bytes))


def levels(module: Module) -> list[Level]:
    """Return the bytes that the entry computation holds in HBM, in the order of the schedule."""
    return _levels(_buffers(module, module.entry, _hbm_bytes))


def most_gathered(module: Module) -> int:
    """Return the most bytes of gathered parameters at once, in HBM or in memory on the chip."""
    buffers = _buffers(module, module.entry, lambda array: array.padded_nbytes)
    return _peak_of([each for each in buffers if each.purpose == GATHERED]).total


def _hbm_bytes(array: Array) -> int:
    return array.padded_nbytes if array.is_in_hbm else 0


def _peak_of(buffers: Sequence[_Buffer]) -> Peak:
    fullest, _ = max(_levels(buffers), key=lambda level: sum(level[1].values()))
    alive = [buffer for buffer in buffers if buffer.made <= fullest <= buffer.last_read]
    by_purpose: dict[str, int] = defaultdict(int)
    for buffer in alive:
        by_purpose[buffer.purpose] += buffer.nbytes
    largest = sorted(alive, key=lambda buffer: -buffer.nbytes)[:12]
    return Peak(
        dict(by_purpose),
        tuple((each.nbytes, each.maker.shape, each.maker.origin) for each in largest),
    )


def _levels(buffers: Sequence[_Buffer]) -> list[Level]:
    changes: dict[int, Counter[str]] = defaultdict(Counter)
    for buffer in buffers:
        changes[buffer.made][buffer.purpose] += buffer.nbytes
        changes[buffer.last_read + 1][buffer.purpose] -= buffer.nbytes
    held: Counter[str] = Counter()
    found: list[Level] = [(0, {})]
    for at in sorted(changes):
        held.update(changes[at])
        found.append((at, dict(held)))
    return found


def _buffers(
    module: Module, computation: Computation, size: Callable[[Array], int]
) -> list[_Buffer]:
    """Return all buffers of a computation, except its inputs and results."""
    values: dict[str, list[_Buffer]] = {}  # one buffer for each array of an instruction's shape
    found: list[_Buffer] = []
    for at, each in enumerate(computation.instructions):
        operands = [buffer for name in each.operands for buffer in values.get(name, ())]
        for operand in operands:
            operand.last_read = at
        arrays = each.arrays
        values[each.name] = []
        for array, buffer in zip(arrays, _shared(module, each, operands, arrays), strict=True):
            if buffer is None:
                nbytes = 0 if each.opcode == "parameter" else size(array)
                buffer = _Buffer(at, at, array, nbytes, _purpose(module, each), each)
                found.append(buffer)
            values[each.name].append(buffer)
        if each.opcode == "while":
            body = module.computations[each.attribute("body")]
            nbytes = _peak_of(_buffers(module, body, size)).total
            found.append(_Buffer(at, at, Array("u8", str(nbytes)), nbytes, OTHER, each))
    results = set(values[computation.root.name])
    return [buffer for buffer in found if buffer.nbytes and buffer not in results]


def _shared(
    module: Module, each: Instruction, operands: list[_Buffer], arrays: Sequence[Array]
) -> Sequence[_Buffer | None]:
    """Return, for each array of an instruction's result, the operand's buffer that it reuses."""
    if each.opcode == "get-tuple-element":
        index = int(each.attribute("index"))
        return [operands[index] if index < len(operands) else None for _ in arrays]
    if each.opcode in ("tuple", "bitcast", "opt-barrier") or each.opcode.endswith("-done"):
        return [*operands, *[None] * len(arrays)][: len(arrays)]
    if each.opcode == "while" or each.opcode.endswith("-start") or _is_fragment(module, each):
        by_kind = {_kind(buffer.array): buffer for buffer in operands}
        return [by_kind.get(_kind(array)) for array in arrays]
    return [None] * len(arrays)


def _kind(array: Array) -> tuple[str, str, bool]:
    return array.dtype, array.sizes, array.is_in_hbm


def _is_fragment(module: Module, each: Instruction) -> bool:
    """Return whether this is a fusion of a split collective, whose buffers it passes on."""
    if each.opcode != "fusion":
        return False
    return any(
        "async_collective_fusion_config" in line.attributes
        for line in module.computations[each.attribute("calls")].instructions
        if line.opcode.startswith("all-") or line.opcode.startswith("reduce-scatter")
    )


def _purpose(module: Module, each: Instruction) -> str:
    # A fusion that computes during a gather passes on the gather's buffers; those that it makes
    # itself are not gathered parameters.
    lines = [each]
    if each.opcode == "fusion":
        lines = module.computations[each.attribute("calls")].instructions
    gathers = any(line.opcode.startswith("all-gather") for line in lines)
    begins = len(lines) == 1 or any("AsyncCollectiveStart" in line.attributes for line in lines)
    return GATHERED if gathers and begins else OTHER
