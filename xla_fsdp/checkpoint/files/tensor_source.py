"""Tensors in files or in memory that are read on demand, and sources composed of parts of others.

A ``TensorSource`` is a dtype, a shape and a ``ByteSource`` of its elements (row-major,
little-endian).

Invariants: creating a source reads nothing. A read fills the buffer or raises, reads no other bytes
(but ``Rows`` reads complete ones), takes bounded memory, and is thread-safe.
"""

from __future__ import annotations

import math
import os
import re
import stat
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from xla_fsdp.checkpoint.errors import CheckpointError, T, deleted_meanwhile
from xla_fsdp.checkpoint.format.records import MemberRecord

SMALL = 1 << 27  # bytes at most of a file that describes others, as of a step of 100,000 ranks
BLOCK = 1 << 23  # bytes that ``Rows`` reads at a time, of all parts together


LOCAL = "file://"


def full_path(path: str | os.PathLike[str], name: str = "the path") -> str:
    """Return a local path from the root, with ``~`` replaced, so that it stays the same when the
    working directory changes; of a URL with ``file://`` the path, any other one with at most one
    slash at its end. ``name`` is what an error calls it."""
    text = os.fspath(path).removeprefix(LOCAL)
    if not text:
        raise CheckpointError(f"{name} is empty; expected one ('.' is the working directory)")
    if "\0" in text:
        raise CheckpointError(f"{name}: {text!r} has a zero byte, which no path has")
    if re.match(r"[A-Za-z][\w+.-]+:/(?!/)", text):  # Path("gs://bucket") is "gs:/bucket"
        raise CheckpointError(
            f"{name}: {text!r} is what pathlib makes of a URL: give it as a string, with two "
            f"slashes (of a directory of this name, ./{text})"
        )
    if "://" in text:
        return re.sub(r"(?<=[^:/])/+$", "/", text)
    return os.path.join(os.getcwd(), os.path.expanduser(text))


Buffer = bytes | memoryview


class ByteSource(Protocol):
    """A number of bytes that can be read from any offset."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from offset ``start`` on; raise if there are too few."""


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is read on demand.

    Args:
        spec: its dtype and shape.
        data: its elements.
        identity: equal for two sources of the same memory or the same bytes of a file, to find tied
            names; None if unknown.
        checksum: of the elements, as stated in the file; None if it states none.
    """

    spec: TensorSpec
    data: ByteSource = field(repr=False)
    identity: Hashable = None
    checksum: str | None = None

    def __post_init__(self) -> None:
        if self.data.nbytes != self.spec.nbytes:
            raise CheckpointError(
                f"{self.spec} takes {self.spec.nbytes} bytes, but {self.data.nbytes} are there"
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def elements(self, start: int, stop: int) -> ByteSource:
        """Return the bytes of elements ``start`` to ``stop`` of the flattened tensor."""
        size = self.dtype.itemsize
        return Part(self.data, start * size, (stop - start) * size)

    def cast(self, dtype: torch.dtype) -> TensorSource:
        """Return the tensor in another dtype, converted as by ``Tensor.to``."""
        if dtype == self.dtype:
            return self
        identity = None if self.identity is None else (self.identity, dtype)
        data = Cast(self.data, self.dtype, dtype)
        return TensorSource(TensorSpec(dtype, self.shape), data, identity)

    def load(self) -> Tensor:
        """Read the tensor into new CPU memory."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if tensor.numel():
            self.data.read_into(0, bytes_of(tensor))
        return tensor


def source_of(tensor: Tensor) -> TensorSource:
    """Return a source of a tensor in memory, which is copied from its device on the first read."""
    spec = TensorSpec.of(tensor)
    address = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.numel() else 0
    identity = (address, spec, tensor.stride()) if address else None
    return TensorSource(spec, TensorBytes(spec.nbytes, lambda: tensor), identity)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes; without a copy if it is contiguous and on the CPU."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def read_bytes(source: ByteSource, start: int, length: int) -> bytes:
    buffer = bytearray(length)
    source.read_into(start, memoryview(buffer))
    return bytes(buffer)


