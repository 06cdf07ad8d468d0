"""A reduction around rings gives what a reduce-scatter gives.

On CPU ranks a gather takes the place of each collective-permute. That the TPU compiler hides the
sends is shown in ``fsdp/scan/test_tpu``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.ranks import cached_outcome, run_on_ranks
from xla_fsdp.distributed.collectives import folded

RANKS = 4
RINGS = {
    "one": [[0, 1, 2, 3]],
    "two": [[0, 2], [1, 3]],
    "not in order": [[2, 0, 3, 1]],
    "alone": [[0], [1], [2], [3]],
}
ROWS, WIDTH = 512, 256  # more than collectives.RING


def stack_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def factors_of(rank: int) -> tuple[Tensor, Tensor]:
    """Two matrices; rows of their product are those of all ranks."""
    generator = torch.Generator().manual_seed(30 + rank)
    shapes = ((6, RANKS * ROWS), (6, WIDTH))
    left, right = (torch.randn(shape, generator=generator) for shape in shapes)
    return left, right


@pytest.mark.parametrize(("axes", "parts"), [((4,), 4), ((2, 4), 2), ((2, 2, 2), 0)])
def test_products_are_cut_for_the_first_ring_of_a_torus_of_two_axes(
    axes: tuple[int, ...], parts: int
) -> None:
    from xla_fsdp.distributed.collectives import RingCollectives

    ranks = math.prod(axes)
    steps = [[list(range(size))] for size in axes]
    assert RingCollectives([list(range(ranks))], 0, ranks, steps).product_parts == parts


def on_ranks(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp.distributed.collectives import (
        RingCollectives,
        XlaCollectives,
        ring_order,
        ring_reduce_scatter,
    )

    device = torch_xla.device()
    found: dict[str, Any] = {}
    for name, groups in RINGS.items():
        [(place, ring)] = [(g.index(rank), g) for g in groups if rank in g]
        stack = stack_of(rank, len(ring)).to(device)
        order = ring_order(len(ring), place).to(device)
        found[name] = ring_reduce_scatter(partial(stack.index_select, 0), groups, order)
    two_steps = RingCollectives(None, rank, RANKS, steps=[[[0, 2], [1, 3]], [[0, 1], [2, 3]]])
    stack = stack_of(rank, RANKS).to(device)
    found["large"] = two_steps.reduce_scatter(stack.flatten(0, 1))
    found["finished"] = two_steps.reduce_scatter(stack.flatten(0, 1), torch.neg)
    left, right = factors_of(rank)
    product = (left.to(device), right.to(device), torch.neg)
    found["product"] = two_steps.reduce_scatter_product(*product)
    plain = XlaCollectives(None, rank, RANKS, steps=[])
    found["plain product"] = plain.reduce_scatter_product(*product)
    found["small"] = two_steps.reduce_scatter(torch.ones(RANKS, 5, device=device) * rank)
    torch_xla.sync()
    return {name: value.cpu() for name, value in found.items()}


@cached_outcome
def outcomes() -> list[dict[str, Any]]:
    return run_on_ranks(on_ranks, RANKS)


def test_every_rank_gets_its_chunk_of_the_sum() -> None:
    for rank, found in enumerate(outcomes()):
        for name, groups in RINGS.items():
            [(place, ring)] = [(g.index(rank), g) for g in groups if rank in g]
            expected = sum(stack_of(member, len(ring))[place] for member in ring)
            torch.testing.assert_close(found[name], expected)


def test_steps_along_two_axes_of_a_torus_leave_the_rank_its_chunk() -> None:
    for rank, found in enumerate(outcomes()):
        expected = sum(stack_of(member, RANKS)[rank] for member in range(RANKS))
        torch.testing.assert_close(found["large"], expected)
        torch.testing.assert_close(found["finished"], -expected)
        torch.testing.assert_close(found["small"], torch.full((1, 5), 6.0))


@pytest.mark.parametrize("name", ["product", "plain product"])
def test_a_product_is_reduced_like_its_result(name: str) -> None:
    factors = [factors_of(member) for member in range(RANKS)]
    expected = -sum(left.t() @ right for left, right in factors)
    for rank, found in enumerate(outcomes()):
        torch.testing.assert_close(found[name], expected[rank * ROWS : (rank + 1) * ROWS])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
def test_no_send_of_a_ring_passes_more_than_two_links_of_a_line(size: int) -> None:
    path = folded(size)
    assert sorted(path) == list(range(size))
    assert max(abs(at - to) for at, to in zip(path, path[1:] + path[:1], strict=True)) <= 2
