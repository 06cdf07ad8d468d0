"""Steps inside backward against steps after it, and several sharded models under one optimizer.
Two ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.in_place import in_place
from test.common.models import FEATURES, FrozenNet, Net, TwiceNet
from test.common.ranks import run_on_ranks
from test.common.replicas import batch, values
from test.common.scenarios import Scenarios, fsdp, make, message, nested

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result

STEPS = 2
ADAMW: Callable[[Any], Any] = lambda params: torch.optim.AdamW(params, lr=0.01)  # noqa: E731
MOMENTUM: Callable[[Any], Any] = lambda params: torch.optim.SGD(  # noqa: E731
    params, lr=0.1, momentum=0.9
)


def train(
    model: Any, optimizer: Any, rank: int, *, micro_batches: int = 1, **no_sync: bool
) -> list[Tensor]:
    """Train; returns the shards."""
    import torch_xla

    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            quiet = micro < micro_batches - 1
            x = batch(10 * step + micro, rank).to(torch_xla.device())
            with model.no_sync(**no_sync) if quiet else contextlib.nullcontext():
                model(x).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
    return values(model)


CASES: dict[str, tuple[type[nn.Module], Any, dict[str, Any], dict[str, Any]]] = {
    "adamw flat": (Net, ADAMW, {"flatten_parameters": True}, {}),
    "unit runs twice": (TwiceNet, MOMENTUM, {}, {}),
    "frozen, no_sync": (FrozenNet, MOMENTUM, {}, {"micro_batches": 2}),
    "no_sync sharded": (Net, MOMENTUM, {}, {"micro_batches": 2, "sharded": True}),
}


QUICK = ("unit runs twice", "no_sync sharded")


def train_cases(rank: int, names: Sequence[str]) -> dict[Any, Any]:
    """What is left of each case, stepped after backward (False) and inside (True)."""
    from xla_fsdp.optim import step_in_backward

    found: dict[Any, Any] = {}
    for name in names:
        model_class, make_optimizer, options, how = CASES[name]
        for fused in (False, True):
            model = nested(make(model_class), **options)
            optimizer = make_optimizer(model.parameters())
            if fused:
                step_in_backward(model, optimizer)
            found[name, fused] = train(model, optimizer, rank, **how)
            found[name, fused, "groups"] = optimizer.state_dict()["param_groups"]
            found[name, fused, "grads"] = sum(p.grad is not None for p in model.parameters())
    return found


def assert_alike(name: str, found: dict[Any, Any]) -> None:
    after, within = found[name, False], found[name, True]
    assert all(torch.equal(a, b) for a, b in zip(after, within, strict=True))
    assert found[name, True, "groups"] == found[name, False, "groups"]
    assert found[name, True, "grads"] == 0 < found[name, False, "grads"]


@scenario
def trained(rank: int) -> dict[Any, Any]:
    return train_cases(rank, QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_the_same_values_as_with_steps_after_backward(name: str) -> None:
    for rank in range(2):
        assert_alike(name, result("trained", rank))


@pytest.mark.slow
def test_the_same_values_with_all_options() -> None:
    for found in run_on_ranks(train_cases, 2, tuple(CASES)):
        for name in CASES:
            assert_alike(name, found)


def layers() -> nn.Module:
    """As little as has two gradients, one after the other."""
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, 4))


@scenario
def with_ignored(rank: int) -> dict[bool, list[Tensor]]:
    """The head's bias, whose gradient comes first, is ignored and stepped after backward."""
    import torch_xla

    from xla_fsdp.optim import step_in_backward

    found = {}
    for fused in (False, True):
        model = make(layers).to(torch_xla.device())
        wrapped = fsdp(model, ignored_params=[model[2].bias])
        optimizer = MOMENTUM(wrapped.parameters())
        if fused:
            step_in_backward(wrapped, optimizer)
        found[fused] = train(wrapped, optimizer, rank)
    return found


