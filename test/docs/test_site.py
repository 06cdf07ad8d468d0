"""The site of documentation: it builds strictly, and a real browser shows it."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.common.browser import Shown, executable, show
from test.common.ranks import ROOT

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
SEARCH = """
(async () => {
  const input = document.querySelector("[data-md-component=search-query]");
  document.querySelector("[data-md-toggle=search]").click();
  input.focus();
  input.value = "no_sync";
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
        pytest.skip("no mkdocs here; pip install 'xla_fsdp[docs]'")
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


def test_search_finds_pages(address: str) -> None:
    shown = show(f"{address}/index.html", SEARCH)
    check(shown, address)
    assert any("training.html" in each for each in shown.answer)
