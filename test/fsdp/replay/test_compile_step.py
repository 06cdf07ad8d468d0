"""``compile_step``: replayed steps are traced ones to the bit, or are refused.

All jobs of a number of ranks run in one launch, 30 steps each, traced and replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.ranks import cached_outcome, run_on_ranks
from test.common.replay import JOBS, STEPS, run_jobs
from test.common.scenarios import Scenarios, fsdp, make, message
from xla_fsdp import compile_step

scenarios = Scenarios(__name__)
scenario = scenarios.add

FEWEST_REPLAYS = {"batch_norm": 10, "accumulation": 14, "adamw": 18, "sgd": 16}
"""Of 30 steps; what changes on purpose is traced."""
QUICK = ["adamw", "accumulation"]


@cached_outcome
def trained(num_ranks: int) -> dict[str, Any]:
    """Return what ``run_jobs`` finds on rank 0."""
    names = QUICK if num_ranks == 3 else list(JOBS)
    return run_on_ranks(run_jobs, num_ranks, names, timeout=1800)[0]


@cached_outcome
def on_one_rank() -> dict[str, Any]:
    """Return the values of the scenarios; on one rank, as others would wait for one that raises."""
    return run_on_ranks("test.common.scenarios:_run", 1, __name__)[0]


def result(name: str) -> Any:
    """Return the value of a scenario."""
    return on_one_rank()[name]


def check(found: dict[str, Any], name: str) -> None:
    """Assert that a job's replayed steps are those traced."""
    assert not found["error"], found["error"]
    assert found["differences"] == []
    assert found["replays"] + sum(found["traces"].values()) == STEPS
    assert found["replays"] >= FEWEST_REPLAYS.get(name, 22), found["traces"]


