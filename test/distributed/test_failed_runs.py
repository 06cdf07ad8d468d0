"""Runs that fail, each followed by a right one in the same process."""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.ranks import PATIENCE, cached_outcome, run_python
from xla_fsdp.distributed.launcher import launch

RANKS = 2
WIDTH = 4
SECONDS = 60  # of a failing run, on a busy machine; ranks wait for others for 600 s
WHEN_OTHERS_HAVE_STEPPED = "when others have stepped"

PLACES = (
    "start",
    "forward",
    "generator in forward",
    "after forward",
    "backward",
    "tensor hook",
    "after backward",
    "optimizer",
    "after a pending collective",
    "after optimizer",
    "in the sync",
    "after sync",
    "before a read",
    "before an operator on the host",
)


class FaultError(Exception):
    pass


@dataclass(frozen=True)
class Failing:
    """How a run fails.

    Args:
        place: where ``ranks`` raise ``error``; nowhere if None.
        holders: ranks whose tensors stay alive in a global list.
    """

    place: str | None = None
    ranks: tuple[int, ...] = (0,)
    error: type[BaseException] = FaultError
    holders: tuple[int, ...] = ()

    def at(self, place: str, rank: int) -> None:
        if place == self.place and rank in self.ranks:
            raise self.error(place)


RIGHT = Failing()
held: list[Any] = []
stepped = threading.Event()

QUICK = [
    Failing("start"),
    Failing("forward", ranks=(0, 1)),
    Failing("generator in forward", ranks=(1,), holders=(0,)),
    Failing("after forward", holders=(1,)),
    Failing("backward", error=SystemExit),
    Failing("tensor hook", ranks=(1,), holders=(0, 1)),
    Failing("after backward", ranks=(1,), error=KeyboardInterrupt, holders=(1,)),
    Failing("optimizer", holders=(0, 1)),
    Failing("after a pending collective", ranks=(0, 1), holders=(0,)),
    Failing("after optimizer", ranks=(1,), holders=(1,)),
    Failing("in the sync", ranks=(0, 1), holders=(1,)),
    Failing("after sync", error=ValueError),
    Failing("before a read", ranks=(1,)),
    Failing("before an operator on the host", holders=(1,)),
]

MANY = [
    Failing(place, ranks, error, holders)
    for place, ranks, (error, holders) in itertools.product(
        PLACES,
        [(0,), (1,), (0, 1)],
        [(FaultError, (0,)), (ValueError, (0, 1)), (KeyboardInterrupt, ()), (SystemExit, (1,))],
    )
]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, at: Callable[[str], None], x: Tensor) -> Tensor:
        ctx.at = at
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.at("backward")
        return None, grad * 2


class Block(nn.Module):
    at: Callable[[str], None]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def _pieces(self, x: Tensor) -> Iterator[Tensor]:
        yield torch.tanh(x)
        self.at("generator in forward")
        yield x

    def forward(self, x: Tensor) -> Tensor:
        x = sum(self._pieces(self.linear(x)))
        self.at("forward")
        x.register_hook(lambda grad: self.at("tensor hook"))
        return Doubled.apply(self.at, x)


