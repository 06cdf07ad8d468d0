"""A preflight report with round figures, for tests of how reports are shown."""

from __future__ import annotations

from typing import Any

from xla_fsdp.preflight import Report
from xla_fsdp.preflight.read.report import Buffer, Memory, Moment, Span, StepTime, Timeline, Traffic
from xla_fsdp.preflight.topologies import GIB

MIB = 2**20
TIMELINE = Timeline(
    seconds=0.03,
    moments=(Moment(0.0, 0, 1 * MIB), Moment(0.01, 6 * MIB, 7 * MIB), Moment(0.02, 0, 2 * MIB)),
    spans=(
        Span("all-gather", "bf16", True, 0.0, 0.01, 3, 2_000_000),
        Span("all-reduce between slices", "bf16", True, 0.005, 0.03, 1, 500_000),
        Span("reduce-scatter", "bf16", False, 0.02, 0.025, 6, 1_000_000),
    ),
)


def report(**changes: Any) -> Report:
    """A report with round figures."""
    memory = Memory(*[part * MIB for part in (1, 2, 3, 4, 5, 6, 7, 8, 9)], capacity=16 * GIB)
    facts: dict[str, Any] = {
        "topology": "v5e:4x4", "num_ranks": 16, "options": {"batch": 2}, "memory": memory,
        "full_parameters": 10, "largest": (Buffer(7, "bf16[7]", "dot.1"),),
        "traffic": (
            Traffic("all-gather", "bf16", 16, True, 3, 2_000_000),
            Traffic("reduce-scatter", "bf16", 4, False, 6, 1_000_000),
        ),
        "minimum_wire_bytes": 2_500_000,
        "step_time": StepTime(0.03, 0.02, 0.01, 0.0, 0.0, 10**12, 0.25),
        "compile_seconds": 5.0, "compile_cpu_seconds": 9.0, "host_bytes": 2**30,
        "offloaded_bytes": 0,
        "host_capacity": 48 * 10**9,
        "warnings": (), "findings": ("<something> to look at",), "timeline": TIMELINE,
    }  # fmt: skip
    return Report(**{**facts, **changes})