def test_ignored_parameters_are_stepped_once_and_after_backward() -> None:
    found = result("with_ignored")
    assert all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))


@scenario
def what_is_pending(rank: int) -> dict[str, list[int]]:
    """After backward, of scanned blocks without a unit around them, and of a pass without units."""
    import torch_xla

    from xla_fsdp import scan_blocks
    from xla_fsdp.optim import step_in_backward

    blocks = [fsdp(make(lambda: nn.Linear(FEATURES, FEATURES))) for _ in range(3)]
    scan_blocks(blocks)
    holder = nn.ModuleList(blocks)
    optimizer = torch.optim.SGD(holder.parameters(), lr=0.1)
    step_in_backward(holder, optimizer)

    def stepped(loss: Tensor) -> list[int]:
        before = values(holder)
        loss.backward()
        torch_xla.sync()
        same = [torch.equal(*pair) for pair in zip(before, values(holder), strict=True)]
        assert rank == 1 or not any(same)  # what is this small is rank 0's
        return [len(block._fsdp_unit.schedule._unfinished) for block in blocks]

    x = torch.ones(4, FEATURES, device=torch_xla.device())
    for block in blocks:
        x = block(x)
    found = {"blocks": stepped(x.square().mean())}
    penalty = torch.stack([param.square().sum() for param in holder.parameters()]).sum()
    return {**found, "penalty": stepped(penalty)}


def test_nothing_is_pending_after_a_pass() -> None:
    assert result("what_is_pending") == {"blocks": [0, 0, 0], "penalty": [0, 0, 0]}


@scenario
def parameters_kept(rank: int) -> dict[Any, list[Tensor]]:
    """By what is kept after forward and after backward."""
    from xla_fsdp.optim import step_in_backward

    found = {}
    for options in ({}, {"reshard_after_forward": False}):
        for frees in (True, False):
            model = in_place(make(), **options)
            model.set_reshard_after_backward(frees)
            optimizer = MOMENTUM(model.parameters())
            step_in_backward(model, optimizer)
            train(model, optimizer, rank)
            for unit in model._fsdp_units():
                unit.reshard()
            found[bool(options), frees] = values(model)
    return found


