"""The report on a step, as dataclasses, JSON and text: its memory, collectives and time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xla_fsdp.preflight.topologies import MIB

MB = 10**6

# Labels of the parts of ``Memory``.
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients kept",
    "optimizer_state": "optimizer state",
    "data": "batch, buffers, padding",
    "outputs": "other results",
    "gathered_parameters": "gathered parameters",
    "activations": "activations, gradients",
    "scratch": "compiler's scratch",
    "code": "program code",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of a chip's memory (HBM) per rank, by part; the parts add up to ``peak``."""

    parameters: int
    gradients: int  # those held between steps; the others are among the activations
    optimizer_state: int
    data: int  # batch, buffers, constants, and padding of inputs
    outputs: int  # results that do not reuse the memory of an input
    gathered_parameters: int
    activations: int
    scratch: int  # reserved by the compiler beyond the buffers in the schedule
    code: int
    capacity: int  # memory of the chip that the runtime does not reserve
    # Bytes that a chip lacks, if the compiler refused the program as too large. The parts are then
    # those of the program on a chip with enough memory.
    too_large_by: int = 0

    @property
    def peak(self) -> int:
        """Bytes that the step needs."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def left(self) -> int:
        """Unused bytes; negative if the step does not fit.

        Includes code, which the compiler ignores when it decides whether to refuse a program.
        """
        left = self.capacity - self.peak
        return min(left, -self.too_large_by) if self.too_large_by else left


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: executions in a step, and bytes that a rank sends in a step."""

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
class StepTime:
    """Estimated seconds of one step, and the share of the chip's peak FLOPs that it uses."""

    total: float  # blocking collectives, and the largest of the others
    compute: float  # all cycles that the compiler expects, loops included
    blocking: float  # collectives under which no compute is scheduled, at full link speed
    overlapped: float  # all others, at full link speed
    offloading: float  # storing what is offloaded in the host's memory, and reading it
    model_flops: int  # of forward and backward, without recomputation
    mfu: float  # model FLOPs utilization, from 0 to 1


@dataclass(frozen=True)
class Moment:
    """Bytes that the program's buffers hold from ``seconds`` on, without inputs; an estimate."""

    seconds: float
    gathered_parameters: int
    activations: int


@dataclass(frozen=True)
class Span:
    """A collective in flight; all executions in a loop are one span."""

    kind: str
    dtype: str
    overlapped: bool
    start: float
    end: float
    times: int
    wire_bytes: int
    unit: str = ""  # and phase, such as "blocks.3: all-gather", where it is known


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
        topology: name of the topology.
        num_ranks: its number of ranks.
        options: options of the model.
        memory: memory of the step's program that needs most.
        full_parameters: most bytes of gathered parameters at once, on-chip ones included.
        largest: largest buffers at the peak of memory.
        traffic: collectives of one step.
        minimum_wire_bytes: bytes for all parameters of this wrapping, in the dtypes that units
            gather and reduce in. A finding tells where the compiler sends less.
        step_time: estimated time.
        compile_seconds: duration of compilation.
        compile_cpu_seconds: CPU time of compilation.
        host_bytes: host memory needed for compilation.
        offloaded_bytes: memory of a TPU's host that the step uses per rank.
        host_capacity: memory that a TPU's host has per rank.
        warnings: problems of the configuration.
        findings: other sentences about what could be better.
        timeline: timeline of the program that needs most memory.
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
    host_capacity: int
    warnings: tuple[str, ...]
    findings: tuple[str, ...]
    timeline: Timeline

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a chip and of its host."""
        return self.memory.left >= 0 and self.offloaded_bytes <= self.host_capacity

    @property
    def shortage(self) -> str:
        """In words what a chip and its host lack for the step."""
        return shortage(-self.memory.left, self.offloaded_bytes - self.host_capacity)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(each.wire_bytes for each in self.traffic)

    @property
    def blocking_bytes(self) -> int:
        """Bytes that a rank sends in collectives under which no compute is scheduled."""
        return sum(each.wire_bytes for each in self.traffic if not each.overlapped)

    def to_json(self) -> str:
        """Return all figures as JSON, derived ones included."""
        derived = {
            "fits": self.fits,
            "peak_bytes": self.memory.peak,
            "wire_bytes": self.wire_bytes,
            "blocking_bytes": self.blocking_bytes,
            "estimated_step_seconds": self.step_time.total,
        }
        return json.dumps({**derived, **asdict(self)}, indent=1, default=str)


@dataclass(frozen=True)
class Failed:
    """A run of which there is no report."""

    topology: str
    options: Mapping[str, Any]  # of the user's function, as text
    error: str  # what was raised

    @property
    def run(self) -> str:
        """Topology and options in a line."""
        return f"{self.topology} {options_text(self.options)}".rstrip()

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self), indent=1, default=str)


def shortage(device: float, host: float) -> str:
    """Return in words the bytes that a chip and its host lack: those that are above 0."""
    lacking = {"": device, " of the host's memory": host}
    return " and ".join(
        f"{nbytes / MIB:,.0f} MiB{where}" for where, nbytes in lacking.items() if nbytes > 0
    )


# ---------------------------------------------------------------- text


def full_text(report: Report) -> str:
    """Return a report as text: warnings, figures, findings."""
    top = "\n".join((title(report), *_warnings(report)))
    findings = "\n".join(f"- {finding}" for finding in report.findings) or "Nothing to remark."
    return "\n\n".join((top, figures(report), findings))


def title(report: Report) -> str:
    """Return topology and options in a line."""
    return f"{report.topology}, {report.num_ranks} ranks {options_text(report.options)}".rstrip()


def options_text(options: Mapping[str, Any]) -> str:
    """Return options in a line."""
    return " ".join(f"{name}={value}" for name, value in options.items())


def figures(report: Report) -> str:
    """Return memory, collectives and time as text."""
    return "\n\n".join((_memory(report), _traffic(report), _time(report)))


HEADINGS = (
    "topology", "options", "fits", "peak MiB", "left MiB", "wire MB", "minimum", "blocking",
    "est. step ms", "est. MFU", "compile s",
)  # fmt: skip


def table(reports: Sequence[Report]) -> str:
    """Return one row per report, and below, the fastest of each topology and all warnings."""
    warnings = dict.fromkeys(line for report in reports for line in _warnings(report))
    rows = aligned([HEADINGS, *map(cells, reports)])
    return "\n".join((*rows, *_fastest_ones(reports), *warnings))


def fastest_of(reports: Sequence[Report]) -> Report | None:
    """Return that which makes most of the chip by estimate, among those that fit, if any does.

    Of steps on as much data that is the one that takes the least time.
    """
    fitting = [each for each in reports if each.fits]
    return max(fitting, key=lambda each: each.step_time.mfu, default=None)


def _fastest_ones(reports: Sequence[Report]) -> Iterator[str]:
    for name in dict.fromkeys(each.topology for each in reports):
        some = [each for each in reports if each.topology == name]
        best = fastest_of(some)
        if best is not None and len(some) > 1:
            milliseconds = best.step_time.total * 1e3
            yield f"Fastest that fits: {title(best)}, {milliseconds:,.1f} ms by estimate"


def cells(report: Report) -> tuple[str, ...]:
    """Return the row of a report under ``HEADINGS``."""
    return (
        report.topology,
        options_text(report.options),
        "yes" if report.fits else "NO",
        f"{report.memory.peak / MIB:,.0f}",
        f"{report.memory.left / MIB:,.0f}",
        f"{report.wire_bytes / MB:,.0f}",
        f"{report.minimum_wire_bytes / MB:,.0f}",
        f"{report.blocking_bytes / MB:,.0f}",
        f"{report.step_time.total * 1e3:.1f}",
        f"{report.step_time.mfu:.0%}",
        f"{report.compile_seconds:.0f}",
    )


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0, 1)) -> list[str]:
    """Return rows as lines; the columns of these numbers are flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _warnings(report: Report) -> list[str]:
    return [f"WARNING: {report.topology}: {warning}" for warning in report.warnings]


