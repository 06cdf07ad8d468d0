"""``compile_step``: replayed steps are traced ones to the bit, or are refused.

A launch takes 30 steps of a job, traced and replayed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from test.common import copies as copies_module
from test.common.memory import peak, reset_peak
from test.common.ranks import FAST_COMPILE, ChildError, run_on_ranks
from test.common.replay import JOBS, STEPS, run_jobs
from test.common.scenarios import Scenarios, fsdp, make, message
from xla_fsdp import compile_step, fully_shard
from xla_fsdp.optim import WholeParameterOptimizer
from xla_fsdp.xla import ops, programs
from xla_fsdp.xla import worker as worker_module
from xla_fsdp.xla.worker import Worker

scenarios = Scenarios(__name__, num_ranks=1)  # others would wait for one that raises
result = scenarios.result
scenario = scenarios.add

FEWEST_REPLAYS = {"changed": 10, "batch_norm": 10, "accumulation": 14, "adamw": 18, "sgd": 16}
"""Of 30 steps; what changes on purpose is traced."""
QUICK = ["adamw", "accumulation"]
# In these a plain step also returns what autograd still holds, and a replay does not. The compiler
# simplifies the two differently, which on some processors changes the last bit.
WITHOUT_SIMPLIFYING = ("accumulation", "zero1")


def trained(num_ranks: int, name: str) -> dict[str, Any]:
    """Return what ``run_jobs`` finds of a job on rank 0."""
    flags = FAST_COMPILE
    if name in WITHOUT_SIMPLIFYING:
        flags += " --xla_disable_hlo_passes=algsimp"
    env = {"XLA_FLAGS": flags}
    return run_on_ranks(run_jobs, num_ranks, [name], timeout=1800, env=env)[0][name]


def check(num_ranks: int, name: str) -> None:
    """Assert that a job's replayed steps are those traced."""
    found = trained(num_ranks, name)
    assert not found["error"], found["error"]
    assert found["differences"] == []
    assert found["replays"] + sum(found["traces"].values()) == STEPS
    assert found["replays"] >= FEWEST_REPLAYS.get(name, 22), found["traces"]


@pytest.mark.parametrize("name", QUICK)
def test_replays_are_the_traced_steps(name: str) -> None:
    check(3, name)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("name", JOBS)
def test_replays_are_the_traced_steps_on(name: str, num_ranks: int) -> None:
    check(num_ranks, name)


# ---------------------------------------------------------------- what users are told


@scenario
def told(rank: int) -> dict[str, Any]:
    import logging
    import warnings

    import torch_xla

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("xla_fsdp")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    called = []
    kinds = [(torch.float32, size) for size in range(3, 9)] + [(torch.int32, 3)]

    @compile_step(state=[], check=0)
    def step(x: Tensor) -> Tensor:
        called.append(len(called))
        return x.sum()

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [
                step(torch.ones(size, dtype=dtype).to(torch_xla.device())).item()
                for dtype, size in kinds
                for _ in range(4)
            ]
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return {
        "right": found == [size for _, size in kinds for _ in range(4)],
        "log": lines,
        "warnings": [str(each.message) for each in caught],
        "traces": sum(step.traces.values()),
        "reasons": [*step.traces],
        "called": len(called),
        "replays": step.replays,
    }


def test_new_shapes_and_dtypes_are_traced_counted_and_warned_of() -> None:
    found = result("told")
    assert found["right"]
    assert (found["traces"], found["replays"]) == (14, 14)
    [text] = found["warnings"]
    assert "a compiled step was traced 12 times" in text
    assert "1 argument 0: shape torch.Size([3]) is now torch.Size([4])" in text
    assert "dtype torch.float32 is now torch.int32" in found["reasons"][-1]


def test_python_code_runs_while_tracing_only_which_is_said() -> None:
    found = result("told")
    assert found["called"] == found["traces"]
    assert found["log"] == ["compile_step traces a step; replays do not run its Python code"]


def differing(rank: int) -> None:
    """Let one rank replay a step of other collectives than the other."""
    import torch_xla

    models = [fsdp(make(lambda: nn.Linear(3, 3))), fsdp(make(lambda: nn.Linear(3, 5)))]
    steps = [compile_step(lambda x, model=model: model(x).sum(), state=[model]) for model in models]
    x = torch.ones(2, 3).to(torch_xla.device())
    for step in steps:
        for _ in range(4):
            step(x)
    assert [step.replays for step in steps] == [2, 2]
    steps[rank](x)


@pytest.mark.slow
def test_ranks_that_would_replay_different_programs_are_told() -> None:
    with pytest.raises(ChildError, match="the ranks differ in what they traced"):
        run_on_ranks(differing, 2)


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
    return compile_step(lambda x: model(x).sum(), state=[model], **options)


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


def test_a_tensor_drawn_in_every_step_is_refused() -> None:
    text = result("random_tensor")
    assert "the step draws random numbers on the host at" in text
    assert "test_compile_step.py" in text


@scenario
def computed_tensor(rank: int) -> str:
    import torch_xla

    values = iter(range(100))
    return steps_of(
        shifted_step(lambda: torch.full((3,), float(next(values))).to(torch_xla.device()))
    )


def test_a_tensor_computed_in_every_step_is_refused() -> None:
    text = result("computed_tensor")
    assert "a tensor of shape [3] (entered at" in text
    assert "test_compile_step.py" in text


