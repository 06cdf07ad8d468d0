"""Copy tensors into files and compute their CRC-32: in parallel, a chunk at a time.

Invariants: memory is bounded by threads times ``CHUNK`` (twice that where the dtype changes); the
first error ends all threads and is raised; a copy returns CRC-32s without reading twice.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from xla_fsdp.checkpoint.checksum import combine, written
from xla_fsdp.checkpoint.storage import failing
from xla_fsdp.checkpoint.tensor_source import ByteSource, TensorSource, read_bytes

CHUNK = 1 << 24  # bytes: larger chunks are not faster, smaller ones cost more Python calls

Progress = Callable[[int], None]


def default_threads() -> int:
    """Return the number of threads that copy, where the user gives none."""
    return min(8, 2 * (os.cpu_count() or 1))


@dataclass(frozen=True)
class CopyTask:
    """A tensor, and the offset in the file at ``path`` where its bytes belong."""

    source: TensorSource
    path: str
    start: int


@dataclass(frozen=True)
class Chunk:
    """Bytes ``start`` to ``start + length`` of the source with this index."""

    index: int
    start: int
    length: int


def copy(
    tasks: Sequence[CopyTask], *, threads: int, progress: Progress = lambda _: None
) -> list[int]:
    """Copy tensors into files that exist and have their final length.

    Args:
        tasks: tensors to copy, into any number of files.
        threads: that read and write at the same time.
        progress: called with the number of bytes of every copied chunk, from several threads.

    Returns:
        The CRC-32 of each tensor.
    """

    def write(chunk: Chunk, buffer: memoryview) -> None:
        task = tasks[chunk.index]
        with failing(task.path):
            _write(task.path, task.start + chunk.start, buffer)

    return _read_all([task.source.data for task in tasks], write, threads, progress)


def read_crcs(
    sources: Sequence[ByteSource], *, threads: int, progress: Progress = lambda _: None
) -> list[int]:
    """Return the CRC-32 of each source."""
    return _read_all(sources, lambda chunk, buffer: None, threads, progress)


def _read_all(
    sources: Sequence[ByteSource],
    use: Callable[[Chunk, memoryview], None],
    threads: int,
    progress: Progress,
) -> list[int]:
    """Read every chunk of the sources and hand it to ``use``; return the CRC-32 of each source."""
    chunks = [
        Chunk(index, start, min(CHUNK, source.nbytes - start))
        for index, source in enumerate(sources)
        for start in range(0, source.nbytes, CHUNK)
    ]
    longest = max((chunk.length for chunk in chunks), default=0)
    own = threading.local()

    def work(chunk: Chunk) -> int:
        # One buffer per thread: to allocate one takes as long as to copy it.
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(longest))
        buffer = own.buffer[: chunk.length]
        sources[chunk.index].read_into(chunk.start, buffer)
        use(chunk, buffer)
        progress(chunk.length)
        return zlib.crc32(buffer)

    parts: list[list[tuple[int, int]]] = [[] for _ in sources]
    with ThreadPoolExecutor(threads) as pool:
        for chunk, crc in zip(chunks, pool.map(work, chunks), strict=True):
            parts[chunk.index].append((crc, chunk.length))
    return [combine(each) for each in parts]


def _write(path: str, start: int, buffer: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        done = 0
        while done < len(buffer):
            done += os.pwrite(descriptor, buffer[done:], start + done)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- damage


class ChecksumVerifier:
    """A byte source of one tensor that records the CRC-32 of every read."""

    def __init__(self, name: str, source: TensorSource) -> None:
        self.name = name
        self.nbytes = source.spec.nbytes
        self._source = source
        self._read: dict[tuple[int, int], int] = {}  # (start, stop) of a read to its CRC-32

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._source.data.read_into(start, buffer)
        self._read[start, start + len(buffer)] = zlib.crc32(buffer)

    def problem(self, *, unread: bool) -> str | None:
        """Return a line if the tensor is damaged, else None.

        Args:
            unread: whether to check the tensor even if nothing was read of it (it is all padding,
                or another rank's copy of an unsharded tensor).
        """
        if not self._read and not unread:
            return None
        return damage(self.name, self._source, self._crc())

    def _crc(self) -> int:
        """Return the CRC-32 of the tensor; read the bytes that were not read yet (padding)."""
        parts, at = [], 0
        for (start, stop), crc in sorted(self._read.items()):
            if start < at:  # two reads overlap, so their CRC-32s cannot be combined
                return self._crc_of(0, self.nbytes)
            if start > at:
                parts.append((self._crc_of(at, start), start - at))
            parts.append((crc, stop - start))
            at = stop
        parts.append((self._crc_of(at, self.nbytes), self.nbytes - at))
        return combine(parts)

    def _crc_of(self, start: int, stop: int) -> int:
        crc = 0
        for at in range(start, stop, CHUNK):
            crc = zlib.crc32(read_bytes(self._source.data, at, min(CHUNK, stop - at)), crc)
        return crc


def damage(name: str, source: TensorSource, crc: int) -> str | None:
    """Return a line if a tensor's CRC-32 is not the one its file states, else None."""
    if written(crc) == source.checksum:
        return None
    return (
        f"{name} is damaged: its checksum is {written(crc)}, but was {source.checksum} when it was "
        f"saved. Take this file from another copy."
    )


def verifying(
    name: str, tensors: Mapping[str, TensorSource]
) -> tuple[dict[str, TensorSource], list[ChecksumVerifier]]:
    """Return the same tensors, reading through verifiers where they have a checksum.

    Args:
        name: of their file, for messages.
        tensors: by name.
    """
    verifiers, same = [], {}
    for key, tensor in tensors.items():
        if tensor.checksum is not None and tensor.spec.nbytes:
            verifier = ChecksumVerifier(f"{name}: {key}", tensor)
            verifiers.append(verifier)
            tensor = replace(tensor, data=verifier)
        same[key] = tensor
    return same, verifiers


def find_damage(verifiers: Iterable[ChecksumVerifier], *, unread: bool = False) -> list[str]:
    """Return one line for every damaged tensor.

    Args:
        verifiers: from ``verifying``.
        unread: whether to check tensors too of which nothing was read.
    """
    return [problem for each in verifiers if (problem := each.problem(unread=unread))]
