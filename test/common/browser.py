"""Show a page of this machine in headless Chromium, driven through a pipe by the devtools protocol.

``show(page)`` returns what the page measured, requested and complained about.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from test.common.ranks import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
INSTALLED = ROOT / ".venv" / "browser" / "chromium"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
SECONDS = 300
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


def executable() -> str | None:
    """Chromium, or None where there is none."""
    if INSTALLED.exists():
        return str(INSTALLED)
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Shown:
    """What became of a page.

    Args:
        answer: value of the expression that was asked for, evaluated in the page.
        requests: addresses that were asked for, the page's own first.
        complaints: messages on the console, and exceptions.
        screenshot: of the whole page, PNG.
    """

    answer: Any = None
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    screenshot: bytes = b""


def show(
    page: Path | str, expression: str, *, size: tuple[int, int] = (1200, 900), dark: bool = False
) -> Shown:
    """Load ``page``, a file or an address, and evaluate ``expression`` in it.

    If the expression is a promise, its value is waited for.

    Raises:
        RuntimeError: if Chromium does not answer in time, or ends.
    """
    shown = Shown()
    with _browser() as browser:
        about = {"url": "about:blank", "width": size[0], "height": size[1]}
        target = browser.call("Target.createTarget", **about)["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        browser.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            browser.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.call("Emulation.setEmulatedMedia", features=[scheme])
        browser.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        browser.wait_for("Page.loadEventFired")
        answer = browser.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        shown.answer = answer["result"].get("value")
        picture = browser.call("Page.captureScreenshot", captureBeyondViewport=True)
        shown.screenshot = base64.b64decode(picture["data"])
    for event in browser.events:
        if event["method"] == "Network.requestWillBeSent":
            shown.requests.append(event["params"]["request"]["url"])
        elif event["method"] in COMPLAINTS:
            shown.complaints.append(json.dumps(event["params"]))
    return shown


@contextlib.contextmanager
def _browser() -> Iterator[_Browser]:
    """Chromium with its pipe: it reads commands from descriptor 3 and writes to 4."""
    found = executable()
    if found is None:
        raise RuntimeError("no Chromium; run make browser")
    commands, answers = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (commands[0], answers[1])]

    def redirect() -> None:
        for number, each in zip((3, 4), theirs, strict=True):
            os.dup2(each, number)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        child = subprocess.Popen(
            [found, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=redirect,
            close_fds=False,  # Python's own are not inheritable; 3 and 4 are
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for each in (*theirs, commands[0], answers[1]):
            os.close(each)
        try:
            yield _Browser(commands[1], answers[0])
        finally:
            child.kill()
            child.wait()
            os.close(commands[1])
            os.close(answers[0])


class _Browser:
    """Commands and events, as JSON that ends with a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self.session = ""
        self.events: list[dict[str, Any]] = []
        self._commands, self._answers = commands, answers
        self._number, self._pending = 0, b""
        self._until = time.monotonic() + SECONDS

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Result of a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def wait_for(self, method: str) -> None:
        """Return once an event has come, or at once if it has already."""
        while not any(event["method"] == method for event in self.events):
            self._read()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            left = self._until - time.monotonic()
            if not select.select([self._answers], [], [], max(0, left))[0]:
                raise RuntimeError(f"Chromium has not answered within {SECONDS} s")
            if not (some := os.read(self._answers, 1 << 20)):
                raise RuntimeError("Chromium has ended")
            self._pending += some
        first, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message
