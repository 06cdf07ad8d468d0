"""How long a step takes, estimated from the compiler's schedule; not a measurement.

Words: *compute* is the sum of the cycles that the compiler expects of each instruction, loops
included; *blocking* is the time of collectives under which no compute is scheduled, at the full
speed of the links that their group can use.
Always true: overlapped collectives are taken to be hidden entirely, so real steps are slower.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    compute = sum(map(_cycles, modules)) / topology.chip.clock_hz
    blocking = sum(
        each.total_bytes / _bandwidth(each, topology) for each in collectives if not each.overlapped
    )
    seconds = compute + blocking
    mfu = model_flops / (seconds * topology.chip.peak_flops) if seconds else 0.0
    return StepTime(compute, blocking, model_flops, mfu)


def _cycles(module: Module) -> int:
    """Cycles of a run; a fusion's are its own, those inside it are part of them."""
    return sum(
        each.cycles * execution.times
        for execution in module.executions
        if execution.caller is None or execution.caller.opcode != "fusion"
        for each in execution.computation.instructions
    )


def _bandwidth(collective: Collective, topology: Topology) -> float:
    """Bytes per second that a rank can send: two links of every axis that the group may span."""
    axes, spanned = 0, 1
    for size in sorted(topology.shape, reverse=True):
        if spanned < collective.group_size and size > 1:
            axes, spanned = axes + 1, spanned * size
    return 2 * max(axes, 1) * topology.chip.link_bytes
