"""Read, write and list files below a directory, local or remote; write files atomically.

Invariants: a local file gets its name only when it is complete and on disk. A remote file may be
incomplete unless it is announced, or was written by ``put``; what an exception interrupts is not
uploaded.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from glob import escape, glob
from pathlib import Path
from weakref import finalize

from xla_fsdp.checkpoint.errors import CheckpointError, failing
from xla_fsdp.checkpoint.files.remote_storage import RemoteStorage
from xla_fsdp.checkpoint.files.tensor_source import (
    LOCAL,
    Buffer,
    ByteSource,
    LocalFile,
    full_path,
    read_chunks,
    read_small_file,
    same_bytes,
)

ABSENT = (FileNotFoundError, NotADirectoryError)  # there is no such folder
EXISTS = "exists already; remove it, choose another save_path, or overwrite it (--overwrite)"


def open_storage(directory: str | os.PathLike[str], files_at_once: int = 1) -> Storage:
    """Return the storage at a path, or at a URL for fsspec (``gs://bucket/run``).

    Args:
        directory: the path or URL.
        files_at_once: number of files of which small parts are read in turns.

    Raises:
        CheckpointError: if fsspec does not know the URL's scheme, or lacks a package for it; if the
            store takes characters of the URL for something else.
    """
    where = full_path(directory)
    if not is_url(where):
        return LocalStorage(where)
    # To an object store, "run//job.json" is another object than "run/job.json".
    scheme, mark, rest = where.partition("://")
    return RemoteStorage(f"{scheme}{mark}{rest.rstrip('/')}", files_at_once=files_at_once)


def is_url(path: str) -> bool:
    """Return whether a path is that of a remote file."""
    return "://" in path and not path.startswith(LOCAL)


def split_path(path: str) -> tuple[str, str]:
    """Return the folder of a path or URL, and the name in it: of ``memory://x`` those are
    ``memory://`` and ``x``."""
    if not is_url(path):
        return os.path.split(path)
    scheme, _, rest = path.partition("://")
    folder, _, name = rest.rpartition("/")
    return f"{scheme}://{folder}", name


class LocalStorage:
    """Files below a local directory, which may be on a network file system. Names are relative to
    it, with slashes.

    Every method raises ``CheckpointError``, with the path and the reason, if it fails.

    Args:
        where: the directory.
    """

    per_host = True  # whether other hosts may have another directory of this name

    def __init__(self, where: str) -> None:
        self.where = where
        self._root = Path(where)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of files and folders in a folder, sorted, without hidden ones; [] if
        there is no such folder."""
        found: list[str] = []
        path = self._root / folder
        # A run that is a file is a mistake; files in it that are named like its folders are none.
        missing = suppress(*ABSENT) if folder else suppress(FileNotFoundError)
        with failing(path, "cannot be listed"), missing:
            found = os.listdir(path)
        return sorted(name for name in found if not name.startswith("."))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file in a folder by its name; {} if there is no such folder."""
        found: dict[str, int] = {}
        path = self._root / folder
        with failing(path, "cannot be listed"), suppress(*ABSENT), os.scandir(path) as entries:
            for entry in entries:
                with suppress(OSError):  # a temporary file, renamed meanwhile; a link to itself
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def tree(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the files in every folder, by its name; asks the store once."""
        return {name: self.sizes(name) for name in self.names() if (self._root / name).is_dir()}

    def read(self, name: str) -> bytes:
        """Read a small file, of at most ``SMALL`` bytes."""
        return read_small_file(self._root / name)

    def find(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        try:
            return read_small_file(self._root / name)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def source(self, name: str, nbytes: int | None = None) -> ByteSource:
        """Return a source that reads ranges of a file; its size is asked for, unless given."""
        return LocalFile(str(self._root / name))

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write a file, and create the folders that it needs."""
        path = str(self._root / name)
        with AtomicFiles(overwrite=True) as files:
            temporary = files.add(path)
            with failing(path), open(temporary, "wb") as file:
                file.writelines(chunks)
            files.commit()

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, which nobody ever sees in part."""
        self.write(name, [data])

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file if there is none of this name; return whether this caller did.

        Of several callers one succeeds; on a remote file system, if that has such a request.
        """
        path = self._root / name
        with failing(path):
            make_folder(path.parent)
            try:
                with open(path, "xb") as file:
                    file.write(data)
            except FileExistsError:
                return False
            except OSError:
                _remove(str(path))
                with suppress(OSError):  # other ranks may have put files there
                    path.parent.rmdir()
                raise
        return True

    def delete(self, name: str) -> None:
        """Delete a file or a link, durably, if it exists."""
        path = self._root / name
        with failing(path, "could not be removed"), suppress(FileNotFoundError):
            os.unlink(path)
            _sync_folder(path.parent)

    def delete_folder(self, folder: str, first: str) -> None:
        """Delete a folder, if it exists, and of its content the file ``first`` before all else; of
        a link, only the link. A folder with a mount is left, and an error."""
        path = self._root / folder
        if path.is_symlink():
            self.delete(folder)
            return
        inside = (os.path.join(above, each) for above, names, _ in os.walk(path) for each in names)
        if mounted := [each for each in (str(path), *inside) if os.path.ismount(each)]:
            raise CheckpointError(
                f"{path}: could not be removed: what is mounted at {mounted[0]} is not this run's"
            )
        self.delete(f"{folder}/{first}")
        with failing(path, "could not be removed"), suppress(FileNotFoundError):
            shutil.rmtree(path)

    def sweep(self, folder: str) -> None:
        """Delete what killed processes have left in a folder under hidden names, if it can be told
        that they do not live any more."""
        remove_abandoned(str(self._root / folder))

    def lasting_problems(self, check: Callable[[], list[str]]) -> list[str]:
        """Return the problems that ``check`` finds in a listing.

        A remote store may list a new file late, so it is asked again for some seconds.
        """
        return check()


Storage = LocalStorage | RemoteStorage
"""Both have the methods that ``LocalStorage`` describes."""


# ---------------------------------------------------------------- atomic writing


class AtomicFiles:
    """A context that writes files or directories under temporary names, until ``commit`` renames.

    Without ``commit``, its end deletes the temporary files and the directories created for them. A
    link at a final name is replaced, not followed.

    Args:
        overwrite: whether existing files may be replaced.
        verify: whether to read files again that were uploaded, and compare.
    """

    def __init__(self, *, overwrite: bool, verify: bool = False) -> None:
        self._overwrite, self._verify = overwrite, verify
        self._temporary: dict[str, str] = {}  # by final path, in the order of the commit
        self._made: list[Path] = []
        self._staging: dict[str | None, Staging] = {}  # by the folder that it is in

    def add(self, path: str) -> str:
        """Return the path at which to make the file or directory for ``path``; create the
        directory that it will be in.

        For a URL it is on this machine, from which ``commit`` uploads it.
        """
        folder, name = (None if is_url(path) else os.path.dirname(path)), os.path.basename(path)
        with failing(path):
            self._made += [] if folder is None else make_folder(Path(folder))
            staging = self._staging[folder] = self._staging.get(folder) or Staging(folder)
        self._temporary[path] = os.path.join(staging.path, f"{len(self._temporary)}-{name}")
        return self._temporary[path]

    def commit(self) -> None:
        """Sync all files and give them their final names, in the order in which they were added.

        Raises:
            CheckpointError: if a file exists and must not be replaced, or cannot be renamed.
        """
        taken = [path for path in self._temporary if exists(path)]
        if taken and not self._overwrite:
            raise CheckpointError([f"{path}: {EXISTS}" for path in taken])
        for path, temporary in self._temporary.items():
            if not is_url(path):
                with failing(path):
                    for name in os.listdir(temporary) if os.path.isdir(temporary) else ():
                        sync(os.path.join(temporary, name))
                    sync(temporary)
        for path, temporary in self._temporary.items():
            if is_url(path):
                upload(temporary, path, verify=self._verify)
                _remove(temporary)
            else:
                with failing(path):
                    _replace(temporary, path)
                _sync_folder(Path(path).parent)
        self._made.clear()

    def __enter__(self) -> AtomicFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for staging in self._staging.values():
            staging.remove()
        for folder in reversed(self._made):
            with suppress(OSError):  # another process may have put files there
                folder.rmdir()


class Staging:
    """A folder for files that are not complete, hidden in another one, which goes with this object
    or by ``remove``; that of a killed process by ``remove_abandoned``, as nobody locks it then.

    Args:
        above: folder that it is in; None for that of temporary files of this machine.
    """

    def __init__(self, above: str | None = None) -> None:
        if above is None:
            above = tempfile.gettempdir()
            remove_abandoned(above)
        lock = None
        while lock is None:
            self.path = os.path.join(above, f".{secrets.token_hex(8)}.xla_fsdp.tmp")
            os.mkdir(self.path, 0o700)
            lock = _locked(self.path)
        self.remove = finalize(self, _release, self.path, lock, os.getpid())


def _locked(folder: str) -> int | None:
    """Lock a new folder, if the file system can; return the descriptor, or None if another process
    has taken it for an abandoned one meanwhile."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if os.path.isdir(folder):
        return descriptor
    os.close(descriptor)
    return None


def _release(folder: str, lock: int, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it, which ends
        _remove(folder)
        os.close(lock)


def remove_abandoned(folder: str) -> None:
    """Delete what killed processes have left in a folder; nothing if the file system has no
    locks."""
    for path in glob(os.path.join(escape(folder), ".*.xla_fsdp.tmp*")):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(descriptor)


def exists(path: str) -> bool:
    """Return whether there is something at a path or URL."""
    if not is_url(path):
        return os.path.lexists(path)
    folder, name = split_path(path.rstrip("/"))
    return name in open_storage(folder).names()


def find_special(path: str) -> list[str]:
    """Return a line if there is something at a local path that is neither file nor directory: it is
    never replaced."""
    if os.path.islink(path):
        what = "a symbolic link"
    elif not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path):
        return []
    else:
        what = "a device or a pipe"
    return [f"{path}: is {what}, which is never replaced; choose another save_path"]


def upload(path: str, url: str, *, verify: bool) -> None:
    """Write a local file, or all files of a directory, to a URL."""
    if os.path.isdir(path):
        # The description of a directory of torch.distributed.checkpoint, .metadata, is the last.
        for name in sorted(os.listdir(path), key=lambda name: (name.startswith("."), name)):
            upload(os.path.join(path, name), f"{url.rstrip('/')}/{name}", verify=verify)
        return
    folder, name = split_path(url)
    storage, file = open_storage(folder), LocalFile(path)
    storage.write(name, read_chunks(file))
    there = storage.source(name)
    if there.nbytes != file.nbytes:
        raise CheckpointError(f"{url}: has {there.nbytes} bytes, but {file.nbytes} were written")
    if verify and not same_bytes(there, file):
        raise CheckpointError(f"{url}: has other bytes than were written")


def fetch(url: str, folder: str) -> str:
    """Copy a file at a URL into a local folder; return its path."""
    above, name = split_path(url)
    source, path = open_storage(above).source(name), os.path.join(folder, name)
    with failing(path), open(path, "wb") as file:
        file.writelines(read_chunks(source))
    return path


def make_folder(path: Path) -> list[Path]:
    """Create a folder and its missing parents, durably; return those created, outermost first."""
    if path.is_dir():
        return []
    made = make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)
    return [*made, path]


def sync(path: str | Path) -> None:
    """Flush a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Make created, renamed and deleted names durable, if the file system can."""
    with suppress(OSError):
        sync(path)


def _replace(temporary: str, path: str) -> None:
    if not (os.path.isdir(path) and os.path.isdir(temporary)):
        os.replace(temporary, path)
        return
    # No system call replaces a directory that is not empty.
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
