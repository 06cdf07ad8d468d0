"""How long a step and its parts take, estimated from the compiler's schedule; not measured.

Words: *compute* is the sum of the cycles that the compiler expects of each instruction, loops
included; *blocking* is the time of collectives under which no compute is scheduled, at the full
speed of the links that their group can use.
Always true: overlapped collectives are taken to be hidden entirely, so real steps are slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from xla_fsdp.preflight.dcn import SUFFIX
from xla_fsdp.preflight.hlo import Module
from xla_fsdp.preflight.topologies import Topology
from xla_fsdp.preflight.traffic import Collective


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and the part of the peak that its model FLOPs use (MFU)."""

    compute: float
    blocking: float
    model_flops: int
    mfu: float

    @property
    def total(self) -> float:
        """Seconds of one step."""
        return self.compute + self.blocking


def estimate(
    modules: Iterable[Module],
    collectives: Iterable[Collective],
    model_flops: int,
    topology: Topology,
) -> StepTime:
    """The estimate for the programs of one step."""
    compute = sum(sum(_compute_seconds(module, topology)) for module in modules)
    blocking = sum(
        wire_seconds(each, topology) * each.times for each in collectives if not each.overlapped
    )
    seconds = compute + blocking
    mfu = model_flops / (seconds * topology.chip.peak_flops) if seconds else 0.0
    return StepTime(compute, blocking, model_flops, mfu)


def clock(module: Module, collectives: Iterable[Collective], topology: Topology) -> list[float]:
    """Seconds from the start of a module until each of its entry's instructions begins, and until
    the last has ended."""
    seconds = _compute_seconds(module, topology)
    for each in collectives:
        if not each.overlapped:
            seconds[each.places[0]] += wire_seconds(each, topology) * each.times
    return list(itertools.accumulate(seconds, initial=0.0))


def wire_seconds(collective: Collective, topology: Topology) -> float:
    """Time of one execution at the speed of two links of every axis that the group may span, or of
    the network between slices."""
    if collective.kind.endswith(SUFFIX):
        return collective.wire_bytes / (topology.chip.network_bytes / topology.chip.cores)
    axes, spanned = 0, 1
    for size in sorted(topology.shape, reverse=True):
        if spanned < collective.group_size and size > 1:
            axes, spanned = axes + 1, spanned * size
    return collective.wire_bytes / (2 * max(axes, 1) * topology.chip.link_bytes)


def _compute_seconds(module: Module, topology: Topology) -> list[float]:
    """Of each instruction of the entry, what it runs included. The cycles of a fusion are its own,
    those inside it are part of them."""
    seconds = [0.0] * len(module.entry.instructions)
    for execution in module.executions:
        if execution.caller is not None and execution.caller.opcode == "fusion":
            continue
        for index, each in enumerate(execution.computation.instructions):
            cycles = each.cycles * execution.times
            seconds[execution.place_of(index)] += cycles / topology.chip.clock_hz
    return seconds
