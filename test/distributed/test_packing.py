"""Where parameters lie in shards: the arithmetic, on tensors in host memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from xla_fsdp.distributed.packing import ShardPacking
from xla_fsdp.distributed.shard_layout import LANES, ShardLayout, shard_multiple

CASES: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "matrix": ([(7, 5)], 0),
    "columns": ([(5, 8)], 1),
    "middle dim": ([(3, 4, 2)], 1),
    "vector": ([(11,)], 0),
    "scalar": ([()], 0),
    "several": ([(3, 5), (4,), (), (2, 2, 2)], 0),
    "none": ([(0, 4), (3,)], 0),
    "whole tiles": ([(512, 128)], 0),
    "padded by rows": ([(500, 128)], 0),
}
SENT_BY_ROWS = {"whole tiles", "padded by rows"}


def packing_of(name: str, num_shards: int) -> tuple[ShardPacking, list[Tensor]]:
    """The packing of a case, and values that tell each element of its parameters."""
    shapes, dim = CASES[name]
    numels = list(map(math.prod, shapes))
    flat = torch.arange(1.0, 1 + sum(numels)).split(numels)
    values = [each.reshape(shape) for each, shape in zip(flat, shapes, strict=True)]
    multiple = LANES if len(shapes) > 1 else shard_multiple(shapes[0], num_shards)
    if dim:  # whole rows of it
        multiple = numels[0] // shapes[0][dim]
    layout = ShardLayout((sum(numels),), num_shards, multiple)
    return ShardPacking([torch.Size(shape) for shape in shapes], layout, dim), values


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_what_is_packed_is_unpacked(name: str, num_shards: int) -> None:
    packing, values = packing_of(name, num_shards)
    packed = packing.pack(values)
    assert packed.numel() == packing.layout.padded_numel
    assert (len(packing.sent_shape) == 2) == (name in SENT_BY_ROWS)
    for value, found in zip(values, packing.unpack(packed), strict=True):
        assert torch.equal(value, found)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_shards_in_the_order_of_ranks_are_what_is_packed(name: str, num_shards: int) -> None:
    packing, values = packing_of(name, num_shards)
    shards = [packing.cut(values, rank, by_rows=False) for rank in range(num_shards)]
    assert torch.equal(torch.cat(shards), packing.pack(values).reshape(-1))
    assert torch.cat(shards)[packing.layout.numel :].count_nonzero() == 0


@pytest.mark.parametrize("name", ["columns", "middle dim"])
def test_a_shard_along_a_dim_has_that_dim_in_its_place(name: str) -> None:
    packing, [value] = packing_of(name, 1)
    assert torch.equal(packing.from_rows(packing.in_rows(value)), value)
    stack = torch.stack([value, 2 * value])
    rows = packing.in_rows(stack)
    assert rows.shape[:2] == (2, value.shape[packing.dim])
    assert torch.equal(packing.from_rows(rows, 2), stack)
