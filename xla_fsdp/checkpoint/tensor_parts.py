"""Whole tensors of the parts that tensor parallelism cut them into, and parts of whole tensors.

Words: see ``format``: of a parameter with a tensor dim, every *part* of a model has an equal slice
along that dim; a *row* here is what is contiguous of a part: all that follows the dim.
Always true: making a source reads nothing; reading one takes a bounded amount of memory beside the
buffer that is filled, and reads runs of rows, not single ones.
Which elements of a part a rank holds is ``layout``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from xla_fsdp.checkpoint.byte_source import ByteSource, bytes_of
from xla_fsdp.checkpoint.format import MemberRecord
from xla_fsdp.checkpoint.safetensors_file import TensorSpec
from xla_fsdp.checkpoint.tensor_source import Joined, Part, TensorSource

BLOCK = 1 << 23

"""Bytes of rows, of all parts, that are read at a time."""


def whole_of(parts: Sequence[TensorSource], member: MemberRecord) -> TensorSource:
    """The whole tensor.

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


def part_of(whole: TensorSource, member: MemberRecord, part: int, parts: int) -> TensorSource:
    """One part of a tensor of the shape of ``member``."""
    if member.tensor_dim is None or parts == 1:
        return whole
    spec = TensorSpec(whole.dtype, member.local_shape(parts))
    row = _row_bytes(spec, member.tensor_dim)
    if member.tensor_dim == 0:
        return TensorSource(spec, Part(whole.data, part * spec.nbytes, spec.nbytes))
    return TensorSource(spec, Column(whole.data, row, part, parts))


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
        """See ``ByteSource``."""
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
        """See ``ByteSource``."""
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
    """What to fill ``buffer`` with, from byte ``start`` on: at most so many rows of ``row`` bytes
    at a time (but at least one)."""
    at, stop = start, start + len(buffer)
    while at < stop:
        first = at // row
        last = min(-(-stop // row), first + max(most, 1))
        end = min(stop, last * row)
        wanted = slice(at - first * row, end - first * row)
        yield _Block(first, last, wanted, buffer[at - start : end - start])
        at = end


def _row_bytes(part: TensorSpec, dim: int) -> int:
    """Of a part: what follows the elements before ``dim``."""
    return math.prod(part.shape[dim:]) * part.dtype.itemsize
