"""Files that are written beside their places and get their names together, at the end.

Words: a *temporary file* lies beside the final one, under a name that starts with a dot and that
no checkpoint pattern matches; to *commit* is to give all files their names.
Always true: until the commit every final name holds what it held before; whatever is raised, no
temporary file and no directory made for one stays behind; a link at a final name is replaced, not
followed.
What is written is the caller's business.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from types import TracebackType
from typing import Self

from xla_fsdp.checkpoint.errors import CheckpointError

EXISTS = "exists already; remove it, choose another save_path, or overwrite it (--overwrite)"


class PendingFiles:
    """A context in which files are written; they are gone at its end unless it was committed.

    Args:
        overwrite: whether existing files may be replaced.
    """

    def __init__(self, *, overwrite: bool) -> None:
        self._overwrite = overwrite
        self._temporary: dict[str, str] = {}  # by final path, in the order of the commit
        self._directories: list[str] = []

    def add(self, path: str) -> str:
        """The temporary path for a file that will be called ``path``; directories are made.

        Raises:
            CheckpointError: if the directory cannot be made.
        """
        directory, name = os.path.split(path)
        self._make_directory(directory or ".")
        temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.tmp")
        self._temporary[path] = temporary
        return temporary

    def commit(self) -> None:
        """Give all files their names, in the order in which they were added.

        Raises:
            CheckpointError: if a file exists and may not be replaced, or cannot be renamed.
        """
        taken = [path for path in self._temporary if os.path.lexists(path)]
        if taken and not self._overwrite:
            raise CheckpointError([f"{path}: {EXISTS}" for path in taken])
        for path, temporary in list(self._temporary.items()):
            with writing(path):
                sync(temporary)
                os.replace(temporary, path)
            del self._temporary[path]
            _sync_directory(os.path.dirname(path) or ".")
        self._directories.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for temporary in self._temporary.values():
            with suppress(OSError):
                os.unlink(temporary)
        for directory in reversed(self._directories):
            with suppress(OSError):  # what others have put there stays
                os.rmdir(directory)

    def _make_directory(self, directory: str) -> None:
        if os.path.isdir(directory):
            return
        self._make_directory(os.path.dirname(directory) or ".")
        with writing(directory):
            os.mkdir(directory)
        self._directories.append(directory)


class writing:  # noqa: N801 (a context manager, used like a function)
    """Turns what goes wrong while a file is written into one line that names it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # torch turns a failed write into a RuntimeError of several lines.
        if isinstance(error, OSError | RuntimeError):
            why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise CheckpointError(f"{self._path}: could not be written: {why}") from error


def sync(path: str) -> None:
    """Have a file's bytes on disk before its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(directory: str) -> None:
    """Make the new name itself durable, where the file system can do that."""
    with suppress(OSError):
        sync(directory)
