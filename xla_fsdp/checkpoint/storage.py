"""Named files below one directory: on this machine, or wherever fsspec reaches.

Words: a *folder* is a part of a file's name up to a slash; names are relative to the directory.
Always true: a local file that has its name is complete and on disk, whatever happens while it is
written (it is written aside, synced, then renamed); an object store has no renaming, so there a
file may appear before all is known to be well: only ``step_directory``'s marker, which is written
in one request, says that files are complete.
What is in the files is ``rank_file``'s business, their names are ``step_directory``'s.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from xla_fsdp.checkpoint.byte_source import ByteSource, LocalFile
from xla_fsdp.checkpoint.errors import CheckpointError

Chunk = bytes | memoryview

LOCAL = "file://"


class Storage(Protocol):
    """Files below one directory."""

    where: str
    """The directory, as the user named it."""

    def names(self, folder: str = "") -> list[str]:
        """What is directly in a folder, sorted; without hidden files; [] if it does not exist."""

    def read(self, name: str) -> bytes:
        """A whole file.

        Raises:
            CheckpointError: if it cannot be read.
        """

    def source(self, name: str) -> ByteSource:
        """A file, to be read in parts."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Make a file of these bytes, and the folders that it needs.

        Raises:
            CheckpointError: naming the file and the reason.
        """

    def claim(self, name: str) -> bool:
        """Make an empty file; whether it did not exist before. False if that cannot be told."""

    def delete(self, name: str) -> None:
        """Remove a file, durably, if it exists."""

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it, if it exists."""


def open_storage(directory: str | os.PathLike[str]) -> Storage:
    """Where ``directory`` points: a path, or a URL that fsspec knows (``gs://bucket/run``).

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
        """See ``Storage``."""
        try:
            found = os.listdir(self._root / folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failure(self._root / folder, "cannot be listed", error) from error
        return sorted(name for name in found if not name.startswith("."))

    def read(self, name: str) -> bytes:
        """See ``Storage``."""
        try:
            return (self._root / name).read_bytes()
        except OSError as error:
            raise _failure(self._root / name, "cannot be read", error) from error

    def source(self, name: str) -> ByteSource:
        """See ``Storage``."""
        return LocalFile(str(self._root / name))

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See ``Storage``."""
        path = self._root / name
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            _make_folder(path.parent)
            _write_synced(aside, chunks)
            os.replace(aside, path)
            _sync_folder(path.parent)
        except OSError as error:
            raise _failure(path, "could not be written", error) from error
        finally:
            with suppress(OSError):
                os.unlink(aside)

    def claim(self, name: str) -> bool:
        """See ``Storage``."""
        path = self._root / name
        try:
            _make_folder(path.parent)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return False
        except OSError as error:
            raise _failure(path, "could not be written", error) from error
        return True

    def delete(self, name: str) -> None:
        """See ``Storage``."""
        path = self._root / name
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
                _sync_folder(path.parent)
        except OSError as error:
            raise _failure(path, "could not be removed", error) from error

    def delete_folder(self, folder: str) -> None:
        """See ``Storage``."""
        path = self._root / folder
        try:
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
        except OSError as error:
            raise _failure(path, "could not be removed", error) from error


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
        """See ``Storage``."""
        path = self._path(folder)
        self._fs.invalidate_cache()  # other machines write here, too
        try:
            found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:  # each file system has its own
            raise _failure(self._url(folder), "cannot be listed", error) from error
        names = (each.rstrip("/").rpartition("/")[2] for each in found)
        return sorted(name for name in names if name and not name.startswith("."))

    def read(self, name: str) -> bytes:
        """See ``Storage``."""
        try:
            return self._fs.cat_file(self._path(name))
        except Exception as error:
            raise _failure(self._url(name), "cannot be read", error) from error

    def source(self, name: str) -> ByteSource:
        """See ``Storage``."""
        return RemoteFile(self._fs, self._path(name), self._url(name))

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See ``Storage``."""
        path = self._path(name)
        try:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._write(path, chunks)
        except Exception as error:
            with suppress(Exception):  # what had been written before the failure
                self._fs.rm_file(path)
            raise _failure(self._url(name), "could not be written", error) from error

    def claim(self, name: str) -> bool:
        """See ``Storage``: every rank sees the same files here, and rank 0 needs no proof."""
        return False

    def delete(self, name: str) -> None:
        """See ``Storage``."""
        try:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))
        except Exception as error:
            raise _failure(self._url(name), "could not be removed", error) from error

    def delete_folder(self, folder: str) -> None:
        """See ``Storage``."""
        try:
            with suppress(FileNotFoundError):
                self._fs.rm(self._path(folder), recursive=True)
        except Exception as error:
            raise _failure(self._url(folder), "could not be removed", error) from error

    def _write(self, path: str, chunks: Iterable[Chunk]) -> None:
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
        try:
            self.nbytes: int = fs.size(path)
        except Exception as error:
            raise _failure(url, "cannot be read", error) from error

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        if not len(buffer):
            return
        try:
            data = self._fs.cat_file(self._path, start=start, end=start + len(buffer))
        except Exception as error:
            raise _failure(self._url, "cannot be read", error) from error
        if len(data) != len(buffer):
            raise CheckpointError(f"{self._url}: ends at byte {start + len(data)}: truncated")
        buffer[:] = data


# ---------------------------------------------------------------- durability


def _make_folder(path: Path) -> None:
    """A folder and its parents, each entered durably into its own parent."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)


def _write_synced(path: Path, chunks: Iterable[Chunk]) -> None:
    with open(path, "xb", buffering=0) as file:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make a new or changed name durable, where the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _failure(path: str | Path, what: str, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return CheckpointError(f"{path}: {what}: {reason}")
