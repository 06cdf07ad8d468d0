"""Named files below one directory, on this machine or wherever fsspec reaches; atomic writing.

Invariants: a local file that has its name is complete and on disk, whatever happens while it is
written. An object store has no renaming, so a file may appear there before all is known to be well:
only a step's marker, which is written in one request, says that its files are complete.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.tensor_source import ByteSource, LocalFile

Buffer = bytes | memoryview

LOCAL = "file://"

EXISTS = "exists already; remove it, choose another save_path, or overwrite it (--overwrite)"


class Storage(Protocol):
    """Files below one directory. Their names are relative to it, with slashes."""

    where: str
    """The directory, as the user named it."""

    def names(self, folder: str = "") -> list[str]:
        """List what is directly in a folder, without hidden files; [] if it does not exist."""

    def read(self, name: str) -> bytes:
        """Read a whole file.

        Raises:
            CheckpointError: if it cannot be read.
        """

    def source(self, name: str) -> ByteSource:
        """Return a file, to be read in parts."""

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Make a file of these bytes, and the folders that it needs.

        Raises:
            CheckpointError: naming the file and the reason.
        """

    def claim(self, name: str) -> bool:
        """Make an empty file; return whether it did not exist. False if that cannot be told."""

    def delete(self, name: str) -> None:
        """Remove a file, durably, if it exists."""

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it, if it exists."""


def open_storage(directory: str | os.PathLike[str]) -> Storage:
    """Return the storage at a path, or at a URL that fsspec knows (``gs://bucket/run``).

    Raises:
        CheckpointError: if fsspec does not know the kind of URL, or needs a package for it.
    """
    where = os.fspath(directory)
    if where.startswith(LOCAL):
        return LocalStorage(where.removeprefix(LOCAL))
    return RemoteStorage(where) if "://" in where else LocalStorage(where)


class LocalStorage:
    """A directory of this machine's, which may be on a network file system."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._root = Path(where)

    def names(self, folder: str = "") -> list[str]:
        found: list[str] = []
        path = self._root / folder
        with failing(path, "cannot be listed"), suppress(FileNotFoundError):
            found = os.listdir(path)
        return sorted(name for name in found if not name.startswith("."))

    def read(self, name: str) -> bytes:
        with failing(self._root / name, "cannot be read"):
            return (self._root / name).read_bytes()

    def source(self, name: str) -> ByteSource:
        return LocalFile(str(self._root / name))

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        path = str(self._root / name)
        with AtomicFiles(overwrite=True) as files:
            temporary = files.add(path)
            with failing(path), open(temporary, "xb", buffering=0) as file:
                for chunk in chunks:
                    rest = memoryview(chunk)
                    while rest:
                        rest = rest[file.write(rest) :]
            files.commit()

    def claim(self, name: str) -> bool:
        path = self._root / name
        try:
            make_folder(path.parent)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return False
        except OSError as error:
            raise _failure(path, "could not be written", error) from error
        return True

    def delete(self, name: str) -> None:
        path = self._root / name
        with failing(path, "could not be removed"), suppress(FileNotFoundError):
            os.unlink(path)
            _sync_folder(path.parent)

    def delete_folder(self, folder: str) -> None:
        path = self._root / folder
        with failing(path, "could not be removed"), suppress(FileNotFoundError):
            shutil.rmtree(path)


class RemoteStorage:
    """A directory of a file system that fsspec knows.

    Args:
        where: its URL; options of the file system come from fsspec's own configuration.
    """

    def __init__(self, where: str) -> None:
        import fsspec

        self.where = where
        try:
            self._fs, self._root = fsspec.core.url_to_fs(where)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{where}: {error}") from error

    def names(self, folder: str = "") -> list[str]:
        found: list[str] = []
        self._fs.invalidate_cache()  # other machines write here, too
        with failing(self._url(folder), "cannot be listed", Exception), suppress(FileNotFoundError):
            found = self._fs.ls(self._path(folder), detail=False)
        names = (each.rstrip("/").rpartition("/")[2] for each in found)
        return sorted(name for name in names if name and not name.startswith("."))

    def read(self, name: str) -> bytes:
        with failing(self._url(name), "cannot be read", Exception):
            return self._fs.cat_file(self._path(name))

    def source(self, name: str) -> ByteSource:
        return RemoteFile(self._fs, self._path(name), self._url(name))

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        path = self._path(name)
        with failing(self._url(name), errors=Exception):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                self._write(path, chunks)
            except Exception:
                with suppress(Exception):  # what had been written before the failure
                    self._fs.rm_file(path)
                raise

    def claim(self, name: str) -> bool:
        return False  # every rank sees the same files here, and rank 0 needs no proof

    def delete(self, name: str) -> None:
        with (
            failing(self._url(name), "could not be removed", Exception),
            suppress(FileNotFoundError),
        ):
            self._fs.rm_file(self._path(name))

    def delete_folder(self, folder: str) -> None:
        with (
            failing(self._url(folder), "could not be removed", Exception),
            suppress(FileNotFoundError),
        ):
            self._fs.rm(self._path(folder), recursive=True)

    def _write(self, path: str, chunks: Iterable[Buffer]) -> None:
        with self._fs.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _url(self, name: str) -> str:
        return f"{self.where.rstrip('/')}/{name}"


class RemoteFile:
    """A remote file's bytes, one request for each read; several threads may read at once."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs, self._path, self._url = fs, path, url
        with failing(url, "cannot be read", Exception):
            self.nbytes: int = fs.size(path)

    def read_into(self, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        with failing(self._url, "cannot be read", Exception):
            data = self._fs.cat_file(self._path, start=start, end=start + len(buffer))
        if len(data) != len(buffer):
            raise CheckpointError(f"{self._url}: ends at byte {start + len(data)}: truncated")
        buffer[:] = data


# ---------------------------------------------------------------- atomic writing


class AtomicFiles:
    """A context in which files (or directories) are written aside, to get their names together.

    At its end what was written is gone, and so are the directories made for it, unless ``commit``
    was called: until then every final name holds what it held before. A link at a final name is
    replaced, not followed.

    Args:
        overwrite: whether what exists may be replaced.
    """

    def __init__(self, *, overwrite: bool) -> None:
        self._overwrite = overwrite
        self._temporary: dict[str, str] = {}  # by final path, in the order of the commit
        self._folders: list[Path] = []

    def add(self, path: str) -> str:
        """Return the temporary path for what will be called ``path``, whose directory is made.

        It is in the same directory, under a hidden name that no checkpoint pattern matches.

        Raises:
            CheckpointError: if the directory cannot be made.
        """
        folder, name = os.path.split(path)
        with failing(folder):
            self._folders += make_folder(Path(folder))
        temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
        self._temporary[path] = temporary
        return temporary

    def commit(self) -> None:
        """Sync all files and give them their names, in the order in which they were added.

        Raises:
            CheckpointError: if one exists and may not be replaced, or cannot be renamed.
        """
        taken = [path for path in self._temporary if os.path.lexists(path)]
        if taken and not self._overwrite:
            raise CheckpointError([f"{path}: {EXISTS}" for path in taken])
        for path, temporary in list(self._temporary.items()):
            with failing(path):
                sync(temporary)
                _replace(temporary, path)
            del self._temporary[path]
            _sync_folder(Path(path).parent)
        self._folders.clear()

    def __enter__(self) -> AtomicFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for temporary in self._temporary.values():
            _remove(temporary)
        for folder in reversed(self._folders):
            with suppress(OSError):  # what others have put there stays
                folder.rmdir()


# What goes wrong with local files: torch turns a failed write into a RuntimeError of several lines.
# Each remote file system has its own errors.
LOCAL_ERRORS = (OSError, RuntimeError)


@contextmanager
def failing(
    path: str | Path,
    what: str = "could not be written",
    errors: type[Exception] | tuple[type[Exception], ...] = LOCAL_ERRORS,
) -> Iterator[None]:
    """Turn what goes wrong with a file into a ``CheckpointError`` of one line that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except errors as error:
        raise _failure(path, what, error) from error


def make_folder(path: Path) -> list[Path]:
    """Make a folder and its parents, each durably; return those that were not there."""
    if path.is_dir():
        return []
    made = make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)
    return [*made, path]


def sync(path: str | Path) -> None:
    """Have a file's bytes on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Make a new or changed name durable, where the file system can do that."""
    with suppress(OSError):
        sync(path)


def _replace(temporary: str, path: str) -> None:
    if not (os.path.isdir(path) and os.path.isdir(temporary)):
        os.replace(temporary, path)
        return
    # A directory with something in it cannot be replaced in one step.
    old = f"{temporary}.old"
    os.rename(path, old)
    os.rename(temporary, path)
    _remove(old)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        os.unlink(path)


def _failure(path: str | Path, what: str, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return CheckpointError(f"{path}: {what}: {reason or type(error).__name__}")
