"""Copies tensors from where they are to their places in files: in parallel, a chunk at a time.

Words: a *placement* is a tensor source and the place in a file where its bytes belong; a *chunk* is
what one thread reads and writes at once; a *watched* tensor remembers the CRC-32 of everything
that was read of it.
Always true: memory is bounded by threads times ``CHUNK`` (twice that where a dtype changes),
whatever the size of the tensors; the first error ends all threads and is raised; after a copy the
CRC-32 of every placement is known, as are those of the watched tensors, without another pass.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

from xla_fsdp.checkpoint.atomic_files import writing
from xla_fsdp.checkpoint.byte_source import ByteSource
from xla_fsdp.checkpoint.fingerprint import combine, written
from xla_fsdp.checkpoint.tensor_source import TensorSource

CHUNK = 1 << 24

"""Bytes. Larger ones are not faster; smaller ones cost a Python call more often."""

Progress = Callable[[int], None]


def default_threads() -> int:
    """Enough to read, compute checksums and write at once, on this machine's cores."""
    return min(8, 2 * (os.cpu_count() or 1))


@dataclass(frozen=True)
class Placement:
    """A tensor, and the offset in the file at ``path`` where its bytes belong."""

    source: TensorSource
    path: str
    start: int


@dataclass(frozen=True)
class Chunk:
    """Bytes ``start`` to ``start + length`` of a placement's tensor."""

    placement: int
    start: int
    length: int


def copy(
    placements: Sequence[Placement], *, threads: int, progress: Progress = lambda _: None
) -> list[int]:
    """Fill the places, in files that exist and are as long as needed; the CRC-32 of each.

    Args:
        placements: in any number of files.
        threads: that read and write at the same time.
        progress: called with the bytes of every chunk that is done, from several threads.
    """

    def do(chunk: Chunk, buffer: memoryview) -> int:
        placement = placements[chunk.placement]
        placement.source.data.read_into(chunk.start, buffer)
        with writing(placement.path):
            _write(placement.path, placement.start + chunk.start, buffer)
        return zlib.crc32(buffer)

    sizes = [placement.source.spec.nbytes for placement in placements]
    return _for_all_chunks(sizes, do, threads, progress)


def checksums(
    sources: Sequence[ByteSource], *, threads: int, progress: Progress = lambda _: None
) -> list[int]:
    """The CRC-32 of each source. Arguments as for ``copy``."""

    def do(chunk: Chunk, buffer: memoryview) -> int:
        sources[chunk.placement].read_into(chunk.start, buffer)
        return zlib.crc32(buffer)

    return _for_all_chunks([source.nbytes for source in sources], do, threads, progress)


def _for_all_chunks(
    sizes: Sequence[int],
    do: Callable[[Chunk, memoryview], int],
    threads: int,
    progress: Progress,
) -> list[int]:
    """``do`` every chunk of things of these sizes; the CRC-32 of each thing, from its chunks'."""
    results: dict[Chunk, int] = {}
    chunks = _Shared(_chunks(sizes))

    def work() -> None:
        buffer = memoryview(bytearray(min(CHUNK, max(sizes, default=0))))
        try:
            for chunk in chunks:
                results[chunk] = do(chunk, buffer[: chunk.length])
                progress(chunk.length)
        except BaseException:
            chunks.stop()
            raise

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
    parts: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for chunk in sorted(results, key=lambda chunk: chunk.start):
        parts[chunk.placement].append((results[chunk], chunk.length))
    return [combine(each) for each in parts]


def _chunks(sizes: Sequence[int]) -> Iterator[Chunk]:
    for index, size in enumerate(sizes):
        for start in range(0, size, CHUNK):
            yield Chunk(index, start, min(CHUNK, size - start))


class _Shared:
    """An iterator that several threads take from, until it ends or is stopped."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._lock = Lock()

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._lock:
                chunk = next(self._chunks, None)
            if chunk is None:
                return
            yield chunk

    def stop(self) -> None:
        """No more for anybody."""
        with self._lock:
            self._chunks = iter(())


def _write(path: str, start: int, buffer: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        done = 0
        while done < len(buffer):
            done += os.pwrite(descriptor, buffer[done:], start + done)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- damage


class Watched:
    """A byte source that remembers the CRC-32 of what was read; see ``ByteSource``."""

    def __init__(self, name: str, source: TensorSource) -> None:
        self.name = name
        self.nbytes = source.spec.nbytes
        self._source = source
        self._read: dict[tuple[int, int], int] = {}  # by first and last byte

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        self._source.data.read_into(start, buffer)
        self._read[start, start + len(buffer)] = zlib.crc32(buffer)

    def problem(self, *, unread: bool) -> str | None:
        """What is wrong with the bytes; of a tensor of which nothing was read, only if ``unread``
        (padding alone, or another rank's copy of what is the same on all)."""
        if not self._read and not unread:
            return None
        found = written(self._checksum())
        if found == self._source.fingerprint:
            return None
        return (
            f"{self.name} is damaged: its fingerprint is {found}, but was "
            f"{self._source.fingerprint} when it was saved. Take this file from another copy."
        )

    def _checksum(self) -> int:
        """From what was read, and a look at what was not (the padding of a shard)."""
        parts, at = [], 0
        for (start, stop), checksum in sorted(self._read.items()):
            if start < at:  # read by two ways of cutting it
                return self._fresh(0, self.nbytes)
            if start > at:
                parts.append((self._fresh(at, start), start - at))
            parts.append((checksum, stop - start))
            at = stop
        parts.append((self._fresh(at, self.nbytes), self.nbytes - at))
        return combine(parts)

    def _fresh(self, start: int, stop: int) -> int:
        checksum = 0
        for at in range(start, stop, CHUNK):
            buffer = bytearray(min(CHUNK, stop - at))
            self._source.data.read_into(at, memoryview(buffer))
            checksum = zlib.crc32(buffer, checksum)
        return checksum


def watch(
    name: str, tensors: Mapping[str, TensorSource]
) -> tuple[dict[str, TensorSource], list[Watched]]:
    """The same tensors, and those that can be watched because they have a fingerprint.

    Args:
        name: of the file that they are in.
        tensors: by name.
    """
    all_watched, same = [], {}
    for key, tensor in tensors.items():
        if tensor.fingerprint is not None and tensor.spec.nbytes:
            watched = Watched(f"{name}: {key}", tensor)
            all_watched.append(watched)
            tensor = replace(tensor, data=watched)
        same[key] = tensor
    return same, all_watched


def find_damage(watched: Iterable[Watched], *, unread: bool = False) -> list[str]:
    """One line for every watched tensor of which something else was read than was saved.

    Args:
        watched: from ``watch``.
        unread: whether to read those now that nobody needed.
    """
    return [problem for each in watched if (problem := each.problem(unread=unread))]
