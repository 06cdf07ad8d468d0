"""``ZeroRedundancyOptimizer`` against the plain optimizer on the joined batch. Two ranks; where the
number of ranks changes, three."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.models import FEATURES, WideNet
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.replicas import (
    STEPS,
    MakeOptimizer,
    Matrix,
    Tiny,
    assert_same_state,
    batch,
    largest_error,
    loss_of,
    on_device,
    train_plain,
    train_replica,
    values,
)
from test.common.scenarios import RANKS, Scenarios, fsdp, make, message
from test.common.warned import recorded_warnings

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SYNCFREE = "syncfree "
WHOLE: dict[str, dict[str, Any]] = {
    "Adafactor": {"lr": 0.05},
    "LBFGS": {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"},
    "Muon": {"lr": 0.05},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.05},
    "Adadelta": {},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "SGD": {"lr": 0.1, "nesterov": True, "momentum": 0.5},
    "syncfree Adam": {"lr": 0.01},
    "syncfree AdamW": {"lr": 0.01},
    "syncfree SGD": {"lr": 0.1, "momentum": 0.5},
    **WHOLE,
}
# A line search, which decides by losses; an iteration in bf16.
INEXACT = {"LBFGS": 1e-4, "Muon": 5e-3}
COMMON = ("Adagrad", "Rprop", "syncfree AdamW", "Adafactor")
TOLERANCE = 1e-6  # of values near 1, by sums in another order
# Adam divides gradients by their own size, so tiny ones pass rounding errors on.
ADAM_TOLERANCE = 2e-4


def zero(params: Any, optimizer_class: Any, **options: Any) -> Any:
    from xla_fsdp.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, optimizer_class, **options)


def over_slices(optimizer_class: Any, **options: Any) -> MakeOptimizer:
    return lambda params: zero(params, optimizer_class, **options)


# ---------------------------------------------------------------- parity


@scenario
def wide(rank: int) -> dict[str, Any]:
    found = {}
    for name, optimizer_class, clip in (("adamw", ADAMW, 0.1), ("momentum", MOMENTUM, None)):
        model, optimizer, norms = train_replica(rank, over_slices(optimizer_class), clip=clip)
        slices = optimizer.slices.keys().values()
        states = optimizer.state_dict()["state"].values()
        found[name] = {
            "params": values(model),
            "norms": norms,
            "state": optimizer.consolidate_state_dict(to=1),
            "at rest": sum(part.numel() for part in slices),
            "held": sum(v.numel() for state in states for v in state.values() if v.numel() > 1),
        }
    return found


@pytest.mark.parametrize(("name", "clip"), [("adamw", 0.1), ("momentum", None)])
def test_training_equals_that_of_the_plain_optimizer(name: str, clip: float | None) -> None:
    make_optimizer = {"adamw": ADAMW, "momentum": MOMENTUM}[name]
    model, optimizer, norms = train_plain(RANKS, make_optimizer, clip=clip)
    for rank in range(RANKS):
        found = result("wide", rank)[name]
        assert largest_error(found["params"], values(model)) <= ADAM_TOLERANCE
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
    assert result("wide", 0)[name]["state"] == {}  # it was for rank 1
    assert_same_state(result("wide", 1)[name]["state"], optimizer.state_dict(), 1e-5)


def test_replicas_stay_equal_to_the_last_bit() -> None:
    for name in ("adamw", "momentum"):
        first, second = (result("wide", rank)[name]["params"] for rank in range(RANKS))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_rank_keeps_its_part_of_the_state_and_no_copy_of_parameters() -> None:
    total = sum(param.numel() for param in WideNet().parameters())
    found = result("wide")["adamw"]
    assert found["at rest"] == 0
    assert 2 * total / RANKS <= found["held"] <= 1.01 * 2 * total / RANKS  # two moments; padding


def classes(rank: int, names: Sequence[str]) -> dict[str, list[Tensor]]:
    """Parameters after training by each of the classes."""
    found = {}
    for name in names:
        make_optimizer = over_slices(class_of(name), **OPTIONS[name])
        with recorded_warnings():
            found[name] = values(train_replica(rank, make_optimizer, model_for(name))[0])
    return found


def class_of(name: str, *, plain: bool = False) -> Any:
    from torch_xla.amp import syncfree

    base = name.removeprefix(SYNCFREE)
    return getattr(syncfree if base != name and not plain else torch.optim, base)


def model_for(name: str) -> type[torch.nn.Module]:
    return Matrix if name == "Muon" else Tiny


def assert_trained_alike(name: str, found: list[Tensor]) -> None:
    model_class = model_for(name)
    make_optimizer = partial(class_of(name, plain=True), **OPTIONS[name])
    model, *_ = train_plain(RANKS, make_optimizer, model_class)
    assert largest_error(found, values(model)) <= INEXACT.get(name, 2e-5)
    assert largest_error(found, values(make(model_class))) > 2 * INEXACT.get(name, 2e-5)


@scenario
def common_classes(rank: int) -> dict[str, list[Tensor]]:
    return classes(rank, COMMON)


@pytest.mark.parametrize("name", COMMON)
def test_classes_step_as_they_do_plainly(name: str) -> None:
    assert_trained_alike(name, result("common_classes")[name])


@cached_outcome
def all_classes() -> dict[str, list[Tensor]]:
    return run_on_ranks(classes, RANKS, tuple(OPTIONS))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_class_steps_as_it_does_plainly(name: str) -> None:
    assert_trained_alike(name, all_classes()[name])


@scenario
def unknown_classes(rank: int) -> Any:
    given = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None, *, times: int = 1) -> None:  # type: ignore[override]
            given.append(times)
            super().step()

    params = list(on_device(Tiny).parameters())
    with recorded_warnings() as texts:
        optimizers = [zero(params, Own, lr=0.1), zero(params, Own, elementwise=True)]
    for param in params:
        param.grad = torch.ones_like(param)
    for optimizer in optimizers:
        optimizer.step(times=3)
    return [each.is_sliced for each in optimizers], given, texts


def test_an_unknown_class_steps_whole_parameters_unless_told() -> None:
    sliced, given, [text] = result("unknown_classes")
    assert (sliced, given) == ([False, True], [3, 3])
    assert "Own is not known" in text
    assert "pass elementwise=True" in text


# ---------------------------------------------------------------- programs


@scenario
def programs(rank: int) -> dict[str, Any]:
    """HLO of a step with gradients from nowhere, and the number of compilations after the first."""
    import torch_xla
    import torch_xla.debug.metrics as metrics

    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import exchange

    found: dict[str, Any] = {}
    for name, options in (("local", {}), ("averaged", {"gradients_are_averaged": True})):
        model = on_device(WideNet)
        optimizer = zero(model.parameters(), torch.optim.AdamW, **options)
        for step in range(5):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.25)
            optimizer.step()
            if step == 2:
                found[name] = lowered_hlo(list(model.parameters()))
            optimizer.zero_grad()
            torch_xla.sync()
            if step == 2:
                exchange(b"")
                before = metrics.counter_value("UncachedCompile")
        exchange(b"")
        found[f"{name} compiled"] = metrics.counter_value("UncachedCompile") - before
        exchange(b"")
    return found


def counts(program: str) -> tuple[int, int]:
    return len(re.findall(r"\ball-gather\(", program)), len(
        re.findall("reduce-scatter\\(", program)
    )


def test_all_ranks_run_the_same_program() -> None:
    for name in ("local", "averaged"):
        assert result("programs", 0)[name] == result("programs", 1)[name]


def test_a_step_takes_one_collective_for_each_large_matrix_and_one_for_the_rest() -> None:
    large = 4  # 255x128, 128x255, 256x128, and the rest together
    found = result("programs")
    assert counts(found["local"]) == (large, large)
    assert counts(found["averaged"]) == (large, 0)


def test_steps_are_compiled_once() -> None:
    assert result("programs")["local compiled"] == 0
    assert result("programs")["averaged compiled"] == 0


@scenario
def reduced_by_the_user(rank: int) -> Any:
    import torch_xla.core.xla_model as xm

    found = {}
    for averaged in (False, True):
        make_optimizer = over_slices(ADAMW, gradients_are_averaged=averaged)
        model, *_ = train_replica(rank, make_optimizer, Tiny, before_step=xm.reduce_gradients)
        found[averaged] = values(model)
    return found


def test_gradients_that_were_averaged_before_are_right_with_and_without_saying_so() -> None:
    model, *_ = train_plain(RANKS, ADAMW, Tiny)
    for averaged in (False, True):
        assert largest_error(result("reduced_by_the_user")[averaged], values(model)) <= TOLERANCE


@scenario
def alone(rank: int) -> Any:
    make_optimizer = over_slices(MOMENTUM, groups=[[0], [1]])
    return values(train_replica(rank, make_optimizer, Tiny)[0])


def test_groups_of_one_rank_train_apart() -> None:
    first, second = result("alone", 0), result("alone", 1)
    assert largest_error(first, second) > 1e-3
    assert largest_error(first, values(train_plain(1, MOMENTUM, Tiny)[0])) <= TOLERANCE


def in_pairs(rank: int) -> list[Tensor]:
    """Four ranks, of which 0 and 2, and 1 and 3, train together."""
    make_optimizer = over_slices(MOMENTUM, groups=[[0, 2], [1, 3]])
    return values(train_replica(rank % 2 * 2 + rank // 2, make_optimizer, clip=0.5)[0])


@pytest.mark.slow
def test_groups_of_two_ranks_train_apart() -> None:
    found = run_on_ranks(in_pairs, 4)
    # Ranks 0 and 2 are given the batches of 0 and 1.
    expected = values(train_plain(2, MOMENTUM, clip=0.5)[0])
    assert largest_error(found[0], expected) <= TOLERANCE
    assert largest_error(found[2], found[0]) == 0
    assert largest_error(found[1], found[3]) == 0
    assert largest_error(found[0], found[1]) > 1e-3


# ---------------------------------------------------------------- groups of parameters, closures


@scenario
def parameter_groups(rank: int) -> Any:
    import torch_xla

    model = on_device(Tiny)
    optimizer = zero([{"params": [model.inp.weight], "lr": 0.2}], torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": model.inp.bias})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses = []
    for step in range(STEPS):
        x = batch(step, rank).to(torch_xla.device())
        if step == 1:
            optimizer.add_param_group({"params": [model.scale], "lr": 0.05, "momentum": 0.9})
            scheduler.base_lrs.append(0.05)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
        scheduler.step()
        torch_xla.sync()
    optimizer.zero_grad()
    rates = [group["lr"] for group in optimizer.param_groups]
    grads = [param.grad for param in model.parameters()]
    return values(model), [loss.item() for loss in losses], rates, grads


def test_groups_schedulers_and_closures() -> None:
    found, losses, rates, grads = result("parameter_groups")
    model = make(Tiny)
    optimizer = torch.optim.SGD([{"params": [model.inp.weight], "lr": 0.2}], lr=0.1)
    optimizer.add_param_group({"params": model.inp.bias})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    first_ranks_losses = []
    for step in range(STEPS):
        if step == 1:
            optimizer.add_param_group({"params": [model.scale], "lr": 0.05, "momentum": 0.9})
            scheduler.base_lrs.append(0.05)
        optimizer.zero_grad()
        parts = [loss_of(model, batch(step, rank)) for rank in range(RANKS)]
        torch.stack(parts).mean().backward()
        model.scale.grad = model.scale.grad if step else None
        first_ranks_losses.append(parts[0].item())
        optimizer.step()
        scheduler.step()
    assert largest_error(found, values(model)) <= TOLERANCE
    assert losses == pytest.approx(first_ranks_losses, rel=1e-5)
    assert rates == pytest.approx([group["lr"] for group in optimizer.param_groups])
    assert grads == [None, None, None]


# ---------------------------------------------------------------- state


def plain_state() -> dict[str, Any]:
    """Of AdamW over ``WideNet``, after some training that never was."""
    optimizer = ADAMW(WideNet().parameters())
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.005
    for number, param in enumerate(WideNet().parameters()):
        ramp = torch.linspace(-1, 1, param.numel()).reshape(param.shape)
        state["state"][number] = {
            "step": torch.tensor(4.0),
            "exp_avg": ramp,
            "exp_avg_sq": ramp.square() + 0.1,
        }
    return state


@scenario
def state(rank: int) -> dict[str, Any]:
    import torch_xla

    model, optimizer, _ = train_replica(rank, over_slices(ADAMW), steps=range(2))
    own = optimizer.state_dict()
    again = zero(model.parameters(), ADAMW)
    again.load_state_dict(own)
    found: dict[str, Any] = {"own": own["zero"]}
    kept = values(model)
    for name, each in (("first", optimizer), ("again", again)):
        with torch.no_grad():
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
        each.zero_grad()
        loss_of(model, batch(2, rank).to(torch_xla.device())).backward()
        each.step()
        torch_xla.sync()
        found[name] = values(model)
    again.load_state_dict(plain_state())
    found["plain"] = again.consolidate_state_dict()
    found["messages"] = [
        message(lambda: again.load_state_dict({**own, "zero": {**own["zero"], "rank": 7}})),
        message(lambda: again.load_state_dict({})),
        message(lambda: again.load_state_dict(_short(plain_state()))),
        message(lambda: again.load_state_dict(_misshapen(plain_state()))),
        message(lambda: again.consolidate_state_dict(to=2)),
    ]
    found["after"] = again.consolidate_state_dict()
    return found


def _short(given: dict[str, Any]) -> dict[str, Any]:
    del given["param_groups"][0]["params"][-1]
    return given


def _misshapen(given: dict[str, Any]) -> dict[str, Any]:
    given["state"][0]["exp_avg"] = torch.zeros(3)
    del given["state"][1]["exp_avg_sq"]
    return given


def test_this_ranks_state_goes_on_where_it_was_saved() -> None:
    found = result("state", 1)
    assert (found["own"]["rank"], found["own"]["num_ranks"]) == (1, RANKS)
    assert all(torch.equal(a, b) for a, b in zip(found["first"], found["again"], strict=True))


def test_a_plain_state_is_sliced_and_made_whole_again_without_a_change() -> None:
    assert_same_state(result("state", 0)["plain"], plain_state(), 0)
    assert result("state", 1)["plain"] == {}


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    other_rank, empty, short, misshapen, nobody = result("state")["messages"]
    assert "Load it on the rank that saved it" in other_rank
    assert "expected an optimizer state dict" in empty
    assert "groups of the state have [8] parameters, those of the optimizer [9]" in short
    assert "'exp_avg' of 0 is (3,), expected (128, 5)" in misshapen
    assert "1 has no 'exp_avg_sq'" in misshapen
    assert "to=2 is not one of the 2 ranks" in nobody
    assert_same_state(result("state", 0)["after"], plain_state(), 0)


def go_on(rank: int) -> Any:
    """Three ranks: load a plain state, make a step, return parameters and the plain state."""

    def loaded(params: Any) -> Any:
        optimizer = zero(params, ADAMW)
        optimizer.load_state_dict(plain_state())
        return optimizer

    model, optimizer, _ = train_replica(rank, loaded, steps=range(1))
    return values(model), optimizer.consolidate_state_dict(to=2)


@cached_outcome
def three_ranks() -> list[Any]:
    return run_on_ranks(go_on, 3)


def test_any_number_of_ranks_goes_on_from_a_plain_state() -> None:
    model, optimizer, _ = train_plain(
        3, ADAMW, steps=range(1), prepare=lambda opt: opt.load_state_dict(plain_state())
    )
    params, _ = three_ranks()[0]
    assert largest_error(params, values(model)) <= TOLERANCE
    assert_same_state(three_ranks()[2][1], optimizer.state_dict(), 1e-6)


# ---------------------------------------------------------------- loss scaling, mistakes


@scenario
def overflow(rank: int) -> Any:
    import torch_xla
    from torch_xla.amp import syncfree

    from xla_fsdp import ShardedGradScaler

    model, scaler = on_device(Tiny), ShardedGradScaler(init_scale=4.0)
    optimizer = zero(model.parameters(), syncfree.SGD, lr=0.1)
    found = [values(model)]
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(step, rank).to(torch_xla.device()))).backward()
        if step == 0 and rank == 1:
            model.inp.bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        torch_xla.sync()
        found.append(values(model))
    adam = zero(model.parameters(), torch.optim.Adam)
    found_inf = torch.zeros((), device=torch_xla.device())
    return found, scaler.get_scale(), message(lambda: adam.step(found_inf=found_inf))


def test_an_overflow_on_one_rank_skips_the_step_of_all() -> None:
    for rank in range(RANKS):
        (start, first, second), scale, text = result("overflow", rank)
        assert all(torch.equal(a, b) for a, b in zip(start, first, strict=True))
        assert largest_error(first, second) > 1e-3
        assert scale == 2.0
        assert "Adam cannot skip a step by found_inf" in text


@scenario
def mistakes(rank: int) -> dict[str, str]:
    import torch_xla

    model = on_device(Tiny)
    sharded = fsdp(make(partial(torch.nn.Linear, FEATURES, 2)))
    optimizer = zero(model.parameters(), torch.optim.SGD, lr=0.1)

    def change_after_clipping() -> None:
        loss_of(model, batch(0, rank).to(torch_xla.device())).backward()
        optimizer.clip_grad_norm_(1.0)
        model.scale.grad.mul_(2)
        optimizer.step()

    found = {
        "overlap": message(lambda: zero(model.parameters(), ADAMW, overlap_with_ddp=True)),
        "sharded": message(lambda: zero(sharded.parameters(), ADAMW)),
        "host": message(lambda: zero(Tiny().parameters(), ADAMW)),
        "groups": message(lambda: zero(model.parameters(), ADAMW, groups=[[0, 1], [1]])),
        "changed": message(change_after_clipping),
    }
    with recorded_warnings() as texts:
        zero(model.parameters(), ADAMW, parameters_as_bucket_view=True)
    optimizer.zero_grad()
    torch_xla.sync()
    return {**found, "view": texts[0]}


def test_mistakes_are_told() -> None:
    found = result("mistakes")
    assert "one program, in which the compiler overlaps them" in found["overlap"]
    assert found["sharded"].count("is sharded by FSDP already") == 2
    assert "is on cpu; move the model to the XLA device first" in found["host"]
    assert "differ in size" in found["groups"]
    assert "every rank of range(2) must be in exactly one" in found["groups"]
    assert "gradients changed after clip_grad_norm_" in found["changed"]
    assert "small parameters always travel joined" in found["view"]
