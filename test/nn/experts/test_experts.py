"""Grouped products are those of each expert by itself, whatever the routes are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test.common.compare import assert_close
from test.common.experts import CASES, by_loop, by_routes
from xla_fsdp.nn.experts.api import grouped_linear
from xla_fsdp.nn.experts.routes import Routes
from xla_fsdp.nn.experts.segments import SEGMENTS


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_a_loop_over_experts(name: str) -> None:
    case = CASES[name]
    limits: Any = {"atol": 1e-6, "of_largest": 1e-6}
    if case.dtype is torch.bfloat16:
        limits = {"atol": 0.05, "of_largest": 0.02}
    assert_close(by_routes(case), by_loop(case), **limits)


def test_an_expert_takes_no_more_than_its_capacity() -> None:
    experts = torch.tensor([[1, 0], [0, 2], [0, 1], [0, 3], [2, 0]])
    routes = Routes.of(experts, 4, capacity=1.2)  # 3 of 10 pairs
    assert routes.order.tolist() == [1, 2, 3, 0, 7, -1, 4, 6, -1, 8, -1, -1]
    assert routes.places.tolist() == [3, 0, 1, 2, 6, -1, 7, 4, 9, -1]


def test_rows_are_sorted_and_equal_ones_stay_in_order() -> None:
    routes = Routes.of(torch.tensor([[2, 0], [1, 2], [2, 1]]), 4)
    assert routes.order.tolist() == [3, 1, 5, 0, 2, 4]
    assert routes.order[routes.places.long()].tolist() == list(range(6))
    assert routes.sizes.tolist() == [1, 2, 3, 0]


def test_rows_of_no_expert_are_zero_whatever_they_hold() -> None:
    rows = torch.full((5, 3), torch.nan)
    rows[:2] = 1
    sizes = torch.tensor([2, 0], dtype=torch.int32)
    product = SEGMENTS.multiply(rows, torch.ones(2, 3, 4), sizes, False, 4)
    assert product[:2].eq(3).all()
    assert product[2:].eq(0).all()
    outer = SEGMENTS.outer(rows, rows, sizes, 4)
    assert outer[0].eq(2).all()
    assert outer[1].eq(0).all()


def test_autocast_is_that_of_a_linear_layer() -> None:
    routes = Routes.of(torch.tensor([[0], [1]]), 2)
    with torch.autocast("cpu", torch.bfloat16):
        result = grouped_linear(torch.ones(2, 3), torch.ones(2, 4, 3), routes)
    assert result.dtype is torch.bfloat16


def test_a_second_derivative_is_refused() -> None:
    routes = Routes.of(torch.tensor([[0], [1]]), 2)
    rows = torch.ones(2, 3, requires_grad=True)
    weight = torch.ones(2, 4, 3, requires_grad=True)
    result = grouped_linear(routes.spread(rows), weight, routes)
    [grad] = torch.autograd.grad(result.square().sum(), [weight], create_graph=True)
    with pytest.raises(RuntimeError, match="experts save no graph of their backward"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("rows", "weight", "bias", "message"),
    [
        ((4, 3), (2, 5, 4), None, r"rows \[4, 3\] and weight \[2, 5, 4\] do not fit 4 rows of 2"),
        ((3, 3), (2, 5, 3), None, r"rows \[3, 3\] and weight"),
        ((4, 3), (3, 5, 3), None, r"weight \[3, 5, 3\] do not fit"),
        ((4, 3), (5, 3), None, r"weight \[5, 3\] do not fit"),
        ((4, 3), (2, 5, 3), (5,), r"bias is \[5\], not \[experts, outputs\] = \[2, 5\]"),
    ],
)
def test_shapes_that_do_not_fit(rows: Any, weight: Any, bias: Any, message: str) -> None:
    routes = Routes.of(torch.tensor([[0, 1], [1, 0]]), 2)
    given = None if bias is None else torch.zeros(bias)
    with pytest.raises(ValueError, match=message):
        grouped_linear(torch.zeros(rows), torch.zeros(weight), routes, given)


def routes_of(capacity: float | None = None) -> Routes:
    return Routes.of(torch.tensor([[0, 1], [1, 0], [0, 1]]), 2, capacity)


@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize(
    ("method", "shape", "message"),
    [
        ("spread", (2, 4), r"tokens is \[2, 4\], not \[3, 4\]"),
        ("spread", (1, 3, 4), r"tokens is \[1, 3, 4\], not \[3, 4\]"),
        ("weights_of_rows", (3, 1), r"weights is \[3, 1\], not \[3, 2\]"),
        ("weights_of_rows", (2, 3), r"weights is \[2, 3\], not \[3, 2\]"),
        ("combine", (3, 4), r"rows is \[3, 4\], not \[[46], 4\]"),
    ],
)
def test_no_other_rows_are_taken_than_have_been_routed(
    capacity: float | None, method: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(routes_of(capacity), method)(torch.zeros(shape))


@pytest.mark.parametrize(
    "experts",
    [torch.tensor([0, 1]), torch.zeros(1, 2, 2).int(), torch.zeros(2, 2), torch.zeros(0, 2).int()],
)
def test_experts_that_are_not_those_of_tokens(experts: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"give \[tokens, choices\] integers of at least one"):
        Routes.of(experts, 2)


@pytest.mark.parametrize("capacity", [0, -1.0, float("nan"), "1", True])
def test_a_capacity_of_nothing(capacity: Any) -> None:
    with pytest.raises(ValueError, match=f"capacity is {capacity!r}; give a number above 0"):
        routes_of(capacity)


@pytest.mark.parametrize("capacity", [2.0, 1e9, float("inf")])
def test_no_expert_has_more_rows_than_there_are_pairs(capacity: float) -> None:
    assert routes_of(capacity).each == 6


def test_rounds_share_a_weight_that_autocast_casts_in_each() -> None:
    weight, joined = torch.ones(2, 4, 3, requires_grad=True), dict[int, Any]()
    routes = Routes.even(2, 1, torch.device("cpu"))._replace(joined=joined)
    rows = [torch.randn(2, 3) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        results = [grouped_linear(each, weight, routes) for each in rows]
    torch.stack(results).sum().backward()
    assert len(joined) == 1
    assert weight.grad is not None
    expected = torch.stack(rows).sum(0).unsqueeze(1).expand(2, 4, 3)
    assert torch.allclose(weight.grad, expected, atol=0.05)
