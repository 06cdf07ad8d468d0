"""File systems of fsspec that are worse than object stores: no atomic puts, writes that fail.

``register()`` makes them known by their protocols; fsspec's own ``memory://`` shows a file from the
moment it is opened on.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile


class BufferedFile(AbstractBufferedFile):
    """Uploads what it has when it is closed, as gcsfs and s3fs do with files of one part."""

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.pipe_file(self.path, self.buffer.getvalue())
        return final


class Buffered(MemoryFileSystem):
    """An object store in memory, with a buffer before it."""

    protocol = "buffered"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("buffered://").strip("/")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and "data" not in options:
            return BufferedFile(self, path, mode, cache_type="none", block_size=1 << 20)
        return super()._open(path, mode, **options)


class Faulty(LocalFileSystem):
    """Local files written in place; each request fails with ``probability``, writes in the
    middle."""

    protocol = "faulty"
    probability = 0.0
    chance = random.Random()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def fail_by_chance(self) -> None:
        if self.chance.random() < self.probability:
            raise OSError("503 Service Unavailable")

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.fail_by_chance()
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, *args: Any, **options: Any) -> bytes:
        self.fail_by_chance()
        return super().cat_file(path, *args, **options)

    def rm(self, path: Any, *args: Any, **options: Any) -> None:
        self.fail_by_chance()
        super().rm(path, *args, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode != "wb":
            return file
        return InPieces(self, file)


class InPieces:
    """A file that is written a piece at a time."""

    def __init__(self, fs: Faulty, file: Any) -> None:
        self._fs, self._file = fs, file

    def write(self, data: Any) -> int:
        view = memoryview(data)
        for at in range(0, len(view), 1000):
            self._fs.fail_by_chance()
            self._file.write(view[at : at + 1000])
            self._file.flush()
        return len(view)

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        self._file.close()  # what is there stays there

    def __enter__(self) -> InPieces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def register() -> None:
    """Make the file systems known to fsspec."""
    for each in (Buffered, Faulty):
        fsspec.register_implementation(each.protocol, each, clobber=True)
