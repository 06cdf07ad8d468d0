"""Tensors whose elements are somewhere else, and new ones made of their parts, without reading.

Words: a tensor *source* is a dtype, a shape and a ``ByteSource`` of its elements (row-major,
little-endian). ``Part``, ``Joined``, ``Zeros`` and ``Cast`` are byte sources made of others.
Always true: making one reads nothing; reading costs memory only for the buffer that is filled
(``Cast``: and one of the same number of elements).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock

import torch
from torch import Tensor

from xla_fsdp.checkpoint.byte_source import ByteSource, TensorBytes, bytes_of
from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.safetensors_file import TensorSpec


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is read on demand.

    Args:
        spec: its dtype and shape.
        data: its elements.
        identity: equal for two sources that are the same memory or the same place in a file, which
            is how tied names are found; None if that cannot be told.
        fingerprint: of the elements, as the file says; None if it does not.
    """

    spec: TensorSpec
    data: ByteSource = field(repr=False)
    identity: Hashable = None
    fingerprint: str | None = None

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
        """Elements ``start`` to ``stop`` of the flattened tensor."""
        size = self.dtype.itemsize
        return Part(self.data, start * size, (stop - start) * size)

    def cast(self, dtype: torch.dtype) -> TensorSource:
        """The same tensor in another dtype, as ``Tensor.to`` rounds it."""
        if dtype == self.dtype:
            return self
        identity = None if self.identity is None else (self.identity, dtype)
        data = Cast(self.data, self.dtype, dtype)
        return TensorSource(TensorSpec(dtype, self.shape), data, identity)

    def load(self) -> Tensor:
        """The tensor itself, on the CPU, in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if tensor.numel():
            self.data.read_into(0, bytes_of(tensor))
        return tensor


def source_of(tensor: Tensor) -> TensorSource:
    """A source for a tensor in memory, which is read when the source is."""
    spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
    address = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.numel() else 0
    identity = (address, spec, tensor.stride()) if address else None
    return TensorSource(spec, Loaded(spec.nbytes, tensor), identity)


class Loaded:
    """The bytes of a tensor in memory. If need be, they are copied to the CPU and ordered, once,
    when they are first read."""

    def __init__(self, nbytes: int, tensor: Tensor) -> None:
        self.nbytes = nbytes
        self._tensor = tensor
        self._ordered: TensorBytes | None = None
        self._lock = Lock()

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        with self._lock:  # a tensor on a device is copied once, not by every thread
            self._ordered = self._ordered or TensorBytes(self._tensor)
        self._ordered.read_into(start, buffer)


class Part:
    """Some of another source's bytes."""

    def __init__(self, source: ByteSource, start: int, nbytes: int) -> None:
        if not 0 <= start <= start + nbytes <= source.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} are not in {source.nbytes}")
        self._source = source
        self._start = start
        self.nbytes = nbytes

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        self._source.read_into(self._start + start, buffer)


class Zeros:
    """Padding."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        buffer[:] = bytes(len(buffer))


class Joined:
    """Several sources, one after the other."""

    def __init__(self, parts: Iterable[ByteSource]) -> None:
        self._parts: Sequence[ByteSource] = [part for part in parts if part.nbytes]
        self._stops = list(accumulate(part.nbytes for part in self._parts))
        self.nbytes = self._stops[-1] if self._stops else 0

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
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
        """See ``ByteSource``."""
        count = len(buffer) // self._new.itemsize
        elements = torch.empty(count, dtype=self._old)
        first = start // self._new.itemsize
        self._source.read_into(first * self._old.itemsize, bytes_of(elements))
        buffer[:] = bytes_of(elements.to(self._new))
