"""Reports as text for a terminal: one in full, or several as the rows of a table.

Always true: units are in the text (MiB of memory, MB on the wire, ms), what is estimated is called
so, and warnings are shown in every form, on top of a report in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xla_fsdp.preflight.report import Report

MIB, MB = 2**20, 10**6

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


def in_full(report: Report) -> str:
    """Everything about one program."""
    top = "\n".join((title(report), *_warnings(report)))
    return "\n\n".join((top, figures(report), _findings(report)))


def figures(report: Report) -> str:
    """Memory, collectives and time."""
    return "\n\n".join((_memory(report), _traffic(report), _time(report)))


def title(report: Report) -> str:
    """Topology and options."""
    return f"{report.topology}, {report.num_ranks} ranks {options(report)}".rstrip()


def options(report: Report) -> str:
    """What the model was built with."""
    return shown(report.options)


def shown(options: Mapping[str, Any]) -> str:
    """Options in a line."""
    return " ".join(f"{name}={value}" for name, value in options.items())


def table(reports: Sequence[Report]) -> str:
    """One row per report."""
    warnings = dict.fromkeys(line for report in reports for line in _warnings(report))
    return "\n".join((*aligned([HEADINGS, *map(cells, reports)]), *warnings))


HEADINGS = (
    "topology",
    "options",
    "fits",
    "peak MiB",
    "left MiB",
    "wire MB",
    "minimum",
    "blocking",
    "est. step ms",
    "est. MFU",
    "compile s",
)


def cells(report: Report) -> tuple[str, ...]:
    """A row under ``HEADINGS``."""
    return (
        report.topology,
        options(report),
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which columns are as wide as their longest cell; the first two flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _warnings(report: Report) -> list[str]:
    return [f"WARNING: {report.topology}: {warning}" for warning in report.warnings]


def _memory(report: Report) -> str:
    memory = report.memory
    rows = [(label, "", f"{getattr(memory, name) / MIB:,.1f}") for name, label in PARTS.items()]
    rows.append(("peak", "", f"{memory.peak / MIB:,.1f}"))
    if report.offloaded_bytes:
        rows.append(("beside it, in the host's memory", "", f"{report.offloaded_bytes / MIB:,.1f}"))
    verdict = f"fits, with {memory.left / MIB:,.0f} left"
    if not report.fits:
        verdict = f"does NOT fit: short of {-memory.left / MIB:,.0f}"
    head = f"HBM per rank (MiB), {verdict} of {memory.capacity / MIB:,.0f}"
    if memory.too_large_by:
        head += " (the compiler refused it, so its code is not known)"
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
    return (
        f"Estimated step: {time.total * 1e3:.1f} ms (compute {time.compute * 1e3:.1f}, blocking "
        f"collectives {time.blocking * 1e3:.1f}), estimated MFU {time.mfu:.1%}. Compiled in "
        f"{report.compile_seconds:.0f} s with {report.host_bytes / MIB:,.0f} MiB of host memory"
    )


def _findings(report: Report) -> str:
    return "\n".join(f"- {finding}" for finding in report.findings) or "Nothing to remark."
