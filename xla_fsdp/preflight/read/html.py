"""Reports as one HTML page: a table, SVG drawings with tooltips, and each report in full.

Invariants: no scripts and nothing to load; names, options and findings are escaped.
"""

from __future__ import annotations

import datetime
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata
from typing import Any

from xla_fsdp.preflight.read.report import (
    HEADINGS,
    MB,
    PARTS,
    Failed,
    Memory,
    Moment,
    Report,
    Span,
    cells,
    figures,
    options_text,
    title,
)
from xla_fsdp.preflight.search.tuned import HEADINGS as TUNED_HEADINGS
from xla_fsdp.preflight.search.tuned import Candidate, Tuned
from xla_fsdp.preflight.topologies import MIB

_STYLE = (
    ":root{color-scheme:light}"
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:76em;padding:0 1.2em;"
    "overflow-wrap:anywhere;color:#222;background:#fff}"
    "h1{margin-bottom:0}h2{margin-top:2.2em;border-bottom:1px solid #ddd;padding-bottom:.2em}"
    "table{border-collapse:collapse;font-size:14px}td,th{padding:.3em .6em;text-align:right}"
    "td:nth-child(-n+2),th:nth-child(-n+2),.tuned td:last-child,.tuned th:last-child"
    "{text-align:left}"
    "th{border-bottom:1px solid #999;vertical-align:bottom}"
    "th,td{overflow-wrap:normal}td:nth-child(2){overflow-wrap:anywhere;min-width:8em}"
    "tr:nth-child(odd) td{background:#f5f5f5}"
    ".no{color:#b00020;font-weight:bold}.yes{color:#1b7a34;font-weight:bold}"
    ".wide{overflow-x:auto}svg{display:block;width:100%;min-width:760px;max-width:1080px;"
    "height:auto;margin:.6em 0}svg text{font-size:13px;fill:#333}"
    "line.grid{stroke:#ddd}line.peak{stroke:#222;stroke-dasharray:5 3}"
    "line.capacity{stroke:#b00020;stroke-width:2}rect.back{fill:#f1f1f1}"
    ".part:hover,.span:hover,polygon:hover{opacity:.7}"
    ".legend{margin:.3em 0;font-size:13px}.legend span{display:inline-block;margin-right:1.1em}"
    ".legend i{display:inline-block;width:.9em;height:.9em;margin-right:.35em;"
    "vertical-align:-.1em}"
    "pre{white-space:pre-wrap;background:#f7f7f7;padding:.8em;font-size:13px}"
    ".note{color:#555}dl{display:grid;grid-template-columns:auto 1fr;gap:.1em .9em;color:#555}"
    "dd{margin:0}"
    "@media(max-width:760px){th{display:none}tr,td,table{display:block}"
    "tr{padding:.5em 0;border-bottom:1px solid #999}td,td:first-child{text-align:left;"
    "padding:.1em .4em}td::before{content:attr(data-name);display:inline-block;width:8.5em;"
    "color:#777;font-weight:normal}pre{font-size:11px}}"
    "@media(prefers-color-scheme:dark){:root{color-scheme:dark}body{color:#ddd;background:#181818}"
    "tr:nth-child(odd) td,pre{background:#262626}svg text{fill:#ccc}line.grid{stroke:#444}"
    "line.peak{stroke:#ddd}rect.back{fill:#2b2b2b}.note,dl,td::before{color:#aaa}"
    ".no{color:#ff8a80}.yes{color:#81c784}h2{border-color:#444}}"
)

_COLORS = {
    "parameters": "#4c78a8", "gradients": "#f58518", "optimizer_state": "#72b7b2",
    "data": "#bab0ac", "outputs": "#9d755d", "gathered_parameters": "#54a24b",
    "activations": "#e45756", "scratch": "#eeca3b", "code": "#b279a2",
}  # fmt: skip
_TRAFFIC_COLORS = {True: ("overlapped", "#8fa8c8"), False: ("blocking", "#3b3f8f")}
_RECIPE_COLORS = {"lean": "#e377c2", "fast": "#17a2b8", "plain": "#8c6d31"}


