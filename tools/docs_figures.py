"""Write the benchmark's figures into the pages that tell them, and draw their bar chart.

    python tools/docs_figures.py

Whatever is said of a compiled step of the benchmark comes from ``benchmarks/tpu_compile.md``, which
``benchmarks/tpu_compile.py --write`` makes; a test compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "benchmarks" / "tpu_compile.md"
PICTURE = ROOT / "docs" / "pictures" / "memory.svg"

SECTIONS = {
    "4 blocks of width 1024": "## width 1024, 4 blocks, v5e:4x4",
    "24 blocks of width 1024": "## width 1024, 24 blocks, v5e:4x4",
}
ROW = "peak, MiB"
PROGRAMS = {
    "streamed": ("xla_fsdp, all features", "#3f51b5"),
    "ours": ("xla_fsdp, as wrapped", "#7986cb"),
    "jax": ("JAX, scan over layers", "#9e9e9e"),
    "upstream": ("torch_xla's FSDP", "#bdbdbd"),
}
"""Column of the tables, and label and colour of its bars."""

_ROWS = {"peak": ROW, "blocking": "blocking, MB", "trace": "tracing a step, CPU ms"}
_CELLS = " | ".join(
    f"{{BLOCKS {name} peak}} / {{BLOCKS {name} blocking}}"
    for name in ("ours", "stacked", "streamed", "upstream", "jax")
)
PASSAGES = {
    "README.md": [
        f"| {blocks} \N{MULTIPLICATION SIGN} 1024 | {_CELLS.replace('BLOCKS', blocks)} |"
        for blocks in ("4", "24")
    ],
    "docs/index.md": [
        "training step: {24 streamed peak} MiB with all features, {24 ours peak} as wrapped, "
        "{24 jax peak} in JAX, {24 upstream peak} with torch_xla's FSDP, for 24 blocks"
    ],
    "docs/performance.md": [
        "v5e the peak is {24 ours peak} MiB (wrapped, recomputed), {24 stacked peak} (stacked), "
        "and goes to {24 streamed peak} (with a streamed head and\n"
        "embedding and steps inside backward) to {24 offloaded peak} (with activations on the "
        "host). `torch_xla.distributed.fsdp` needs\n"
        "{24 upstream peak} there, plain JAX with a scan over layers {24 jax peak}.",
        "24 blocks of width 1024 take {24 stacked trace} ms to trace instead of {24 ours trace}.",
    ],
}
"""By page: what it says, with {blocks program row} in the place of each figure."""

WIDTH, LEFT, RIGHT, LINE, GROUP = 400, 168, 52, 24, 30  # in pixels; text has 13


@cache
def figures(heading: str) -> dict[str, dict[str, str]]:
    """Return the table below a heading: by row and program."""
    section = TABLES.read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in section.splitlines()]
    names = next(row for row in rows if "ours" in row)
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)}


def peaks(heading: str) -> dict[str, float]:
    """MiB by program, from the table below a heading."""
    found = figures(heading)[ROW]
    return {name: float(found[name].replace(",", "")) for name in PROGRAMS}


def written(page: str) -> str:
    """Return the text of a page with the figures of now.

    Raises:
        ValueError: if a passage is not there, or twice.
    """
    text = (ROOT / page).read_text()
    for passage in PASSAGES[page]:
        parts = re.split(r"\{(.*?)\}", passage)
        parts[1::2] = map(_figure, parts[1::2])
        pattern = r"[\d,.]+".join(map(re.escape, parts[::2]))
        text, count = re.subn(pattern, "".join(parts).replace("\\", r"\\"), text)
        if count != 1:
            raise ValueError(f"{page} has this passage {count} times: {passage}")
    return text


def _figure(place: str) -> str:
    blocks, program, row = place.split()
    value = figures(SECTIONS[f"{blocks} blocks of width 1024"])[_ROWS[row]][program]
    return f"{float(value.replace(',', '')):,.0f}"


def chart() -> str:
    """Return the picture, SVG."""
    groups = {label: peaks(heading) for label, heading in SECTIONS.items()}
    most = max(size for found in groups.values() for size in found.values())
    drawn, top = [], 44
    for label, found in groups.items():
        drawn.append(_text(0, top + 16, label, "start", "bold"))
        top += GROUP
        for name, size in found.items():
            drawn += _bar(name, size, (WIDTH - LEFT - RIGHT) * size / most, top)
            top += LINE
    title = "Peak memory of a training step, MiB per chip"
    about = f"A GPT on 16 chips of v5e, as the TPU compiler lays it out. {_sentence(groups)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 8}" width="{WIDTH}" '
        f'role="img" aria-label="{escape(title)}">\n<title>{escape(title)}. {escape(about)}</title>'
        f"\n<style>text{{font:13px sans-serif;fill:#222}}.bold{{font-weight:bold}}</style>\n"
        f'<rect width="{WIDTH}" height="{top + 8}" fill="#fff"/>\n'
        f"{_text(0, 14, title, 'start', 'bold')}\n"
        f"{_text(0, 32, 'GPT, 16 chips of v5e, by the TPU compiler', 'start')}\n"
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _sentence(groups: dict[str, dict[str, float]]) -> str:
    parts = (
        f"{label}: " + ", ".join(f"{PROGRAMS[name][0]} {size:,.0f}" for name, size in found.items())
        for label, found in groups.items()
    )
    return "; ".join(parts) + "."


def _bar(name: str, size: float, length: float, top: int) -> Iterator[str]:
    label, color = PROGRAMS[name]
    yield _text(LEFT - 8, top + 14, label, "end")
    yield f'<rect x="{LEFT}" y="{top + 2}" width="{length:.1f}" height="16" fill="{color}"/>'
    yield _text(LEFT + length + 6, top + 14, f"{size:,.0f}", "start")


def _text(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{mark}>{escape(content)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(chart())
    for page in PASSAGES:
        (ROOT / page).write_text(written(page))
    sys.exit(0)
