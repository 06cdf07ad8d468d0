"""Reports as one HTML page without anything to load: a table, drawings, and each report in full.

Always true: no scripts, no network; what comes from outside (names, options, findings) is escaped.
The drawings are made by ``charts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from xla_fsdp.preflight import charts, text
from xla_fsdp.preflight.report import Report

_STYLE = (
    ":root{color-scheme:light}"
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1.5em;"
    "color:#222;background:#fff}"
    "h1{margin-bottom:0}h2{margin-top:2.2em;border-bottom:1px solid #ddd;padding-bottom:.2em}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;white-space:nowrap;font-size:14px}"
    "td,th{padding:.3em .7em;text-align:right}"
    "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}"
    "th{border-bottom:1px solid #999}tr:nth-child(odd) td{background:#f5f5f5}"
    ".no{color:#b00020;font-weight:bold}.yes{color:#1b7a34;font-weight:bold}"
    "svg{display:block;width:100%;height:auto;margin:.6em 0}svg text{font-size:12px;fill:#333}"
    "line.grid{stroke:#ddd}line.peak{stroke:#222;stroke-dasharray:5 3}"
    "line.capacity{stroke:#b00020;stroke-width:2}"
    ".part:hover,.span:hover,polygon:hover{opacity:.7}"
    ".legend{margin:.3em 0;font-size:13px}.legend span{display:inline-block;margin-right:1.1em}"
    ".legend i{display:inline-block;width:.9em;height:.9em;margin-right:.35em;"
    "vertical-align:-.1em}pre{overflow-x:auto;background:#f7f7f7;padding:.8em;font-size:13px}"
    ".note{color:#555}"
)


def page(reports: Sequence[Report]) -> str:
    """The page."""
    rows = "".join(map(_row, reports))
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in text.HEADINGS)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>Preflight</title><style>{_STYLE}</style></head><body><h1>Preflight</h1>"
        f'<p class="note">One training step per rank, as the TPU compiler makes it.</p>'
        f'<div class="wide"><table><tr>{headings}</tr>{rows}</table></div>'
        f"<h2>Memory against the chip's capacity</h2>{charts.legend()}{charts.memory_bars(reports)}"
        f"{''.join(map(_section, reports))}</body></html>\n"
    )


def _row(report: Report) -> str:
    cells = [f"<td>{escape(cell)}</td>" for cell in text.cells(report)]
    verdict = "yes" if report.fits else "no"
    place = text.HEADINGS.index("fits")
    cells[place] = cells[place].replace("<td>", f'<td class="{verdict}">')
    return f"<tr>{''.join(cells)}</tr>"


def _section(report: Report) -> str:
    warnings = "".join(f'<li class="no">{escape(warning)}</li>' for warning in report.warnings)
    findings = warnings + "".join(f"<li>{escape(finding)}</li>" for finding in report.findings)
    return (
        f"<h2>{escape(text.title(report))}</h2>"
        f"<ul>{findings or '<li>Nothing to remark.</li>'}</ul>"
        f"<h3>Over the step's estimated time</h3>{charts.step_timeline(report)}"
        f'<p class="note">Read from the schedule: below the peak lies what the compiler reserves '
        f"beyond the buffers that it can be seen to use.</p>"
        f"<details open><summary>All figures</summary>"
        f"<pre>{escape(text.figures(report))}</pre></details>"
    )
