"""Several outputs of one forward: what reads the gradient of one sees what comes through others.

The oracle is the same model without FSDP.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.scenarios import Scenarios, fsdp, make

scenarios = Scenarios(__name__)

WIDTH = 8


class Steps(nn.Module):
    """Returns a tensor, what is computed from it, a view, a parameter, and what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x).tanh()
        later = self.second(hidden).relu()
        self.kept, self.used = hidden, weakref.ref(self.head.weight)
        views = (later[:, 0], self.head.weight.t())
        self.parts = [later, hidden]
        return {"hidden": hidden, "later": later, "views": views, "out": self.head(later), "x": x,
                "parts": self.parts}  # fmt: skip


def nested(**options: Any) -> Any:
    model = make(Steps)
    model.first, model.second = fsdp(model.first, **options), fsdp(model.second, **options)
    return fsdp(model, **options)


def in_place(**options: Any) -> Any:
    from xla_fsdp import fully_shard

    model = make(Steps)
    for each in (model.first, model.second, model):
        fully_shard(each, **options)
    return model


def recomputed(**options: Any) -> Any:
    from xla_fsdp import checkpoint_module

    return fsdp(checkpoint_module(make(Steps)), **options)


WAYS: dict[str, Callable[[], Any]] = {
    "one unit": lambda: fsdp(make(Steps)),
    "nested": nested,
    "in_place": in_place,
    "kept": partial(nested, reshard_after_forward=False),
    "no barriers": partial(
        nested, optimization_barrier_in_forward=False, optimization_barrier_in_backward=False
    ),
    "recomputed": recomputed,
}


def gradients(model: Any, device: Any) -> dict[str, Tensor]:
    """What hooks see in two backward passes through one graph, and the loss."""
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).to(device).requires_grad_()
    found = model(x)
    hooked: list[Tensor] = []
    found["hidden"].retain_grad()
    found["views"][0].retain_grad()
    found["later"].register_hook(lambda grad: hooked.append(grad) or 2 * grad)
    changed = found["out"].mul_(2)  # in place, as ``out += residual`` is
    loss = changed.square().mean() + found["hidden"].square().sum() + found["views"][0].sum()
    loss = loss + found["views"][1].square().sum() + found["x"].sum()
    loss.backward(retain_graph=True)
    loss.backward()
    grads = {"x": x.grad, "hidden": found["hidden"].grad, "view": found["views"][0].grad}
    hooks = dict(zip(("first pass", "second pass"), hooked, strict=True))
    return {name: each.detach().cpu() for name, each in {**grads, **hooks, "loss": loss}.items()}


@scenarios.add
def seen(rank: int) -> dict[str, dict[str, Tensor]]:
    import torch_xla

    return {way: gradients(build(), torch_xla.device()) for way, build in WAYS.items()}


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_one_output_see_what_comes_through_others(way: str) -> None:
    assert_close(scenarios.result("seen")[way], gradients(make(Steps), "cpu"), atol=1e-5)


@scenarios.add
def identity(rank: int) -> list[bool]:
    import torch_xla

    model = fsdp(make(Steps))
    found = model(torch.ones(2, WIDTH, device=torch_xla.device()))
    return [found["hidden"] is model.module.kept, found["parts"] is model.module.parts]


def test_an_output_is_what_the_forward_has_made() -> None:
    assert scenarios.result("identity") == [True, True]


@scenarios.add
def freed(rank: int) -> list[bool]:
    """Whether a parameter of the forward lives on after a backward, while the loss does."""
    import torch_xla

    model = fsdp(make(Steps), reshard_after_forward=False)
    alive = []
    for keeps in (False, True):
        loss = model(torch.ones(2, WIDTH, device=torch_xla.device()))["out"].sum()
        loss.backward(retain_graph=keeps)
        torch_xla.sync()
        alive.append(model.module.used() is not None)
    return alive


def test_a_loss_that_is_held_keeps_no_parameters_after_backward() -> None:
    assert scenarios.result("freed") == [False, True]


class Keeping(nn.Module):
    """Keeps what shares memory with its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("buffer", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        z = self.linear(x)
        self.kept = {"row": y[0], "detached": y.detach(), "data": y.data, "base": z}
        return {
            "y": y,
            "slice": z[:1],
            "constant": y.detach(),
            "buffer": self.buffer,
            "parameter": self.linear.weight.detach(),
        }


def changed_outputs(model: Any, kept: Any, device: Any) -> dict[str, Tensor]:
    """What the module has kept, and what it has returned, after changes of its outputs."""
    found = {}
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            outputs = model(torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(device))
            outputs["y"][0] = 7
            outputs["slice"].mul_(3)
            outputs["buffer"][1] += 1
        all_of_it = {**outputs, **kept.kept, "own buffer": kept.buffer}
        found |= {f"{mode.__name__}, {name}": each for name, each in all_of_it.items()}
    return {name: each.detach().cpu() for name, each in found.items()}


@scenarios.add
def memory(rank: int) -> dict[str, dict[str, Tensor]]:
    import torch_xla

    from xla_fsdp import checkpoint_module, fully_shard

    def recomputed(model: Any) -> Any:
        return fsdp(checkpoint_module(model))

    found = {}
    for door in (fsdp, fully_shard, recomputed):
        model = make(Keeping)
        found[door.__name__] = changed_outputs(door(model), model, torch_xla.device())
    return found


@pytest.mark.parametrize("door", ["fsdp", "fully_shard", "recomputed"])
def test_what_a_module_keeps_of_an_output_shares_its_memory(door: str) -> None:
    model = make(Keeping)
    assert_close(scenarios.result("memory")[door], changed_outputs(model, model, "cpu"), atol=1e-6)


class Hooked(nn.Linear):
    """Puts a hook on its own output that reads its weight."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: grad * self.weight.detach().square().mean())
        return y


def grad_of_input(module: Any, device: Any) -> Tensor:
    x = torch.ones(2, WIDTH, device=device, requires_grad=True)
    module(x).square().sum().backward()
    assert x.grad is not None
    return x.grad.cpu()


@scenarios.add
def hooked_inside(rank: int) -> Tensor:
    import torch_xla

    return grad_of_input(fsdp(make(lambda: Hooked(WIDTH, 3))), torch_xla.device())


def test_a_hook_of_the_forward_reads_unsharded_parameters() -> None:
    expected = grad_of_input(make(lambda: Hooked(WIDTH, 3)), "cpu")
    assert_close({"x": scenarios.result("hooked_inside")}, {"x": expected}, atol=1e-6)
