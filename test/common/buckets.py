"""A bucket of Google Cloud Storage on this machine: ``gcp-storage-emulator``, and faults before it.

The emulator has no conditional writes, so the layer before it has (``ifGenerationMatch``).
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest

emulator = pytest.importorskip("gcp_storage_emulator.server")

BUCKET = "bucket"
URL = f"gs://{BUCKET}/run"
CODES = (429, 500, 502, 503)
PATIENCE = 10.0
"""Seconds that a write waits for others at most."""


@dataclass
class Faults:
    """What goes wrong. The numbers from 0 to 1 are probabilities.

    Args:
        error: of an answer with one of ``CODES``, without the request being done.
        lost: of a connection that is cut after the request was done.
        cut: of a connection that is cut in the middle of an answer.
        short: of an answer to a read that lacks its end, without saying so.
        late: seconds for which new objects are not listed.
        slow: seconds that a write takes longer.
        together: number of writes that wait until there have been so many at once.
        always: pattern of paths to which every request fails with 503.
    """

    error: float = 0.0
    lost: float = 0.0
    cut: float = 0.0
    short: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    together: int = 0
    always: str = "(?!)"
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    reads: Counter[str] = field(default_factory=Counter)
    listings: int = 0
    most_writes: int = 0
    done: Counter[str] = field(default_factory=Counter)


class Handler(emulator.RequestHandler):
    """The emulator's, which is not made for several threads, one request at a time."""

    def __init__(self, faults: Faults, state: dict[str, Any], *args: Any) -> None:
        self.faults, self.state = faults, state
        super().__init__(state["storage"], *args)

    def do_GET(self) -> None:  # noqa: N802
        self.answer(super().do_GET)

    def do_POST(self) -> None:  # noqa: N802
        self.answer(super().do_POST)

    def do_DELETE(self) -> None:  # noqa: N802
        self.answer(super().do_DELETE)

    def do_PUT(self) -> None:  # noqa: N802
        self.answer(super().do_PUT)

    def answer(self, handle: Any) -> None:
        url, faults = urlparse(self.path), self.faults
        query = parse_qs(url.query)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        name = self.name_of(url.path, query, body)
        if self.by_chance("error", faults.error) or re.search(faults.always, name):
            self.refuse(503 if re.search(faults.always, name) else faults.chance.choice(CODES))
            return
        if writes := "/upload/" in url.path:
            with self.state["counting"]:
                self.state["writes"] += 1
                faults.most_writes = max(faults.most_writes, self.state["writes"])
            time.sleep(faults.slow)
            end = time.monotonic() + PATIENCE
            while faults.most_writes < faults.together and time.monotonic() < end:
                time.sleep(0.001)
        with self.state["lock"]:
            if "ifGenerationMatch" in query and self.exists(name):
                self.refuse(412)
                return
            answer = self.run(handle, in_base64(body))
            if writes:
                self.state["since"].setdefault(name, time.monotonic())
        if writes:
            with self.state["counting"]:
                self.state["writes"] -= 1
        self.send(self.changed(answer, url.path, query, name))

    def run(self, handle: Any, body: bytes) -> bytes:
        """Return the emulator's answer."""
        there, here = (self.rfile, self.wfile), (io.BytesIO(body), io.BytesIO())
        self.rfile, self.wfile = here
        self.headers.replace_header("Content-Length", str(len(body))) if body else None
        try:
            handle()
            return here[1].getvalue()
        finally:
            self.rfile, self.wfile = there

    def changed(self, answer: bytes, path: str, query: dict[str, list[str]], name: str) -> bytes:
        head, _, body = answer.partition(b"\r\n\r\n")
        if path.endswith("/o") and self.command == "GET":
            self.faults.listings += 1
            body = self.listed(body)
        elif "alt" in query and self.command == "GET":
            self.faults.reads[name] += 1
            if "Range" in self.headers and self.by_chance("short", self.faults.short):
                body = body[: len(body) // 2]
        length = b"Content-Length: %d" % len(body)
        head = re.sub(rb"Content-Length: \d+", length, head, flags=re.IGNORECASE)
        return head + b"\r\n\r\n" + body

    def listed(self, body: bytes) -> bytes:
        """Return a listing without the objects that are too new."""
        if not self.faults.late or not body.startswith(b"{"):
            return body
        found, since = json.loads(body), self.state["since"]
        old = time.monotonic() - self.faults.late
        found["items"] = [each for each in found["items"] if since.get(each["name"], 0) < old]
        return json.dumps(found).encode()

    def send(self, answer: bytes) -> None:
        if self.by_chance("lost", self.faults.lost):
            answer = b""
        elif self.by_chance("cut", self.faults.cut):
            answer = answer[: self.faults.chance.randrange(len(answer))]
        with contextlib.suppress(OSError):
            self.wfile.write(answer)
        self.close_connection = True

    def refuse(self, code: int) -> None:
        text = json.dumps({"error": {"code": code, "message": "not now"}}).encode()
        head = f"HTTP/1.0 {code} No\r\nContent-Type: application/json\r\n"
        self.wfile.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        self.close_connection = True

    def by_chance(self, what: str, probability: float) -> bool:
        with self.state["counting"]:
            happens = self.faults.chance.random() < probability
            self.faults.done[what] += happens
        return happens

    def exists(self, name: str) -> bool:
        try:
            self.state["storage"].get_file_obj(BUCKET, name)
        except Exception:
            return False
        return True

    @staticmethod
    def name_of(path: str, query: dict[str, list[str]], body: bytes) -> str:
        """Return the name of the object that a request is about; "" if there is none."""
        if "name" in query:
            return query["name"][0]
        if match := re.search(r"/o/(.+?)(?:/compose)?$", path):
            return unquote(match[1])
        found = re.search(rb'"name": *"([^"]+)"', body[:2000]) if "/upload/" in path else None
        return found[1].decode() if found else ""


def in_base64(body: bytes) -> bytes:
    """Return a body with its file in base64: the emulator loses a line's end at a file's end."""
    match = re.fullmatch(rb"(--==0==\n.*?\n--==0==\n[^\n]*\n)\n(.*)(\n--==0==--)", body, re.DOTALL)
    if match is None:
        return body
    coding = b"Content-Transfer-Encoding: base64\n\n"
    return match[1] + coding + base64.b64encode(match[2]) + match[3]


@contextlib.contextmanager
def bucket(faults: Faults | None = None) -> Iterator[tuple[str, Faults]]:
    """Run a server with an empty bucket; yield its address and its faults."""
    faults = faults or Faults()
    storage = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)._storage
    state = {
        "storage": storage,
        "lock": threading.Lock(),
        "counting": threading.Lock(),
        "since": {},
        "writes": 0,
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, faults, state))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(address: str) -> dict[str, str]:
    """Return the variables with which gcsfs finds a server, and asks no other one."""
    return {
        "STORAGE_EMULATOR_HOST": address,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "FSSPEC_GS_TOKEN": "anon",
        "FSSPEC_GS_PROJECT": "project",
    }


@contextlib.contextmanager
def known_bucket(faults: Faults | None = None) -> Iterator[Faults]:
    """Run a server that ``gs://`` means in this process, and in those that it starts."""
    import fsspec
    from fsspec.config import conf

    with bucket(faults) as (address, own), pytest.MonkeyPatch.context() as patched:
        for name, value in environment(address).items():
            patched.setenv(name, value)
        patched.setitem(conf, "gs", {"token": "anon", "project": "project"})
        import gcsfs
        import gcsfs.retry

        gcsfs.GCSFileSystem.clear_instance_cache()
        patched.setattr(gcsfs.retry.asyncio, "sleep", _short_sleep(gcsfs.retry.asyncio.sleep))
        assert fsspec.get_filesystem_class("gs")
        yield own
        gcsfs.GCSFileSystem.clear_instance_cache()


def _short_sleep(sleep: Any) -> Any:
    async def short(seconds: float, *args: Any) -> Any:
        return await sleep(seconds / 500, *args)

    return short


if __name__ == "__main__":  # until its stdin is closed
    with bucket() as (own_address, _):
        print(own_address, flush=True)
        sys.stdin.read()
