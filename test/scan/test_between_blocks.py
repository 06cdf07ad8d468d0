"""What forwards do between the blocks of a loop, and with outputs that they keep. Two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.scenarios import Scenarios, fsdp, make, message

scenarios = Scenarios(__name__)
WIDTH, DEPTH, STEPS = 8, 8, 2


def damped(grad: Tensor) -> Tensor:
    return grad / 2


class Blocks(nn.Module):
    """``way`` says what the forward does with the blocks' outputs."""

    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.blocks):
            with torch.set_grad_enabled(self.way != "no gradients" or number >= DEPTH // 2):
                x = block(x)
            kept.append(x)
            if self.way == "asked" and x.requires_grad:
                x.register_hook(damped)
            if self.way == "asserted":
                assert x.requires_grad
                assert x.grad_fn is not None
        if self.way == "hooked later":
            kept[3].register_hook(damped)
        if self.way == "differentiated":
            (grad,) = torch.autograd.grad(x.sum(), kept[3], retain_graph=True)
            x = x * (1 + grad.abs().mean())
        return self.head(x)


WAYS = ("no gradients", "asked", "asserted", "hooked later", "differentiated")


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Any, optimizer: Any, loss_of: Callable[[int], Tensor]) -> None:
    for step in range(STEPS):
        loss_of(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(way: str) -> dict[str, Tensor]:
    model = make(Blocks)
    model.way = way
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    train(
        model,
        optimizer,
        lambda step: torch.stack([model(batch(r, step)).square().mean() for r in range(2)]).mean(),
    )
    return dict(model.state_dict())


def wrapped() -> tuple[Any, Any]:
    from xla_fsdp import checkpoint_module

    model = make(Blocks)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fsdp(checkpoint_module(block))
    model = fsdp(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def lean() -> tuple[Any, Any]:
    from xla_fsdp import Recipe, parallelize

    model = make(Blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, _ = parallelize(model, optimizer, Recipe("lean", stacked=False))
    return model, optimizer


DOORS = {"wrapped": wrapped, "lean": lean}


@scenarios.add
def trained(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import full_state_dict

    found = {}
    for door, build in DOORS.items():
        for way in WAYS:
            model, optimizer = build()
            model.module.way = way
            train(
                model,
                optimizer,
                lambda step, model=model: (
                    model(batch(rank, step).to(torch_xla.device()))  # type: ignore[misc]
                    .square()
                    .mean()
                ),
            )
            state = full_state_dict(model).items()
            found[f"{door} {way}"] = {name: each.cpu() for name, each in state}
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("door", DOORS)
def test_it_trains_as_the_plain_model(door: str, way: str) -> None:
    found = scenarios.result("trained")[f"{door} {way}"]
    assert_close(found, plain(way), atol=1e-6, of_largest=1e-5)


class Remembering(nn.Linear):
    """Keeps something of each forward in a list."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        self.means.append(y.mean().detach())
        return y


@scenarios.add
def refused(rank: int) -> dict[str, str]:
    import torch_xla

    from xla_fsdp import parallelize, scan_blocks

    model = make(Blocks)
    model.way = "no gradients"
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fsdp(block, scan_layers=False)
    scan_blocks(model.blocks)
    model = fsdp(model, scan_layers=False)
    x = batch(rank, 0).to(torch_xla.device())

    remembering: Any = make(lambda: nn.Sequential(*(Remembering() for _ in range(4))))
    optimizer = torch.optim.SGD(remembering.parameters(), lr=0.1)
    remembering, optimizer, recipe = parallelize(remembering, optimizer, "lean")

    def step(x: Tensor) -> Tensor:
        loss: Tensor = remembering(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = recipe.compile(step)
    return {"modes": message(lambda: model(x)), "list": message(lambda: compiled(x).item())}


def test_what_no_loop_can_see_is_refused() -> None:
    found = scenarios.result("refused")
    assert "modes of gradients or of autocast change before block 4" in found["modes"]
    assert "means[0] holds a tensor that was never computed" in found["list"]
