"""The module that the TPU compiler left, written anew as one that any client of XLA runs.

``runnable(text)`` keeps what is computed and in which dtype, what is sent to whom, and loops;
fusions become calls. It leaves out layouts and memory spaces, and writes anew, in this order:

- operations that read other dtypes than they compute in: with conversions;
- what starts and ends beside other work: as one operation;
- sums between slices, which go over their hosts: as collectives;
- calls of the compiler's own, as for integers of 64 bits (``CALLS``);
- bytes that are read in another layout: by the order of the tiles.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from test.common.ranks import run_python
from xla_fsdp.preflight.read.hlo import Computation, Instruction, Module

HOW = (
    "metadata", "backend_config", "frontend_attributes", "operand_layout_constraints", "kind",
    "control-predecessors", "sharding", "output_to_operand_aliasing", "async_execution_thread",
)  # fmt: skip
"""Attributes that say how, not what."""

_LAYOUT = re.compile(r"(?<=\])\{[^{}]*\}")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?")


def runnable(text: str, slices: int = 1) -> str:
    """Return a module that computes the same.

    Args:
        text: what the compiler left.
        slices: how many run it. It numbers the chips of one; all of them are replicas here.

    Raises:
        ValueError: if it calls what is not known here.
    """
    module = Module(text + SUMS if slices > 1 else text)
    chips = module.num_devices
    module.computations = {
        each.name: _at_once(_joined(each, slices, chips)) for each in module.computations.values()
    }
    module.entry = module.computations[module.entry.name]
    others = [each for each in module.computations.values() if not each.is_entry]
    bodies = ("\n".join(_lines(each, module)) for each in (*others, module.entry))
    return "HloModule optimized\n\n" + "\n\n".join(bodies) + "\n"


def _lines(computation: Computation, module: Module) -> Iterator[str]:
    """The text of a computation; copies are left out."""
    yield f"{'ENTRY ' if computation.is_entry else ''}%{computation.name} {{"
    same: dict[str, str] = {}  # names of values that are others
    for each in computation.instructions:
        operands = tuple(same.get(name, name) for name in each.operands)
        if _is_identity(each) and not each.is_root and _keeps_dtype(each, computation):
            same[each.name] = operands[0]
        elif each.opcode == "bitcast":
            yield from _bitcast(each, operands[0], computation.by_name[each.operands[0]])
        else:
            yield from _written(dataclasses.replace(each, operands=operands), computation, module)
    yield "}"


def _is_identity(each: Instruction) -> bool:
    return each.opcode == "copy" or _target(each) == "AssumeGatherIndicesInBound"


def _keeps_dtype(each: Instruction, inside: Computation) -> bool:
    """Copies may convert, too."""
    return inside.by_name[each.operands[0]].dtypes == each.dtypes


def _target(each: Instruction) -> str:
    return each.find(r'custom_call_target="([^"]*)"') if each.opcode == "custom-call" else ""


def _written(each: Instruction, inside: Computation, module: Module) -> Iterator[str]:
    if _is_identity(each):
        yield _line(each, "convert", each.operands)
    elif target := _target(each):
        if target not in CALLS:
            raise ValueError(f"{each.name} calls {target}, which is not known here")
        yield from CALLS[target](each, inside)
    elif each.opcode in ("fusion", "async"):
        yield _line(each, "call", each.operands, f"to_apply=%{each.attribute('calls')}")
    elif each.opcode in ("constant", "parameter"):
        yield _line(each, each.opcode, (), values=[each.attributes])
    elif each.opcode in ("tuple", "get-tuple-element"):
        yield _line(each, each.opcode, each.operands, _what(each.attributes))
    else:
        yield from _computed(each, inside, module)


def _line(
    each: Instruction,
    opcode: str,
    operands: Sequence[str],
    attributes: str = "",
    values: Sequence[str] = (),
) -> str:
    root = "ROOT " if each.is_root else ""
    arguments = ", ".join([*(f"%{name}" for name in operands), *values])
    rest = f", {attributes}" if attributes else ""
    return f"  {root}%{each.name} = {_plain(each.shape)} {opcode}({arguments}){rest}"


def _plain(shape: str) -> str:
    return _LAYOUT.sub("", _COMMENT.sub("", shape))


def _what(attributes: str) -> str:
    parts = _split(attributes.strip().removeprefix(","))
    return ", ".join(part for part in parts if part.partition("=")[0] not in HOW)


def _split(text: str) -> list[str]:
    """Split at commas that are in no brackets and no quotes."""
    parts, depth, quoted = [""], 0, False
    for before, char in itertools.pairwise(f" {text}"):
        quoted ^= char == '"' and before != "\\"
        depth += 0 if quoted else {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(char, 0)
        if char == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


# ---------------------------------------------------------------- dtypes

FLOATS = ("f64", "f32", "f16", "bf16")
"""Wide ones first."""

FREE = (
    "convert",
    "bitcast-convert",
    "convolution",
    "dot",
    "parameter",
    "constant",
    "while",
    "call",
)
"""Operations whose results may be of another dtype than what they read."""


def _computed(each: Instruction, inside: Computation, module: Module) -> Iterator[str]:
    """An operation, in the dtype in which it is computed: the compiler leaves conversions of what
    is read, and of the result, to the operation."""
    reducer = module.computations.get(each.attribute("to_apply"))
    used = [inside.by_name[name].dtypes for name in each.operands]
    floats = [dtype for dtypes in used for dtype in dtypes if dtype in FLOATS]
    if each.opcode in FREE or not floats or (reducer and len(reducer.root.dtypes) > 1):
        yield _line(each, each.opcode, each.operands, _what(each.attributes))
        return
    dtype = reducer.root.dtypes[0] if reducer else min(floats, key=FLOATS.index)
    operands = list(each.operands)
    for number, (name, dtypes) in enumerate(zip(each.operands, used, strict=True)):
        if dtypes[0] in FLOATS and dtypes != [dtype]:
            operands[number] = f"{each.name}.from.{number}"
            shape = _as(inside.by_name[name].shape, dtype)
            yield f"  %{operands[number]} = {shape} convert(%{name})"
    yield from _of_dtype(each, dtype, operands)


def _of_dtype(each: Instruction, dtype: str, operands: Sequence[str]) -> Iterator[str]:
    """An operation whose floats are computed in ``dtype``, and converted to those of its shape."""
    shape, attributes = _plain(each.shape), _what(each.attributes)
    is_tuple = shape.startswith("(")
    parts = _elements(shape) if is_tuple else [shape]
    computed = [_as(part, dtype) if part.partition("[")[0] in FLOATS else part for part in parts]
    if computed == parts:
        yield _line(each, each.opcode, operands, attributes)
        return
    whole = f"({', '.join(computed)})" if is_tuple else computed[0]
    first = dataclasses.replace(each, name=f"{each.name}.as.{dtype}", shape=whole, is_root=False)
    yield _line(first, each.opcode, operands, attributes)
    if is_tuple:
        yield from _parts_converted(each, first)
    else:
        yield _line(each, "convert", [first.name])


def _parts_converted(each: Instruction, computed: Instruction) -> Iterator[str]:
    shapes = zip(_elements(_plain(each.shape)), _elements(computed.shape), strict=True)
    names = []
    for number, (after, before) in enumerate(shapes):
        part = f"{computed.name}.part.{number}"
        names.append(f"{each.name}.part.{number}")
        yield f"  %{part} = {before} get-tuple-element(%{computed.name}), index={number}"
        yield f"  %{names[-1]} = {after} convert(%{part})"
    yield _line(each, "tuple", names)


def _as(shape: str, dtype: str) -> str:
    return f"{dtype}[{_plain(shape).partition('[')[2]}"


# ---------------------------------------------------------------- what runs beside other work


def _at_once(computation: Computation) -> Computation:
    """Begin and end in one operation: the beginning's, whose value the end returns."""
    return dataclasses.replace(computation, instructions=[*map(_begun, computation.instructions)])


