"""Estimate how long a step and its parts take, from the cycles in the compiler's schedule.

Overlapped collectives, and what is offloaded to the host, are assumed to travel beside all compute,
and kernels to reach the chip's peak, so real steps are slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from xla_fsdp.preflight.read.hlo import Module
from xla_fsdp.preflight.read.liveness import GATHERED, OTHER, Level, levels
from xla_fsdp.preflight.read.report import Moment, Span, StepTime, Timeline
from xla_fsdp.preflight.read.traffic import Collective
from xla_fsdp.preflight.topologies import Topology

MAX_MOMENTS = 500


def estimate(
    modules: Iterable[Module],
    collectives: Iterable[Collective],
    model_flops: int,
    offloaded_bytes: int,
    topology: Topology,
) -> StepTime:
    """Estimate the time of a step that runs these programs, with all their collectives.

    Each byte of the host's memory that a rank uses counts as stored and read once, also where a
    program uses it several times, as in several backward passes.
    """
    compute = sum(sum(_compute_seconds(module, topology)) for module in modules)
    wire = {True: 0.0, False: 0.0}
    for each in collectives:
        wire[each.overlapped] += _wire_seconds(each, topology) * each.times
    chip = topology.chip
    offloading = 2 * offloaded_bytes / (chip.host_link_bytes / chip.cores)
    seconds = max(compute, wire[True], offloading) + wire[False]
    mfu = model_flops / (seconds * chip.peak_flops) if seconds else 0.0
    return StepTime(seconds, compute, wire[False], wire[True], offloading, model_flops, mfu)


def timeline(module: Module, collectives: Sequence[Collective], topology: Topology) -> Timeline:
    """Return the memory held and the collectives in flight over a program's estimated time.

    A loop counts as one instruction; its inside is not resolved in time.
    """
    seconds = _compute_seconds(module, topology)
    for each in collectives:
        if not each.overlapped:
            seconds[each.start] += _wire_seconds(each, topology) * each.times
    begins = list(itertools.accumulate(seconds, initial=0.0))  # start of each, and the end of all
    spans = tuple(
        Span(each.kind, each.dtype, each.overlapped, begins[each.start], begins[each.end + 1],
             each.times, each.total_bytes, each.unit)
        for each in collectives
    )  # fmt: skip
    return Timeline(begins[-1], tuple(_moments(levels(module), begins)), spans)


def _moments(found: Sequence[Level], begins: Sequence[float]) -> Iterator[Moment]:
    """Yield at most ``MAX_MOMENTS``: of several in a row, the one with the most memory held."""
    step = -(-len(found) // MAX_MOMENTS)
    for start in range(0, len(found), step):
        some = found[start : start + step]
        _, fullest = max(some, key=lambda level: sum(level[1].values()))
        index = min(some[0][0], len(begins) - 1)
        yield Moment(begins[index], fullest.get(GATHERED, 0), fullest.get(OTHER, 0))


def _wire_seconds(collective: Collective, topology: Topology) -> float:
    """Return the time of one execution, at full speed of the links that its group can use."""
    if collective.is_between_slices:
        return collective.wire_bytes / (topology.chip.network_bytes / topology.chip.cores)
    axes, ranks = 0, 1  # torus axes that a group of this size lies along, the longest first
    for size in sorted(topology.shape, reverse=True):
        if ranks < collective.group_size and size > 1:
            axes, ranks = axes + 1, ranks * size
    # A chip has two links along each axis.
    return collective.wire_bytes / (2 * max(axes, 1) * topology.chip.link_bytes)


def _compute_seconds(module: Module, topology: Topology) -> list[float]:
    seconds = [0.0] * len(module.entry.instructions)
    for execution in module.executions:
        # The cycles of a fusion include those of the instructions in it.
        if execution.caller is not None and execution.caller.opcode == "fusion":
            continue
        for index, each in enumerate(execution.computation.instructions):
            once = each.cycles / topology.chip.clock_hz
            once += each.kernel_flops / topology.chip.peak_flops
            seconds[execution.index_in_entry(index)] += once * execution.times
    return seconds
