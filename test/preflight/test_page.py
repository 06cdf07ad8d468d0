"""The preflight page as a real browser shows it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from test.common.browser import Shown, executable, show
from test.common.example_report import TIMELINE, report
from xla_fsdp.preflight.read.html import TICKS, about_run, axis_marks, page
from xla_fsdp.preflight.read.report import PARTS, Memory
from xla_fsdp.preflight.topologies import GIB

MEASURE = """
(() => {
  const box = element => {
    const it = element.getBoundingClientRect();
    return [it.left, it.top, it.width, it.height];
  };
  const color = element => getComputedStyle(element).backgroundColor;
  const boxes = selector => [...document.querySelectorAll(selector)].map(box);
  return {
    bars: boxes("svg.bars .part"), capacity: boxes("svg.bars .capacity"),
    charts: boxes("svg"), areas: boxes("svg.timeline polygon"), spans: boxes("svg.timeline .span"),
    axis: boxes("svg.timeline .back"), labels: boxes("svg text"), width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    text: document.body.innerText,
    legend: [...document.querySelectorAll(".legend span")].map(
      each => [each.innerText, color(each.firstChild)]),
    drawn: [...document.querySelectorAll("polygon, rect:not(.back)")].map(
      each => getComputedStyle(each).fill),
    cut: [...document.querySelectorAll("table, tr, td, pre, dl")].filter(
      each => each.getBoundingClientRect().right > innerWidth + 1).length,
    smallest: Math.min(...[...document.querySelectorAll("svg text")].map(
      each => each.getBoundingClientRect().height)),
    scrolls: [...document.querySelectorAll("svg")].every(
      each => each.parentElement.clientWidth <= innerWidth),
    background: getComputedStyle(document.body).backgroundColor,
  };
})()
"""
TOO_LARGE = Memory(*[GIB] * 9, capacity=8 * GIB)
SMALLEST_TEXT = 11.5  # pixels of a line
ABOUT = about_run("train:build_step")
HOSTILE = {"name": "</pre><img src=http://host.invalid/x><script>throw 1</script>"}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    if executable() is None:
        pytest.skip("no Chromium on this machine; make browser installs one (it needs npm)")
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page([report(), report(memory=TOO_LARGE, options=HOSTILE)], about=ABOUT))
    found = show(path, MEASURE)
    assert found.requests[0] == path.as_uri()
    return found


def answer(shown: Shown, name: str) -> Any:
    return shown.answer[name]


def test_the_page_asks_for_nothing_and_complains_of_nothing(shown: Shown) -> None:
    assert [each for each in shown.requests[1:] if not each.startswith("data:")] == []
    assert shown.complaints == []
    assert HOSTILE["name"] in answer(shown, "text")


def test_bars_are_stacked_in_proportion_below_the_chips_capacity(shown: Shown) -> None:
    bars, capacity = answer(shown, "bars"), answer(shown, "capacity")
    assert (len(bars), len(capacity)) == (2 * len(PARTS), 2)
    large = bars[len(PARTS) :]
    for left, right in itertools.pairwise(large):
        assert left[0] + left[2] == pytest.approx(right[0], abs=0.5)  # side by side
    assert all(box[2] == pytest.approx(large[0][2], abs=0.5) and box[3] > 10 for box in large)
    fits, too_large = bars[: len(PARTS)], large
    assert fits[-1][0] + fits[-1][2] < capacity[0][0]
    assert too_large[-1][0] + too_large[-1][2] > capacity[1][0] + 20


def test_a_color_has_one_meaning_and_a_place_in_a_legend(shown: Shown) -> None:
    legend = {(label, color) for label, color in answer(shown, "legend")}
    assert len(legend) == len(PARTS) + 2
    assert len({label for label, _ in legend}) == len({color for _, color in legend}) == len(legend)
    assert {*answer(shown, "drawn")} <= {color for _, color in legend}


@pytest.mark.parametrize("width", [400, 1280, 1600])
def test_nothing_is_cut_off_at_any_width(width: int, shown: Shown, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([report(), report(memory=TOO_LARGE, options=HOSTILE)], about=ABOUT))
    found = show(path, MEASURE, size=(width, 900))
    assert (answer(found, "cut"), answer(found, "scrolls")) == (0, True)
    assert answer(found, "overflow") <= 0
    assert answer(found, "smallest") >= SMALLEST_TEXT
    for fact in (*ABOUT, *ABOUT.values()):
        assert fact in answer(found, "text")


def test_it_is_dark_where_that_is_preferred(tmp_path: Path) -> None:
    if executable() is None:
        pytest.skip("no Chromium on this machine; make browser installs one (it needs npm)")
    path = tmp_path / "page.html"
    path.write_text(page([report()]))
    light, dark = (show(path, MEASURE, dark=each).answer["background"] for each in (False, True))
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(24, 24, 24)")


def test_memory_over_time_is_drawn_with_its_steps(shown: Shown) -> None:
    areas = answer(shown, "areas")
    assert len(areas) == 2 * (5 + 2)  # what is as large at all times, and what is not
    first = areas[:7]
    assert all(area[2] > 500 and area[3] > 0 for area in first)
    for below, above in itertools.pairwise(first):
        assert above[1] < below[1]


def test_collectives_travel_in_lanes_at_their_time(shown: Shown) -> None:
    spans, lanes = answer(shown, "spans"), answer(shown, "axis")
    count = len(TIMELINE.spans)
    assert (len(spans), len(lanes)) == (2 * count, 2 * count)
    for span, lane, drawn in zip(spans[:count], lanes[:count], TIMELINE.spans, strict=True):
        assert span[1] == pytest.approx(lane[1], abs=0.5)
        assert span[0] - lane[0] == pytest.approx(lane[2] * drawn.start / TIMELINE.seconds, abs=1)
        share = (drawn.end - drawn.start) / TIMELINE.seconds
        assert span[2] == pytest.approx(lane[2] * share, abs=1)


def test_nothing_is_cut_off(shown: Shown) -> None:
    assert answer(shown, "overflow") <= 0
    left = min(chart[0] for chart in answer(shown, "charts"))
    right = max(chart[0] + chart[2] for chart in answer(shown, "charts"))
    for label in answer(shown, "labels"):
        assert label[0] >= left - 1
        assert label[0] + label[2] <= right + 1
    assert len(shown.screenshot) > 10_000


def test_the_page_escapes_and_shows_every_report() -> None:
    source = page([report(), report(topology="v4:2x2x2")])
    assert "&lt;something&gt;" in source
    assert "<something>" not in source
    assert len(re.findall("<h2>.*?ranks", source)) == 2
    assert "<script" not in page([report(options=HOSTILE)])


def test_moments_and_spans_are_in_the_json() -> None:
    found = json.loads(report().to_json())["timeline"]
    assert found["moments"][1] == {
        "seconds": 0.01, "gathered_parameters": 6 * 2**20, "activations": 7 * 2**20,
    }  # fmt: skip
    assert found["spans"][-1]["kind"] == "reduce-scatter"


@pytest.mark.parametrize("whole", [0.0007, 0.9, 17.6, 503.0, 98765.0])
def test_axes_have_a_few_round_marks(whole: float) -> None:
    marks = axis_marks(whole)
    assert 2 <= len(marks) <= TICKS + 1
    assert marks[-1] <= whole < marks[-1] + marks[1]
    assert re.fullmatch("[125]e.*", f"{marks[1]:.0e}")
