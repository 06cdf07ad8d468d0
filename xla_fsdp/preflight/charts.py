"""Drawings of reports as SVG: memory against capacity, and a step over its estimated time.

Always true: a drawing is text without scripts, fonts or anything else to load; whatever has a
figure shows it when pointed at. Where drawings go on the page is ``html``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from xla_fsdp.preflight import text
from xla_fsdp.preflight.report import Memory, Moment, Report, Span

WIDTH, LEFT, RIGHT = 1000, 250, 115

HEIGHT, LANE, GAP = 220, 18, 6

COLORS = {
    "parameters": "#4c78a8", "gradients": "#f58518", "optimizer_state": "#72b7b2",
    "data": "#bab0ac", "outputs": "#9d755d", "gathered_parameters": "#54a24b",
    "activations": "#e45756", "scratch": "#eeca3b", "code": "#b279a2",
}  # fmt: skip

INPUTS = ("parameters", "gradients", "optimizer_state", "data")

LANE_COLORS = {True: COLORS["gathered_parameters"], False: COLORS["activations"]}

TICKS = 5


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    whole: float
    start: float
    length: float

    def __call__(self, value: float) -> float:
        return self.start + self.length * value / (self.whole or 1)


def legend() -> str:
    """What the colors mean."""
    entries = (
        f'<span><i style="background:{COLORS[name]}"></i>{escape(label)}</span>'
        for name, label in text.PARTS.items()
    )
    return f'<p class="legend">{"".join(entries)}</p>'


def memory_bars(reports: Sequence[Report]) -> str:
    """One bar per report, all on one scale; the mark is the chip's capacity."""
    whole = max(max(each.memory.capacity, each.memory.peak) for each in reports)
    x = _Scale(whole, LEFT, WIDTH - LEFT - RIGHT)
    row = 30
    bars = (_bar(report, x, row * number) for number, report in enumerate(reports))
    return _svg("bars", row * len(reports) + 4, "Memory by part against capacity", bars)


def _bar(report: Report, x: _Scale, top: float) -> str:
    memory = report.memory
    label = f"{report.topology} {text.options(report)}".strip()
    parts = [_text(LEFT - 8, top + 19, _short(label), "end", hint=label)]
    done = 0
    for name, title in text.PARTS.items():
        size = getattr(memory, name)
        hint = f"{title}: {_mib(size)} MiB"
        parts.append(_rect(x(done), top + 4, x(done + size) - x(done), 22, COLORS[name], hint))
        done += size
    edge = x(memory.capacity)
    hint = f"capacity: {_mib(memory.capacity)} MiB"
    parts.append(_line(edge, top + 1, edge, top + 29, "capacity", hint))
    fits = "" if report.fits else " !"
    parts.append(_text(WIDTH - RIGHT + 8, top + 19, f"{_mib(memory.peak)} MiB{fits}", "start"))
    return "".join(parts)


def step_timeline(report: Report) -> str:
    """Memory over the step's estimated time, and below it the collectives in their lanes."""
    timeline, memory = report.timeline, report.memory
    x = _Scale(timeline.seconds, LEFT, WIDTH - LEFT - RIGHT)
    lanes = sorted({(span.kind, span.overlapped) for span in timeline.spans})
    bottom = HEIGHT + 26 + len(lanes) * (LANE + GAP)
    drawn = [
        *_areas(memory, timeline.moments, timeline.seconds, x),
        *_time_axis(timeline.seconds, x, bottom),
        *(
            part
            for number, lane in enumerate(lanes)
            for part in _lane(*lane, timeline.spans, x, HEIGHT + 26 + number * (LANE + GAP))
        ),
    ]
    return _svg("timeline", bottom + 22, "Memory and collectives over one step", drawn)


