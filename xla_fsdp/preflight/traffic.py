"""Find the collectives of an optimized TPU program, and what each puts on the wire.

Words: the *wire bytes* of a collective are what a rank sends in a ring; *overlapped* means that
the compiler has scheduled compute between its start and its end, else it is *blocking*.
Always true: a collective counts once per execution, however many instructions the compiler made of
it. An asynchronous one is split over fusions: one holds it with ``AsyncCollectiveStart``, one with
``AsyncCollectiveDone``, and each fusion that computes meanwhile holds it again. An all-reduce
inside a fusion that slices its result is a reduce-scatter; outside of one it is a full all-reduce.
What goes from slice to slice is read by ``between_slices``, and is a kind of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from xla_fsdp.preflight import dcn as between_slices
from xla_fsdp.preflight.dcn import SUFFIX
from xla_fsdp.preflight.hlo import Computation, Execution, Instruction, Module

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

START, DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Args:
        kind: one of ``KINDS``, with " between slices" if it leaves the slice.
        dtype: element type on the wire.
        sizes: of the operand (the first of several).
        group_size: number of ranks that take part together.
        times: executions per run of the program.
        wire_bytes: bytes that a rank sends in one execution.
        overlapped: whether compute is scheduled between its start and its end.
        only_sliced: for an all-reduce: whether every reader takes a slice of the result only.
        origin: name of the instruction that torch_xla made, as far as the compiler kept it.
        places: indices of the entry's instructions in which it starts and ends.
    """

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    group_size: int
    times: int
    wire_bytes: int
    overlapped: bool
    only_sliced: bool
    origin: str
    places: tuple[int, int] = (0, 0)

    @property
    def total_bytes(self) -> int:
        """Wire bytes in one run of the program."""
        return self.times * self.wire_bytes


def collectives_of(module: Module) -> list[Collective]:
    """The collectives of a module, in the order of the schedule."""
    found = _Finder(module)
    return found.collectives


class _Finder:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._middles: dict[tuple[str, ...], int] = defaultdict(int)
        self._ends: dict[tuple[str, ...], int] = {}
        starts: list[tuple[Execution, int, bool]] = []
        for execution in module.executions:
            for index, each in enumerate(execution.computation.instructions):
                if _kind(each) and self._begins(execution, index):
                    starts.append((execution, index, _piece(execution.computation, each) == START))
        self.collectives = [self._collective(*start) for start in starts]

    def _begins(self, execution: Execution, index: int) -> bool:
        """Whether this instruction is the one to count; notes the pieces that compute meanwhile,
        and the last one."""
        each = execution.computation.instructions[index]
        piece = _piece(execution.computation, each)
        if piece in ("", START):
            return True
        if piece == DONE:
            self._ends[_chain(each)] = execution.place_of(index)
        else:
            self._middles[_chain(each)] += 1
        return False

    def _collective(self, execution: Execution, index: int, split: bool) -> Collective:
        inside = execution.computation
        each = inside.instructions[index]
        start, kind = execution.place_of(index), _kind(each)
        done = between_slices.end_of(inside, each) if kind.endswith(SUFFIX) else None
        if done is not None:
            end, overlapped = execution.place_of(done), _computes(inside, index, done)
        elif split:
            end, overlapped = self._ends.get(_chain(each), start), self._middles[_chain(each)] > 0
        else:
            end, overlapped = _place_of_done(execution, index), _waits(execution, each)
        sliced = kind == "all-reduce" and _only_sliced(self._module, inside, each.name)
        fused = execution.caller is not None and execution.caller.opcode == "fusion"
        if fused and sliced:
            kind, sliced = "reduce-scatter", False
        given = each.operands if done is None else each.operands[:1]  # without its token
        sent = [inside.by_name[name] for name in given]
        size = _group_size(each, self._module.num_devices)
        return Collective(
            kind=kind,
            dtype="+".join(dict.fromkeys(dtype for operand in sent for dtype in operand.dtypes)),
            sizes=sent[0].sizes,
            group_size=size,
            times=execution.times,
            wire_bytes=_wire_bytes(kind, sum(operand.nbytes for operand in sent), size),
            overlapped=overlapped,
            only_sliced=sliced,
            origin=_origin(each),
            places=(start, max(start, end)),
        )


def _kind(each: Instruction) -> str:
    name = each.opcode.removesuffix("-start")
    return name if name in KINDS else between_slices.kind_of(each)