READ = 1 << 25  # bytes of a source that are in memory at a time


def read_chunks(source: ByteSource) -> Iterator[bytes]:
    """Yield all bytes of a source, ``READ`` at a time."""
    for at in range(0, source.nbytes, READ):
        yield read_bytes(source, at, min(READ, source.nbytes - at))


def same_bytes(first: ByteSource, second: ByteSource) -> bool:
    """Return whether two sources of one length have equal bytes; a NaN equals itself."""
    return all(a == b for a, b in zip(read_chunks(first), read_chunks(second), strict=True))


def convert_tensors(content: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with every tensor converted; ``convert`` is
    called once with each tensor or ``TensorSource``, however often it is there."""
    converted: dict[int, Any] = {}  # by id, so that tied names stay tied

    def once(value: Any) -> Any:
        if id(value) not in converted:
            converted[id(value)] = convert(value)
        return converted[id(value)]

    return tree_map_only((Tensor, TensorSource), once, content)


class LazyMapping(Mapping[str, Any]):
    """Values by key, each made when it is asked for; the keys are in a dict or the like."""

    def __init__(self, keys: Mapping[str, Any], make: Callable[[str], Any]) -> None:
        self._keys, self._make = keys, make

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        return self._make(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class LazySequence(Sequence[Any]):
    """Values in an order, each made of what ``of`` has when it is asked for."""

    def __init__(self, of: Sequence[T], make: Callable[[T], Any]) -> None:
        self._of, self._make = of, make

    def __getitem__(self, index: Any) -> Any:
        found: Any = self._of[index]
        return LazySequence(found, self._make) if isinstance(index, slice) else self._make(found)

    def __len__(self) -> int:
        return len(self._of)


# ---------------------------------------------------------------- sources of bytes


class LocalFile:
    """A local file; it is opened for every read, so that the files of all ranks can be in use."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes = self._size()

    def read_into(self, start: int, buffer: memoryview) -> None:
        done = 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(start)
                while done < len(buffer) and (count := file.readinto(buffer[done:])):
                    done += count
        except FileNotFoundError as error:
            raise CheckpointError(deleted_meanwhile(self.path)) from error
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
        if done < len(buffer):
            raise CheckpointError(f"{self.path}: ends at byte {start + done}: truncated")

    def _size(self) -> int:
        try:
            status = os.stat(self.path)
        except (OSError, ValueError) as error:  # a ValueError if there is a zero byte in the path
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.path}: cannot be read: {reason}") from error
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise CheckpointError(f"{self.path}: cannot be read: it is {kind}")
        return status.st_size


def read_small_file(path: str | os.PathLike[str], limit: int = SMALL) -> bytes:
    """Return the content of a file that describes others."""
    file = LocalFile(os.fspath(path))
    check_size(file.path, file.nbytes, limit)
    return read_bytes(file, 0, file.nbytes)


def check_size(name: str, nbytes: int, limit: int) -> None:
    """Raise ``CheckpointError`` if a file that is read as a whole is too large for its content."""
    if nbytes > limit:
        raise CheckpointError(
            f"{name}: has {nbytes:,} bytes; such a file has at most {limit:,}, so this is another"
        )


