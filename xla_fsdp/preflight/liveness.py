"""What lies in a chip's memory at the moment when most does, by what it is for.

Words: a *buffer* is one array that an instruction makes in HBM; it lives from there to the last
instruction that reads it, in the order of the schedule. Instructions that only rename (tuples,
bitcasts) make none.
Always true: this is an estimate from the text of the schedule. What the compiler packs into one
address range, and its own scratch space, it does not say; the figures to trust are the totals in
``buffers``. Loops count with what they carry and the most that their body holds.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xla_fsdp.preflight.hlo import BITS, Computation, Instruction, Module

GATHERED, OTHER = "gathered parameters", "activations and temporaries"

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)(?::([^}]*))?\})?")

_RENAMES = ("tuple", "bitcast", "opt-barrier")

Array = tuple[str, str, str, str]

"""Dtype, sizes, order of the dims (minor first) and layout, as the text has them."""

Size = Callable[[Array], int]

Level = tuple[int, dict[str, int]]

"""Index of an instruction, and bytes by purpose from there on."""


@dataclass(frozen=True)
class Peak:
    """The fullest moment: bytes by purpose, and the largest buffers (bytes, shape, origin)."""

    by_purpose: dict[str, int]
    largest: tuple[tuple[int, str, str], ...]

    @property
    def total(self) -> int:
        """Bytes of all buffers together, inputs left out."""
        return sum(self.by_purpose.values())


def fullest_moment(module: Module) -> Peak:
    """Where the entry computation of a scheduled module holds most."""
    return _peak_of(_buffers(module, module.entry, _hbm_only))


def levels(module: Module) -> list[Level]:
    """What the entry computation holds in HBM, in the order of the schedule."""
    return _levels(_buffers(module, module.entry, _hbm_only))


def most_gathered(module: Module) -> int:
    """Bytes of gathered parameters that are there at once at most, in HBM or on the chip."""
    buffers = _buffers(module, module.entry, _anywhere)
    return _peak_of([each for each in buffers if each.purpose == GATHERED]).total


@dataclass
class _Buffer:
    made: int
    last_read: int
    array: Array
    nbytes: int
    purpose: str
    maker: Instruction


def _peak_of(buffers: Sequence[_Buffer]) -> Peak:
    moment, _ = max(_levels(buffers), key=lambda level: sum(level[1].values()))
    alive = [buffer for buffer in buffers if buffer.made <= moment <= buffer.last_read]
    by_purpose: dict[str, int] = defaultdict(int)
    for buffer in alive:
        by_purpose[buffer.purpose] += buffer.nbytes
    largest = sorted(alive, key=lambda buffer: -buffer.nbytes)[:12]
    return Peak(
        dict(by_purpose),
        tuple((each.nbytes, each.maker.shape, _origin(each.maker)) for each in largest),
    )


def _levels(buffers: Sequence[_Buffer]) -> list[Level]:
    changes: dict[int, Counter[str]] = defaultdict(Counter)
    for buffer in buffers:
        changes[buffer.made][buffer.purpose] += buffer.nbytes
        changes[buffer.last_read + 1][buffer.purpose] -= buffer.nbytes
    now: Counter[str] = Counter()
    levels: list[Level] = [(0, {})]
    for at in sorted(changes):
        now.update(changes[at])
        levels.append((at, dict(now)))
    return levels


def _buffers(module: Module, computation: Computation, size: Size) -> list[_Buffer]:
    """Every buffer of a computation, except its inputs and results."""
    values: dict[str, list[_Buffer]] = {}  # one for each array of an instruction's shape
    found: list[_Buffer] = []
    for at, each in enumerate(computation.instructions):
        reads = [buffer for name in each.operands for buffer in values.get(name, ())]
        for read in reads:
            read.last_read = at
        handed_on = _handed_on(module, each, reads)
        values[each.name] = []
        for place, array in enumerate(_ARRAY.findall(each.shape)):
            if (buffer := handed_on(place, array)) is None:
                nbytes = 0 if each.opcode == "parameter" else size(array)
                buffer = _Buffer(at, at, array, nbytes, _purpose(module, each), each)
                found.append(buffer)
            values[each.name].append(buffer)
        if each.opcode == "while":
            found.append(_loop_buffer(module, each, at, size))
    results = {id(buffer) for buffer in values[computation.root.name]}
    return [buffer for buffer in found if buffer.nbytes and id(buffer) not in results]


def _handed_on(
    module: Module, each: Instruction, reads: list[_Buffer]
) -> Callable[[int, Array], _Buffer | None]:
    """Which buffer that it reads an instruction's result at some place is."""
    if each.opcode == "get-tuple-element":
        index = int(each.attribute("index"))
        return lambda place, array: reads[index] if index < len(reads) else None
    if each.opcode in _RENAMES or each.opcode.endswith("-done"):
        return lambda place, array: reads[place] if place < len(reads) else None
    if each.opcode == "while" or each.opcode.endswith("-start") or _is_piece(module, each):
        by_array = {_place(buffer.array): buffer for buffer in reads}
        return lambda place, array: by_array.get(_place(array))
    return lambda place, array: None


def _place(array: Array) -> tuple[str, str, bool]:
    """What tells the buffers that one instruction hands on apart."""
    return array[0], array[1], _outside_hbm(array[3])


def _outside_hbm(layout: str) -> bool:
    return re.search(r"S\([1-9]", layout) is not None


def _loop_buffer(module: Module, each: Instruction, at: int, size: Size) -> _Buffer:
    body = module.computations[each.attribute("body")]
    nbytes = _peak_of(_buffers(module, body, size)).total
    return _Buffer(at, at, ("u8", str(nbytes), "", ""), nbytes, OTHER, each)


def _is_piece(module: Module, each: Instruction) -> bool:
    """Whether a fusion is a piece of a split collective, and hands on its buffers."""
    if each.opcode != "fusion":
        return False
    return any(
        "async_collective_fusion_config" in line.attributes
        for line in module.computations[each.attribute("calls")].instructions
        if line.opcode.startswith("all-") or line.opcode.startswith("reduce-scatter")
    )


def _purpose(module: Module, each: Instruction) -> str:
    """What the buffers that an instruction makes are for; those that it hands on it does not make,
    so a fusion that computes while a gather goes on makes others."""
    lines = [each]
    if each.opcode == "fusion":
        lines = module.computations[each.attribute("calls")].instructions
    gathers = any(line.opcode.startswith("all-gather") for line in lines)
    begins = len(lines) == 1 or any("AsyncCollectiveStart" in line.attributes for line in lines)
    return GATHERED if gathers and begins else OTHER


def _hbm_only(array: Array) -> int:
    return 0 if _outside_hbm(array[3]) else _anywhere(array)


def _anywhere(array: Array) -> int:
    """Bytes of one array, its dims filled up to whole tiles."""
    dtype, sizes, order, layout = array
    if dtype not in BITS:
        return 0
    dims = [int(size) for size in sizes.split(",") if size]
    minor = [int(axis) for axis in order.split(",") if axis]
    if (tile := re.search(r"T\(([\d,]+)\)", layout)) and minor:
        widths = [int(width) for width in tile.group(1).split(",")]
        for axis, width in zip(minor, reversed(widths), strict=False):
            dims[axis] = -(-dims[axis] // width) * width
    return math.prod(dims) * BITS[dtype] // 8


def _origin(each: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', each.attributes)
    return found.group(1) if found else each.name