def _piece(inside: Computation, each: Instruction) -> str:
    """Which piece of a split collective this is: START, DONE, "middle", or "" for a whole one."""
    targets = {
        user.attribute("custom_call_target").strip('"') or _target(user)
        for user in inside.users[each.name]
        if user.opcode == "custom-call"
    }
    for piece in (START, DONE):
        if piece in targets:
            return piece
    return "middle" if '"async_collective_fusion_config"' in each.attributes else ""


def _target(call: Instruction) -> str:
    found = re.search(r'custom_call_target="(\w+)"', call.attributes)
    return found.group(1) if found else ""


def _chain(each: Instruction) -> tuple[str, ...]:
    """What the pieces of one split collective have in common."""
    chain = re.search(r'chain_id="?(\d+)', each.attributes)
    channel = re.search(r"channel_id=(\d+)", each.attributes)
    return (chain.group(1) if chain else "", channel.group(1) if channel else "", _origin(each))


def _origin(each: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', each.attributes)
    return found.group(1) if found else each.name


def _group_size(each: Instruction, num_devices: int) -> int:
    if each.opcode == "send":
        return between_slices.num_slices(each)
    if listed := re.search(r"replica_groups=\{\{([\d, ]*)\}", each.attributes):
        return len(listed.group(1).split(","))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=", each.attributes):
        return int(iota.group(1).split(",")[-1])
    return num_devices


def _wire_bytes(kind: str, sent: int, size: int) -> int:
    """Of a ring among ``size`` ranks, each of which puts in ``sent`` bytes."""
    return {
        "all-gather": (size - 1) * sent,
        "all-reduce": 2 * (size - 1) * sent // size,
        "reduce-scatter": (size - 1) * sent // size,
        "all-to-all": (size - 1) * sent // size,
        "collective-permute": sent,
    }[kind.removesuffix(SUFFIX)]


def _waits(execution: Execution, each: Instruction) -> bool:
    """Whether compute is scheduled between a ``-start`` and its ``-done``."""
    found = _start_and_done(execution, each)
    if found is None:
        return False
    inside, start, done = found
    order = inside.instructions
    return _computes(inside, order.index(start), order.index(done))


def _computes(inside: Computation, start: int, done: int) -> bool:
    """Whether there is compute between two instructions."""
    between = inside.instructions[start + 1 : done]
    return any(line.cycles > 0 or line.opcode == "while" for line in between)


def _start_and_done(
    execution: Execution, each: Instruction
) -> tuple[Computation, Instruction, Instruction] | None:
    """The ``-start`` that a collective is or is wrapped in, its ``-done``, and what holds both."""
    inside, start = execution.computation, each
    if execution.caller is not None and execution.caller.opcode == "async-start":
        assert execution.inside is not None  # a caller is in a computation
        inside, start = execution.inside, execution.caller
    if not start.opcode.endswith("-start"):
        return None
    ends = [user for user in inside.users[start.name] if user.opcode.endswith("-done")]
    return (inside, start, ends[0]) if ends else None


def _place_of_done(execution: Execution, index: int) -> int:
    """Place in the entry where a collective that is not split into fusions ends."""
    found = _start_and_done(execution, execution.computation.instructions[index])
    if found is None or not found[0].is_entry:
        return execution.place_of(index)
    entry, _, done = found
    return entry.instructions.index(done)


_PASS_ON = ("get-tuple-element", "bitcast", "copy", "copy-start", "copy-done", "reshape", "convert")


def _only_sliced(module: Module, inside: Computation, name: str) -> bool:
    """Whether all that reads a value, also inside fusions, takes a slice of it."""
    users = inside.users[name]
    return bool(users) and all(_takes_slice(module, inside, user, name) for user in users)


def _takes_slice(module: Module, inside: Computation, user: Instruction, name: str) -> bool:
    if user.opcode in ("dynamic-slice", "slice"):
        return user.operands[0] == name
    if user.opcode in _PASS_ON and not user.is_root:
        return _only_sliced(module, inside, user.name)
    if user.opcode == "fusion":
        fused = module.computations[user.attribute("calls")]
        places = {str(place) for place, operand in enumerate(user.operands) if operand == name}
        inputs = [
            each
            for each in fused.instructions
            if each.opcode == "parameter" and each.attributes in places
        ]
        return bool(inputs) and all(_only_sliced(module, fused, each.name) for each in inputs)
    return False
