"""Runs that fail, each followed by a right one in the same process."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.ranks import run_python
from xla_fsdp.distributed.launcher import launch

RANKS = 2
WIDTH = 4

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
    "after sync",
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
    Failing("after sync", error=ValueError),
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
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.at = at

    def _pieces(self, x: Tensor) -> Iterator[Tensor]:
        yield torch.tanh(x)
        self.at("generator in forward")
        yield x

    def forward(self, x: Tensor) -> Tensor:
        x = sum(self._pieces(self.linear(x)))
        self.at("forward")
        x.register_hook(lambda grad: self.at("tensor hook"))
        return Doubled.apply(self.at, x)


def train(rank: int, failing: Failing) -> float:
    import torch_xla
    import torch_xla.core.xla_model as xm

    from test.common.scenarios import fsdp, make

    at = functools.partial(failing.at, rank=rank)
    at("start")
    wrap = functools.partial(fsdp, execute_sharding_on_init=False)  # which collects garbage
    blocks = make(lambda: nn.ModuleList([Block(at) for _ in range(2)]))
    model = wrap(nn.Sequential(*map(wrap, blocks)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: at("optimizer"))
    x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(torch_xla.device())
    loss = model(x + rank).square().mean()
    if rank in failing.holders:
        held.append((model, loss, optimizer))
    at("after forward")
    loss.backward()
    at("after backward")
    optimizer.step()
    if failing.place == "after a pending collective":
        held.append(xm.all_reduce("sum", torch.ones(3, device=x.device)) if rank else x + 1)
        at("after a pending collective")
    at("after optimizer")
    torch_xla.sync()
    at("after sync")
    return model(x).sum().item() + loss.item()


def outcome(failing: Failing) -> Any:
    """Return what ``launch`` returns or raises."""
    try:
        return launch(train, (failing,), num_ranks=RANKS)
    except (RuntimeError, SystemExit) as error:
        held.append(error)  # with the frames of its traceback
        return f"{type(error).__name__}: {error}"


def all_outcomes(failures: Sequence[Failing]) -> list[Any]:
    """Return the values of a first run, and then of each failing one and a right one after it."""
    return [outcome(each) for each in (RIGHT, *itertools.chain(*[(f, RIGHT) for f in failures]))]


def check(name: str, timeout: float) -> None:
    code = f"import json, {__name__} as t; print(json.dumps(t.all_outcomes(t.{name})))"
    done = run_python("-c", code, timeout=timeout)
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(done.stdout.splitlines()[-1])
    failures = getattr(sys.modules[__name__], name)
    assert len(others) == 2 * len(failures)
    for failing, failed, right in zip(failures, others[::2], others[1::2], strict=True):
        assert re.match(_expected(failing), failed), failing
        assert right == first, failing


def _expected(failing: Failing) -> str:
    if failing.error is SystemExit:
        return f"SystemExit: {failing.place}"
    return rf"RankError: rank \d raised {failing.error.__name__}: {failing.place}"


def test_a_right_run_after_each_kind_of_failure() -> None:
    check("QUICK", 120)


MANY = [
    Failing(place, ranks, error, holders)
    for place, ranks, (error, holders) in itertools.product(
        PLACES,
        [(0,), (1,), (0, 1)],
        [(FaultError, (0,)), (ValueError, (0, 1)), (KeyboardInterrupt, ()), (SystemExit, (1,))],
    )
]


@pytest.mark.slow
def test_a_right_run_after_each_of_132_failures() -> None:
    check("MANY", 600)


def tensors_of_a_failed_run() -> list[str]:
    """Return what becomes of uses of them, outside of ranks, and the number of ranks that use them
    in a run without an error."""
    outcome(Failing("after optimizer", holders=(0, 1)))
    [(model, loss, optimizer), *_] = [each for each in held if isinstance(each, tuple)]

    def use(rank: int) -> str:
        import torch_xla

        ones = torch.ones(2, device=torch_xla.device())
        uses = [
            lambda: loss.item(),
            lambda: loss.backward(),
            lambda: torch.add(ones, loss),
            lambda: model(ones),
            lambda: optimizer.step(),
        ]
        found = [_message(each) for each in uses] if rank == 0 else []
        torch_xla.sync()
        return found

    return launch(use, num_ranks=RANKS)[0] + [repr(loss)]


def _message(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except RuntimeError as error:
        return str(error)


def test_what_was_never_computed_cannot_be_used() -> None:
    code = f"import json, {__name__} as t; print(json.dumps(t.tensors_of_a_failed_run()))"
    done = run_python("-c", code, timeout=60)
    assert done.returncode == 0, done.stderr
    *messages, text = json.loads(done.stdout.splitlines()[-1])
    assert text.startswith("LostTensor(shape=[], dtype=torch.float32, device=xla:")
    for message in messages:
        assert "was called with a tensor that was never computed: launch failed" in message
