"""The shard arithmetic, checked as properties over random shapes, world sizes and multiples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xla_fsdp.distributed.shard_layout import LANES, ShardLayout, rows_layout, shard_multiple

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
layouts = st.builds(ShardLayout, shapes, st.integers(1, 9), st.sampled_from([1, 2, 3, LANES]))


@given(layouts)
def test_joined_slices_give_the_full_tensor(layout: ShardLayout) -> None:
    full = torch.arange(math.prod(layout.shape))
    slices = [full[layout.slice_for(rank)] for rank in range(layout.num_shards)]
    assert torch.equal(torch.cat(slices), full)


@given(layouts)
def test_every_element_lies_where_the_padded_vector_has_it(layout: ShardLayout) -> None:
    for rank in range(layout.num_shards):
        held = layout.slice_for(rank)
        assert held.start == min(rank * layout.shard_numel, layout.numel)
        assert held.stop == min((rank + 1) * layout.shard_numel, layout.numel)


@given(layouts)
def test_shards_are_equal_multiples_and_no_longer_than_needed(layout: ShardLayout) -> None:
    assert layout.padded_numel == layout.num_shards * layout.shard_numel >= layout.numel
    assert layout.shard_numel % layout.multiple == 0
    if layout.numel:
        one_row_less = layout.shard_numel - layout.multiple
        assert one_row_less * layout.num_shards < layout.numel
    else:
        assert layout.shard_numel == 0


@pytest.mark.parametrize(
    ("shape", "num_shards", "multiple", "shard_numel"),
    [
        ((), 1, 128, 128),
        ((), 8, 1, 1),
        ((0, 5), 3, 128, 0),
        ((3,), 8, 1, 1),
        ((3,), 8, 128, 128),
        ((16, 64), 8, 128, 128),
        ((16, 65), 8, 128, 256),
        ((5, 2), 3, 1, 4),
    ],
)
def test_shard_numel(
    shape: tuple[int, ...], num_shards: int, multiple: int, shard_numel: int
) -> None:
    assert ShardLayout(shape, num_shards, multiple).shard_numel == shard_numel


def test_more_ranks_than_elements_leaves_the_last_ones_empty() -> None:
    layout = ShardLayout((3,), 5, multiple=1)
    assert [layout.slice_for(rank) for rank in range(5)] == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 3),
        slice(3, 3),
        slice(3, 3),
    ]


def test_default_multiple_is_a_row_of_lanes() -> None:
    assert ShardLayout((1,), 1).shard_numel == LANES == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, -1), 2, 1), r"shape \(2, -1\) has a negative size"),
        (((2,), 0, 1), "must be at least 1, got 0 and 1"),
        (((2,), 2, 0), "must be at least 1, got 2 and 0"),
    ],
)
def test_impossible_layouts_are_refused(
    arguments: tuple[tuple[int, ...], int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ShardLayout(*arguments)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of the 4 shards"):
        ShardLayout((9,), 4).slice_for(rank)


@pytest.mark.parametrize(
    ("shape", "num_shards", "multiple"),
    [
        ((50257, 1024), 16, 8 * 1024),  # 3141.06 rows a rank, rounded up to 3144
        ((50304, 1024), 16, LANES),  # 3144 rows a rank as it is
        ((50257, 1000), 16, 8 * 1000),
        ((50257, 300), 16, LANES),  # rows are no whole lanes, nor nearly
        ((2048, 64, 3, 3), 16, LANES),
        ((50257,), 16, LANES),
        ((), 16, LANES),
        ((100, 1024), 16, LANES),  # 8 rows for 6.25 would be over an eighth more
        ((15, 128), 2, LANES),  # too small to travel by itself
        ((512, 60, 3, 3), 16, LANES),
        ((2049, 64, 2, 1), 16, 8 * 128),
    ],
)
def test_shards_of_large_matrices_end_with_a_row(
    shape: tuple[int, ...], num_shards: int, multiple: int
) -> None:
    assert shard_multiple(shape, num_shards) == multiple


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim", "rows"),
    [
        ((3413, 1280), 8, 0, 432),  # 426.6 rows a rank
        ((3456, 1280), 8, 0, 432),
        ((1280, 3413), 8, 0, 160),
        ((1284, 3413), 8, 0, 168),
        ((1284, 3413), 8, 1, 427),  # along another dim they are copied anyway
        ((1284, 300), 8, 0, 161),
        ((100, 1024), 16, 0, 7),  # 8 rows would be over an eighth more
        ((60, 128), 8, 0, 8),  # too small to travel by itself
        ((3413, 64, 64), 8, 0, 427),
        ((3413,), 8, 0, 427),
    ],
)
def test_rows_of_large_matrices_are_whole_tiles(
    shape: tuple[int, ...], num_shards: int, dim: int, rows: int
) -> None:
    layout = rows_layout(shape, num_shards, dim)
    assert layout.shard_numel == rows * math.prod(shape) // shape[dim]
    assert layout.padded_numel <= 1.15 * layout.numel