@pytest.mark.parametrize("name", QUICK)
def test_replays_are_the_traced_steps(name: str) -> None:
    check(trained(3)[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("name", JOBS)
def test_replays_are_the_traced_steps_on(name: str, num_ranks: int) -> None:
    check(trained(num_ranks)[name], name)


# ---------------------------------------------------------------- refusals


class Shifted(nn.Module):
    """A layer whose output is shifted by what ``shift`` returns."""

    def __init__(self, shift: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift()


def steps_of(step: Callable[..., Any], count: int = 6) -> str:
    """Take so many steps of ones; return the error's text."""
    import torch_xla

    def take() -> None:
        for _ in range(count):
            step(torch.ones(2, 3).to(torch_xla.device()))

    return message(take)


def shifted_step(shift: Callable[[], Any], **options: Any) -> Any:
    """Return a compiled step of a sharded ``Shifted``."""
    model = fsdp(make(lambda: Shifted(shift)))
    return compile_step(lambda x: model(x).sum(), **options)


@scenario
def random_number(rank: int) -> str:
    values = iter(range(100))
    return steps_of(shifted_step(lambda: 0.25 + next(values)))


def test_a_number_computed_in_every_step_is_refused() -> None:
    text = result("random_number")
    assert "the host computes a value anew in every step" in text
    assert "test_compile_step.py" in text


@scenario
def random_tensor(rank: int) -> str:
    import torch_xla

    return steps_of(shifted_step(lambda: torch.rand(3).to(torch_xla.device())))


def test_a_tensor_computed_in_every_step_is_refused() -> None:
    text = result("random_tensor")
    assert "a tensor of shape [3] (entered at" in text
    assert "test_compile_step.py" in text


@scenario
def reading(rank: int) -> list[str]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    return [
        steps_of(compile_step(lambda x: model(x).sum().item())),
        steps_of(compile_step(lambda x: str(model(x)))),
    ]


def test_reads_are_refused_with_their_place() -> None:
    for text in result("reading"):
        assert text.startswith("CompileStepError: the step reads a value of the device at")
        assert "test_compile_step.py" in text


@scenario
def counter(rank: int) -> str:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    count = 0

    def step(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return model(x).sum()

    return steps_of(compile_step(step))


def test_a_counter_is_refused() -> None:
    assert "the step changes a number of the host itself: count" in result("counter")


@scenario
def traced_instead(rank: int) -> list[Any]:
    import warnings

    import torch_xla

    values = iter(range(100))
    step = shifted_step(lambda: 0.25 + next(values), unknown="trace")
    x = torch.zeros(2, 3).to(torch_xla.device())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [step(x).item() for _ in range(6)]
    return [found, step.replays, [str(each.message) for each in caught]]


def test_such_a_step_can_be_traced_every_time() -> None:
    found, replays, warned = result("traced_instead")
    assert [b - a for a, b in itertools.pairwise(found)] == pytest.approx([6.0] * 5)
    assert replays == 0
    assert any("every step is traced, because the host computes" in each for each in warned)


@scenario
def syncing(rank: int) -> str:
    import torch_xla

    model = fsdp(make(lambda: nn.Linear(3, 3)))
    return steps_of(compile_step(torch_xla.compile(lambda x: model(x).sum())))


def test_a_sync_inside_is_refused() -> None:
    assert "the step runs what is pending (torch_xla.sync()) of the device" in result("syncing")


@scenario
def arguments(rank: int) -> list[Any]:
    import torch_xla

    step = compile_step(lambda x, y: (x * 2 + y).sum())
    x, y = (torch.full((3,), each).to(torch_xla.device()) for each in (1.0, 5.0))
    same = [step(x, x).item() for _ in range(4)]
    other = [step(x, y).item() for _ in range(4)]
    aliased = message(lambda: compile_step(lambda x, y: x + y)(x, x.detach()))
    return [same, other, aliased, message(lambda: step(x, object()))]


def test_arguments_that_are_one_tensor_are_another_program() -> None:
    same, other, aliased, unknown = result("arguments")
    assert (same, other) == ([9.0] * 4, [21.0] * 4)
    assert "argument 1 of the step shares its memory with another argument" in aliased
    assert unknown.startswith("TypeError: a compiled step got a object; pass tensors")


# ---------------------------------------------------------------- memory and exceptions


@scenario
def donated(rank: int) -> list[Any]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp.distributed.xla import programs

    model = fsdp(make(lambda: nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @compile_step
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for _ in range(5):
        held = [*model.parameters()]
        held += [state[name] for state in optimizer.state.values() for name in state]
        held = [each for each in held if each.is_xla]
        buffers = programs.inputs_of([each.detach() + 1 for each in held]).values if held else []
        step(torch.ones(2, 3).to(torch_xla.device()))
        xm.wait_device_ops()
        kept = [each for each in programs.buffers_of(buffers) if each is not None]
        found.append((len(held), len(kept)))
    return [found, step.replays]


def test_what_a_step_changes_is_donated() -> None:
    found, replays = result("donated")
    numbers = [held for held, _ in found]
    assert (numbers, replays) == ([2, 6, 6, 6, 6], 2)
    # Of the number 1, which is an input of the test's own program, and of nothing else.
    assert all(kept <= 1 for _, kept in found), found


# ---------------------------------------------------------------- exceptions


@scenario
def raising(rank: int) -> list[Any]:
    import torch_xla

    model = fsdp(make(lambda: nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @compile_step
    def step(x: Tensor, fail: bool = False) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if fail:
            raise ValueError("on purpose")
        return loss

    x = torch.ones(2, 3).to(torch_xla.device())
    for _ in range(5):
        step(x)
    before = [p.detach().cpu() for p in model.parameters()]
    text = message(lambda: step(x, fail=True))
    after = [p.detach().cpu() for p in model.parameters()]
    counts = [state["step"].item() for state in optimizer.state.values()]
    step(x)
    return [text, all(map(torch.equal, before, after)), counts, step.replays]


def test_a_step_that_raises_leaves_the_model_as_it_was() -> None:
    text, same, counts, replays = result("raising")
    assert (text, same, set(counts), replays) == ("ValueError: on purpose", True, {5.0}, 3)