def test_parameters_kept_after_backward_are_gathered_anew_after_the_step() -> None:
    found = result("parameters_kept")
    for options in (False, True):
        pairs = zip(found[options, True], found[options, False], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@scenario
def handled(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp.optim import (
        HighPrecisionOptimizer,
        PeriodicModelAverager,
        PostLocalSGDOptimizer,
        step_in_backward,
    )

    model, x = fsdp(make(layers)), batch(0, rank).to(torch_xla.device())
    found = _stepped_and_removed(model, x)
    model.zero_grad()
    found["gone"] = message(lambda: _backward_without_optimizer(model, x))
    other = torch.optim.SGD(make(layers).parameters(), lr=0.1)
    found["plain"] = message(lambda: step_in_backward(make(layers), other))
    found["foreign"] = message(lambda: step_in_backward(model, other))
    averaging = PostLocalSGDOptimizer(MOMENTUM(model.parameters()), PeriodicModelAverager(2))
    found["averaging"] = message(lambda: step_in_backward(model, averaging))
    model.zero_grad()

    low = fsdp(make(lambda: nn.Linear(FEATURES, 64, dtype=torch.bfloat16)))
    wide = HighPrecisionOptimizer(
        low.parameters(), torch.optim.SGD, lr=0.1, stochastic_rounding=True
    )
    step_in_backward(low, wide)
    low(x.to(torch.bfloat16)).square().mean().backward()
    found["low"] = {"master" in wide.state[param] for param in low.parameters()}
    torch_xla.sync()
    return found


def _stepped_and_removed(model: Any, x: Tensor) -> dict[str, Any]:
    import xla_fsdp
    from xla_fsdp.optim import step_in_backward

    optimizer = MOMENTUM(model.parameters())
    scaler, disabled = (xla_fsdp.ShardedGradScaler(enabled=on) for on in (True, False))
    handle = step_in_backward(model, optimizer)
    start = values(model)
    scaler.scale(model(x).square().mean()).backward()
    moved = values(model)
    found: dict[str, Any] = {
        "in backward": not all(torch.equal(a, b) for a, b in zip(start, moved, strict=True)),
        "clip": message(lambda: model.clip_grad_norm_(1.0)),
        "clip of parameters": message(lambda: xla_fsdp.clip_grad_norm_(model.parameters(), 1.0)),
        "clip value": message(lambda: model.clip_grad_value_(1.0)),
        "unscale": message(lambda: scaler.unscale_(optimizer)),
        "scaled step": message(lambda: scaler.step(optimizer)),
        "disabled scaler": message(lambda: disabled.step(optimizer)),
        "again": message(lambda: step_in_backward(model, optimizer)),
    }
    handle.remove()
    model(x).square().mean().backward()
    found["removed"] = all(torch.equal(a, b) for a, b in zip(moved, values(model), strict=True))
    found["norm"] = model.clip_grad_norm_(1.0).item() > 0
    return found


def _backward_without_optimizer(model: Any, x: Tensor) -> None:
    from xla_fsdp.optim import step_in_backward

    handle = step_in_backward(model, MOMENTUM(model.parameters()))
    try:
        model(x).square().mean().backward()
    finally:
        handle.remove()


def twice_before_a_step(rank: int) -> dict[str, bool]:
    """Whether two backward passes warn: of a plain model, of blocks in a loop, and of these under
    no_sync, or with a step after each."""
    import torch_xla

    from xla_fsdp.optim import step_in_backward

    def scanned() -> Any:
        blocks = nn.Sequential(*[fsdp(make(layer)) for _ in range(3)])
        return fsdp(nn.Sequential(blocks), scan_layers="0", scan_stacked=True)

    def warns(model: Any, *, quiet: bool = False, steps: bool = False) -> bool:
        optimizer = ADAMW(model.parameters())
        step_in_backward(model, optimizer)
        x = batch(0, rank).to(torch_xla.device())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for first in (True, False) * 2:
                with model.no_sync() if first and quiet else contextlib.nullcontext():
                    model(x).square().mean().backward()
                if steps or not first:
                    optimizer.step()
                torch_xla.sync()
        return any("backward ran again before" in str(each.message) for each in caught)

    return {
        "nested": warns(nested(make())),
        "scanned": warns(scanned()),
        "quiet": warns(scanned(), quiet=True),
        "stepped": warns(scanned(), steps=True),
    }


def layer() -> nn.Module:
    return nn.Linear(FEATURES, FEATURES)


def test_a_second_backward_before_the_step_warns() -> None:
    [found] = run_on_ranks(twice_before_a_step, 1)  # warnings are the process's, and ranks threads
    assert found == {"nested": True, "scanned": True, "quiet": False, "stepped": False}


@scenario
def clipped_replicas(rank: int) -> str:
    """Whole parameters, whose norm torch's function would find."""
    import torch_xla

    from xla_fsdp import init_mesh
    from xla_fsdp.optim import step_in_backward

    model = fsdp(make(layers), mesh=init_mesh((2, 1), ("replica", "shard")))
    optimizer = ADAMW(model.parameters())
    step_in_backward(model, optimizer)
    model(batch(0, rank).to(torch_xla.device())).square().mean().backward()
    return message(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def test_torchs_clipping_of_gradients_that_are_gone_is_refused() -> None:
    assert "on a model that is stepped in backward" in result("clipped_replicas")


def test_remove_goes_back_to_steps_after_backward() -> None:
    found = result("handled")
    assert found["in backward"]
    assert found["removed"]
    assert found["norm"]


def test_what_needs_all_gradients_is_refused() -> None:
    found = result("handled")
    assert "clip_grad_norm_ was called on a model that is stepped in backward" in found["clip"]
    assert "parallelize with Recipe(step_in_backward=False), or remove() of" in found["clip"]
    assert "model that is stepped in backward" in found["clip of parameters"]
    assert "clip_grad_value_ was called" in found["clip value"]
    for call in ("unscale", "scaled step"):
        assert "SGD was given to a ShardedGradScaler" in found[call]
    assert found["disabled scaler"] == "nothing was raised"
    assert "stepped in backward already" in found["again"]
    assert "has no FSDP units" in found["plain"]
    assert "averages once all parameters are stepped" in found["averaging"]
    assert "the optimizer that step_in_backward was given is gone" in found["gone"]
    assert "holds no shard of the model" in found["foreign"]


def test_high_precision_in_backward() -> None:
    assert result("handled")["low"] == {True}


@scenario
def several_models(rank: int) -> dict[str, Any]:
    import torch_xla

    found = {}
    x = batch(0, rank).to(torch_xla.device())
    for joint in (False, True):
        encoder, decoder = fsdp(make(lambda: nn.Linear(FEATURES, 9))), make(lambda: nn.Linear(9, 2))
        decoder = decoder.to(torch_xla.device())
        if joint:
            optimizers = [ADAMW([*encoder.parameters(), *decoder.parameters()])]
        else:
            optimizers = [ADAMW(encoder.parameters()), ADAMW(decoder.parameters())]
        for _ in range(STEPS):
            decoder(encoder(x)).square().mean().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            torch_xla.sync()
        found[joint] = [*values(encoder), *values(decoder)]
    return found


def test_one_optimizer_steps_a_sharded_and_a_plain_model() -> None:
    found = result("several_models")
    assert all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))


# ---------------------------------------------------------------- losses of other models


def adversarial(rank: int, lean: bool) -> dict[str, Any]:
    """Train a generator against a discriminator, which is stepped in backward if ``lean``."""
    import torch_xla

    from xla_fsdp import Recipe, full_state_dict, parallelize

    torch.manual_seed(5)
    generator, critic = square_layers(), square_layers()
    to_make, to_judge = MOMENTUM(generator.parameters()), MOMENTUM(critic.parameters())
    generator, *_ = parallelize(generator, to_make, Recipe("plain"))
    critic, *_ = parallelize(critic, to_judge, Recipe("lean") if lean else Recipe("plain"))
    x = batch(0, rank).to(torch_xla.device())
    said = message(lambda: critic(generator(x)))
    for _ in range(STEPS):
        made = generator(x)
        (critic(made.detach()).mean() - critic(x).square().mean()).backward()
        to_judge.step()
        to_judge.zero_grad()
        critic.requires_grad_(False)
        critic(made).square().mean().backward()
        to_make.step()
        to_make.zero_grad()
        critic.requires_grad_(True)
        torch_xla.sync()
    states = {"made": full_state_dict(generator), "judge": full_state_dict(critic)}
    found = {name: {n: v.cpu() for n, v in state.items()} for name, state in states.items()}
    given = x.clone().requires_grad_()
    critic(given).mean().backward()  # a gradient of an input of the user's
    assert given.grad is not None
    return {"said": said, **found}


def square_layers() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3)]
    return Blocks(blocks)


class Blocks(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@scenario
def generator_and_critic(rank: int) -> dict[bool, Any]:
    return {lean: adversarial(rank, lean) for lean in (True, False)}


def test_a_loss_of_another_model_does_not_step_a_model_in_backward() -> None:
    for rank in range(2):
        lean, plain = (result("generator_and_critic", rank)[each] for each in (True, False))
        assert plain["said"] == "nothing was raised"
        assert "a Blocks, whose steps lie in backward" in lean["said"]
        assert "requires_grad_(False) of the Blocks before this forward" in lean["said"]
        assert "Recipe(step_in_backward=False)" in lean["said"]
        for name in ("made", "judge"):
            torch.testing.assert_close(lean[name], plain[name], rtol=1e-4, atol=1e-6)
