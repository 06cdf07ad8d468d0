"""Model averaging and post-local SGD against a simulation of the ranks in one process. Four
ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.models import FEATURES
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.replicas import Tiny, batch, largest_error, loss_of, on_device, values
from test.common.scenarios import fsdp, make, message
from test.common.warned import recorded_warnings

RANKS, STEPS = 4, 9
PAIRS = [[0, 1], [2, 3]]
CASES: dict[str, Callable[[], Any]] = {
    "periodic": lambda: _averagers().PeriodicModelAverager(3, warmup_steps=2),
    "in pairs": lambda: _averagers().PeriodicModelAverager(2, groups=[[0, 2], [1, 3]]),
    "hierarchical": lambda: _averagers().HierarchicalModelAverager(
        OrderedDict([(2, 2), (4, 4)]), warmup_steps=3
    ),
}
DUE: dict[str, Callable[[int], list[list[int]] | None]] = {
    "periodic": lambda step: [[0, 1, 2, 3]] if step >= 2 and (step - 2) % 3 == 0 else None,
    "in pairs": lambda step: [[0, 2], [1, 3]] if step % 2 == 0 else None,
    "hierarchical": lambda step: (
        None if step < 3 or step % 2 else [[0, 1, 2, 3]] if step % 4 == 0 else PAIRS
    ),
}
PROGRAMS = {"periodic": 2, "in pairs": 2, "hierarchical": 3}
"""Kinds of steps: local, and one for each size of group."""


def _averagers() -> Any:
    import xla_fsdp.optim

    return xla_fsdp.optim


def _compiled() -> int:
    """Programs compiled in this process so far; all ranks wait for each other to read it."""
    import torch_xla.debug.metrics as metrics

    from xla_fsdp.xla.host import exchange

    exchange(b"")
    count = metrics.counter_value("UncachedCompile") or 0
    exchange(b"")
    return count


def train(rank: int, name: str) -> list[list[Tensor]]:
    import torch_xla

    model = on_device(Tiny)
    optimizer = _averagers().PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3), CASES[name]()
    )
    history = []
    for step in range(STEPS):
        x = batch(step, rank).to(torch_xla.device())
        torch_xla.sync()
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        torch_xla.sync()
        history.append(values(model))
    return history


def programs(rank: int, name: str) -> list[int]:
    """How many programs each step of several cycles had to compile."""
    import torch_xla

    model, x = on_device(Tiny), batch(0, rank).to(torch_xla.device())
    optimizer = _averagers().PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3), CASES[name]()
    )
    counts = [_compiled()]
    for _ in range(3 * STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        torch_xla.sync()
        counts.append(_compiled())
    return [b - a for a, b in pairwise(counts)]


def train_with_masters(rank: int) -> list[list[Tensor]]:
    """Parameters and masters after each step; steps 0 and 2 average."""
    import torch_xla

    model = on_device(lambda: torch.nn.Linear(FEATURES, 2, dtype=torch.bfloat16))
    local = _averagers().HighPrecisionOptimizer(model.parameters(), torch.optim.SGD, lr=0.3)
    optimizer = _averagers().PostLocalSGDOptimizer(local, _averagers().PeriodicModelAverager(2))
    history = []
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, rank).to(torch_xla.device(), torch.bfloat16)).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
        masters = [local.state[param]["master"].detach().cpu() for param in model.parameters()]
        history.append([*values(model), *masters])
    return history


def mistakes(rank: int) -> dict[str, str]:
    optim = _averagers()
    shard = fsdp(make(Tiny)).inp.weight
    with recorded_warnings() as texts:
        always = optim.PeriodicModelAverager(1)
        optim.HierarchicalModelAverager({1: 4})
    return {
        "period": message(lambda: optim.PeriodicModelAverager(0)),
        "warmup": message(lambda: optim.PeriodicModelAverager(2, warmup_steps=-1)),
        "groups": message(lambda: optim.PeriodicModelAverager(2, groups=[[0, 1]])),
        "empty": message(lambda: optim.HierarchicalModelAverager({})),
        "levels": message(lambda: optim.HierarchicalModelAverager({4: 3, 2: 2})),
        "shard": message(lambda: always.average_parameters([shard])),
        "type": message(lambda: always.average_parameters(["weight"])),
        "warned": " ".join(texts),
    }


def save_and_load(rank: int) -> dict[str, Any]:
    optim = _averagers()

    def new() -> Any:
        return optim.PostLocalSGDOptimizer(
            torch.optim.SGD(on_device(Tiny).parameters(), lr=0.1, momentum=0.9),
            optim.PeriodicModelAverager(2, warmup_steps=5),
        )

    first, second, third, hooked = new(), new(), new(), new()
    first.averager.step = 6
    seen: list[Any] = []
    hooked.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    hooked.step()
    first.param_groups[0]["lr"] = 0.25
    second.load_state_dict(first.state_dict())
    third.averager.step = 3
    with recorded_warnings() as texts:
        third.load_state_dict(first.optim.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(second, 1, gamma=0.5)
    with recorded_warnings():  # no step was made
        scheduler.step()
    return {
        "steps": (second.averager.step, third.averager.step),
        "rates": (second.optim.param_groups[0]["lr"], third.optim.param_groups[0]["lr"]),
        "hooks": seen == [hooked.optim],
        "warning": texts,
    }


def written_and_read(rank: int) -> int:
    """The averager's step after two steps on shards of replicas, as checkpoints write and read
    optimizers."""
    import torch_xla

    from xla_fsdp.state.optim import read_optimizer, write_optimizer

    optim, alone = _averagers(), [[each] for each in range(RANKS)]
    groups = {"sharding_groups": alone, "sharding_rank": 0, "sharding_world_size": 1}

    def new() -> tuple[Any, Any]:
        model = fsdp(make(Tiny), **groups)
        averager = optim.PeriodicModelAverager(2, groups=PAIRS)
        local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optim.PostLocalSGDOptimizer(local, averager)

    (model, optimizer), (again, other) = new(), new()
    for step in range(2):
        loss_of(model, batch(step, rank).to(torch_xla.device())).backward()
        optimizer.step()
    saved = read_optimizer(optimizer, dict(model.named_parameters()))
    write_optimizer(other, dict(again.named_parameters()), saved)
    return other.averager.step


def everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"programs": {name: programs(rank, name) for name in CASES}}
    found |= {name: train(rank, name) for name in CASES}
    found["written and read"] = written_and_read(rank)
    found["masters"] = train_with_masters(rank)
    return {**found, "mistakes": mistakes(rank), "state": save_and_load(rank)}


@cached_outcome
def outcome() -> list[dict[str, Any]]:
    return run_on_ranks(everything, RANKS)


def simulate(name: str) -> list[list[list[Tensor]]]:
    """By step and rank: the parameters."""
    models = [make(Tiny) for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
    history = []
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
        for group in DUE[name](step) or []:
            together = [models[rank].parameters() for rank in group]
            for same in zip(*together, strict=True):
                mean = torch.stack([param.detach() for param in same]).mean(0)
                for param in same:
                    param.data.copy_(mean)
        history.append([[value.clone() for value in values(model)] for model in models])
    return history


@pytest.mark.parametrize("name", CASES)
def test_averaging_equals_the_simulation_at_every_step(name: str) -> None:
    for step, expected in enumerate(simulate(name)):
        found = [outcome()[rank][name][step] for rank in range(RANKS)]
        for rank in range(RANKS):
            assert largest_error(found[rank], expected[rank]) <= 1e-6
        for group in DUE[name](step) or []:
            for rank in group:
                pairs = zip(found[rank], found[group[0]], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
        if DUE[name](step) is None:
            assert largest_error(found[0], found[1]) > 1e-3


def test_masters_are_averaged_and_stay_so() -> None:
    """A local step moves every rank from the average: without, they would part for good."""
    steps = [[outcome()[rank]["masters"][step] for rank in range(RANKS)] for step in range(4)]
    for step in (0, 2):
        first, *others = steps[step]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        params, masters = first[:2], first[2:]
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(params, masters, strict=True))
    assert largest_error(steps[1][0], steps[1][1]) > 1e-3
    assert any(not torch.equal(m, m.bfloat16().float()) for m in steps[2][0][2:])


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_step_is_compiled_once(name: str) -> None:
    first, *others = outcome()[0]["programs"][name]
    assert first <= 1  # whose parameters are not the results of a program yet
    assert sum(others[:STEPS]) <= PROGRAMS[name]
    assert sum(others[STEPS:]) == 0


def test_local_and_averaging_steps_are_two_programs() -> None:
    compiled = outcome()[0]["programs"]["periodic"]  # the first to run
    assert sum(compiled[1:]) == 2


def test_state_holds_the_averagers_step() -> None:
    found = outcome()[0]["state"]
    assert found["steps"] == (6, 0)
    assert found["rates"] == (0.125, 0.25)
    assert found["hooks"]
    [warning] = found["warning"]
    assert "no 'step' of an averager" in warning


def test_checkpoints_of_shards_hold_the_averagers_step() -> None:
    assert outcome()[0]["written and read"] == 2


def test_mistakes_are_told() -> None:
    found = outcome()[0]["mistakes"]
    assert "period is 0; give 1 or more" in found["period"]
    assert "warmup_steps is -1" in found["warmup"]
    assert "every rank of range(4) must be in exactly one" in found["groups"]
    assert "it is empty" in found["empty"]
    assert "not in increasing order" in found["levels"]
    assert "3 ranks do not divide a group of 4" in found["levels"]
    assert "the last number of ranks is 2, expected 4" in found["levels"]
    assert "different slices" in found["shard"]
    assert "was given a str" in found["type"]
    assert found["warned"].count("averaged at every step") == 2