def _areas(memory: Memory, moments: Sequence[Moment], seconds: float, x: _Scale) -> Iterator[str]:
    """Bytes at each moment, stacked: what is always there first."""
    inputs = sum(getattr(memory, name) for name in INPUTS)
    stack: list[tuple[str, str, list[int]]] = [
        ("optimizer_state", "parameters, optimizer state, batch", [inputs] * len(moments)),
        ("code", text.PARTS["code"], [memory.code] * len(moments)),
        ("gathered_parameters", text.PARTS["gathered_parameters"],
         [each.gathered_parameters for each in moments]),
        ("activations", text.PARTS["activations"], [each.activations for each in moments]),
    ]  # fmt: skip
    most = max([memory.peak, *map(sum, zip(*(each[2] for each in stack), strict=True))])
    shows_capacity = memory.capacity <= 2 * most
    whole = 1.05 * max(most, memory.capacity if shows_capacity else 0)
    y = _Scale(whole, HEIGHT, -HEIGHT + 10)
    yield from _memory_axis(whole, y)
    edges = [*(each.seconds for each in moments), seconds]
    below = [0] * len(moments)
    for name, label, sizes in stack:
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        outline = [*_stairs(edges, above, x, y), *reversed(list(_stairs(edges, below, x, y)))]
        points = " ".join(f"{across:.1f},{up:.1f}" for across, up in outline)
        hint = f"{label}: at most {_mib(max(sizes, default=0))} MiB"
        yield f'<polygon points="{points}" fill="{COLORS[name]}">{_hint(hint)}</polygon>'
        below = above
    lines = [("peak", memory.peak)] + [("capacity", memory.capacity)] * shows_capacity
    for name, size in lines:
        hint = f"{name}: {_mib(size)} MiB"
        yield _line(LEFT, y(size), WIDTH - RIGHT, y(size), name, hint)
        yield _text(WIDTH - RIGHT + 6, y(size) + 4, f"{name} {_mib(size)}", "start")


def _stairs(
    edges: Sequence[float], levels: Sequence[int], x: _Scale, y: _Scale
) -> Iterator[tuple[float, float]]:
    for left, right, level in zip(edges[:-1], edges[1:], levels, strict=True):
        yield x(left), y(level)
        yield x(right), y(level)


def _memory_axis(whole: float, y: _Scale) -> Iterator[str]:
    for size in round_steps(whole / text.MIB):
        at = y(size * text.MIB)
        yield _line(LEFT, at, WIDTH - RIGHT, at, "grid")
        yield _text(LEFT - 8, at + 4, f"{size:,.0f} MiB", "end")


def _time_axis(seconds: float, x: _Scale, bottom: float) -> Iterator[str]:
    for each in round_steps(1e3 * seconds):
        at = x(each / 1e3)
        yield _line(at, HEIGHT, at, bottom, "grid")
        yield _text(at, bottom + 14, f"{each:g} ms", "middle")


def _lane(
    kind: str, overlapped: bool, spans: Sequence[Span], x: _Scale, top: float
) -> Iterator[str]:
    label = f"{kind}, {'overlapped' if overlapped else 'blocking'}"
    yield _text(LEFT - 8, top + 13, label, "end")
    yield _rect(LEFT, top, WIDTH - LEFT - RIGHT, LANE, "#f4f4f4")
    own = [each for each in spans if (each.kind, each.overlapped) == (kind, overlapped)]
    for each in own:
        # Never thinner than can be seen.
        left = min(x(each.start), WIDTH - RIGHT - 0.8)
        width = max(x(each.end) - x(each.start), 0.8)
        hint = (
            f"{each.kind} {each.dtype}, {each.wire_bytes / text.MB:.2f} MB"
            + (f" in {each.times} executions" if each.times > 1 else "")
            + f", {1e3 * each.start:.2f} to {1e3 * each.end:.2f} ms"
        )
        yield _rect(left, top, width, LANE, LANE_COLORS[overlapped], hint, "span")
    total = sum(each.wire_bytes for each in own) / text.MB
    yield _text(WIDTH - RIGHT + 6, top + 13, f"{total:,.0f} MB", "start")


def round_steps(whole: float) -> list[float]:
    """At most ``TICKS`` steps of 1, 2 or 5 times a power of ten, from 0 to ``whole``."""
    smallest = 10.0 ** math.floor(math.log10(whole / TICKS)) if whole > 0 else 1.0
    step = next(smallest * each for each in (1, 2, 5, 10) if whole <= TICKS * smallest * each)
    return [number * step for number in range(int(whole / step) + 1)]


# ---------------------------------------------------------------- elements


def _svg(name: str, height: float, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg class="{name}" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def _rect(
    x: float, y: float, width: float, height: float, color: str, hint: str = "", kind: str = "part"
) -> str:
    kind = kind if hint else "back"
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
        f'fill="{color}">{_hint(hint)}</rect>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, hint: str = "") -> str:
    return (
        f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}">'
        f"{_hint(hint)}</line>"
    )


def _text(x: float, y: float, content: str, anchor: str, hint: str = "") -> str:
    inside = escape(content) + _hint(hint)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{inside}</text>'


def _hint(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def _mib(size: float) -> str:
    return f"{size / text.MIB:,.0f}"


def _short(label: str) -> str:
    return label if len(label) <= 32 else f"{label[:31]}\N{HORIZONTAL ELLIPSIS}"
