"""In which order a block's large parameters travel in forward, which gradients together, and what
is cast before a loop."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xla_fsdp.distributed.collectives import LocalCollectives
from xla_fsdp.distributed.packing import ShardPacking
from xla_fsdp.distributed.shard_layout import ShardLayout
from xla_fsdp.fsdp.engine.schedule import ScheduleLog
from xla_fsdp.fsdp.engine.unit_collectives import AllGather
from xla_fsdp.scan.weights import BlockWeights, StackedShards

RANKS, WIDTH = 16, 1024


def weights_of(*rows: int, ranks: int = RANKS) -> BlockWeights:
    """Of a block with a matrix of so many rows each."""
    shapes = [torch.Size([each, WIDTH]) for each in rows]
    params: list[Any] = [
        SimpleNamespace(
            packing=ShardPacking([shape], ShardLayout(tuple(shape), ranks)),
            originals=[None],
            is_expert=False,
        )
        for shape in shapes
    ]
    group: Any = SimpleNamespace(
        params=params, collectives=LocalCollectives(0, ranks), log=ScheduleLog()
    )
    return BlockWeights(group, gather_once_below=WIDTH)


@pytest.mark.parametrize(
    ("rows", "turns"),
    [
        ((3072, 1024, 4096, 4096), [[2], [1], [3]]),  # of a GPT: qkv, proj, up, down
        ((1024, 256, 256, 1024), [[1], [2], [3]]),  # equal ones stay
        ((1024, 4096, 1024, 4096), [[1], [2], [3]]),
        ((1024, 4096), [[1]]),
        ((1024,), []),
    ],
)
def test_the_second_gather_is_not_the_larger_one(rows: tuple[int, ...], turns: Any) -> None:
    weights = weights_of(*rows)
    assert weights.prefetched == [0]
    assert weights.turns() == turns
    assert sorted(at for run in turns for at in run) == weights.gathered_late


def test_parameters_that_share_a_collective_have_one_turn() -> None:
    assert weights_of(3072, 1024, 4096, ranks=256).turns() == [[1, 2]]


def reduced_together(*rows: int) -> list[list[int]]:
    weights, found = weights_of(*rows, ranks=256), []

    def scatter(grads: Any, params: Any, by: Any) -> dict[int, torch.Tensor]:
        found.append(list(params))
        return {at: grads[at] for at in params}

    weights.group.reduction = SimpleNamespace(scatter=scatter, unpack=dict)  # type: ignore
    grads = {at: torch.full((), at) for at in range(len(rows))}
    assert weights.reduce(list(grads), grads, {}, torch.empty(0)) == grads
    return found


def test_gradients_of_one_loop_do_not_all_wait_for_the_last() -> None:
    assert reduced_together(3072, 1024, 4096, 4096) == [[0, 1], [2], [3]]
    assert reduced_together(8192, 8, 16, 8192) == [[0], [1, 2], [3]]


@pytest.mark.parametrize(
    ("parts", "in_parts", "products"),
    [
        (1, [0, 2], [0, 2]),
        (2, [2], [0, 2]),  # 682 multiplications for each element, and 819
        (8, [], []),
        (0, [], [0]),  # of three axes: the first, which is differentiated last, waits
    ],
)
def test_gradients_are_made_in_parts_that_multiply_enough(
    parts: int, in_parts: list[int], products: list[int]
) -> None:
    weights = weights_of(4096, 1024, 8192)
    weights._rings = SimpleNamespace(product_parts=parts)  # type: ignore[assignment]
    assert (weights.in_parts, weights.matrices) == (in_parts, products)


@pytest.mark.parametrize(
    ("rows", "sent"),
    [
        (64, (torch.float32, (3, 2, 64, WIDTH))),  # cast in the loop
        (60, (torch.bfloat16, (3, 120, WIDTH))),  # which laying these out anew would precede
    ],
)
def test_matrices_of_whole_tiles_are_sent_as_stored(rows: int, sent: Any) -> None:
    shape = torch.Size([4, rows, WIDTH])
    leaf = torch.zeros(3, 2, rows, WIDTH)  # of three blocks
    param = SimpleNamespace(
        packing=ShardPacking([shape], ShardLayout(tuple(shape), 2)),
        leaf=leaf,
        compute_dtype=torch.bfloat16,
        slots=SimpleNamespace(part=SimpleNamespace(number=0)),
    )
    gather = SimpleNamespace(sent=partial(AllGather.sent, None))
    group: Any = SimpleNamespace(params=[param], gather=gather)
    [found] = StackedShards([group]).sent_large([0], [leaf], [])
    assert (found.dtype, found.shape) == sent
