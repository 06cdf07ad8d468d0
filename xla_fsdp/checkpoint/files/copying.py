"""Copy tensors into files and compute their checksums: in parallel, a chunk at a time.

Invariants: memory is bounded by threads times ``CHUNK`` (twice that where the dtype changes); the
first error ends all threads and is raised; a copy returns CRC-32s without reading twice.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from xla_fsdp.checkpoint.errors import CheckpointError, failing
from xla_fsdp.checkpoint.files.checksum import BLOCK, combine, crcs_in, whole, whole_of, written
from xla_fsdp.checkpoint.files.tensor_source import (
    ByteSource,
    Composed,
    LazyMapping,
    Part,
    RecentBlocks,
    TensorSource,
    pieces,
    read_bytes,
    read_chunks,
)
from xla_fsdp.checkpoint.format.records import model_name

# Bytes: larger chunks are not faster, smaller ones cost more Python calls. A multiple of ``BLOCK``
# or, in tests, a divisor of it.
CHUNK = 4 * BLOCK

COMBINED = 1 << 18  # bytes from which on to combine CRC-32s is faster than to compute them again

Progress = Callable[[int], None]


def default_threads() -> int:
    """Return the number of threads that copy, where the user gives none."""
    return min(8, 2 * (os.cpu_count() or 1))


@dataclass(frozen=True)
class CopyTask:
    """A tensor, and where it belongs.

    Args:
        source: of the tensor.
        path: of the file.
        start: offset in the file of its bytes.
        crc_at: offsets in the file of fields with the CRC-32 of all its bytes.
    """

    source: TensorSource
    path: str
    start: int
    crc_at: tuple[int, ...] = ()


def copy(
    tasks: Sequence[CopyTask], *, threads: int, progress: Progress = lambda _: None
) -> list[list[int]]:
    """Copy tensors into files that exist and have their final length; return the CRC-32 of each
    block of each tensor. ``progress`` is called from several threads."""

    def write(index: int, start: int, buffer: memoryview) -> None:
        with failing(tasks[index].path):
            _write(tasks[index].path, tasks[index].start + start, buffer)

    return _read_all([task.source.data for task in tasks], write, threads, progress)


def read_crcs(
    sources: Sequence[ByteSource], *, threads: int, progress: Progress = lambda _: None
) -> list[list[int]]:
    """Return the CRC-32 of each block of each source."""
    return _read_all(sources, lambda index, start, buffer: None, threads, progress)


def _read_all(
    sources: Sequence[ByteSource],
    use: Callable[[int, int, memoryview], None],
    threads: int,
    progress: Progress,
) -> list[list[int]]:
    """Read every chunk of the sources and hand it to ``use``, with the index of its source and its
    first byte; return the CRC-32 of each block."""
    own, longest = threading.local(), max((source.nbytes for source in sources), default=0)

    def work(chunk: tuple[int, int]) -> list[tuple[int, int]]:
        # One buffer per thread: to allocate one takes as long as to copy it.
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(min(CHUNK, longest)))
        index, start = chunk
        buffer, crcs = own.buffer[: sources[index].nbytes - start], []
        for at in range(0, len(buffer), BLOCK):
            block = buffer[at : at + BLOCK]
            crcs.append((read_with_crc(sources[index], start + at, block), len(block)))
        use(index, start, buffer)
        progress(len(buffer))
        return crcs

    chunks = [(i, start) for i, s in enumerate(sources) for start in range(0, s.nbytes, CHUNK)]
    parts: list[dict[int, list[tuple[int, int]]]] = [defaultdict(list) for _ in sources]
    with ThreadPoolExecutor(threads) as pool:
        for (index, start), crcs in zip(chunks, pool.map(work, chunks), strict=True):
            for number, crc in enumerate(crcs):
                parts[index][start // BLOCK + number].append(crc)
    return [[combine(block) for block in own.values()] for own in parts]


def read_with_crc(source: ByteSource, start: int, buffer: memoryview) -> int:
    """Fill ``buffer`` with bytes of a source from ``start`` on, and return their CRC-32.

    Bytes that a verifier reads need not be gone through twice.
    """
    if isinstance(source, ChecksumVerifier):
        return source.read_with_crc(start, buffer)
    if isinstance(source, Composed):
        parts = list(source.parts(start, start + len(buffer)))
        if len(parts) == 1 or len(buffer) >= len(parts) * COMBINED:
            return combine(
                (read_with_crc(part, at, buffer[low - start : high - start]), high - low)
                for part, at, low, high in parts
            )
    source.read_into(start, buffer)
    return zlib.crc32(buffer)


def write_crcs(tasks: Sequence[CopyTask], crcs: Sequence[Sequence[int]]) -> None:
    """Write the CRC-32s of copied tensors, from those of their blocks, into the fields for them."""
    for path, own in groupby(zip(tasks, crcs, strict=True), lambda each: each[0].path):
        with failing(path), open(path, "r+b") as file:
            for task, blocks in own:
                for at in task.crc_at:
                    file.seek(at)
                    file.write(struct.pack("<I", whole(blocks, task.source.spec.nbytes)))


def _write(path: str, start: int, buffer: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        done = 0
        while done < len(buffer):
            done += os.pwrite(descriptor, buffer[done:], start + done)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- damage


class Verifier(Protocol):
    """Knows what was read of tensors, and whether it is damaged."""

    def problems(self, *, unread: bool) -> list[str]:
        """Return one line for every damaged tensor; with ``unread`` also of those of which nothing
        was read (they are all padding, or another rank's copies of unsharded tensors)."""


class ChecksumVerifier:
    """A byte source of one tensor that records the CRC-32 of every read."""

    def __init__(self, name: str, source: TensorSource) -> None:
        self.name = name
        self.nbytes = source.spec.nbytes
        self._source = source
        self._read: dict[tuple[int, int], int] = {}  # (start, stop) of a read to its CRC-32

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.read_with_crc(start, buffer)

    def read_with_crc(self, start: int, buffer: memoryview) -> int:
        """Read, and return the CRC-32 of what was read."""
        self._source.data.read_into(start, buffer)
        crc = self._read[start, start + len(buffer)] = zlib.crc32(buffer)
        return crc

    def problems(self, *, unread: bool) -> list[str]:
        """As ``Verifier`` has it."""
        if not self._read and not unread:
            return []
        problem = damage(self.name, self._source, self._crc())
        return [problem] if problem else []

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
        for chunk in read_chunks(Part(self._source.data, start, stop - start)):
            crc = zlib.crc32(chunk, crc)
        return crc


def damage(name: str, source: TensorSource, crc: int) -> str | None:
    """Return a line if a tensor's CRC-32 is not the one its file states, else None."""
    expected = whole_of(source.checksum or "", source.spec.nbytes)
    if crc == expected:
        return None
    was = "that of another tensor" if expected is None else written(expected)
    return (
        f"{name} is damaged: its checksum is {written(crc)}, but was {was} when it was saved. Take "
        f"this file from another copy."
    )


class VerifiedBytes:
    """A byte source of one tensor that raises if what it reads is damaged.

    A read is verified in blocks; the rest of its first and its last block is read with it. Without
    checksums of blocks (files of versions before 4), only a read of the whole tensor is verified.

    Args:
        name: of the tensor, with its file, for messages.
        source: of a tensor with a checksum.
        recent: the blocks that were read in part last, shared by all tensors of a step.
    """

    def __init__(self, name: str, source: TensorSource, recent: RecentBlocks) -> None:
        self.nbytes = source.spec.nbytes
        self._name, self._data, self._recent = name, source.data, recent
        first = next(pieces(source.data, 0, self.nbytes))
        self.place, self.at = first.place, first.at
        self._crcs = crcs_in(source.checksum or "")
        self._block = self.nbytes if len(self._crcs) == 1 else BLOCK
        if len(self._crcs) not in (1, -(-self.nbytes // BLOCK)):
            raise CheckpointError(
                f"{name}: has {len(self._crcs)} checksums for {self.nbytes:,} bytes; expected one "
                f"for each block of {BLOCK:,}"
            )

    def read_into(self, start: int, buffer: memoryview) -> None:
        stop = start + len(buffer)
        if start == stop or (self._block > BLOCK and len(buffer) < self.nbytes):
            self._data.read_into(start, buffer)
            return
        first, last = -(-start // self._block), self._end(stop)
        if first < last:  # whole blocks, in one read
            low, high = first * self._block, min(last * self._block, self.nbytes)
            self._data.read_into(low, buffer[low - start : high - start])
            self._verify(first, buffer[low - start : high - start])
        for index in {start // self._block, (stop - 1) // self._block} - set(range(first, last)):
            at = index * self._block
            low, high = max(start, at), min(stop, at + self._block)
            buffer[low - start : high - start] = self._read(index)[low - at : high - at]

    def _end(self, stop: int) -> int:
        """Return the number of the first block that does not end at or before ``stop``."""
        return -(-stop // self._block) if stop == self.nbytes else stop // self._block

    def _read(self, index: int) -> memoryview:
        """Return a block that is needed in part; the next read often needs the rest of it."""

        def read() -> bytes:
            at = index * self._block
            block = read_bytes(self._data, at, min(self._block, self.nbytes - at))
            self._verify(index, memoryview(block))
            return block

        return self._recent.get((self._name, index), read)

    def _verify(self, first: int, data: memoryview) -> None:
        for index, at in enumerate(range(0, len(data), self._block), first):
            crc = zlib.crc32(data[at : at + self._block])
            if crc != self._crcs[index]:
                low = index * self._block
                raise CheckpointError(
                    f"{self._name} is damaged: its checksum is {written(crc)}, but was "
                    f"{written(self._crcs[index])} when it was saved (bytes {low:,} to "
                    f"{min(low + self._block, self.nbytes):,}). Load an earlier step, or a copy of "
                    f"this one"
                )


def verified(name: str, tensors: Mapping[str, Any], recent: RecentBlocks) -> Mapping[str, Any]:
    """Return the same tensors of the file ``name``, and values; reading what is damaged raises
    ``CheckpointError``."""

    def make(key: str) -> Any:
        value = tensors[key]
        if not _has_checksum(value):
            return value
        return replace(value, data=VerifiedBytes(_called(name, key), value, recent))

    return LazyMapping(tensors, make)


def verifying(
    name: str, tensors: Mapping[str, Any]
) -> tuple[dict[str, Any], list[ChecksumVerifier]]:
    """Return the same tensors of the file ``name``, and values, reading through verifiers where
    they have a checksum."""
    verifiers = {
        key: ChecksumVerifier(_called(name, key), value)
        for key, value in tensors.items()
        if _has_checksum(value)
    }
    same = {key: replace(tensors[key], data=verifier) for key, verifier in verifiers.items()}
    return {**tensors, **same}, list(verifiers.values())


def _has_checksum(value: Any) -> bool:
    return isinstance(value, TensorSource) and value.checksum is not None and value.spec.nbytes > 0


def _called(file: str, name: str) -> str:
    """Return what messages call a tensor."""
    return f"{file}: {name.removeprefix(model_name(''))}"


def find_damage(verifiers: Iterable[Verifier], *, unread: bool = False) -> list[str]:
    """Return the problems of all verifiers, each once."""
    return list(dict.fromkeys(p for each in verifiers for p in each.problems(unread=unread)))