class RecentBlocks:
    """The blocks of files that were read last, up to a number of bytes of all, for several
    threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._blocks: OrderedDict[Hashable, Future[Buffer]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, read: Callable[[], Buffer]) -> memoryview:
        """Return the block under ``key``, or ``read()``, once, if it is not there."""
        with self._lock:
            found = self._blocks.get(key)
            block = self._blocks.setdefault(key, Future())
            self._blocks.move_to_end(key)
        if found is None:
            try:
                block.set_result(read())
            except BaseException as error:
                block.set_exception(error)
                with self._lock:  # the next caller tries again
                    del self._blocks[key]
                raise
            self._trim(len(block.result()))
        return memoryview(block.result())

    def _trim(self, more: int) -> None:
        with self._lock:
            self._bytes += more
            for key in list(self._blocks):
                if self._bytes <= self._limit:
                    return
                if self._blocks[key].done():
                    self._bytes -= len(self._blocks.pop(key).result())


class TensorBytes:
    """The bytes of a tensor in memory, on any device and with any strides.

    Args:
        nbytes: of the tensor.
        make: returns the tensor.
        remember: whether to call ``make`` on the first read only, and not for every read.
    """

    def __init__(self, nbytes: int, make: Callable[[], Tensor], *, remember: bool = True) -> None:
        self.nbytes = nbytes
        self._make, self._remember = make, remember
        self._bytes: memoryview | None = None
        self._lock = Lock()

    def read_into(self, start: int, buffer: memoryview) -> None:
        with self._lock:  # so that only one thread copies a tensor from a device
            data = self._bytes or bytes_of(self._make())
            self._bytes = data if self._remember else None
        buffer[:] = data[start : start + len(buffer)]


class Composed:
    """A source of bytes of others."""

    nbytes: int

    def parts(self, start: int, stop: int) -> Iterator[tuple[ByteSource, int, int, int]]:
        """Divide bytes ``start`` to ``stop`` by the sources that they are of: yield each, the
        place in it, and the first and the last place in this one."""
        raise NotImplementedError

    def read_into(self, start: int, buffer: memoryview) -> None:
        for source, at, low, high in self.parts(start, start + len(buffer)):
            source.read_into(at, buffer[low - start : high - start])


class Part(Composed):
    """A range of another source's bytes."""

    def __init__(self, source: ByteSource, start: int, nbytes: int) -> None:
        if not 0 <= start <= start + nbytes <= source.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} are not in {source.nbytes}")
        self.source, self.start, self.nbytes = source, start, nbytes

    def parts(self, start: int, stop: int) -> Iterator[tuple[ByteSource, int, int, int]]:
        yield self.source, self.start + start, start, stop


