"""Scenarios: functions that run on ranks, in one launch those that a file's chosen tests ask for.

A file makes ``scenarios = Scenarios(__name__)``, marks functions of a rank with ``@scenarios.add``
and reads their values by ``scenarios.result("name")``. Helpers of such functions follow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.models import FEATURES, Net
from test.common.own_generator import OwnGenerator
from test.common.ranks import cached_outcome, run_on_ranks

RANKS = 2

Step = Callable[[Tensor], Tensor]


class Scenarios:
    """The scenarios of one test file.

    Args:
        module: ``__name__`` of the file, which holds this object as ``scenarios``.
        num_ranks: that run them.
    """

    def __init__(self, module: str, num_ranks: int = RANKS) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self.functions: dict[str, Callable[[int], Any]] = {}
        self._chosen: set[str] = set()

    def add(self, fn: Callable[[int], Any]) -> Callable[[int], Any]:
        """Run ``fn(rank)`` in the launch of this file."""
        self.functions[fn.__name__] = fn
        return fn

    def choose(self, test: pytest.Function) -> None:
        """Let the launch run what a test asks for: the scenarios whose names it, its parameters or
        functions of the file that it calls contain."""
        words = {*_words(test.obj, vars(test.module), set())}
        if hasattr(test, "callspec"):
            words |= {*map(str, test.callspec.params.values())}
        self._chosen |= words & self.functions.keys()

    def result(self, name: str, rank: int = 0) -> Any:
        """Return the value of the scenario ``name`` on a rank."""
        # Of a name that is put together only when the test runs: all of them.
        chosen = self._chosen if name in self._chosen else self.functions
        return _results(self._module, self._num_ranks, frozenset(chosen))[rank][name]


def _words(fn: Any, names: dict[str, Any], seen: set[CodeType]) -> Iterator[str]:
    """Yield the strings in a function and in those of ``names`` that it refers to."""
    codes = [fn.__code__] if hasattr(fn, "__code__") else []
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        yield from (each for each in code.co_consts if isinstance(each, str))
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        codes += [
            names[each].__code__ for each in code.co_names if hasattr(names.get(each), "__code__")
        ]


@cached_outcome
def _results(module: str, num_ranks: int, names: frozenset[str]) -> list[dict[str, Any]]:
    return run_on_ranks(_run, num_ranks, module, names)


def _run(rank: int, module: str, names: frozenset[str]) -> dict[str, Any]:
    functions = importlib.import_module(module).scenarios.functions
    return {name: fn(rank) for name, fn in functions.items() if name in names}


def fsdp(module: nn.Module, **options: Any) -> Any:
    """Wrap a module."""
    from xla_fsdp import XlaFullyShardedDataParallel

    return XlaFullyShardedDataParallel(module, **options)


def make(model_class: Callable[[], nn.Module] = Net, seed: int = 3) -> Any:
    """Build a model with the same values on every rank."""
    from xla_fsdp import one_rank_at_a_time

    # One at a time, as some classes change settings of the process while they are built.
    with one_rank_at_a_time(), OwnGenerator(seed):
        return model_class()


def nested(model: Any, **options: Any) -> Any:
    """Wrap each block, and then the model as the root."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fsdp(block, **options)
    return fsdp(model, **options)


def one_step(model: Any, optimizer: Any) -> Step:
    """Return a step of an ordinary loop, whose gradients are alive at its end."""

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def rows() -> Tensor:
    """Return a batch [2, FEATURES] on this rank's device, the same on every rank."""
    import torch_xla

    return torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES).to(torch_xla.device())


def message(call: Callable[[], Any]) -> str:
    """Return the class and text of the error that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def states(model: Any) -> set[str]:
    """Return the names of the states that the units of a model are in."""
    return {unit.state.name for unit in model._fsdp_units()}
