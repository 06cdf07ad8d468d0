"""Numbers of blocks, recorded and replaced by tensors; on the CPU, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from xla_fsdp.scan.block_numbers import Number, Numbers


class Recording(TorchFunctionMode):
    """Lets ``numbers`` see all operations."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self.numbers = numbers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.numbers.call(func, getattr(func, "__name__", ""), args, kwargs or {})


def run(compute: Callable[[], Tensor], given: dict[int, Tensor]) -> tuple[Tensor, list[Number]]:
    numbers = Numbers(given)
    with Recording(numbers):
        return compute(), numbers.found


OPERATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "x + n": lambda x, n: x + n,
    "n + x": lambda x, n: n + x,
    "x - n": lambda x, n: x - n,
    "n - x": lambda x, n: n - x,
    "x * n": lambda x, n: x * n,
    "x / n": lambda x, n: x / n,
    "n / x": lambda x, n: n / x,
    "x // n": lambda x, n: x // n,
    "x % n": lambda x, n: x % n,
    "x ** n": lambda x, n: x**n,
    "n ** x": lambda x, n: n**x,
    "x > n": lambda x, n: x > n,
    "x == n": lambda x, n: x == n,
    "add, alpha": lambda x, n: torch.add(x, n, alpha=2),
    "mul, other": lambda x, n: torch.mul(x, other=n),
    "div, rounded": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "add_": lambda x, n: x.clone().add_(n) if x.is_floating_point() else x + n,
    "where": lambda x, n: torch.where(torch.ones_like(x, dtype=torch.bool), n, x),
    "masked_fill": lambda x, n: x.to(torch.float32).masked_fill(x == x, n),
}
TENSORS = {
    "float32": torch.tensor([1.0, 2.5]),
    "float64": torch.tensor([1.0, 2.5], dtype=torch.float64),
    "bf16": torch.tensor([1.0, 2.5], dtype=torch.bfloat16),
    "bf16 without dims": torch.tensor(2.5, dtype=torch.bfloat16),
    "int64": torch.tensor([1, 3]),
    "int32": torch.tensor([1, 3], dtype=torch.int32),
    "bool": torch.tensor([True, True]),
}


@pytest.mark.parametrize("number", [0.5, 2, 3.0])
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_tensor_in_the_place_of_a_number_gives_the_same(
    operation: str, tensor: str, number: float
) -> None:
    x = TENSORS[tensor]
    try:
        plain = OPERATIONS[operation](x, number)
    except RuntimeError:
        pytest.skip("not defined for these")
    recorded, found = run(lambda: OPERATIONS[operation](x, number), {})
    assert found[0].value == number
    given = {at: torch.tensor(each.value, dtype=each.dtype) for at, each in enumerate(found)}
    replaced, again = run(lambda: OPERATIONS[operation](x, number), given)
    assert again == found
    for result in (recorded, replaced):
        torch.testing.assert_close(result, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, n: F.leaky_relu(x, n),
        lambda x, n: F.layer_norm(x, (2,), eps=n),
        lambda x, n: x.clamp(min=n),
        lambda x, n: torch.full((2,), n),
        lambda x, n: x.float() * torch.tensor(n),
    ],
)
def test_numbers_elsewhere_stay(compute: Callable[[Tensor, float], Tensor]) -> None:
    x = TENSORS["float32"]
    result, found = run(lambda: compute(x, 0.25), {0: torch.tensor(9.0)})
    assert found == []
    torch.testing.assert_close(result, compute(x, 0.25))


@pytest.mark.parametrize(
    ("draw", "given"),
    [
        (lambda x: F.dropout(x, 0.5), 0.25),
        (lambda x: torch.dropout(x, 0.5, True), 0.25),
        (lambda x: x.clone().bernoulli_(0.5), 0.75),
        (lambda x: torch.bernoulli(x, 0.5), 0.75),
    ],
)
def test_random_numbers_have_the_rate_that_is_given(
    draw: Callable[[Tensor], Tensor], given: float
) -> None:
    x = torch.ones(100, 100)
    result, found = run(lambda: draw(x), {0: torch.tensor(given)})
    assert [each.value for each in found] == [0.5]
    assert len(result.unique()) == 2
    assert (result != 0).float().mean().item() == pytest.approx(0.75, abs=0.05)


def test_numbers_are_told_by_their_order() -> None:
    x = torch.tensor([3.0])
    result, found = run(lambda: (x * 2 + 0.5) * 2, {1: torch.tensor(1.0)})
    assert [(each.operation, each.value) for each in found] == [
        ("mul", 2),
        ("add", 0.5),
        ("mul", 2),
    ]
    assert result.item() == 14


def test_all_or_nothing_is_left_out() -> None:
    x = torch.ones(100)
    for rate, expected in ((0.0, 1.0), (1.0, 0.0)):
        result, _ = run(lambda: F.dropout(x, 0.5), {0: torch.tensor(rate)})
        torch.testing.assert_close(result, torch.full_like(x, expected))
    evaluated, _ = run(lambda: F.dropout(x, 0.5, training=False), {0: torch.tensor(1.0)})
    assert torch.equal(evaluated, x)
