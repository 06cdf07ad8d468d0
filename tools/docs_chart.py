"""Draw the bar chart of README and the landing page from the benchmark's own tables.

    python tools/docs_chart.py    # writes docs/pictures/memory.svg

The numbers are those of ``benchmarks/tpu_compile.md``; a test compares the picture with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    "ours": ("xla_fsdp, units alone", "#7986cb"),
    "jax": ("JAX, scan over layers", "#9e9e9e"),
    "upstream": ("torch_xla's FSDP", "#bdbdbd"),
}
"""Column of the tables, and label and colour of its bars."""

WIDTH, LEFT, RIGHT, LINE, GROUP = 400, 168, 52, 24, 30  # in pixels; text has 13


def peaks(heading: str) -> dict[str, float]:
    """MiB by program, from the table below a heading."""
    section = TABLES.read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in section.splitlines()]
    names = next(row for row in rows if "ours" in row)
    found = next(row for row in rows if ROW in row)
    return {name: float(found[names.index(name)].replace(",", "")) for name in PROGRAMS}


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
    sys.exit(0)