class Zeros:
    """Zero bytes, such as the padding of a shard."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read_into(self, start: int, buffer: memoryview) -> None:
        buffer[:] = bytes(len(buffer))


class Joined(Composed):
    """Several sources concatenated."""

    def __init__(self, parts: Iterable[ByteSource]) -> None:
        self._parts: Sequence[ByteSource] = [part for part in parts if part.nbytes]
        self._stops = list(accumulate(part.nbytes for part in self._parts))
        self.nbytes = self._stops[-1] if self._stops else 0

    def parts(self, start: int, stop: int) -> Iterator[tuple[ByteSource, int, int, int]]:
        index = bisect_right(self._stops, start)
        while start < stop:
            part, end = self._parts[index], self._stops[index]
            yield part, start - (end - part.nbytes), start, min(end, stop)
            start = end
            index += 1


class JoinedShards(Composed):
    """Tensors of ``width`` bytes each, one after the other; each is asked for when it is read."""

    def __init__(self, shards: Sequence[TensorSource], width: int) -> None:
        self._shards, self._width = shards, width
        self.nbytes = width * len(shards)

    def parts(self, start: int, stop: int) -> Iterator[tuple[ByteSource, int, int, int]]:
        while start < stop:
            shard, at = divmod(start, self._width)
            end = min(start - at + self._width, stop)
            yield self._shards[shard].data, at, start, end
            start = end


class Cast:
    """A source's elements in another dtype. Reads must begin and end between elements."""

    def __init__(self, source: ByteSource, old: torch.dtype, new: torch.dtype) -> None:
        self._source, self._old, self._new = source, old, new
        self.nbytes = source.nbytes // old.itemsize * new.itemsize

    def read_into(self, start: int, buffer: memoryview) -> None:
        count = len(buffer) // self._new.itemsize
        elements = torch.empty(count, dtype=self._old)
        first = start // self._new.itemsize
        self._source.read_into(first * self._old.itemsize, bytes_of(elements))
        buffer[:] = bytes_of(elements.to(self._new))


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a source, which are at ``at`` of the file ``place``, or after
    what has a smaller ``at``."""

    place: str
    at: int
    start: int
    stop: int


def pieces(source: ByteSource, start: int, stop: int) -> Iterator[Piece]:
    """Divide bytes ``start`` to ``stop`` of a source by the files that they are read from."""
    if isinstance(source, Composed):
        for part, at, low, high in source.parts(start, stop):
            for piece in pieces(part, at, at + high - low):
                yield piece._replace(start=piece.start - at + low, stop=piece.stop - at + low)
    elif isinstance(source, Cast):
        old, new = source._old.itemsize, source._new.itemsize
        for piece in pieces(source._source, start // new * old, stop // new * old):
            yield piece._replace(start=piece.start // old * new, stop=piece.stop // old * new)
    else:
        at = getattr(source, "at", start)
        yield Piece(str(getattr(source, "place", "")), at, start, stop)


# ---------------------------------------------------------------- tensor parallelism


def global_of(parts: Sequence[TensorSource], member: MemberRecord) -> TensorSource:
    """Return the global tensor of a parameter, from the local tensor of every tensor-parallel part;
    if it has no ``tensor_dim``, the first is enough."""
    if member.tensor_dim is None:
        return parts[0]
    data, row = [part.data for part in parts], _row_bytes(parts[0].spec, member.tensor_dim)

    def interleaved(first: int, count: int) -> Tensor:
        return torch.stack([_rows(each, first, count, row) for each in data], 1)

    joined = Joined(data) if member.tensor_dim == 0 else Rows(interleaved, row * len(parts), data)
    return TensorSource(TensorSpec(parts[0].dtype, member.shape), joined)


def part_of(tensor: TensorSource, member: MemberRecord, part: int, parts: int) -> TensorSource:
    """Return the local tensor of one tensor-parallel part of a global tensor."""
    if member.tensor_dim is None or parts == 1:
        return tensor
    spec = TensorSpec(tensor.dtype, member.local_shape(parts))
    row = _row_bytes(spec, member.tensor_dim)
    if member.tensor_dim == 0:
        return TensorSource(spec, Part(tensor.data, part * spec.nbytes, spec.nbytes))

    def column(first: int, count: int) -> Tensor:
        return _rows(tensor.data, first, count, row * parts).view(count, parts, row)[:, part]

    return TensorSource(spec, Rows(column, row, [tensor.data], parts))


def _row_bytes(part: TensorSpec, dim: int) -> int:
    """Return the length of a row: a part's bytes that are contiguous in the global tensor too."""
    return math.prod(part.shape[dim:]) * part.dtype.itemsize


def _rows(source: ByteSource, first: int, count: int, row: int) -> Tensor:
    rows = torch.empty((count, row), dtype=torch.uint8)
    source.read_into(first * row, bytes_of(rows))
    return rows


class Rows:
    """Bytes that are made in complete rows.

    Args:
        make: returns so many rows from a first one on.
        row: number of bytes of one.
        sources: that they are made of.
        read: bytes of these for each byte that is made.
    """

    def __init__(
        self,
        make: Callable[[int, int], Tensor],
        row: int,
        sources: Sequence[ByteSource],
        read: int = 1,
    ) -> None:
        self.nbytes = sum(source.nbytes for source in sources) // read
        self._make, self._row, self._read = make, row, read

    def read_into(self, start: int, buffer: memoryview) -> None:
        at, stop, row = start, start + len(buffer), self._row
        while at < stop:
            first = at // row
            last = min(-(-stop // row), first + max(BLOCK // (row * self._read), 1))
            end = min(stop, last * row)
            made = bytes_of(self._make(first, last - first))
            buffer[at - start : end - start] = made[at - first * row : end - first * row]
            at = end