def _begun(each: Instruction) -> Instruction:
    opcode, _, end = each.opcode.rpartition("-")
    if end == "done":
        return dataclasses.replace(each, opcode="copy")
    if end != "start":
        return each
    shape = each.shape if opcode == "all-reduce" else _elements(each.shape)[1]
    return dataclasses.replace(each, opcode=opcode, shape=shape)


def _elements(shape: str) -> list[str]:
    return _split(_COMMENT.sub("", shape).strip()[1:-1])


def _collective_start(each: Instruction, inside: Computation) -> Iterator[str]:
    """What is gathered, the result, and flags."""
    [gather] = each.operands
    flags = []
    for number, shape in enumerate(_elements(each.shape)[2:]):
        flags.append(f"{each.name}.flag.{number}")
        yield from _zeros(flags[-1], shape)
    yield _line(each, "tuple", [inside.by_name[gather].operands[0], gather, *flags])


def _collective_done(each: Instruction, inside: Computation) -> Iterator[str]:
    yield _line(each, "reshape", each.operands[1:2])


def _cropped(each: Instruction, inside: Computation) -> Iterator[str]:
    """The same with what was padding in memory, which becomes zeros."""
    dtype, before = each.dtypes[0], inside.by_name[each.operands[0]].sizes
    ends = "x".join(f"0_{after - size}" for size, after in zip(before, each.sizes, strict=True))
    yield f"  %{each.name}.zero = {dtype}[] constant(0)"
    yield _line(each, "pad", [*each.operands, f"{each.name}.zero"], f"padding={ends}")