def build() -> tuple[Any, torch.optim.Optimizer]:
    from test.common.scenarios import fsdp, make

    wrap = functools.partial(fsdp, execute_sharding_on_init=False)  # which collects garbage
    blocks = make(lambda: nn.ModuleList([Block() for _ in range(2)]))
    model = wrap(nn.Sequential(*map(wrap, blocks)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(rank: int, failing: Failing) -> float:
    failing.at("start", rank)
    return step(rank, failing, *build())


def train_further(rank: int, failing: Failing, kept: dict[int, Any]) -> float:
    if rank not in kept:
        kept[rank] = build()
    return step(rank, failing, *kept[rank])


def step(rank: int, failing: Failing, model: Any, optimizer: torch.optim.Optimizer) -> float:
    import torch_xla
    import torch_xla.core.xla_model as xm

    at = functools.partial(failing.at, rank=rank)
    for module in model.modules():
        if isinstance(module, Block):
            module.at = at
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(torch_xla.device())
    loss = model(x + rank).square().mean()
    if rank in failing.holders:
        held.append((rank, model, loss, optimizer))
    at("after forward")
    loss.backward()
    if failing.place == WHEN_OTHERS_HAVE_STEPPED and rank in failing.ranks:
        stepped.wait()
        at(WHEN_OTHERS_HAVE_STEPPED)
    at("after backward")
    hook = optimizer.register_step_pre_hook(lambda *_: at("optimizer"))
    try:
        optimizer.step()
    finally:
        hook.remove()
    if failing.place == "after a pending collective":
        held.append(xm.all_reduce("sum", torch.ones(3, device=x.device)) if rank else x + 1)
        at("after a pending collective")
    stepped.set()
    at("after optimizer")
    xm.add_step_closure(at, ("in the sync",))
    torch_xla.sync()
    at("after sync")
    output = model(x)
    at("before an operator on the host")
    found = torch.isin(output, output[:1]).sum()
    at("before a read")
    return output.sum().item() + found.item() + loss.item()


def outcome(failing: Failing, *kept: Any) -> Any:
    """Return what ``launch`` returns or raises; ``kept`` is of ``train_further``."""
    start = time.monotonic()
    stepped.clear()
    try:
        fn: Any = train_further if kept else train
        return launch(fn, (failing, *kept), num_ranks=RANKS)
    except (RuntimeError, SystemExit) as error:
        held.append(error)  # with the frames of its traceback
        assert time.monotonic() - start < SECONDS
        raised = error if isinstance(error, SystemExit) else error.__cause__
        *_, last = traceback.extract_tb(raised.__traceback__) if raised else [None]
        return f"{type(error).__name__}: {error}, in {last and last.name}"


def after_each(failures: Sequence[Failing]) -> list[Any]:
    """Return the values of a first run, and then of each failing one and a right one after it."""
    return [outcome(each) for each in (RIGHT, *itertools.chain(*[(f, RIGHT) for f in failures]))]


# ---------------------------------------------------------------- models that outlive runs

# On all ranks, as another rank may have stepped, which is pending and lost.
KEEPING = [
    Failing(place, ranks=(0, 1))
    for place in ("forward", "backward", "tensor hook", "after backward", "optimizer")
]


def kept_models() -> list[list[Any]]:
    """Return the values of three steps in three runs, without and with failed runs between."""
    alone: dict[int, Any] = {}
    found = [[outcome(RIGHT, alone) for _ in range(3)]]
    kept: dict[int, Any] = {}
    for failures in ([], KEEPING, KEEPING[1:2]):
        for failing in failures:
            outcome(failing, kept)
        found.append(outcome(RIGHT, kept))
    return found


def lost_models() -> list[Any]:
    """Return what becomes of a model that one rank stepped in a failed run, and of a new one."""
    kept: dict[int, Any] = {}
    failed = outcome(Failing(WHEN_OTHERS_HAVE_STEPPED, ranks=(1,)), kept)
    return [failed, outcome(RIGHT, kept), outcome(RIGHT, {}) == outcome(RIGHT, {})]


def accumulate(rank: int, fails: bool, kept: dict[int, nn.Linear]) -> float:
    import torch_xla
    import torch_xla.core.xla_model as xm

    model = kept.setdefault(rank, nn.Linear(WIDTH, 1).to(torch_xla.device()))
    torch_xla.sync()
    model(torch.ones(3, WIDTH, device=torch_xla.device())).sum().backward()
    grad: Any = model.weight.grad
    if fails:
        xm.all_reduce("sum", grad)
        raise FaultError
    return grad.sum().item()


def lost_gradients() -> list[Any]:
    """Return what becomes of gradients to which autograd adds others, and of new ones."""
    kept: dict[int, nn.Linear] = {}
    found: list[Any] = []
    for fails in (True, False, False):
        try:
            found.append(launch(accumulate, (fails, kept), num_ranks=RANKS))
        except RuntimeError as error:
            found.append(str(error))
            for model in kept.values() if not fails else ():
                model.zero_grad()
    return found


def lost_tensors() -> list[str]:
    """Return what becomes of uses of tensors that a failed run left, and the text of one."""
    held.clear()
    outcome(Failing("after optimizer", holders=(0, 1)))
    [(model, loss, optimizer)] = [
        each[1:] for each in held if isinstance(each, tuple) and not each[0]
    ]

    def use(rank: int) -> list[str]:
        import torch_xla

        from test.common.scenarios import message

        ones = torch.ones(2, WIDTH, device=torch_xla.device())
        uses: list[Callable[[], Any]] = [
            loss.item,
            loss.backward,
            lambda: torch.add(ones, loss),
            lambda: model(ones),
            optimizer.step,
        ]
        found = [message(each) for each in uses] if rank == 0 else []
        torch_xla.sync()
        return found

    [found, _] = launch(use, num_ranks=RANKS) or []
    return [*found, repr(loss)]


# ---------------------------------------------------------------- tests


def in_child(call: str, timeout: float = PATIENCE) -> Any:
    code = f"import json, {__name__} as t; print(json.dumps({call}))"
    done = run_python("-c", code, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@cached_outcome
def quick_results() -> Any:
    calls = "t.after_each(t.QUICK), t.kept_models(), t.lost_tensors(), t.lost_models()"
    return in_child(f"[{calls}, t.lost_gradients()]")


def check(failures: Sequence[Failing], values: Sequence[Any]) -> None:
    first, *others = values
    for failing, failed, right in zip(failures, others[::2], others[1::2], strict=True):
        assert re.match(_expected(failing), failed), failing
        assert right == first, failing


def _expected(failing: Failing) -> str:
    if failing.error is SystemExit:
        return f"SystemExit: {failing.place}, in at"
    others = r"( \(ranks \[\d\] raised, too\))?"
    error = f"{failing.error.__name__}: {failing.place}{others}"
    return rf"RankError: rank \d raised {error}, in at$"


def test_a_run_after_one_that_failed_is_right() -> None:
    check(QUICK, quick_results()[0])


@pytest.mark.slow
def test_runs_after_168_that_failed_are_right() -> None:
    check(MANY, in_child("t.after_each(t.MANY)", 1200))


def test_a_model_trains_on_after_failed_runs() -> None:
    alone, *kept = quick_results()[1]
    assert kept == alone
    assert all(isinstance(each, list) for each in alone)


def test_what_was_never_computed_cannot_be_used() -> None:
    *messages, text = quick_results()[2]
    assert text.startswith("LostTensor(shape=[], dtype=torch.float32, device=xla:")
    for each in messages:
        assert "was called with a tensor that was never computed: launch failed" in each


def test_a_model_that_only_some_ranks_stepped_cannot_be_used() -> None:
    failed, again, renewed = quick_results()[3]
    assert WHEN_OTHERS_HAVE_STEPPED in failed
    assert "rank 0 raised RuntimeError" in again
    assert "with a tensor that was never computed: launch failed" in again
    assert renewed


def test_gradients_that_were_lost_are_not_added_to() -> None:
    failed, again, renewed = quick_results()[4]
    assert "raised FaultError" in failed
    assert "backward was called with a tensor that was never computed" in again
    assert "optimizer.zero_grad()" in again
    assert renewed == [3.0 * WIDTH] * RANKS
