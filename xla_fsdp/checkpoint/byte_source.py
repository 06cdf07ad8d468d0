"""Random access to bytes: of a local file, of any seekable file object, of a tensor in memory.

Words: a *source* has a number of bytes and fills a buffer from any offset.
Always true: a read gives exactly the bytes asked for or raises; sources may be read by several
threads at once; no source reads more than it is asked for.
What the bytes mean is ``safetensors_file``'s and ``torch_file``'s to know.
"""

from __future__ import annotations

import io
import os
import stat
from threading import Lock
from typing import IO, Protocol

import torch
from torch import Tensor

from xla_fsdp.checkpoint.errors import CheckpointError


class ByteSource(Protocol):
    """Bytes that can be read from any offset."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on; raise if there are not that many."""


class LocalFile:
    """A file on this machine.

    It is opened for every read, so that any number of ranks' files may be in use at once, and
    nobody has to close them.

    Raises:
        CheckpointError: if it is no regular file, cannot be opened, or ends before what is read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes = self._size()

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(start)
                self._fill(file, start, buffer)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _size(self) -> int:
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise CheckpointError(f"{self.path}: cannot be read: it is {kind}")
        return status.st_size

    def _fill(self, file: io.FileIO, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = file.readinto(buffer[done:])
            if not count:
                raise CheckpointError(f"{self.path}: ends at byte {start + done}: truncated")
            done += count


class SeekableFile:
    """A binary file object with ``seek`` and ``read``, such as one that fsspec opened.

    Args:
        file: stays the caller's to close.
        name: for messages.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.path = name
        self._file = file
        self._lock = Lock()
        self.nbytes = file.seek(0, os.SEEK_END)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        with self._lock:
            self._file.seek(start)
            done = 0
            while done < len(buffer):
                data = self._file.read(len(buffer) - done)
                if not data:
                    raise CheckpointError(f"{self.path}: ends at byte {start + done}: truncated")
                buffer[done : done + len(data)] = data
                done += len(data)


class TensorBytes:
    """The bytes of a tensor, which is copied to the CPU if it is elsewhere."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = bytes_of(tensor)
        self.nbytes = len(self._bytes)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        buffer[:] = self._bytes[start : start + len(buffer)]


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy (otherwise: of a copy)."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
