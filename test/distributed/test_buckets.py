"""What collectives carry: tensors joined, and apart again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xla_fsdp.distributed.packing import TILE, Bucket, plan_buckets

SHAPES = {0: (5,), 1: (2, 128), 2: (0,), 3: (300,), 4: (4, 256), 5: (7,)}
FP32 = dict.fromkeys(SHAPES, torch.float32)


def planned(limit: float = math.inf) -> list[tuple[int, ...]]:
    return [each.numbers for each in plan_buckets(SHAPES, FP32, limit)]


def test_flat_tensors_share_one_operand_and_others_have_one_each() -> None:
    assert planned() == [(0, 3, 5), (1,), (2,), (4,)]


def test_dtypes_do_not_share_one() -> None:
    dtypes = {**FP32, 3: torch.bfloat16}
    found = plan_buckets(SHAPES, dtypes, math.inf)
    assert {(each.numbers, each.dtype) for each in found} >= {
        ((0, 5), torch.float32),
        ((3,), torch.bfloat16),
    }


def test_a_bucket_holds_so_many_bytes_of_all_copies_or_one_tensor() -> None:
    assert planned(0) == [(at,) for at in SHAPES]
    small = {0: (5,), 1: (6,), 2: (7,)}
    found = plan_buckets(small, FP32, limit=2 * 4 * 11, copies=2)
    assert [each.numbers for each in found] == [(0, 1), (2,)]


WHOLE_TILES = st.integers(1, 3).map(lambda count: count * TILE)
SIZES = st.one_of(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    st.lists(WHOLE_TILES, min_size=1, max_size=4),
    st.lists(st.one_of(WHOLE_TILES, st.integers(1, 3000)), min_size=1, max_size=4),
)


@given(sizes=SIZES, ranks=st.integers(1, 3))
def test_what_is_joined_comes_apart_again(sizes: list[int], ranks: int) -> None:
    numbers = tuple(range(len(sizes)))
    bucket = Bucket(numbers, tuple((size,) for size in sizes), torch.float32)
    shards = [torch.randn(size) for size in sizes]
    joined = bucket.pack(shards)
    assert joined.numel() % TILE == 0
    for shard, piece in zip(shards, bucket.unpack(joined), strict=True):
        torch.testing.assert_close(piece, shard, rtol=0, atol=0)
    stacks = {at: torch.randn(ranks, size) for at, size in enumerate(sizes)}
    pieces = bucket.unpack(bucket.pack_gathered(stacks), ranks)
    for stack, piece in zip(stacks.values(), pieces, strict=True):
        torch.testing.assert_close(piece, stack, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0,), (6,), (2, 3)])
def test_a_joined_tensor_is_not_the_one_that_was_given(shape: tuple[int, ...]) -> None:
    given = torch.ones(shape)
    bucket = Bucket((0,), (shape,), torch.float32)
    [piece] = bucket.unpack(bucket.pack([given]))
    assert piece.shape == given.shape
    piece.zero_()
    assert given.sum() == given.numel()
