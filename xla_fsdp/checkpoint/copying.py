"""Copying tensors from where they are into files: in parallel, a chunk at a time.

Invariants: memory is bounded by threads times ``CHUNK`` (twice that where a dtype changes); the
first error ends all threads and is raised; after a copy the CRC-32 of
all that was read is known without another pass.
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

CHUNK = 1 << 24  # bytes; larger ones are not faster, smaller ones cost more Python calls

Progress = Callable[[int], None]


def default_threads() -> int:
    """Return how many threads read, checksum and write at once on this machine's cores."""
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
    """Copy tensors into files that exist and are as long as needed.

    Args:
        tasks: in any number of files.
        threads: that read and write at the same time.
        progress: called with the bytes of every chunk that is done, from several threads.

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
    """Return the CRC-32 of each source. Arguments as for ``copy``."""
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
        if not hasattr(own, "buffer"):  # one of each thread: making them takes as long as copying
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
    """A tensor's byte source that remembers the CRC-32 of what was read of it."""

    def __init__(self, name: str, source: TensorSource) -> None:
        self.name = name
        self.nbytes = source.spec.nbytes
        self._source = source
        self._read: dict[tuple[int, int], int] = {}  # CRC-32 by first byte and the one behind

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._source.data.read_into(start, buffer)
        self._read[start, start + len(buffer)] = zlib.crc32(buffer)

    def problem(self, *, unread: bool) -> str | None:
        """Say what is wrong with the bytes, if anything is.

        Args:
            unread: whether to look at a tensor of which nothing was read, too (padding alone, or
                another rank's copy of what is the same on all).
        """
        if not self._read and not unread:
            return None
        return damage(self.name, self._source, self._crc())

    def _crc(self) -> int:
        """Combine what was read, and read the rest (the padding of a shard)."""
        parts, at = [], 0
        for (start, stop), crc in sorted(self._read.items()):
            if start < at:  # it was read in chunks of several sizes
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
    """Say that a tensor with this CRC-32 is damaged, if its file says another."""
    if written(crc) == source.checksum:
        return None
    return (
        f"{name} is damaged: its checksum is {written(crc)}, but was {source.checksum} when it was "
        f"saved. Take this file from another copy."
    )


def verifying(
    name: str, tensors: Mapping[str, TensorSource]
) -> tuple[dict[str, TensorSource], list[ChecksumVerifier]]:
    """Return the same tensors, and verifiers of those that have a checksum.

    Args:
        name: of the file that they are in.
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
    """Return one line for every tensor of which something else was read than was saved.

    Args:
        verifiers: from ``verifying``.
        unread: whether to read those now that nobody needed.
    """
    return [problem for each in verifiers if (problem := each.problem(unread=unread))]