def _buffer(each: Instruction, inside: Computation) -> Iterator[str]:
    yield from _zeros(each.name, each.shape, is_root=each.is_root)


def _zeros(name: str, shape: str, *, is_root: bool = False) -> Iterator[str]:
    plain, root = _plain(shape), "ROOT " if is_root else ""
    yield f"  %{name}.zero = {plain.partition('[')[0]}[] constant(0)"
    yield f"  {root}%{name} = {plain} broadcast(%{name}.zero), dimensions={{}}"


# ---------------------------------------------------------------- several slices
# A chip hands to its host what is summed with other slices, and gets the sum from there.

SUMS = "".join(
    f"""
%{dtype}.sum (a: {dtype}[], b: {dtype}[]) -> {dtype}[] {{
  %a = {dtype}[] parameter(0)
  %b = {dtype}[] parameter(1)
  ROOT %sum = {dtype}[] add(%a, %b)
}}
"""
    for dtype in ("f32", "bf16")
)


def _joined(computation: Computation, slices: int, chips: int) -> Computation:
    """Let each slice, of so many chips, do what one does, and sums be those of all."""
    sent = {_meeting(each): each for each in computation.instructions if each.opcode == "send"}
    found: list[Instruction] = []
    for each in computation.instructions:
        if each.opcode == "recv-done":
            found += _received(each, sent[_meeting(computation.by_name[each.operands[0]])], chips)
        elif each.opcode not in ("after-all", "send", "send-done", "recv"):
            found.append(_on_each(each, slices, chips))
    return dataclasses.replace(computation, instructions=found)


def _meeting(each: Instruction) -> str:
    """Name of what is sent and received."""
    return each.find(r'_xla_host_transfer_rendezvous="([^"]*)"')


def _received(end: Instruction, sent: Instruction, chips: int) -> Iterator[Instruction]:
    """The sum, and a tuple of it alone."""
    kind, operation, target = (
        sent.find(rf'_megascale_{key}="([^"]*)"')
        for key in ("transfer_type", "reduce_operation", "target")
    )
    slices, which = map(_numbers, target.split("x"))  # as in {1,2}x{0:3}
    if (kind, operation, which) != ("ALL_REDUCE", "SUM", [*range(chips)]):
        raise ValueError(f"{sent.name} sends {kind} {operation} {target}, which is not known here")
    groups = [[chips * (each - 1) + chip for each in slices] for chip in which]
    how = f", replica_groups={_braces(groups)}, to_apply=%{end.dtypes[0]}.sum"
    name, shape = f"{end.name}.sum", _elements(end.shape)[0]
    yield Instruction(name, shape, "all-reduce", sent.operands[:1], how, is_root=False)
    yield Instruction(end.name, f"({shape})", "tuple", (name,), "", is_root=False)


def _numbers(listed: str) -> list[int]:
    """``[0, 1, 2, 3]`` of ``{0:3}`` or ``{0,1,2,3}``."""
    ranges = (part.partition(":") for part in listed.strip("{}").split(","))
    return [n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)]


def _on_each(each: Instruction, slices: int, chips: int) -> Instruction:
    """The groups or pairs of a collective, on every slice."""
    found = re.search(r"(?:groups|pairs)=\{(\{[\d,{}]*\})\}", each.attributes)
    if found is None:
        if slices > 1 and (each.opcode == "replica-id" or "_groups=" in each.attributes):
            raise ValueError(f"{each.name} is of all chips of a slice, which is not known here")
        return each
    listed = ",".join(_shifted(found[1], chips * number) for number in range(slices))
    return dataclasses.replace(each, attributes=each.attributes.replace(found[1], listed))


