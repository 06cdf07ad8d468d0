"""Find the collectives of an optimized TPU program, and the bytes that each puts on the wire.

A collective counts once per execution, even if the compiler has split it over several fusions: one
contains it with ``AsyncCollectiveStart``, one with ``AsyncCollectiveDone``, and so does each fusion
that computes meanwhile. An all-reduce inside a fusion that slices its result is a reduce-scatter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xla_fsdp.preflight.read.hlo import Computation, Execution, Instruction, Module

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

# Slices are joined by the data-center network. A chip passes its data to the host by ``send``, and
# gets the result by the ``recv`` of the same rendezvous.
_BETWEEN_SLICES = " between slices"

_START, _MIDDLE, _DONE = "AsyncCollectiveStart", "middle", "AsyncCollectiveDone"


@dataclass(frozen=True)
class Collective:
    """One collective of the program."""

    kind: str  # one of ``KINDS``, with " between slices" if it leaves the slice
    dtype: str  # on the wire
    sizes: tuple[int, ...]  # shape of the (first) operand
    group_size: int  # ranks that take part together
    times: int  # executions per run of the program
    wire_bytes: int  # bytes that a rank sends in one execution, in a ring
    overlapped: bool  # whether compute is scheduled between its start and its end
    only_sliced: bool  # for an all-reduce: whether every reader takes only a slice of the result
    origin: str  # name of torch_xla's instruction, if the compiler has noted it
    start: int  # index of the entry's instruction in which it starts
    end: int  # index of the entry's instruction in which it ends
    unit: str = ""  # and phase, such as "blocks.3: reduce-scatter", where it is known

    @property
    def total_bytes(self) -> int:
        """Wire bytes in one run of the program."""
        return self.times * self.wire_bytes

    @property
    def is_between_slices(self) -> bool:
        """Whether it leaves the slice, by the data-center network."""
        return self.kind.endswith(_BETWEEN_SLICES)


@dataclass
class _Split:
    """A collective that is split over fusions, some of which may not have been read yet."""

    end: int | None = None
    overlapped: bool = False


def collectives_of(module: Module, labels: Mapping[str, str] | None = None) -> list[Collective]:
    """Return the collectives of a module, in the order of the schedule; ``labels`` are those of
    the traced program."""
    starts: list[tuple[Execution, int, _Split | None]] = []
    splits: dict[tuple[str, ...], _Split] = defaultdict(_Split)
    for execution in module.executions:
        for index, each in enumerate(execution.computation.instructions):
            if not _kind(each):
                continue
            fragment = _fragment(execution.computation, each)
            if fragment == _MIDDLE:
                splits[_chain(each)].overlapped = True
            elif fragment == _DONE:
                splits[_chain(each)].end = execution.index_in_entry(index)
            else:
                starts.append((execution, index, splits[_chain(each)] if fragment else None))
    found = [_collective(module, *start) for start in starts]
    return [replace(each, unit=(labels or {}).get(each.origin, "")) for each in found]


def _collective(
    module: Module, execution: Execution, index: int, split: _Split | None
) -> Collective:
    inside, caller = execution.computation, execution.caller
    each = inside.instructions[index]
    kind = _kind(each)
    operands = each.operands[:1] if each.opcode == "send" else each.operands  # without its token
    only_sliced = kind == "all-reduce" and _only_sliced(module, inside, each.name)
    if only_sliced and caller is not None and caller.opcode == "fusion":
        kind, only_sliced = "reduce-scatter", False
    sent = [inside.by_name[name] for name in operands]
    size = _group_size(each, module.num_devices)
    start = execution.index_in_entry(index)
    end, overlapped = _end(execution, index, split)
    return Collective(
        kind=kind,
        dtype="+".join(dict.fromkeys(dtype for operand in sent for dtype in operand.dtypes)),
        sizes=sent[0].sizes,
        group_size=size,
        times=execution.times,
        wire_bytes=_wire_bytes(kind, sum(operand.nbytes for operand in sent), size),
        overlapped=overlapped,
        only_sliced=only_sliced,
        origin=each.origin,
        start=start,
        end=max(start, end),
    )


def _kind(each: Instruction) -> str:
    if each.opcode == "send":
        sent = each.find(r'_xla_megascale_transfer_type="(\w+)"').lower().replace("_", "-")
        kind = "collective-permute" if sent == "one-to-one" else sent
        return kind + _BETWEEN_SLICES if kind else ""
    name = each.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def _group_size(each: Instruction, num_devices: int) -> int:
    if each.opcode == "send":
        return _num_slices(each)
    if listed := re.search(r"replica_groups=\{\{([\d, ]*)\}", each.attributes):
        return len(listed.group(1).split(","))
    if iota := each.find(r"replica_groups=\[([\d,]+)\]<="):
        return int(iota.split(",")[-1])
    return num_devices


def _num_slices(each: Instruction) -> int:
    """Return how many slices a transfer joins; they are listed as in "{1,4:7}"."""
    targets = each.find(r'_xla_megascale_target="\{([\d,:]+)\}')
    ends = [target.partition(":") for target in targets.split(",") if target]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends) or 1


def _wire_bytes(kind: str, sent: int, size: int) -> int:
    """Return the bytes that a rank sends in a ring, of operands of ``sent`` bytes."""
    return {
        "all-gather": (size - 1) * sent,
        "all-reduce": 2 * (size - 1) * sent // size,
        "reduce-scatter": (size - 1) * sent // size,
        "all-to-all": (size - 1) * sent // size,
        "collective-permute": sent,
    }[kind.removesuffix(_BETWEEN_SLICES)]


# ---------------------------------------------------------------- where a collective ends


def _end(execution: Execution, index: int, split: _Split | None) -> tuple[int, bool]:
    """Return the index of the entry's instruction that ends a collective; whether it overlaps."""
    inside, start = execution.computation, execution.index_in_entry(index)
    each = inside.instructions[index]
    if each.opcode == "send":
        done = _recv_done(inside, index)
        return execution.index_in_entry(done), _computes(inside, index, done)
    if split is not None:
        return (start if split.end is None else split.end), split.overlapped
    if execution.caller is not None and execution.caller.opcode == "async-start":
        assert execution.caller_computation is not None  # every caller is in one
        inside, each = execution.caller_computation, execution.caller
    ends = [user for user in inside.users[each.name] if user.opcode.endswith("-done")]
    if not each.opcode.endswith("-start") or not ends:
        return start, False
    order = inside.instructions
    done = order.index(ends[0])
    return (done if inside.is_entry else start), _computes(inside, order.index(each), done)


