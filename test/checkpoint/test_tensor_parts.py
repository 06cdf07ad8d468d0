"""Whole tensors of the parts of tensor parallelism, and parts of whole ones: bytes alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xla_fsdp.checkpoint.files import tensor_source
from xla_fsdp.checkpoint.files.tensor_source import (
    TensorSource,
    bytes_of,
    global_of,
    part_of,
    source_of,
)
from xla_fsdp.checkpoint.format.records import MemberRecord

SIZES = st.integers(1, 4)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """A tensor, the dim along which it is cut, and into how many parts."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    shape[dim] *= parts
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    return torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape), dim, parts


@given(cut_tensors(), st.data())
def test_parts_join_and_whole_tensors_part(
    cut: tuple[Tensor, int, int], data: st.DataObject
) -> None:
    tensor, dim, parts = cut
    member = MemberRecord("w", tuple(tensor.shape), dim)
    slices = [part.contiguous() for part in tensor.chunk(parts, dim)]
    joined = global_of([source_of(part) for part in slices], member)
    assert torch.equal(joined.load(), tensor)
    for number, part in enumerate(slices):
        found = part_of(source_of(tensor), member, number, parts)
        assert torch.equal(found.load(), part)
        assert_any_bytes(found, part, data)
    assert_any_bytes(joined, tensor, data)


def assert_any_bytes(source: TensorSource, tensor: Tensor, data: st.DataObject) -> None:
    """Also in blocks of a row, and from the middle of one to the middle of another."""
    start = data.draw(st.integers(0, source.spec.nbytes))
    stop = data.draw(st.integers(start, source.spec.nbytes))
    buffer, block = bytearray(stop - start), tensor_source.BLOCK
    try:
        tensor_source.BLOCK = data.draw(st.sampled_from([1, 16, block]))
        source.data.read_into(start, memoryview(buffer))
    finally:
        tensor_source.BLOCK = block
    assert bytes(buffer) == bytes(bytes_of(tensor)[start:stop])


def test_what_every_part_has_is_taken_of_the_first() -> None:
    member = MemberRecord("w", (2,), None)
    sources = [source_of(torch.full((2,), float(n))) for n in range(3)]
    assert global_of(sources, member) is sources[0]
    assert part_of(sources[0], member, 1, 3) is sources[0]
