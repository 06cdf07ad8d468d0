"""Tensors whose elements are somewhere else, and new ones made of their parts, without reading.

A ``TensorSource`` is a dtype, a shape and a ``ByteSource`` of its elements (row-major,
little-endian).

Invariants: making a source reads nothing; a read gives exactly the bytes asked for or raises, reads
no others (but for whole rows, in ``Interleaved`` and ``Column``), takes a bounded amount of memory
beside the buffer, and may run in several threads at once.
"""

from __future__ import annotations

import math
import os
import stat
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.format import MemberRecord

BLOCK = 1 << 23  # bytes of rows, of all parts of tensor parallelism, that are read at a time


class ByteSource(Protocol):
    """Bytes that can be read from any offset."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on; raise if there are not that many."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return a tensor's."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @cached_property
    def nbytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is read on demand.

    Args:
        spec: its dtype and shape.
        data: its elements.
        identity: equal for two sources that are the same memory or the same place in a file, which
            is how tied names are found; None if that cannot be told.
        checksum: of the elements, as the file says; None if it does not.
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
        """Its dtype."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.spec.shape

    def elements(self, start: int, stop: int) -> ByteSource:
        """Return elements ``start`` to ``stop`` of the flattened tensor."""
        size = self.dtype.itemsize
        return Part(self.data, start * size, (stop - start) * size)

    def cast(self, dtype: torch.dtype) -> TensorSource:
        """Return the same tensor in another dtype, as ``Tensor.to`` rounds it."""
        if dtype == self.dtype:
            return self
        identity = None if self.identity is None else (self.identity, dtype)
        data = Cast(self.data, self.dtype, dtype)
        return TensorSource(TensorSpec(dtype, self.shape), data, identity)

    def load(self) -> Tensor:
        """Read the tensor into memory of its own, on the CPU."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if tensor.numel():
            self.data.read_into(0, bytes_of(tensor))
        return tensor


def source_of(tensor: Tensor) -> TensorSource:
    """Return a source for a tensor in memory, which is read when the source is."""
    spec = TensorSpec.of(tensor)
    address = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.numel() else 0
    identity = (address, spec, tensor.stride()) if address else None
    return TensorSource(spec, TensorBytes(spec.nbytes, lambda: tensor), identity)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy (otherwise: of a copy)."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def read_bytes(source: ByteSource, start: int, length: int) -> bytes:
    """Read ``length`` bytes from ``start`` on."""
    buffer = bytearray(length)
    source.read_into(start, memoryview(buffer))
    return bytes(buffer)


def convert_tensors(
    content: Any, convert: Callable[[Any], Any], *, from_pickle: bool = False
) -> Any:
    """Return nested dicts, lists and tuples with every tensor or tensor source converted.

    Args:
        content: whose containers are copied, as often as they appear.
        convert: given a tensor or a ``TensorSource``.
        from_pickle: whether a file's pickle made the content, which may then hold itself, or one
            list a million times: a container is then copied once, and mappings become
            ``OrderedDict``, whatever class of them the pickle asked for.
    """
    copies: dict[int, Any] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor | TensorSource):
            return convert(value)
        if type(value) is tuple:
            return tuple(walk(each) for each in value)
        if not isinstance(value, Mapping | list):
            return value
        if from_pickle and id(value) in copies:
            return copies[id(value)]
        if isinstance(value, list):
            items = copies[id(value)] = []
            items += [walk(each) for each in value]
            return items
        kind: Any = OrderedDict if from_pickle else type(value)
        made = copies[id(value)] = kind()
        made.update((key, walk(each)) for key, each in value.items())
        return made

    return walk(content)


# ---------------------------------------------------------------- where bytes are


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
        done = 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(start)
                while done < len(buffer) and (count := file.readinto(buffer[done:])):
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
        if done < len(buffer):
            raise CheckpointError(f"{self.path}: ends at byte {start + done}: truncated")

    def _size(self) -> int:
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise CheckpointError(f"{self.path}: cannot be read: it is {kind}")
        return status.st_size


class TensorBytes:
    """The bytes of a tensor in memory, which is copied to the CPU and put in order if need be.

    Args:
        nbytes: of the tensor.
        make: returns it.
        remember: whether to call ``make`` once, when first read, and not for every read.
    """

    def __init__(self, nbytes: int, make: Callable[[], Tensor], *, remember: bool = True) -> None:
        self.nbytes = nbytes
        self._make, self._remember = make, remember
        self._bytes: memoryview | None = None
        self._lock = Lock()

    def read_into(self, start: int, buffer: memoryview) -> None:
        with self._lock:  # a tensor on a device is copied once, not by every thread
            data = self._bytes or bytes_of(self._make())
            self._bytes = data if self._remember else None
        buffer[:] = data[start : start + len(buffer)]


class Part:
    """Some of another source's bytes."""

    def __init__(self, source: ByteSource, start: int, nbytes: int) -> None:
        if not 0 <= start <= start + nbytes <= source.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} are not in {source.nbytes}")
        self._source, self._start, self.nbytes = source, start, nbytes

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._source.read_into(self._start + start, buffer)