def _shifted(numbers: str, by: int) -> str:
    return re.sub(r"\d+", lambda number: str(int(number[0]) + by), numbers)


def _braces(groups: Sequence[Sequence[int]]) -> str:
    return str(groups).translate(str.maketrans("[]", "{}", " "))


# ---------------------------------------------------------------- 64 bits


def _low(each: Instruction, inside: Computation) -> Iterator[str]:
    """The low bits of an integer, or the nearest float32."""
    yield _line(each, "convert", each.operands)


def _high(each: Instruction, inside: Computation) -> Iterator[str]:
    [whole] = each.operands
    dtype = inside.by_name[whole].dtypes[0]
    if dtype == "f64":
        raise ValueError(f"{each.name} is the rest of a float64, which is not known here")
    wide = _plain(each.shape).replace(each.dtypes[0], dtype)
    yield f"  %{each.name}.bits = {dtype}[] constant(32)"
    yield f"  %{each.name}.by = {wide} broadcast(%{each.name}.bits), dimensions={{}}"
    yield f"  %{each.name}.wide = {wide} shift-right-logical(%{whole}, %{each.name}.by)"
    yield _line(each, "convert", [f"{each.name}.wide"])


def _combined(each: Instruction, inside: Computation) -> Iterator[str]:
    low, high = each.operands
    wide, dtype, name = _plain(each.shape), each.dtypes[0], each.name
    yield f"  %{name}.bits = {dtype}[] constant(32)"
    yield f"  %{name}.by = {wide} broadcast(%{name}.bits), dimensions={{}}"
    yield f"  %{name}.low = {wide} convert(%{low})"
    yield f"  %{name}.high = {wide} convert(%{high})"
    yield f"  %{name}.up = {wide} shift-left(%{name}.high, %{name}.by)"
    yield _line(each, "or", [f"{name}.up", f"{name}.low"])


CALLS: dict[str, Callable[[Instruction, Computation], Iterator[str]]] = {
    "AllocateBuffer": _buffer,
    "AsyncCollectiveStart": _collective_start,
    "AsyncCollectiveDone": _collective_done,
    "ZeroCrop": _cropped,
    "X64SplitLow": _low,
    "X64SplitHigh": _high,
    "X64Combine": _combined,
}
"""The TPU compiler's own calls."""


# ---------------------------------------------------------------- bytes read in another layout


