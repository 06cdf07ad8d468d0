"""The site of documentation: it builds strictly, and a real browser shows it."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.common.browser import Shown, executable, show
from test.common.ranks import ROOT
from tools import docs_figures

PHONE = (390, 844)
SMALLEST_FONT = 12
MEASURE = """
({
  overflow: document.documentElement.scrollWidth - innerWidth,
  width: innerWidth,
  font: parseFloat(getComputedStyle(document.querySelector("article p")).fontSize),
  broken: [...document.images].filter(each => !each.naturalWidth).map(each => each.src),
  title: document.querySelector("h1").innerText,
})
"""
WIDTHS = (400, 1280, 1600)
SMALLEST_IN_PICTURES = 10
EVERY_PAGE = """
(async () => {
  const found = {};
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style = "border: 0; width: " + innerWidth + "px; height: 900px";
    const loaded = new Promise(done => { frame.onload = done; });
    frame.src = page;
    document.body.append(frame);
    await loaded;
    const inside = frame.contentDocument, wide = each => each.scrollWidth > each.clientWidth + 1;
    found[page] = {
      overflow: wide(inside.documentElement),
      code: [...inside.querySelectorAll("pre > code")].filter(wide).map(each => each.innerText),
      tables: [...inside.querySelectorAll("article table")].filter(
        each => each.getBoundingClientRect().right > innerWidth).length,
      pictures: [...inside.querySelectorAll("article img")].map(
        each => [each.getAttribute("src"), each.clientWidth]),
    };
    frame.remove();
  }
  return found;
})()
"""
SEARCH = """
(async () => {
  const input = document.querySelector("[data-md-component=search-query]");
  document.querySelector("[data-md-toggle=search]").click();
  input.focus();
  input.value = WORDS;
  for (let wait = 0; wait < 2000; wait++) {
    for (const each of ["keydown", "keyup", "input"]) input.dispatchEvent(new Event(each));
    const found = document.querySelectorAll(".md-search-result__link");
    if (found.length) return [...found].map(each => each.href);
    await new Promise(done => setTimeout(done, 50));
  }
  return [];
})()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs here; pip install '.[docs]'")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    if executable() is None:
        pytest.skip("no Chromium on this machine; make browser installs one (it needs npm)")
    handler = functools.partial(_Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def check(shown: Shown, address: str) -> None:
    """Nothing went wrong in the page, and nothing was asked of anyone else."""
    assert shown.complaints == []
    assert [each for each in shown.requests if not each.startswith((address, "data:"))] == []


def test_it_is_built_strictly(built: Path) -> None:
    pages = {path.relative_to(built).with_suffix("") for path in built.rglob("*.html")}
    written = {path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md")}
    assert {path.with_suffix("") for path in written} <= pages
    assert "the mesh lays out … ranks, but …" in (built / "messages.html").read_text()


@pytest.mark.parametrize(
    "page", ["index", "wrapper", "troubleshooting", "messages", "checkpoints", "reference/wrapping"]
)
def test_a_phone_shows_it(page: str, address: str) -> None:
    shown = show(f"{address}/{page}.html", MEASURE, size=PHONE)
    check(shown, address)
    assert shown.answer["width"] <= PHONE[0]
    assert shown.answer["overflow"] <= 0
    assert shown.answer["font"] >= SMALLEST_FONT
    assert shown.answer["broken"] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_off_and_pictures_are_readable(
    width: int, built: Path, address: str
) -> None:
    pages = [str(path.relative_to(built)) for path in built.rglob("*.html")]
    given = f"const PAGES = {json.dumps([each for each in pages if each != '404.html'])};"
    shown = show(f"{address}/index.html", given + EVERY_PAGE, size=(width, 900))
    assert len(shown.answer) == len(pages) - 1
    for page, found in shown.answer.items():
        assert (page, found["overflow"], found["tables"]) == (page, False, 0)
        if width > PHONE[0] + 100:  # on a phone code is scrolled
            assert (page, found["code"]) == (page, [])
        for name, pixels in found["pictures"]:
            assert pixels * smallest_font(built / page, name) >= SMALLEST_IN_PICTURES, (page, name)


def smallest_font(page: Path, name: str) -> float:
    """Of the text in a picture, as a part of the picture's width."""
    text = (page.parent / name).read_text()
    width = re.search(r'viewBox="0 0 (\d+)', text)
    fonts = [float(each) for each in re.findall(r"font(?:-size)?:([\d.]+)px", text)]
    assert width is not None
    return min(fonts) / float(width[1])


def test_titles_begin_with_the_names_in_the_navigation() -> None:
    entries = re.findall(r"^ +- (?:(\S.*): )(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert len(entries) > 40
    for name, page in entries:
        title = (ROOT / "docs" / page).read_text().partition("\n")[0].removeprefix("# ")
        known = {"Home": "xla_fsdp"}.get(name, name).lower()
        expected = f"reference: {known}" if page.startswith("reference/") else known
        assert title.replace("`", "").lower().startswith(expected), page


def test_pages_and_chart_tell_the_benchmarks_figures() -> None:
    assert docs_figures.PICTURE.read_text() == docs_figures.chart()
    for page in docs_figures.PASSAGES:
        assert docs_figures.written(page) == (ROOT / page).read_text(), page


def test_the_landing_page_shows_what_it_is_and_where_it_stands(built: Path) -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line]) <= 12
    for words in (
        "pictures/memory.svg",
        "has not run on TPU hardware",
        "TorchTPU",
        "make docs-serve",
    ):
        assert words in text
    assert "docs/pictures/memory.svg" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "page"), [("no_sync", "training.html"), ("mark_sharding", "moving.html")]
)
def test_search_finds_pages(words: str, page: str, address: str) -> None:
    shown = show(f"{address}/index.html", SEARCH.replace("WORDS", json.dumps(words)))
    check(shown, address)
    assert any(page in each for each in shown.answer)
