"""Files at a URL that fsspec knows: faults are retried, requests are few, large and parallel.

Invariants: whatever may pass (5xx and 429 answers, cut connections, short answers, timeouts) is
tried again, at most ``Patience.attempts`` times; every error names its file. What is in memory of a
read or a write is bounded by ``RECENT``, or ``TOGETHER`` times ``PART``.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from threading import Semaphore
from typing import Any

from xla_fsdp.checkpoint.errors import CheckpointError, T, failing
from xla_fsdp.checkpoint.files.tensor_source import (
    SMALL,
    Buffer,
    ByteSource,
    RecentBlocks,
    check_size,
)

# A put is seen in whole or not at all, and there are no folders to make.
OBJECT_STORES = frozenset({"gs", "gcs", "s3", "s3a", "az", "abfs", "abfss", "oss", "oci", "r2"})

PART = 1 << 25  # bytes of a request that writes, and of the longest that reads
TOGETHER = 8  # parts of a file that are on their way at a time
COMPOSED = 32  # parts that Google Cloud Storage puts together in one request
READ = 1 << 23  # bytes of a request that reads many small neighbours at once
SMALLEST_READ = 1 << 18
RECENT = 32 * READ  # bytes of such requests that are kept for the next neighbour

# Object stores' clients look for an object's version at the end, fsspec elsewhere for patterns.
_VERSION = re.compile(r"(#|\?\w+=)[^/]*$")
_PATTERN = re.compile(r"([*?\[])")

_FINAL = (
    CheckpointError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Patience:
    """How often a request that fails is repeated: ``attempts`` times in all, after pauses that
    double from ``first`` to at most ``longest`` seconds."""

    attempts: int = 6
    first: float = 0.25
    longest: float = 30.0

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait after each failure that is not the last."""
        for attempt in range(self.attempts - 1):
            # By chance, so that the ranks of a job do not come back all at once.
            yield min(self.first * 2**attempt, self.longest) * random.uniform(0.5, 1)

    def repeat(self, request: Callable[[], T]) -> T:
        """Return the result of ``request``, repeated while its error is one that may pass."""
        for pause in self.pauses():
            try:
                return request()
            except Exception as error:  # each file system has classes of its own
                if not may_pass(error):
                    raise
            time.sleep(pause)
        return request()


def may_pass(error: Exception) -> bool:
    """Return whether a request that failed may succeed when it is repeated: unless it is one that
    makes no sense, or was refused."""
    # gcsfs's own OSError for the status 403 has no number.
    if isinstance(error, _FINAL) or str(error).startswith("Forbidden"):
        return False
    code = str(getattr(error, "code", None) or getattr(error, "status", None))
    return not code.isdigit() or int(code) >= 500 or int(code) in (408, 425, 429)


