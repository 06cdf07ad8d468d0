"""Predict what a step needs from steps of fewer layers, or of smaller batches.

Memory is the largest of many sums, each of them nearly linear in both, so it lies on or above the
line through two smaller steps: what a prediction says does not fit, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from xla_fsdp.preflight.read.report import Report, shortage
from xla_fsdp.preflight.topologies import Chip


@dataclass(frozen=True)
class Figures:
    """What one step needs on a rank: bytes of memory, and estimated seconds."""

    needed: float  # bytes of the chip's memory
    compute: float
    blocking: float  # collectives under which no compute is scheduled
    overlapped: float
    offloading: float  # storing what is offloaded, and reading it
    offloaded: float  # bytes of the host's memory

    @property
    def seconds(self) -> float:
        """Estimated seconds of the step, as ``StepTime.total``."""
        return max(self.compute, self.overlapped, self.offloading) + self.blocking

    @classmethod
    def of(cls, report: Report) -> Figures:
        """Return those of a compiled step."""
        time = report.step_time
        needed = report.memory.capacity - report.memory.left
        offloaded = report.offloaded_bytes
        waiting = time.blocking, time.overlapped, time.offloading
        return cls(needed, time.compute, *waiting, offloaded)

    def fits(self, chip: Chip) -> bool:
        """Return whether such a chip and its host have memory for it."""
        return self.needed <= chip.usable_bytes and self.offloaded <= chip.host_capacity

    def shortage(self, chip: Chip) -> str:
        """Return in words what such a chip and its host lack for it."""
        return shortage(self.needed - chip.usable_bytes, self.offloaded - chip.host_capacity)


def figures_at(known: Mapping[int, Figures], size: int) -> Figures:
    """Return figures at a size (layers, or samples) from those at two sizes or more, on the line
    through the two beside it, or the two nearest."""
    if size in known:
        return known[size]
    sizes = sorted(known)
    below = sum(each < size for each in sizes)
    first = min(max(below - 1, 0), len(sizes) - 2)
    low, high = sizes[first : first + 2]
    share = (size - low) / (high - low)
    ends = zip(astuple(known[low]), astuple(known[high]), strict=True)
    return Figures(*(max(begin + share * (end - begin), 0.0) for begin, end in ends))