def _recv_done(inside: Computation, send: int) -> int:
    """Return the index of the ``recv-done`` that belongs to ``send``; of ``send`` without one."""
    rendezvous = r'_xla_host_transfer_rendezvous="([^"]*)"'
    order = inside.instructions
    for recv in order:
        if recv.opcode == "recv" and recv.find(rendezvous) == order[send].find(rendezvous):
            for user in inside.users[recv.name]:
                if user.opcode == "recv-done":
                    return order.index(user)
    return send


def _computes(inside: Computation, start: int, done: int) -> bool:
    between = inside.instructions[start + 1 : done]
    return any(line.cycles > 0 or line.opcode == "while" for line in between)


def _fragment(inside: Computation, each: Instruction) -> str:
    """Return which fragment of a split collective this is; "" if it is not split."""
    targets = {
        user.find(r'custom_call_target="?%?([\w.\-]+)')
        for user in inside.users[each.name]
        if user.opcode == "custom-call"
    }
    for fragment in (_START, _DONE):
        if fragment in targets:
            return fragment
    return _MIDDLE if '"async_collective_fusion_config"' in each.attributes else ""


def _chain(each: Instruction) -> tuple[str, ...]:
    """Return the attributes that all fragments of a split collective share."""
    return each.find(r'chain_id="?(\d+)'), each.find(r"channel_id=(\d+)"), each.origin


# ---------------------------------------------------------------- all-reduces that are sliced

_RENAMES = ("get-tuple-element", "bitcast", "copy", "copy-start", "copy-done", "reshape", "convert")


def _only_sliced(module: Module, inside: Computation, name: str) -> bool:
    """Return whether all readers of a value, also inside fusions, take a slice of it."""
    users = inside.users[name]
    return bool(users) and all(_takes_slice(module, inside, user, name) for user in users)


def _takes_slice(module: Module, inside: Computation, user: Instruction, name: str) -> bool:
    if user.opcode in ("dynamic-slice", "slice"):
        return user.operands[0] == name
    if user.opcode in _RENAMES and not user.is_root:
        return _only_sliced(module, inside, user.name)
    if user.opcode == "fusion":
        fused = module.computations[user.attribute("calls")]
        numbers = {str(number) for number, operand in enumerate(user.operands) if operand == name}
        inputs = [
            each
            for each in fused.instructions
            if each.opcode == "parameter" and each.attributes in numbers
        ]
        return bool(inputs) and all(_only_sliced(module, fused, each.name) for each in inputs)
    return False
