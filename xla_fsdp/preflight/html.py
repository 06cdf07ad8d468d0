"""Reports as one HTML page without anything to load: a table, and each report in full."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from xla_fsdp.preflight import text
from xla_fsdp.preflight.report import Report

_STYLE = (
    "body{font:15px system-ui;margin:2em;max-width:70em}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:right}"
    "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}tr:nth-child(even){background:#f2f2f2}"
    ".bar{display:flex;height:1.4em;margin:.5em 0}.bar span{overflow:hidden}"
    "pre{overflow-x:auto}"
)
_COLORS = [
    "#4c78a8",
    "#f58518",
    "#e45756",
    "#72b7b2",
    "#54a24b",
    "#eeca3b",
    "#b279a2",
    "#9d755d",
    "#bab0ac",
]


def page(reports: Sequence[Report]) -> str:
    """The page."""
    rows = "".join(_row("td", text.cells(report)) for report in reports)
    body = "".join(map(_section, reports))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Preflight</title>'
        f"<style>{_STYLE}</style><h1>Preflight</h1>"
        f"<table>{_row('th', text.HEADINGS)}{rows}</table>{body}</html>\n"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _section(report: Report) -> str:
    return (
        f"<h2>{escape(text.title(report))}</h2>{_bar(report)}"
        f"<pre>{escape(text.in_full(report))}</pre>"
    )


def _bar(report: Report) -> str:
    """Memory by part, on the scale of the chip's (or of what is needed, if that is more)."""
    whole = max(report.memory.capacity, report.memory.peak)
    parts = "".join(
        f'<span style="width:{100 * getattr(report.memory, name) / whole:.2f}%;background:{color}"'
        f' title="{escape(label)}: {getattr(report.memory, name) / text.MIB:,.0f} MiB"></span>'
        for (name, label), color in zip(text.PARTS.items(), _COLORS, strict=True)
    )
    return f'<div class="bar" style="border:1px solid">{parts}</div>'