class Zeros:
    """Padding."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read_into(self, start: int, buffer: memoryview) -> None:
        buffer[:] = bytes(len(buffer))


class Joined:
    """Several sources, one after the other."""

    def __init__(self, parts: Iterable[ByteSource]) -> None:
        self._parts: Sequence[ByteSource] = [part for part in parts if part.nbytes]
        self._stops = list(accumulate(part.nbytes for part in self._parts))
        self.nbytes = self._stops[-1] if self._stops else 0

    def read_into(self, start: int, buffer: memoryview) -> None:
        index, done = bisect_right(self._stops, start), 0
        while done < len(buffer):
            part, stop = self._parts[index], self._stops[index]
            count = min(len(buffer) - done, stop - start - done)
            part.read_into(start + done - (stop - part.nbytes), buffer[done : done + count])
            done += count
            index += 1


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


# ---------------------------------------------------------------- parts of tensor parallelism


def global_of(parts: Sequence[TensorSource], member: MemberRecord) -> TensorSource:
    """Return the global tensor of a parameter that tensor parallelism cut into parts.

    Args:
        parts: all of them, in order, in the shape of a part; of a parameter without a tensor dim,
            any one.
        member: what they are parts of.
    """
    if member.tensor_dim is None:
        return parts[0]
    row = _row_bytes(parts[0].spec, member.tensor_dim)
    data = [part.data for part in parts]
    joined = Joined(data) if member.tensor_dim == 0 else Interleaved(data, row)
    return TensorSource(TensorSpec(parts[0].dtype, member.shape), joined)


def part_of(tensor: TensorSource, member: MemberRecord, part: int, parts: int) -> TensorSource:
    """Return one part of a global tensor of the shape of ``member``."""
    if member.tensor_dim is None or parts == 1:
        return tensor
    spec = TensorSpec(tensor.dtype, member.local_shape(parts))
    row = _row_bytes(spec, member.tensor_dim)
    if member.tensor_dim == 0:
        return TensorSource(spec, Part(tensor.data, part * spec.nbytes, spec.nbytes))
    return TensorSource(spec, Column(tensor.data, row, part, parts))


def _row_bytes(part: TensorSpec, dim: int) -> int:
    """Return the bytes of a row: what is contiguous of a part, from ``dim`` on."""
    return math.prod(part.shape[dim:]) * part.dtype.itemsize


class Interleaved:
    """A row of each of several sources in turn.

    Args:
        parts: of equal lengths.
        row: bytes of a row of one of them.
    """

    def __init__(self, parts: Sequence[ByteSource], row: int) -> None:
        self._parts, self._row = parts, row
        self.nbytes = sum(part.nbytes for part in parts)

    def read_into(self, start: int, buffer: memoryview) -> None:
        count, row = len(self._parts), self._row
        for block in _blocks(start, buffer, row * count, BLOCK // (row * count)):
            rows = torch.empty((block.last - block.first, count, row), dtype=torch.uint8)
            for number, part in enumerate(self._parts):
                own = torch.empty((len(rows), row), dtype=torch.uint8)
                part.read_into(block.first * row, bytes_of(own))
                rows[:, number] = own
            block.into[:] = bytes_of(rows)[block.wanted]


class Column:
    """The rows of one part, out of a source that has a row of each in turn.

    Args:
        source: of all parts.
        row: bytes of a row of one.
        part: which one.
        parts: how many there are.
    """

    def __init__(self, source: ByteSource, row: int, part: int, parts: int) -> None:
        self._source, self._row, self._part, self._parts = source, row, part, parts
        self.nbytes = source.nbytes // parts

    def read_into(self, start: int, buffer: memoryview) -> None:
        width = self._row * self._parts
        for block in _blocks(start, buffer, self._row, BLOCK // width):
            shape = (block.last - block.first, self._parts, self._row)
            rows = torch.empty(shape, dtype=torch.uint8)
            self._source.read_into(block.first * width, bytes_of(rows))
            block.into[:] = bytes_of(rows[:, self._part].contiguous())[block.wanted]


class _Block(NamedTuple):
    """Rows ``first`` to ``last``, and which of their bytes go where."""

    first: int
    last: int
    wanted: slice
    into: memoryview


def _blocks(start: int, buffer: memoryview, row: int, most: int) -> Iterator[_Block]:
    """Cut the reading of ``buffer``, from byte ``start`` on, into blocks of whole rows.

    Args:
        start: offset of the buffer's first byte.
        buffer: to fill.
        row: bytes of a row.
        most: rows of a block; at least one is taken.
    """
    at, stop = start, start + len(buffer)
    while at < stop:
        first = at // row
        last = min(-(-stop // row), first + max(most, 1))
        end = min(stop, last * row)
        wanted = slice(at - first * row, end - first * row)
        yield _Block(first, last, wanted, buffer[at - start : end - start])
        at = end