class RemoteStorage:
    """A directory at a URL, of which small parts of so many files are read in turns; fsspec's own
    configuration has the options of the file system."""

    per_host = False

    def __init__(
        self, where: str, patience: Patience | None = None, files_at_once: int = 1
    ) -> None:
        import fsspec

        self.where = where
        self._patience = patience or Patience()
        self._recent = RecentBlocks(RECENT)
        self._slots = Semaphore(2 * TOGETHER)
        self._block = max(SMALLEST_READ, min(READ, RECENT // (2 * files_at_once)))
        try:
            self._fs, self._root = fsspec.core.url_to_fs(where)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{where}: {error}") from error
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._has_objects = not OBJECT_STORES.isdisjoint(protocols)
        self._refuse_misread_names()
        if self._has_objects:
            # gcsfs gives a body of any size to aiohttp as bytes, of which that warns above 1 MB,
            # because writing it keeps its event loop busy; nothing else runs on that loop.
            warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)

    def names(self, folder: str = "") -> list[str]:
        return sorted(name for name, _ in self._list(folder) if not name.startswith("."))

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: e["size"] for name, e in self._list(folder) if e["type"] == "file"}

    def tree(self) -> dict[str, dict[str, int]]:
        find = partial(self._fs.find, self._root, maxdepth=2, detail=True)
        found = self._ask("", "cannot be listed", find, missing={})
        folders: dict[str, dict[str, int]] = {}
        for path, each in found.items():
            folder, slash, name = path.removeprefix(f"{self._root}/").partition("/")
            if slash and each["type"] == "file":
                folders.setdefault(folder, {})[name] = each["size"]
        return folders

    def read(self, name: str) -> bytes:
        return self._ask(name, "cannot be read", lambda: self._small(name))

    def find(self, name: str) -> bytes | None:
        return self._ask(name, "cannot be read", lambda: self._small(name), missing=None)

    def source(self, name: str, nbytes: int | None = None) -> ByteSource:
        if nbytes is None:
            nbytes = self._ask(name, "cannot be read", lambda: self._fs.size(self._path(name)))
        return RemoteFile(self, name, nbytes)

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        path = self._path(name)
        with failing(self._url(name), errors=Exception):
            if self._has_objects and hasattr(self._fs, "merge"):
                self._write_parts(path, chunks)
                return
            self._make_folder(path)
            try:
                if isinstance(chunks, Sequence):
                    self._patience.repeat(lambda: self._write(path, chunks))
                else:
                    self._write(path, chunks)
            except BaseException:
                with suppress(Exception):  # there may be a partial file
                    self._fs.rm_file(path)
                raise

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        folder, _, base = path.rpartition("/")
        if self._has_objects:
            self._ask(name, "could not be written", lambda: self._fs.pipe_file(path, data))
            return
        hidden = f".{base}.{secrets.token_hex(4)}.tmp"
        self.write(os.path.join(os.path.dirname(name), hidden), [data])
        # Atomic in most file systems.
        self._ask(name, "could not be written", lambda: self._fs.mv(f"{folder}/{hidden}", path))

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        self._make_folder(path)
        with failing(self._url(name), errors=Exception), suppress(FileExistsError):
            self._patience.repeat(lambda: self._fs.pipe_file(path, data, mode="create"))
            return True
        # It is this caller's if the answer to its own request was lost.
        return self.find(name) == data

    def delete(self, name: str) -> None:
        remove = partial(self._fs.rm_file, self._path(name))
        self._ask(name, "could not be removed", remove, missing=None)

    def delete_folder(self, folder: str, first: str) -> None:
        path = self._path(folder)

        def remove() -> None:
            found = {} if self._has_objects else self._fs.info(path)
            if found.get("type") == "link" or found.get("islink"):
                self._fs.rm_file(path)
                return
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{path}/{first}")
            self._fs.rm(path, recursive=True)

        self._ask(folder, "could not be removed", remove, missing=None)

    def sweep(self, folder: str) -> None:
        """Nothing: a store has no locks. ``delete_folder`` deletes what is hidden, too."""

    def lasting_problems(self, check: Callable[[], list[str]]) -> list[str]:
        for pause in self._patience.pauses():
            problems = check()
            if not problems:
                return []
            if pause > 4:
                return problems
            time.sleep(pause)
        return check()

    # ------------------------------------------------------------ requests

    def _ask(self, name: str, what: str, request: Callable[[], Any], **missing: Any) -> Any:
        """Return what a request returns, or ``missing`` if there is no such file."""

        def anew() -> Any:
            self._fs.invalidate_cache()  # other machines write here too
            return request()

        with failing(self._url(name), what, Exception):
            try:
                return self._patience.repeat(anew)
            except FileNotFoundError:
                if not missing:
                    raise
        return missing["missing"]

    def _list(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of what is in a folder, and what fsspec says of it."""
        path = self._path(folder)
        ask = partial(self._fs.ls, path, detail=True)
        for each in self._ask(folder, "cannot be listed", ask, missing=[]):
            if each["name"].strip("/") != path.strip("/"):
                yield each["name"].rstrip("/").rpartition("/")[2], each

    def _small(self, name: str) -> Any:
        path = self._path(name)
        found = self._fs.info(path)
        if found["type"] not in ("file", "link"):  # opening a pipe would wait for a writer
            raise CheckpointError(f"{self._url(name)}: cannot be read: it is no regular file")
        check_size(self._url(name), found["size"] or 0, SMALL)
        return self._fs.cat_file(path)

    def _range(self, name: str, start: int, stop: int) -> bytes:
        path = self._path(name)

        def ask() -> bytes:
            data = self._fs.cat_file(path, start=start, end=stop)
            if len(data) != stop - start:
                raise OSError(f"ends at byte {start + len(data)}: truncated")
            return data

        return self._ask(name, "cannot be read", ask)

    def _make_folder(self, path: str) -> None:
        if not self._has_objects:
            folder = path.rpartition("/")[0]
            with failing(path, errors=Exception):
                self._patience.repeat(lambda: self._fs.makedirs(folder, exist_ok=True))

    # ------------------------------------------------------------ writing

    def _write(self, path: str, chunks: Iterable[Buffer]) -> None:
        file = self._fs.open(path, "wb")
        try:
            for chunk in chunks:
                file.write(chunk)
        except BaseException:
            # Closing would complete the upload of what is there, and so would the destructor.
            with suppress(Exception):
                file.discard()
            with suppress(Exception):  # not every file system's files have it to set
                file.closed = True
            raise
        file.close()

    def _write_parts(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Write parts at the same time, as objects of their own, and let the store join them."""
        folder, _, base = path.rpartition("/")
        hidden = f"{folder}/.{base}.{secrets.token_hex(4)}"
        parts, written = _parts(chunks), list[str]()
        first, second = next(parts, b""), next(parts, None)
        if second is None:
            self._pipe(path, first)
            return
        parts = chain((first, second), parts)
        del first, second  # or they would be in memory until the end
        try:
            with ThreadPoolExecutor(TOGETHER) as pool:
                while batch := list(islice(parts, TOGETHER)):
                    names = [f"{hidden}.{len(written) + i:05d}" for i in range(len(batch))]
                    written += names
                    list(pool.map(self._pipe, names, batch))
                    batch.clear()
            self._join(path, hidden, written)
        finally:
            for part in written:
                with suppress(Exception):  # a part that stays does no harm
                    self._patience.repeat(partial(self._fs.rm_file, part))

    def _pipe(self, path: str, data: bytes) -> None:
        self._patience.repeat(lambda: self._fs.pipe_file(path, data))

    def _join(self, path: str, hidden: str, written: list[str]) -> None:
        """Join the parts, ``COMPOSED`` at a time."""
        parts = list(written)
        while len(parts) > COMPOSED:
            groups = [parts[at : at + COMPOSED] for at in range(0, len(parts), COMPOSED)]
            parts = [f"{hidden}.{len(written) + i:05d}" for i in range(len(groups))]
            written += parts
            for target, group in zip(parts, groups, strict=True):
                self._patience.repeat(partial(self._fs.merge, target, group))
        self._patience.repeat(lambda: self._fs.merge(path, parts))

    def _refuse_misread_names(self) -> None:
        # What is written there is not found again, or something else is.
        misread = _VERSION if self._has_objects else _PATTERN
        if found := misread.search(self._root):
            raise CheckpointError(
                f"{self.where}: {type(self._fs).__name__} does not take {found[1]!r} there as part "
                f"of a name; choose a name without"
            )
        if self._has_objects and not self._root.strip("/"):
            raise CheckpointError(f"{self.where}: names no bucket, or nothing in it")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _url(self, name: str) -> str:
        return os.path.join(self.where, name) if name else self.where


def _parts(chunks: Iterable[Buffer]) -> Iterator[bytes]:
    """Yield the bytes of all chunks, ``PART`` at a time."""
    part = bytearray()
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            taken = rest[: PART - len(part)]
            part += taken
            rest = rest[len(taken) :]
            if len(part) == PART:
                yield bytes(part)
                part = bytearray()
    if part:
        yield bytes(part)


class RemoteFile:
    """The bytes of a remote file. Neighbours that are read one after the other come in one
    request."""

    def __init__(self, storage: RemoteStorage, name: str, nbytes: int) -> None:
        self.nbytes, self.place = nbytes, storage._path(name)
        self._ask = partial(storage._range, name)
        self._block, self._recent, self._slots = storage._block, storage._recent, storage._slots

    def read_into(self, start: int, buffer: memoryview) -> None:
        stop = start + len(buffer)
        if len(buffer) > self._block // 2:
            self._read_parts(start, buffer)
            return
        for index in range(start // self._block, -(-stop // self._block)):
            low = index * self._block
            high = min(low + self._block, max(self.nbytes, stop))
            block = self._recent.get((self.place, index), partial(self._ask, low, high))
            begin, end = max(start, low), min(stop, high)
            buffer[begin - start : end - start] = block[begin - low : end - low]

    def _read_parts(self, start: int, buffer: memoryview) -> None:
        """Read a long range by requests of ``PART`` bytes at the same time."""

        def read(at: int) -> None:
            with self._slots:
                part = buffer[at : at + PART]
                part[:] = self._ask(start + at, start + at + len(part))

        starts = range(0, len(buffer), PART)
        with ThreadPoolExecutor(min(TOGETHER, len(starts))) as pool:
            for _ in pool.map(read, starts):
                pass