@dataclass(frozen=True)
class Step:
    """One operation on the way from an array to its bytes in order, or back.

    Args:
        before: sizes.
        after: sizes.
        order: of a transpose; () for a reshape, or where ends of dimensions are added or cut.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def changes_ends(self) -> bool:
        """Whether elements are added or cut."""
        return math.prod(self.before) != math.prod(self.after)

    @property
    def inverse(self) -> Step:
        """The step back."""
        order = tuple(map(self.order.index, range(len(self.order))))
        return Step(self.after, self.before, order)


def _bitcast(each: Instruction, name: str, source: Instruction) -> Iterator[str]:
    """The bytes of the source, whose value is called ``name``, read as bytes of the result."""
    [dtype] = each.dtypes
    if source.dtypes != [dtype]:
        raise ValueError(f"{each.name} reads {source.shape} as {each.shape}")
    there = to_bytes(source.shape)
    back = [step.inverse for step in reversed(to_bytes(each.shape))]
    steps = [*there, Step(there[-1].after, back[0].before), *back]
    for number, step in enumerate(steps):
        result = f"{each.name}.step.{number}"
        if step.order or step.before != step.after:
            yield from _stepped(step, dtype, name, result)
            name = result
    yield _line(each, "reshape", [name])


def _stepped(step: Step, dtype: str, name: str, result: str) -> Iterator[str]:
    sizes = ",".join(map(str, step.after))
    shape = f"{dtype}[{sizes}]"
    if step.order:
        order = ",".join(map(str, step.order))
        yield f"  %{result} = {shape} transpose(%{name}), dimensions={{{order}}}"
    elif not step.changes_ends:
        yield f"  %{result} = {shape} reshape(%{name})"
    else:
        yield f"  %{result}.zero = {dtype}[] constant(0)"
        ends = "x".join(f"0_{a - b}" for b, a in zip(step.before, step.after, strict=True))
        yield f"  %{result} = {shape} pad(%{name}, %{result}.zero), padding={ends}"


def to_bytes(shape: str) -> list[Step]:
    """Return the steps from an array to its elements in the order of memory, in one dimension.

    ``f32[16,256]{1,0:T(8,128)}``: minor dimension 1; in tiles of 8 rows and 128 columns.
    """
    found = _ARRAY.fullmatch(_COMMENT.sub("", shape))
    if found is None:
        raise ValueError(f"{shape} is not the shape of an array")
    sizes = tuple(map(int, found.group(2).split(","))) if found.group(2) else ()
    steps: list[Step] = []
    if len(sizes) > 1 and found.group(3):
        order = tuple(map(int, found.group(3).split(",")))[::-1]
        sizes = _add(steps, Step(sizes, tuple(sizes[at] for at in order), order))
    tiles = re.findall(r"\(([^)]*)\)", _tiling(found.group(4) or ""))
    for tile in tiles:
        sizes = _tile(steps, sizes, tuple(map(int, tile.split(","))))
    _add(steps, Step(sizes, (math.prod(sizes),)))
    return steps


def _tiling(properties: str) -> str:
    """``(8,128)(2,1)`` of ``T(8,128)(2,1)S(1)``."""
    found = re.match(r"T((?:\([\d,]+\))+)", properties)
    return found.group(1) if found else ""


def _tile(steps: list[Step], sizes: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    if len(tile) > len(sizes):
        sizes = _add(steps, Step(sizes, (1,) * (len(tile) - len(sizes)) + sizes))
    kept, tiled = sizes[: -len(tile)], sizes[-len(tile) :]
    counts = [math.ceil(size / part) for size, part in zip(tiled, tile, strict=True)]
    padded = tuple(count * part for count, part in zip(counts, tile, strict=True))
    sizes = _add(steps, Step(sizes, kept + padded))
    pairs = tuple(itertools.chain(*zip(counts, tile, strict=True)))
    sizes = _add(steps, Step(sizes, kept + pairs))
    first = len(kept)
    order = (*range(first), *range(first, len(sizes), 2), *range(first + 1, len(sizes), 2))
    return _add(steps, Step(sizes, tuple(sizes[at] for at in order), order))


def _add(steps: list[Step], step: Step) -> tuple[int, ...]:
    steps.append(step)
    return step.after


# ---------------------------------------------------------------- on its way to virtual chips

_SERIALIZE = """
import sys
from jax._src.lib import xla_client
module = xla_client._xla.hlo_module_from_text(open(sys.argv[1]).read())
open(sys.argv[2], "wb").write(module.as_serialized_hlo_module_proto())
"""


def serialized(text: str) -> bytes:
    """Return a module as virtual chips take it.

    Raises:
        ValueError: if the text is not that of a module.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "text"), Path(folder, "proto")
        source.write_text(text)
        run = ("-c", _SERIALIZE, str(source), str(result))
        done = run_python(*run, env={"JAX_PLATFORMS": "cpu"})
        if done.returncode:
            raise ValueError(f"not the text of a module: {done.stderr}")
        return result.read_bytes()


# ---------------------------------------------------------------- mistakes made on purpose


def _regrouped(text: str) -> str:
    """Let ranks 1 and 2 change places in the first reduction that joins a part of the ranks."""
    return _edited(text, r" reduce-scatter\([^\n]*replica_groups=\{(\{[^=]*?\})\}", _swapped)


def _misdirected_after(text: str) -> str:
    """Let ranks 1 and 2 get what is meant for the other, in the first step of a ring."""
    pattern = r" collective-permute\([^\n]*source_target_pairs=\{(\{[^=]*?\})\}"
    return _edited(
        text, pattern, lambda pairs: re.sub(r",[12]\}", lambda to: _swapped(to[0]), pairs)
    )


def _edited(text: str, pattern: str, change: Callable[[str], str]) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"nothing is like {pattern}")
    return text[: found.start(1)] + change(found.group(1)) + text[found.end(1) :]


def _swapped(ranks: str) -> str:
    return re.sub(r"\b[12]\b", lambda rank: str(3 - int(rank.group())), ranks)


EDITS = {"group": _regrouped, "send": _misdirected_after}