def about_run(target: str) -> dict[str, str]:
    """Return what is looked at, by which command and versions, and when."""
    packages = ("xla_fsdp", "torch", "torch_xla", "jaxlib", "libtpu")
    return {
        "target": target,
        "command": shlex.join(["python", "-m", "xla_fsdp.preflight", *sys.argv[1:]]),
        "date": str(datetime.date.today()),
        "versions": ", ".join(f"{name} {_version(name)}" for name in packages),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def page(
    reports: Sequence[Report], failed: Sequence[Failed] = (), about: Mapping[str, str] | None = None
) -> str:
    """Return an HTML page of the runs that compiled, and of the others; ``about`` is of
    ``about_run``."""
    verdicts = [{"fits": "yes" if each.fits else "no"} for each in reports]
    lost = (
        f'<p><span class="no">{escape(each.run)}</span>: {escape(each.error)}</p>'
        for each in failed
    )
    legend = _legend({label: _COLORS[name] for name, label in PARTS.items()})
    return _document(
        f'<p class="note">One training step per rank, as the TPU compiler makes it.</p>'
        f"{''.join(lost)}"
        f"{_table('', HEADINGS, map(cells, reports), verdicts)}"
        f"<h2>Memory against the chip's capacity</h2>{legend}{_memory_bars(reports)}"
        f"{''.join(map(_section, reports))}",
        about,
    )


def tuned_page(tuned: Tuned, about: Mapping[str, str] | None = None) -> str:
    """Return an HTML page of a search: what was tried, and the report on the best."""
    best = tuned.best
    return _document(
        f'<p class="note">{escape(tuned.topology)}: each point is a recipe, a mesh and a batch '
        f"size, filled if it was compiled as it is to run, and else predicted; dashed if it does "
        f"not fit.</p>"
        f"{_scatter(tuned)}"
        f"{_table('tuned', TUNED_HEADINGS, map(tuned.cells, tuned.ranking()))}"
        f"{_section(best.report) if best and best.report else ''}",
        about,
    )


def _table(
    kind: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    kinds: Sequence[Mapping[str, str]] = (),
) -> str:
    """Return a table; ``kinds`` has the class of cells, by heading, in each row."""
    drawn = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    for number, row in enumerate(rows):
        of_row = kinds[number] if kinds else {}
        drawn += "</tr><tr>"
        for heading, content in zip(headings, row, strict=True):
            mark = f'data-name="{escape(heading)}" class="{of_row.get(heading, "")}"'
            drawn += f"<td {mark}>{escape(content)}</td>"
    return f'<table class="{kind}"><tr>{drawn}</tr></table>'


def _document(body: str, about: Mapping[str, str] | None) -> str:
    facts = (f"<dt>{name}</dt><dd>{escape(fact)}</dd>" for name, fact in (about or {}).items())
    body = (f"<dl>{''.join(facts)}</dl>" if about else "") + body
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>Preflight</title><style>{_STYLE}</style></head><body><h1>Preflight</h1>"
        f"{body}</body></html>\n"
    )


def _legend(entries: Mapping[str, str]) -> str:
    drawn = (
        f'<span><i style="background:{color}"></i>{escape(label)}</span>'
        for label, color in entries.items()
    )
    return f'<p class="legend">{"".join(drawn)}</p>'


def _section(report: Report) -> str:
    warnings = "".join(f'<li class="no">{escape(warning)}</li>' for warning in report.warnings)
    findings = warnings + "".join(f"<li>{escape(finding)}</li>" for finding in report.findings)
    areas = [*_CONSTANT, "gathered_parameters", "activations"]
    legend = {PARTS[name]: _COLORS[name] for name in areas} | dict(_TRAFFIC_COLORS.values())
    return (
        f"<h2>{escape(title(report))}</h2>"
        f"<ul>{findings or '<li>Nothing to remark.</li>'}</ul>"
        f"<h3>Over the step's estimated time</h3>{_legend(legend)}{_step_timeline(report)}"
        f'<p class="note">Read from the schedule: below the peak lies what the compiler reserves '
        f"beyond the buffers that it can be seen to use.</p>"
        f"<details open><summary>All figures</summary>"
        f"<pre>{escape(figures(report))}</pre></details>"
    )


# ---------------------------------------------------------------- drawings; lengths in pixels

WIDTH, LEFT, RIGHT = 900, 100, 120  # width of a drawing and of its margins, which hold numbers
INNER = WIDTH - LEFT - RIGHT
BAR = 46
HEIGHT, LANE, GAP = 220, 18, 24  # heights of the memory plot, and of the collectives below it
_CONSTANT = ("parameters", "gradients", "optimizer_state", "data", "code")
"""Parts of memory that are as large at all times."""
PLOT = 320  # height of a search's plot
TICKS = 5


@dataclass(frozen=True)
class _Scale:
    """Map values from 0 to ``top`` to pixels."""

    top: float
    start: float
    length: float

    def __call__(self, value: float) -> float:
        return self.start + self.length * value / (self.top or 1)


def _memory_bars(reports: Sequence[Report]) -> str:
    """Draw one bar per report, on a common scale, with a mark at the chip's capacity."""
    tops = [max(each.memory.capacity, each.memory.peak) for each in reports]
    x = _Scale(max(tops, default=0), LEFT, INNER)
    bars = (_bar(report, x, BAR * number) for number, report in enumerate(reports))
    return _svg("bars", BAR * len(reports) + 4, "Memory by part against capacity", bars)