class Skipping(nn.Module):
    """Layers of which the host draws some that are left out."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x if self.draw() < 0.001 else self.layer(x)


def step_of(module: nn.Module) -> Any:
    """Return a compiled step that only runs a module, sharded."""
    model = fsdp(module)
    return compile_step(lambda x: model(x).sum(), state=[model])


@scenario
def drawn(rank: int) -> list[str]:
    import random

    import numpy as np

    draws = [random.random, lambda: random.uniform(0, 1), np.random.rand, lambda: torch.rand(())]
    draws[0] = lambda: random.random()
    draws[2] = lambda: np.random.rand()
    return [steps_of(step_of(Skipping(draw))) for draw in draws]


def test_random_numbers_that_only_steer_a_step_are_refused() -> None:
    for text in result("drawn"):
        assert "the step draws random numbers on the host at" in text, text
        assert "test_compile_step.py" in text


def job_of_sgd() -> tuple[Any, Any]:
    """Return a sharded layer and its optimizer."""
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def in_turns(period: int, *, compiled: bool) -> list[Any]:
    """Return the losses of two layers, of which a plain argument chooses the one that is trained,
    and the replays."""
    models = [fsdp(make(lambda: nn.Linear(3, 3))) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]

    def train(x: Tensor, first: bool) -> Tensor:
        model, optimizer = (models[not first], optimizers[not first])
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step: Any = compile_step(train, state=[models, optimizers]) if compiled else train
    x = torch.ones(2, 3).to(ops.device())
    losses = [step(x, number % period == 0).item() for number in range(14)]
    return [losses, step.replays if compiled else 0]


@scenario
def turns(rank: int) -> list[Any]:
    return [in_turns(period, compiled=each) for period in (2, 3) for each in (False, True)]


def test_two_optimizers_in_turns_count_for_themselves() -> None:
    (even, _), (compiled_even, even_replays), (third, _), (compiled_third, replays) = result(
        "turns"
    )
    assert (compiled_even, compiled_third) == (even, third)
    assert min(even_replays, replays) >= 6


def device_tensors(count: int) -> list[Tensor]:
    return [torch.arange(4.0).to(ops.device()) + number for number in range(count)]


def returned_sums(*, compiled: bool) -> list[Any]:
    """Return what a step returns of its state, read steps later, and the replays."""
    [total] = device_tensors(1)
    state = {"total": total}

    def add(x: Tensor) -> Tensor:
        state["total"].add_(x)
        return state["total"]

    step: Any = compile_step(add, state=[state]) if compiled else add
    results = [step(torch.ones(4).to(ops.device())) for _ in range(8)]
    return [[each.tolist() for each in results], step.replays if compiled else 0]


def shared_later(*, compiled: bool) -> list[Any]:
    """Return two tensors of the state, one of which is the other for two steps; and the replays."""
    first, second = device_tensors(2)
    state = {"first": first, "second": second}

    def add(x: Tensor) -> Tensor:
        state["first"].add_(x)
        state["second"].mul_(2)
        return state["first"] + state["second"]

    step: Any = compile_step(add, state=[state]) if compiled else add
    found = []
    for number in range(12):
        if number in (4, 6):
            state["second"] = state["first"] if number == 4 else state["first"].clone()
        found.append(step(torch.ones(4).to(ops.device())).tolist())
    return [found, step.replays if compiled else 0]


def bare(*, compiled: bool) -> list[Any]:
    """Return the losses of a parameter that an optimizer alone holds, and the replays."""
    param = nn.Parameter(device_tensors(1)[0])
    optimizer = torch.optim.SGD([param], lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss = (param * x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.ones(4).to(ops.device())
    if not compiled:
        return [[train(x).item() for _ in range(8)], 0]
    step: Any = compile_step(train, state=[optimizer])
    return [[step(x).item() for _ in range(8)], step.replays]


def added_to(change: Callable[[Tensor], Tensor], *, compiled: bool) -> list[Any]:
    """Return what a step adds to, where ``change`` of it replaces it between steps; and the
    replays."""
    [first] = device_tensors(1)
    state = {"sum": first}

    def add(x: Tensor) -> Tensor:
        state["sum"].add_(x)
        return state["sum"] * 2

    step: Any = compile_step(add, state=[state]) if compiled else add
    found = []
    for number in range(9):
        if number in (4, 6):
            state["sum"] = change(state["sum"])
        doubled = step(torch.ones(4).to(ops.device()))
        found += [doubled.tolist(), state["sum"].tolist()]
    return [found, step.replays if compiled else 0]


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.view(4),
    lambda t: (t + 1).view(2, 2).flatten(),
    lambda t: torch.stack([t, t])[1],
    lambda t: (t + 1)[None].t()[:, 0],
]


def drawn_between(*, compiled: bool) -> list[Any]:
    """Return what a step with dropout and its caller draw in turns, and the replays."""
    ops.set_rng_state(7, ops.device())
    drop = nn.Dropout(0.5)
    step: Any = compile_step(drop, state=[drop]) if compiled else drop
    found = []
    for number in range(10):
        found.append(step(torch.ones(8).to(ops.device())).tolist())
        if not compiled:
            ops.sync()
        if number % 3 == 1:
            found.append(torch.rand(2, device=ops.device()).tolist())
            # A sync would go on from where the last one was, as if nothing had been drawn.
            ops.set_rng_state(ops.get_rng_state(ops.device()), ops.device())
    return [found, step.replays if compiled else 0]


def host_arguments(*, compiled: bool) -> list[Any]:
    """Return what a step makes of tensors of the host, and the replays."""
    [total] = device_tensors(1)

    def add(x: Tensor, factor: Tensor) -> Tensor:
        x = x.to(ops.device())
        x.sub_(1)
        total.add_(x * factor.to(ops.device()))
        return total * 2

    step: Any = compile_step(add, state=[[total]]) if compiled else add
    found = []
    for number in range(8):
        x = torch.full((4,), float(number))
        found += [step(x, torch.tensor(number)).tolist(), total.tolist()]
        if compiled:
            assert x.tolist() == [number] * 4
    return [found, step.replays if compiled else 0]


def refusals_of_memory() -> list[str]:
    """Return what is said of memory that a replay would not follow."""
    [whole] = device_tensors(1)
    state = {"whole": whole, "part": whole[:2]}
    leaf = device_tensors(1)[0].requires_grad_()
    steps: list[tuple[Any, Tensor]] = [
        (compile_step(lambda x: state["whole"].add_(x), state=[state]), device_tensors(1)[0]),
        (compile_step(lambda x: x.square().sum().backward(), state=[]), leaf),
        (compile_step(lambda x: x.square().sum(), state=[]), leaf * 2),
    ]
    views = [functools.partial(added_to, view, compiled=True) for view in VIEWS]
    return [message(each) for each in [functools.partial(step, x) for step, x in steps] + views]


def kept_output(kept: Callable[[Tensor], Tensor]) -> tuple[list[float], int]:
    """Return what a compiled step keeps of a result that has a graph, and how often it was
    replayed."""
    [weight] = device_tensors(1)
    state = {"weight": weight.requires_grad_(), "kept": device_tensors(1)[0]}

    def step(x: Tensor) -> None:
        state["kept"] = kept(state["weight"] * x)

    compiled = compile_step(step, state=[state])
    for number in range(1, 7):
        compiled(device_tensors(1)[0].fill_(number))
    return state["kept"].tolist(), compiled.replays


PAIRS: dict[str, Any] = {
    "returned_sums": returned_sums,
    "shared_later": shared_later,
    "bare": bare,
    "pending": functools.partial(added_to, lambda t: t.to(torch.float64).float()),
    "drawn_between": drawn_between,
    "host_arguments": host_arguments,
}
"""Each returns what a step does, as it is or compiled, and how often it was replayed."""


@scenario
def memory_of_state(rank: int) -> dict[str, Any]:
    pairs = {
        name: [each(compiled=compiled) for compiled in (False, True)]
        for name, each in PAIRS.items()
    }
    graphs = {
        "detached": kept_output(Tensor.detach),
        "itself": message(lambda: kept_output(lambda y: y)),
        "a parameter": message(lambda: kept_output(lambda y: y.detach().requires_grad_())),
    }
    return {**pairs, "refused": refusals_of_memory(), "graphs": graphs}


@pytest.mark.parametrize("name", PAIRS)
def test_replays_do_what_the_step_does(name: str) -> None:
    (plain, _), (compiled, replays) = result("memory_of_state")[name]
    assert compiled == plain
    assert replays >= 4


@scenario
def generators(rank: int) -> list[str]:
    def yields(x: Tensor) -> Any:
        yield x + 1

    async def waits(x: Tensor) -> Tensor:
        return x + 1

    return [message(functools.partial(compile_step, each, state=[])) for each in (yields, waits)]


def test_generators_and_coroutines_are_no_steps() -> None:
    for text in result("generators"):
        assert "runs only in parts" in text, text


def test_memory_that_a_replay_would_not_follow_is_refused() -> None:
    view, grad, graph, *views = result("memory_of_state")["refused"]
    assert "changes memory that dict['whole'] and dict['part'] share" in view
    assert "leaves a gradient in argument 0" in grad
    assert "argument 0 of the step has a graph" in graph
    assert len(views) == len(VIEWS)
    for each in views:
        assert "a view of a tensor; keep a clone of it" in each, each
        assert "Hand it to the step" not in each, each


def test_a_step_keeps_results_without_their_graphs() -> None:
    found = result("memory_of_state")["graphs"]
    values, replays = found["detached"]
    assert values == [0.0, 6.0, 12.0, 18.0]
    assert replays >= 2
    assert "keeps a tensor with a graph as state[0]['kept']" in found["itself"]
    assert "replaces state[0]['kept'], a parameter; change it in place" in found["a parameter"]


class Following(nn.Module):
    """Replaces the first of its buffers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("fixed", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return self.lin(x) * self.fixed + self.mean


@scenario
def followed(rank: int) -> list[Any]:
    model = fsdp(make(Following))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step: Any = compile_step(train, state=[model, optimizer], check=1)
    before = list(model.state_dict())
    for number in range(8):
        step(torch.full((2, 3), 1.0 + number).to(ops.device()))
    return [before, list(model.state_dict()), step.replays]


def test_a_buffer_that_replays_replace_keeps_its_place_in_the_state_dict() -> None:
    before, after, replays = result("followed")
    assert after == before
    assert replays >= 4


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def unused_layer(*, compiled: bool) -> list[Any]:
    """Return the losses of a model of which a layer is never used, with gradients of two batches;
    and the replays. After the first step counts of steps that were equal differ."""
    model = fsdp(make(PartlyUsed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(x: Tensor, is_last: bool) -> Tensor:
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(x).square().mean()
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    step: Any = compile_step(train, state=[model, optimizer]) if compiled else train
    x = torch.ones(2, 3).to(ops.device())
    losses = [step(x, number % 2 == 1).item() for number in range(12)]
    return [losses, step.replays if compiled else 0]


@scenario
def unused(rank: int) -> list[Any]:
    return [unused_layer(compiled=compiled) for compiled in (False, True)]


def test_counts_of_steps_that_part_after_the_first_step() -> None:
    (losses, _), (compiled, replays) = result("unused")
    assert compiled == losses
    assert replays >= 6


@scenario
def own_rates(rank: int) -> str:
    model, optimizer = job_of_sgd()

    def step(x: Tensor) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.1  # as in the warm-up of a schedule
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return steps_of(compile_step(step, state=[model, optimizer]))


def test_a_step_that_sets_learning_rates_is_refused() -> None:
    assert "the step sets lr of the optimizer's group 0" in result("own_rates")


@scenario
def voting(rank: int) -> str:
    from xla_fsdp import Preemption

    preemption = Preemption()
    return steps_of(compile_step(lambda x: (x.sum(), preemption.vote())[0], state=[]))


def test_a_vote_inside_is_refused() -> None:
    assert "Preemption.vote() was called inside a compiled step" in result("voting")


def _steps(step: Any) -> None:
    from test.common.replay import batch

    for number in range(4):
        step(*batch(number))


@scenario
def optimizers(rank: int) -> dict[str, list[Any]]:
    import warnings

    from test.common.replay import REFUSED_OPTIMIZERS, batch, optimized

    found = {}
    for name in REFUSED_OPTIMIZERS:
        job = optimized(name)
        text = message(functools.partial(_steps, job.compiled()))
        job = optimized(name)
        traced = job.compiled(unknown="trace")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [traced(*batch(0)).item() for _ in range(4)]
        found[name] = [text, losses]
    return found


@scenario
def tensor_rate(rank: int) -> str:
    from test.common.replay import optimized

    job = optimized("AdamW", lr=torch.tensor(1e-3))
    return message(functools.partial(_steps, job.compiled()))


def test_a_learning_rate_in_a_host_tensor_is_refused() -> None:
    assert "the host computes a value anew in every step" in result("tensor_rate")


def test_optimizers_that_cannot_be_followed_are_refused_or_traced() -> None:
    found = result("optimizers")
    assert "in the state of an optimizer grew by" in found["NAdam"][0]
    assert "capturable=True" in found["NAdam"][0]
    for name in ("ASGD", "Adafactor"):
        assert "the step reads a value of the device at" in found[name][0]
        assert "replay.py" in found[name][0]
    for _, losses in found.values():
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0]


@scenario
def reading(rank: int) -> list[str]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    return [
        steps_of(compile_step(lambda x: model(x).sum().item(), state=[model])),
        steps_of(compile_step(lambda x: str(model(x)), state=[model])),
    ]


def test_reads_are_refused_with_their_place() -> None:
    for text in result("reading"):
        assert text.startswith("CompileStepError: the step reads a value of the device at")
        assert "test_compile_step.py" in text


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
    return steps_of(compile_step(torch_xla.compile(lambda x: model(x).sum()), state=[model]))


def test_a_sync_inside_is_refused() -> None:
    assert "the step runs what is pending (torch_xla.sync()) of the device" in result("syncing")


@scenario
def synced_around(rank: int) -> list[Any]:
    import torch_xla

    found = []
    for around in (torch_xla.compile, lambda step: step):
        model, optimizer = job_of_sgd()

        def train(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        inner = compile_step(train, state=[model, optimizer])
        step = around(inner)
        losses = [step(torch.ones(2, 3).to(torch_xla.device())).item() for _ in range(8)]
        found.append((losses, inner.replays))
    return found


def test_torch_xla_compile_around_a_compiled_step_only_syncs() -> None:
    around, alone = result("synced_around")
    assert around == alone
    assert alone[1] == 5


# ---------------------------------------------------------------- programs that are gone


def evicted(rank: int) -> list[Any]:
    """Train while more programs are compiled than torch_xla keeps; return losses and traces."""
    import torch_xla

    losses = []
    for others in (False, True):
        model, optimizer = job_of_sgd()

        def train(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        step = compile_step(train, state=[model, optimizer])
        found = []
        for number in range(12):
            found.append(step(torch.ones(2, 3).to(torch_xla.device())).item())
            for size in range(4 if others and number == 7 else 0):
                torch.ones(2 + size, 5).to(torch_xla.device()).sum().item()
        losses.append((found, dict(step.traces), step.replays))
    return losses


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_program_that_torch_xla_has_dropped_is_traced_again(num_ranks: int) -> None:
    outcomes = run_on_ranks(evicted, num_ranks, env={"XLA_COMPILATION_CACHE_SIZE": "3"})
    for (undisturbed, _, _), (found, traces, replays) in outcomes:
        assert found == undisturbed
        assert sum(n for reason, n in traces.items() if "dropped the program" in reason) >= 1
        assert replays >= 4


@scenario
def arguments(rank: int) -> list[Any]:
    import torch_xla

    step = compile_step(lambda x, y: (x * 2 + y).sum(), state=[])
    x, y = (torch.full((3,), each).to(torch_xla.device()) for each in (1.0, 5.0))
    same = [step(x, x).item() for _ in range(4)]
    other = [step(x, y).item() for _ in range(4)]
    aliased = message(lambda: compile_step(lambda x, y: x + y, state=[])(x, x.detach()))
    return [same, other, aliased, message(lambda: step(x, object()))]


def test_arguments_that_are_one_tensor_are_another_program() -> None:
    same, other, aliased, unknown = result("arguments")
    assert (same, other) == ([9.0] * 4, [21.0] * 4)
    assert "argument 1 of the step shares its memory with another argument" in aliased
    assert unknown.startswith("TypeError: a compiled step got a object; pass tensors")


@scenario
def one_tensor_again(rank: int) -> list[Any]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    kept, first, second = (torch.full((2, 3), float(n)).to(ops.device()) for n in range(3))
    steps = [
        compile_step(lambda x: model(x).sum(), state=[model]),
        compile_step(lambda x: (kept - x).sum(), state=[kept]),
    ]
    plain = [lambda x: model(x).sum(), lambda x: (kept - x).sum()]
    order = [kept, kept, kept, first, kept, second, first, second]
    found = [[step(x).item() for x in order] for step in steps]
    wanted = [[step(x).item() for x in order] for step in plain]
    return [found, wanted, [step.replays for step in steps]]


def test_a_tensor_that_is_handed_over_again_may_be_another_one_later() -> None:
    found, wanted, replays = result("one_tensor_again")
    assert found == wanted
    assert replays == [5, 4]


# ---------------------------------------------------------------- memory and exceptions


@scenario
def donated(rank: int) -> list[Any]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp.xla import programs

    model = fsdp(make(lambda: nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @compile_step(state=[model, optimizer])
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
        # What is inside of a tensor keeps its buffer, and is replaced in the step.
        buffers = [torch._from_functional_tensor(each.detach()) for each in held]
        step(torch.ones(2, 3).to(torch_xla.device()))
        xm.wait_device_ops()
        kept = [each for each in programs.buffers_of(buffers) if each is not None]
        found.append((len(held), len(kept)))
    program = list(step._own._programs.values())[-1][-1]
    read = [number for place, number in program.inputs if place == "slot"]
    written = [goal[1] for goals in program.outputs for goal in goals]
    return [found, step.replays, read, written]


def test_results_are_written_over_the_inputs_that_they_replace() -> None:
    *_, read, written = result("donated")
    assert len(read) == 6
    assert written[:6] == read  # XLA pairs those of one size in order; gradients come last


def test_what_a_step_changes_is_donated() -> None:
    found, replays, *_ = result("donated")
    numbers = [held for held, _ in found]
    assert (numbers, replays) == ([2, 6, 6, 6, 6], 2)
    assert not any(kept for _, kept in found), found


def adamw_steps(rank: int) -> int:
    """Train a sharded layer; return how many steps were replayed."""
    import torch_xla

    model = fsdp(make(lambda: nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @compile_step(state=[model, optimizer])
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(5):
        step(torch.ones(2, 3).to(torch_xla.device()))
    return step.replays


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_program_that_is_run_has_the_aliases(num_ranks: int, tmp_path: Path) -> None:
    flags = f"{FAST_COMPILE} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    assert run_on_ranks(adamw_steps, num_ranks, env={"XLA_FLAGS": flags}) == [2] * num_ranks
    heads = [
        dump.read_text().partition("\n")[0] for dump in tmp_path.glob("*after_optimizations.txt")
    ]
    # Weight and bias, each with two averages.
    assert max(head.count("may-alias") + head.count("must-alias") for head in heads) == 6, heads


def memory_of_steps(rank: int, compiled: bool) -> tuple[int, int]:
    """Train a layer of 32 MiB; return by how many bytes four steps at most raise the memory of the
    process, and how many bytes of buffers its tensors hold after them."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    model = fsdp(make(lambda: nn.Linear(2048, 4096)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step: Any = compile_step(train, state=[model, optimizer]) if compiled else train

    def take(count: int) -> None:
        for _ in range(count):
            step(torch.ones(2, 2048).to(torch_xla.device()))
            if not compiled:
                torch_xla.sync()
        xm.wait_device_ops()

    take(5)
    before = reset_peak()
    take(4)
    return peak() - before, bytes_held()


def bytes_held() -> int:
    """Return the bytes of the buffers that this rank's tensors hold."""
    import torch_xla

    from xla_fsdp.xla import programs

    with torch._C.DisableTorchFunctionSubclass():
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        own = [each for each in tensors if each.device == torch_xla.device()]
        buffers = dict(zip(programs.buffers_of(own), own, strict=True))
        return sum(each.nbytes for buffer, each in buffers.items() if buffer is not None)


@pytest.mark.slow
def test_replays_need_the_memory_of_traced_steps() -> None:
    traced, replayed = (run_on_ranks(memory_of_steps, 1, each)[0] for each in (False, True))
    scalars = 1 << 10
    assert replayed[1] == pytest.approx(traced[1], abs=scalars)
    # A traced step keeps a copy of a state, whose buffer XLA gives to the result of another one.
    assert replayed[0] <= traced[0]


@scenario
def replaced_state(rank: int) -> list[int]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @compile_step(state=[model, optimizer])
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def take(count: int) -> None:
        for _ in range(count):
            step(torch.ones(2, 3).to(ops.device()))

    take(5)
    old = [weakref.ref(each["exp_avg"]) for each in optimizer.state.values()]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(1)
    gc.collect()
    gone = sum(each() is None for each in old)
    take(3)
    return [len(old), gone, step.replays]


def test_states_that_a_state_dict_replaces_are_let_go_of() -> None:
    states, gone, replays = result("replaced_state")
    assert gone == states > 0
    assert replays == 5


# ---------------------------------------------------------------- exceptions


@scenario
def raising(rank: int) -> list[Any]:
    import torch_xla

    model = fsdp(make(lambda: nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @compile_step(state=[model, optimizer])
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
    assert (text, same, set(counts), replays) == ("ValueError: on purpose", True, {5.0}, 4)


class Interrupted(Future):  # type: ignore[type-arg]
    """A call whose caller is interrupted as soon as it waits."""

    was_waited_for = False

    def exception(self, timeout: float | None = None) -> Any:
        if not self.was_waited_for:
            self.was_waited_for = True
            raise KeyboardInterrupt
        return super().exception(timeout)


def drops_out(*, interrupted: bool) -> list[Any]:
    """Return parameters, counts, random number state, interrupts and replays after 30 steps."""
    model = fsdp(make(lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ops.set_rng_state(7, ops.device())
    interrupts = 0

    @compile_step(state=[model, optimizer], check=0)  # which calls the worker once more
    def step(x: Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        x = torch.full((2, 3), 0.1 * number).to(ops.device())
        taken = step.replays + sum(step.traces.values())
        calls: list[Any] = [
            Future(),
            Future(),
        ]  # of a step: its replay, and what it has traced without one
        if interrupted and number % 3 == 1:
            calls[number == 1] = Interrupted()  # the second step is traced
        with mock.patch.object(worker_module, "Future", mock.Mock(side_effect=calls)):
            try:
                step(x)
            except KeyboardInterrupt:
                interrupts += 1
        if step.replays + sum(step.traces.values()) == taken:
            step(x)  # it was to be traced, and has not begun
    values = [each.tolist() for each in model.parameters()]
    counts = [state["step"].item() for state in optimizer.state.values()]
    return [values, counts, ops.get_rng_state(ops.device()), interrupts, step.replays]


@scenario
def interrupts(rank: int) -> list[Any]:
    return [drops_out(interrupted=each) for each in (False, True)]


def test_an_interrupted_step_is_a_whole_one() -> None:
    (*undisturbed, none, _), (*disturbed, interrupts, replays) = result("interrupts")
    assert disturbed == undisturbed
    assert (none, interrupts) == (0, STEPS // 3)
    assert replays >= 15


def copied(rank: int, *, compiled: bool) -> list[Any]:
    """Return copies of a layer that were made between steps, some on one rank alone, and its
    average; and the replays."""
    model, optimizer = job_of_sgd()
    average = torch.optim.swa_utils.AveragedModel(model)
    target = [torch.zeros_like(param) for param in model.parameters()]

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    step: Any = compile_step(train, state=[model, optimizer]) if compiled else train
    kept = []
    for number in range(7):
        step(torch.full((2, 3), 1.0 + number).to(ops.device()))
        if not compiled:
            ops.sync()
        if rank == 0:
            kept += [param.detach().clone() for param in model.parameters()]
        if number % 2:
            average.update_parameters(model)
        if number == 5:
            for old, new in zip(target, model.parameters(), strict=True):
                old.copy_(new.detach())
    kept += [*average.parameters(), *target]
    return [[each.detach().cpu().tolist() for each in kept], step.replays if compiled else 0]


@scenario
def copies(rank: int) -> list[Any]:
    return [copied(rank, compiled=compiled) for compiled in (False, True)]


def test_copies_made_between_steps_keep_their_values() -> None:
    (traced, _), (compiled, replays) = result("copies")
    assert compiled == traced
    assert replays >= 4


@scenario
def more_copies(rank: int) -> list[str]:
    ways = ["copy_, sync", "exchange", "swap", "best", "chain", "states"]
    return copies_module.differing(rank, ["whole"], ways, [1])


def test_copies_of_all_kinds_share_no_buffer_with_what_replays_donate() -> None:
    assert result("more_copies") == []


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "whole", "stacked", "streamed"])
def test_copies_of_all_kinds_on(name: str, num_ranks: int) -> None:
    ways = [*copies_module.WAYS]
    run = copies_module.differing
    assert run_on_ranks(run, num_ranks, [name], ways, [None, 1], timeout=1800) == [[]] * num_ranks


def viewed(*, compiled: bool) -> list[Any]:
    """Return what views of a layer's weight hold during six steps, some changed between steps; and
    the replays."""
    model, optimizer = job_of_sgd()
    [weight, *_] = model.parameters()
    views = [
        weight.detach(),
        weight.detach().view(-1),
        weight.data[1:],
        *model.state_dict().values(),
    ]

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    step: Any = compile_step(train, state=[model, optimizer]) if compiled else train
    found = []
    for number in range(6):
        if number == 4:
            views.append(weight.detach()[:2])
            views[1].mul_(0.5)
        found.append(step(torch.full((2, 3), 1.0 + number).to(ops.device())).item())
        ops.sync()
        found += [each.tolist() for each in views if number != 3]  # of which some are not read
    return [found, step.replays if compiled else 0]


@scenario
def views(rank: int) -> list[Any]:
    return [viewed(compiled=compiled) for compiled in (False, True)]


def test_views_of_parameters_follow_replays() -> None:
    (traced, _), (compiled, replays) = result("views")
    assert compiled == traced
    assert replays == 3


def touched(*, compiled: bool) -> list[Any]:
    """Return what a layer, a buffer, a view and results hold while views come and go and others
    change the weight between steps; and the replays."""
    model, optimizer = job_of_sgd()
    optimizer.param_groups[0]["momentum"] = 0.9
    model.register_buffer("total", torch.zeros((), device=ops.device()))
    [weight, *_] = model.parameters()

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        model.total = model.total + loss.detach()
        return model.total

    step: Any = compile_step(train, state=[model, optimizer]) if compiled else train
    found, totals = [], []
    view = None
    for number in range(14):
        if number == 6:
            gone = weight.detach()
            gone.mul_(0.5)
            del gone
        elif number == 7:
            view = weight.detach()[:1]
        elif number == 9:
            view = None
        elif number == 10:
            weight.data = weight.data.clone()
        elif number == 11:
            weight.data.mul_(2.0)
        elif number == 12:
            taken = weight.detach().clone()
        totals.append(step(torch.full((2, 3), 0.1 * number).to(ops.device())))
        ops.sync()
        found.append([each.tolist() for each in (weight, weight.detach(), weight.view(-1))])
        found.append([] if view is None else view.tolist())
    found += [each.item() for each in totals] + [taken.tolist(), model.total.item()]
    states = [state["momentum_buffer"].tolist() for state in optimizer.state.values()]
    return [found, states, step.replays if compiled else 0]


@scenario
def touches(rank: int) -> list[Any]:
    return [touched(compiled=compiled) for compiled in (False, True)]


def test_replays_follow_views_that_come_and_go_and_changes_between_steps() -> None:
    (*traced, _), (*compiled, replays) = result("touches")
    assert compiled == traced
    assert replays >= 9


@scenario
def converted(rank: int) -> Any:
    """Return the results of steps whose frozen scale gets data of another dtype, equally long."""
    model, optimizer = job_of_sgd()
    scale = nn.Parameter(torch.full((3,), 0.5).to(ops.device()).bfloat16(), requires_grad=False)
    model.register_parameter("scale", scale)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) * scale.float().mean()).square().sum()
        loss.backward()
        optimizer.step()
        return (loss.detach() * 0 + scale.float()).sum()

    step: Any = compile_step(train, state=[model, optimizer])
    found = []
    for number in range(8):
        if number == 5:
            scale.data = scale.data.half()
        found.append(step(torch.full((2, 3), 0.1 * number).to(ops.device())).item())
    return found, step.replays


def test_data_of_another_dtype_is_no_replay() -> None:
    found, replays = result("converted")
    assert found == [1.5] * 8
    assert replays >= 2


@scenario
def worked(rank: int) -> dict[str, Any]:
    """Return what a worker sees, and what becomes of it."""
    worker = Worker()
    with torch.inference_mode():
        inference = worker.call(torch.is_inference_mode_enabled)
    seen = str(ops.device()), worker.call(lambda: str(ops.device()))
    raised = message(functools.partial(worker.call, functools.partial(divmod, 1, 0)))
    held = torch.ones(2)
    left, may_end = weakref.ref(held), threading.Event()

    class Answered(Future):  # type: ignore[type-arg]
        def set_result(self, result: Any) -> None:
            super().set_result(result)
            may_end.wait(60)  # the worker comes no further while its caller goes on

    with mock.patch.object(worker_module, "Future", Answered):
        worker.call(functools.partial(torch.neg, held))
    del held
    gc.collect()
    kept = left() is not None
    may_end.set()
    thread = worker.thread
    another = thread.ident != threading.get_ident()
    del worker
    thread.join(timeout=60)
    return {
        "inference": (inference, torch.is_inference_mode_enabled()),
        "devices": seen,
        "raised": raised,
        "kept": kept,
        "another": another,
        "alive": thread.is_alive(),
    }


def test_a_worker_calls_for_its_rank_and_ends_with_it() -> None:
    found = result("worked")
    assert found["inference"] == (True, False)
    own, its = found["devices"]
    assert own == its
    assert "division" in found["raised"]
    assert found["another"]
    assert not found["kept"]
    assert not found["alive"]


@scenario
def called(rank: int) -> list[list[int]]:
    """Return the threads that ran traced steps, and those that ran replays."""
    model, optimizer = job_of_sgd()
    threads: dict[str, list[int]] = {"run_traced": [], "run_again": []}

    def noting(name: str) -> Any:
        original = getattr(programs, name)

        def run(*args: Any) -> Any:
            threads[name].append(threading.get_ident())
            return original(*args)

        return mock.patch.object(programs, name, run)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    step = compile_step(train, state=[model, optimizer])
    with noting("run_traced"), noting("run_again"):
        for number in range(8):
            step(torch.full((number // 6 + 1, 3), 1.0).to(ops.device()))
    return [*threads.values()]


def test_replays_have_a_thread_that_has_run_nothing_traced() -> None:
    traced, replayed = result("called")
    assert len(traced) >= 3
    assert len(replayed) >= 3
    assert len({*replayed}) == 1
    assert not {*traced} & {*replayed}


# ---------------------------------------------------------------- tensors that move


class Scaled(torch.optim.Optimizer):
    """Steps by the norm, with a scalar on the device and a tensor of the parameter's shape."""

    def __init__(self, params: Any, lr: float = 0.001) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["sum"] = torch.zeros((), device=param.device)
                    state["average"] = torch.zeros_like(param)
                state["sum"].add_(param.norm())
                state["average"].mul_(0.9).add_(param.grad)
                param.add_(state["average"] * state["sum"], alpha=-group["lr"])


class MovesState(Scaled):
    """Keeps its state in a new dict after each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.old = [*self.state.values()]
        for param, state in list(self.state.items()):
            self.state[param] = dict(state)


def steps_with_whole_state(compiled: bool) -> list[Any]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    return steps_by(model, WholeParameterOptimizer(model.parameters(), Scaled), compiled)


def steps_with_moved_state(compiled: bool) -> list[Any]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    return steps_by(model, MovesState(model.parameters()), compiled)


def steps_after_initialization(compiled: bool) -> list[Any]:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    fully_shard(model)
    model.to_empty(device=ops.device())
    ops.set_rng_state(0, ops.device())
    model.reset_parameters()
    return steps_by(model, torch.optim.SGD(model.parameters(), lr=0.1), compiled)


def steps_by(model: nn.Module, optimizer: Any, compiled: bool) -> list[Any]:
    """Return the losses of six steps, and how many were replayed."""

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    step: Any = compile_step(train, state=[model, optimizer]) if compiled else train
    losses = []
    for number in range(6):
        losses.append(step(torch.full((2, 3), 1.0 + number).to(ops.device())))
        ops.sync()
    return [[each.item() for each in losses], step.replays if compiled else 0]


@scenario
def moving(rank: int) -> list[Any]:
    return [
        [steps(compiled) for compiled in (False, True)]
        for steps in (steps_with_whole_state, steps_with_moved_state, steps_after_initialization)
    ]


@pytest.mark.parametrize(("number", "replays"), [(0, 0), (1, 0), (2, 3)])
def test_state_that_moves_and_fresh_parameters_are_followed(number: int, replays: int) -> None:
    (traced, _), (compiled, replayed) = result("moving")[number]
    assert compiled == traced
    assert replayed >= replays


class Averaging(nn.Module):
    """Adds a buffer, which it may replace; it raises after that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(3, 3), False
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.fails:
            self.kept = [self.mean]
            self.mean = self.mean + out.detach().mean(0)
            raise ValueError("on purpose")
        return out + self.mean


@scenario
def raising_later(rank: int) -> str:
    model = make(Averaging)
    step = step_of(model)
    step(torch.ones(2, 3).to(ops.device()))
    model.fails = True
    return message(lambda: step(torch.ones(2, 3).to(ops.device())))


def test_the_error_of_a_step_that_has_replaced_tensors_is_raised() -> None:
    assert result("raising_later") == "ValueError: on purpose"


# ---------------------------------------------------------------- how steps are written


@scenario
def own_modules(rank: int) -> list[Any]:
    """A step that makes modules for itself."""
    layers = nn.Sequential(*[make(lambda: nn.Linear(3, 3)) for _ in range(3)]).to(ops.device())
    step = compile_step(lambda x, y: nn.CrossEntropyLoss()(layers[:2](x), y), state=layers)
    y = torch.tensor([0, 2]).to(ops.device())
    xs = [torch.full((2, 3), 0.1 * n).to(ops.device()) for n in range(6)]
    found = [step(x, y).item() for x in xs]
    wanted = [nn.functional.cross_entropy(layers[1](layers[0](x)), y).item() for x in xs]
    return [found, wanted, step.replays]


def test_a_step_may_make_a_loss_anew_each_time() -> None:
    found, wanted, replays = result("own_modules")
    assert found == pytest.approx(wanted)
    assert replays == 4


@scenario
def views_returned(rank: int) -> list[Any]:
    """A step that returns views of an argument and of a parameter, and keeps one of another."""
    model = fsdp(make(lambda: nn.Linear(3, 3, bias=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.parameters())
    kept = []

    @compile_step(state=[model, optimizer], check=0)  # which would keep one more
    def step(x: Tensor, other: Tensor) -> Any:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        kept.append(other[1:])
        return x[1:], weight.detach()[:2]

    for n in range(5):
        x, other = (torch.full((2, 3), scale * (n + 1)).to(ops.device()) for scale in (0.1, 2.0))
        part, of_weight = step(x, other)
        same = (
            torch.equal(part.cpu(), x.cpu()[1:]),
            torch.equal(of_weight.cpu(), weight.detach().cpu()[:2]),
        )
        assert same == (True, True), (n, part, x, of_weight, weight)
        assert other.tolist() == [[2.0 * (n + 1)] * 3] * 2
    return [[each.tolist() for each in kept], step.replays]


def test_views_of_arguments_and_parameters_may_be_returned() -> None:
    kept, replays = result("views_returned")
    assert kept == [[[2.0 * (n + 1)] * 3] for n in range(len(kept))]
    assert replays == 2  # the first step has no gradients yet


class InList(nn.Module):
    """Multiplies by a tensor that is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [torch.ones(2).to(ops.device())]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors[0]


@scenario
def gone(rank: int) -> list[Any]:
    model, x = InList(), torch.ones(2).to(ops.device())
    step = compile_step(lambda x: model(x), state=model)
    found = []
    for n in range(12):
        if n % 4 == 0:
            model.factors[0] = torch.full((2,), n + 1.0).to(ops.device())
        found.append(step(x)[0].item())
    return [found, step.replays]


def test_a_tensor_that_is_gone_makes_a_new_trace() -> None:
    found, replays = result("gone")
    assert found == [1.0] * 4 + [5.0] * 4 + [9.0] * 4
    assert replays > 5


@scenario
def unknown_argument(rank: int) -> list[Any]:
    import warnings

    class Batch:
        x = torch.ones(2).to(ops.device())

    step = compile_step(lambda batch: batch.x.sum(), state=[], unknown="trace")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [step(Batch()).item() for _ in range(3)]
    return [found, [str(each.message) for each in caught], step.replays]


def test_a_step_with_unknown_arguments_can_be_traced_every_time() -> None:
    found, [text], replays = result("unknown_argument")
    assert (found, replays) == ([2.0] * 3, 0)
    assert text.startswith("every step is traced, because a compiled step got a Batch; pass")
