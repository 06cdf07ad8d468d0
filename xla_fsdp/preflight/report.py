"""What a step of a model needs on a topology: memory by part, collectives, time. Plain data.

Words: the *peak* is all that a chip must hold for the step, the program's code included; *scratch*
is what the compiler sets aside beyond the buffers that it can be seen to use; the *capacity* is a
chip's memory without what the runtime keeps for itself.
Always true: the parts of ``Memory`` add up to its peak, and a report can be written as JSON.
Made by ``examine``, shown by ``text`` and ``html``; what is worth saying in words by ``findings``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from xla_fsdp.preflight.estimate import StepTime


@dataclass(frozen=True)
class Memory:
    """Bytes of a chip's memory (HBM) per rank, by part.

    ``too_large_by`` is what the compiler says that the program is short of, where it refused it;
    the parts are then those of the program for a chip that has room.
    """

    parameters: int
    gradients: int  # kept between steps; those in flight are among the activations
    optimizer_state: int
    data: int  # batch, buffers, constants, and padding of inputs
    outputs: int  # results that do not take the place of an input
    gathered_parameters: int
    activations: int
    scratch: int
    code: int
    capacity: int
    too_large_by: int = 0

    @property
    def peak(self) -> int:
        """Bytes that the step needs."""
        parts = asdict(self)
        return sum(size for name, size in parts.items() if name not in ("capacity", "too_large_by"))

    @property
    def left(self) -> int:
        """Bytes left over; negative if the step does not fit. Code counts, which the compiler
        leaves out when it decides whether to refuse a program."""
        left = self.capacity - self.peak
        return min(left, -self.too_large_by) if self.too_large_by else left


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: how often they run in a step, and bytes that a rank sends."""

    kind: str
    dtype: str
    group_size: int
    overlapped: bool
    count: int
    wire_bytes: int


@dataclass(frozen=True)
class Buffer:
    """One of the largest buffers at the fullest moment."""

    nbytes: int
    shape: str
    origin: str


@dataclass(frozen=True)
class Moment:
    """What the program's buffers hold from ``seconds`` on, its inputs left out; an estimate."""

    seconds: float
    gathered_parameters: int
    activations: int


@dataclass(frozen=True)
class Span:
    """A collective on its way; all executions of one in a loop are one span."""

    kind: str
    dtype: str
    overlapped: bool
    start: float
    end: float
    times: int
    wire_bytes: int


@dataclass(frozen=True)
class Timeline:
    """One program of the step over its estimated time, in seconds."""

    seconds: float
    moments: tuple[Moment, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Report:
    """The result of ``preflight``; sizes in bytes per rank, times in seconds.

    Args:
        topology: its name.
        num_ranks: ranks of it.
        options: what the model was built with.
        memory: of the program of the step that needs most.
        full_parameters: bytes of gathered parameters that are there at once, on-chip ones included.
        largest: buffers at its fullest moment.
        traffic: collectives of one step.
        minimum_wire_bytes: what any program must send for this model and wrapping.
        step_time: an estimate.
        compile_seconds: that the compiler took, and of CPU time.
        host_bytes: host memory that the compiler took.
        offloaded_bytes: of the memory of a TPU's host that the step takes per rank.
        warnings: what is done in a worse way than it could be because of the configuration.
        findings: what to look at, in words.
        timeline: of the program that needs most memory.
    """

    topology: str
    num_ranks: int
    options: dict[str, Any]
    memory: Memory
    full_parameters: int
    largest: tuple[Buffer, ...]
    traffic: tuple[Traffic, ...]
    minimum_wire_bytes: int
    step_time: StepTime
    compile_seconds: float
    compile_cpu_seconds: float
    host_bytes: int
    offloaded_bytes: int
    warnings: tuple[str, ...]
    findings: tuple[str, ...]
    timeline: Timeline

    @property
    def fits(self) -> bool:
        """Whether the step fits into a chip's memory."""
        return self.memory.left >= 0

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(each.wire_bytes for each in self.traffic)

    @property
    def blocking_bytes(self) -> int:
        """Those of them under which no compute is scheduled."""
        return sum(each.wire_bytes for each in self.traffic if not each.overlapped)

    def to_json(self) -> str:
        """All figures; derived ones included."""
        derived = {
            "fits": self.fits,
            "peak_bytes": self.memory.peak,
            "wire_bytes": self.wire_bytes,
            "blocking_bytes": self.blocking_bytes,
            "estimated_step_seconds": self.step_time.total,
        }
        return json.dumps({**derived, **asdict(self)}, indent=1, default=str)