def _bar(report: Report, x: _Scale, top: float) -> str:
    memory = report.memory
    label = f"{report.topology} {options_text(report.options)}".strip()
    short = label if len(label) <= 90 else f"{label[:89]}\N{HORIZONTAL ELLIPSIS}"
    drawn = [_text(LEFT, top + 14, short, "start", hint=label)]
    done = 0
    for name, part in PARTS.items():
        size = getattr(memory, name)
        hint = f"{part}: {_mib(size)} MiB"
        drawn.append(_rect(x(done), top + 19, x(done + size) - x(done), 22, _COLORS[name], hint))
        done += size
    edge = x(memory.capacity)
    hint = f"capacity: {_mib(memory.capacity)} MiB"
    drawn.append(_line(edge, top + 16, edge, top + 44, "capacity", hint))
    fits = "" if report.fits else " !"
    drawn.append(_text(WIDTH - RIGHT + 8, top + 35, f"{_mib(memory.peak)} MiB{fits}", "start"))
    return "".join(drawn)


SHOWN_MEMORY = 1.5
"""Points of a search are drawn up to so many times the chip's capacity."""


def _scatter(tuned: Tuned) -> str:
    """Draw what each candidate needs against its rate, with a line at the chip's capacity."""
    most = SHOWN_MEMORY * tuned.capacity
    known = [(each, each.figures) for each in tuned.candidates if each.figures is not None]
    points = [(each, found.needed) for each, found in known if found.needed <= most]
    x = _Scale(most, LEFT, INNER)
    fastest = max((tuned.rate(each) for each, _ in points), default=0.0)
    y = _Scale(1.05 * fastest, PLOT, -PLOT + 10)
    drawn = [
        *_across(x, "MiB", 10, PLOT, MIB),
        *_upward(y, f"{tuned.unit}/s"),
        _line(x(tuned.capacity), 10, x(tuned.capacity), PLOT, "capacity",
              f"capacity: {_mib(tuned.capacity)} MiB"),
        *(_point(tuned, each, x(needed), y(tuned.rate(each))) for each, needed in points),
    ]  # fmt: skip
    plot = _svg("scatter", PLOT + 26, "Memory against estimated rate", drawn)
    return _legend(_RECIPE_COLORS) + plot


def _point(tuned: Tuned, candidate: Candidate, x: float, y: float) -> str:
    color = _RECIPE_COLORS[candidate.way.recipe.name]
    hint = (
        f"{candidate.way}, batch {candidate.batch}: {tuned.rate(candidate):,.0f} {tuned.unit}/s. "
        f"{tuned.reason(candidate) or 'The best'}"
    )
    dashes = {} if candidate.fits(tuned.chip) else {"stroke-dasharray": "3 2"}
    return _element(
        "circle", hint, cx=x, cy=y, r=9 if candidate == tuned.best else 5,
        fill=color if candidate.report else "#fff", stroke=color, stroke_width=2, **dashes,
    )  # fmt: skip


def _step_timeline(report: Report) -> str:
    """Draw memory over the step's estimated time, and below it a lane per kind of collective."""
    timeline = report.timeline
    x = _Scale(timeline.seconds, LEFT, INNER)
    lanes = sorted({(span.kind, span.overlapped) for span in timeline.spans})
    bottom = HEIGHT + 30 + len(lanes) * (LANE + GAP)
    drawn = [
        *_areas(report.memory, timeline.moments, timeline.seconds, x),
        *_across(x, "ms", HEIGHT, bottom, 1e-3),
    ]
    for number, lane in enumerate(lanes):
        drawn += _lane(*lane, timeline.spans, x, HEIGHT + 30 + number * (LANE + GAP))
    return _svg("timeline", bottom + 22, "Memory and collectives over one step", drawn)


def _areas(memory: Memory, moments: Sequence[Moment], seconds: float, x: _Scale) -> Iterator[str]:
    """Draw the bytes at each moment as stacked areas, the constant ones lowest."""
    areas = [(name, [getattr(memory, name)] * len(moments)) for name in _CONSTANT]
    areas += [
        (name, [getattr(each, name) for each in moments])
        for name in ("gathered_parameters", "activations")
    ]
    highest = max([memory.peak, *map(sum, zip(*(sizes for _, sizes in areas), strict=True))])
    lines = {"peak": memory.peak}
    if memory.capacity <= 2 * highest:  # otherwise the line would squeeze the areas
        lines["capacity"] = memory.capacity
    y = _Scale(1.05 * max(highest, *lines.values()), HEIGHT, -HEIGHT + 10)
    yield from _upward(y, "MiB", MIB)
    edges = [*(each.seconds for each in moments), seconds]
    below = [0] * len(moments)
    for name, sizes in areas:
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        outline = [*_stairs(edges, above, x, y), *reversed(list(_stairs(edges, below, x, y)))]
        points = " ".join(f"{across:.1f},{up:.1f}" for across, up in outline)
        hint = f"{PARTS[name]}: at most {_mib(max(sizes, default=0))} MiB"
        yield _element("polygon", hint, points=points, fill=_COLORS[name])
        below = above
    for name, size in lines.items():
        yield _line(LEFT, y(size), WIDTH - RIGHT, y(size), name, f"{name}: {_mib(size)} MiB")
        yield _text(WIDTH - RIGHT + 6, y(size) + 4, f"{name} {_mib(size)}", "start")