def _memory(report: Report) -> str:
    memory = report.memory
    sizes = {label: getattr(memory, name) for name, label in PARTS.items()}
    sizes["peak"] = memory.peak
    if report.offloaded_bytes:
        too_much = ", which is too small" if report.offloaded_bytes > report.host_capacity else ""
        sizes[f"beside it, in the host's memory{too_much}"] = report.offloaded_bytes
    verdict = f"fits, with {memory.left / MIB:,.0f} left"
    if memory.left < 0:
        verdict = f"does NOT fit: short of {-memory.left / MIB:,.0f}"
    head = f"HBM per rank (MiB), {verdict} of {memory.capacity / MIB:,.0f}"
    if memory.too_large_by:
        head += " (the compiler refused it, so its code is not known)"
    rows = [(label, "", f"{size / MIB:,.1f}") for label, size in sizes.items()]
    return "\n".join((head, *(f"  {line}" for line in aligned(rows))))


def _traffic(report: Report) -> str:
    rows = [("collective", "dtype", "ranks", "times", "MB", "")]
    for each in report.traffic:
        when = "overlapped" if each.overlapped else "blocking"
        size, count = str(each.group_size), str(each.count)
        rows.append((each.kind, each.dtype, size, count, f"{each.wire_bytes / MB:,.1f}", when))
    head = (
        f"On the wire per rank and step: {report.wire_bytes / MB:,.0f} MB (minimum "
        f"{report.minimum_wire_bytes / MB:,.0f}), {report.blocking_bytes / MB:,.0f} MB blocking"
    )
    return "\n".join((head, *(f"  {line}" for line in aligned(rows))))


def _time(report: Report) -> str:
    time = report.step_time
    host = f", offloading {time.offloading * 1e3:.1f}" if time.offloading else ""
    return (
        f"Estimated step: {time.total * 1e3:.1f} ms (compute {time.compute * 1e3:.1f}, blocking "
        f"collectives {time.blocking * 1e3:.1f}, overlapped {time.overlapped * 1e3:.1f}{host}), "
        f"estimated MFU {time.mfu:.1%}. Compiled in {report.compile_seconds:.0f} s with "
        f"{report.host_bytes / MIB:,.0f} MiB of host memory"
    )
