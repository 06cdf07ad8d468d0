"""Changes in place of what autograd has saved: refused as by plain torch, or harmless."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.scenarios import Scenarios, fsdp, make, message

scenarios = Scenarios(__name__)

WIDTH = 8


class Changing(nn.Module):
    """Changes a tensor in place that its Linear, or another function, has saved."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "input":
            return x.add_(self.linear(x))
        if self.way == "result":
            return self.linear(x).exp().mul_(2)
        hidden = x * 2
        y = self.linear(hidden)
        if self.way == "inner":
            hidden.add_(1)
        if self.way == "inner view":
            hidden[0].zero_()
        return y.tanh()


WAYS = ("input", "result", "inner", "inner view")


def checkpointed(module: nn.Module) -> Any:
    from xla_fsdp import checkpoint_module

    return checkpoint_module(module)


def in_place(module: nn.Module) -> Any:
    from xla_fsdp import fully_shard

    return fully_shard(module)


DOORS: dict[str, Callable[[nn.Module], Any]] = {
    "wrapped": fsdp,
    "in_place": in_place,
    "checkpointed": checkpointed,
    "checkpointed inside": lambda module: fsdp(checkpointed(module)),
    "checkpointed outside": lambda module: checkpointed(fsdp(module)),
}


class Doubling(nn.Module):
    """Changes in place what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def grad_of_input(model: Any, device: Any) -> Tensor:
    given = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).to(device).requires_grad_()
    model(given * 1).square().sum().backward()
    assert given.grad is not None
    return given.grad.cpu()


def around(door: str, way: str, last: nn.Module) -> Any:
    """A unit inside of a root, which keeps its parameters until backward."""
    return fsdp(nn.Sequential(DOORS[door](make(partial(Changing, way)).to("xla")), last))


@scenarios.add
def refused(rank: int) -> dict[str, str]:
    def trained(door: str, way: str) -> Tensor:
        return grad_of_input(around(door, way, nn.Identity()), "xla")

    return {f"{door} {way}": message(partial(trained, door, way)) for door in DOORS for way in WAYS}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("door", DOORS)
def test_what_autograd_has_saved_must_not_change(door: str, way: str) -> None:
    plain = message(lambda: grad_of_input(make(partial(Changing, way)), "cpu"))
    assert "modified by an inplace operation" in plain
    found = scenarios.result("refused")[f"{door} {way}"]
    assert "was changed in place after autograd had saved it" in found


RECOMPUTES = {"checkpointed", "checkpointed inside", "checkpointed outside"}


@scenarios.add
def doubled_output(rank: int) -> dict[str, Any]:
    def trained(door: str) -> Tensor:
        return grad_of_input(around(door, "no", Doubling()), "xla")

    return {
        door: trained(door) if door in RECOMPUTES else message(partial(trained, door))
        for door in DOORS
    }


@pytest.mark.parametrize("door", sorted(RECOMPUTES))
def test_what_is_recomputed_may_be_changed_by_the_caller(door: str) -> None:
    model = make(partial(Changing, "no"))
    expected = grad_of_input(lambda x: 2 * model(x), "cpu")
    assert_close({"x": scenarios.result("doubled_output")[door]}, {"x": expected}, atol=1e-5)


@pytest.mark.parametrize("door", sorted(DOORS.keys() - RECOMPUTES))
def test_an_output_that_autograd_has_saved_must_not_change(door: str) -> None:
    model = make(partial(Changing, "no"))
    plain = message(lambda: grad_of_input(lambda x: model(x).mul_(2), "cpu"))
    assert "modified by an inplace operation" in plain
    found = scenarios.result("doubled_output")[door]
    assert "was changed in place after autograd had saved it" in found