def _stairs(
    edges: Sequence[float], levels: Sequence[int], x: _Scale, y: _Scale
) -> Iterator[tuple[float, float]]:
    for left, right, level in zip(edges[:-1], edges[1:], levels, strict=True):
        yield x(left), y(level)
        yield x(right), y(level)


def _upward(y: _Scale, name: str, unit: float = 1) -> Iterator[str]:
    """Draw lines at round numbers of a unit, with these and its name on their left."""
    for each in axis_marks(y.top / unit):
        at = y(each * unit)
        yield _line(LEFT, at, WIDTH - RIGHT, at, "grid")
        yield _text(LEFT - 8, at + 4, f"{each:,.0f} {name}", "end")


def _across(x: _Scale, name: str, top: float, bottom: float, unit: float) -> Iterator[str]:
    """Draw lines from ``top`` to ``bottom``, with numbers below."""
    for each in axis_marks(x.top / unit):
        at = x(each * unit)
        yield _line(at, top, at, bottom, "grid")
        yield _text(at, bottom + 15, f"{each:,.12g} {name}", "middle")


def axis_marks(top: float) -> list[float]:
    """Return marks from 0 to ``top`` in at most ``TICKS`` steps of 1, 2 or 5 times 10**n."""
    smallest = 10.0 ** math.floor(math.log10(top / TICKS)) if top > 0 else 1.0
    step = next(smallest * each for each in (1, 2, 5, 10) if top <= TICKS * smallest * each)
    return [number * step for number in range(int(top / step) + 1)]


def _lane(
    kind: str, overlapped: bool, spans: Sequence[Span], x: _Scale, top: float
) -> Iterator[str]:
    words, color = _TRAFFIC_COLORS[overlapped]
    yield _text(LEFT, top - 5, f"{kind}, {words}", "start")
    yield _rect(LEFT, top, INNER, LANE, "none", kind="back")
    own = [each for each in spans if (each.kind, each.overlapped) == (kind, overlapped)]
    for each in own:
        left = min(x(each.start), WIDTH - RIGHT - 0.8)
        width = max(x(each.end) - x(each.start), 0.8)  # thinner ones would be invisible
        hint = (
            (f"{each.unit}, " if each.unit else "")
            + f"{each.kind} {each.dtype}, {each.wire_bytes / MB:.2f} MB"
            + (f" in {each.times} executions" if each.times > 1 else "")
            + f", {1e3 * each.start:.2f} to {1e3 * each.end:.2f} ms"
        )
        yield _rect(left, top, width, LANE, color, hint, "span")
    total = sum(each.wire_bytes for each in own) / MB
    yield _text(WIDTH - RIGHT + 6, top + 13, f"{total:,.0f} MB", "start")


# ---------------------------------------------------------------- elements


def _svg(name: str, height: float, label: str, drawn: Iterable[str]) -> str:
    return (
        f'<div class="wide"><svg class="{name}" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}">{"".join(drawn)}</svg></div>'
    )


def _element(tag: str, hint: str = "", content: str = "", **attributes: Any) -> str:
    """Return an element of a drawing; ``kind`` is its class."""
    words = ""
    for name, value in attributes.items():
        text = f"{value:.2f}" if isinstance(value, float) else value
        words += f' {"class" if name == "kind" else name.replace("_", "-")}="{text}"'
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return f"<{tag}{words}>{escape(content)}{title}</{tag}>"


def _rect(
    x: float, y: float, width: float, height: float, color: str, hint: str = "", kind: str = "part"
) -> str:
    return _element("rect", hint, x=x, y=y, width=width, height=height, fill=color, kind=kind)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, hint: str = "") -> str:
    return _element("line", hint, x1=x1, y1=y1, x2=x2, y2=y2, kind=kind)


def _text(x: float, y: float, content: str, anchor: str, hint: str = "") -> str:
    return _element("text", hint, content, x=x, y=y, text_anchor=anchor)


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f}"
