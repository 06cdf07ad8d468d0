"""Trace and compile steps of a search: several at once, within a budget, whatever fails.

Steps are traced one after the other, in this process; the compiler's child processes run beside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from xla_fsdp.preflight.api import compiled_report, traced_on
from xla_fsdp.preflight.compile.compiler import CompileError, available_memory
from xla_fsdp.preflight.read.report import Report
from xla_fsdp.preflight.search.candidates import Way, recipe_text
from xla_fsdp.preflight.topologies import Topology
from xla_fsdp.preflight.trace.program import Traced

CPUS = 2
"""That a compilation keeps busy."""


@dataclass(frozen=True)
class Trial:
    """A step to compile; ``depth`` is None where ``build_step`` has no such option."""

    way: Way
    batch: int
    depth: int | None = None


class OutOfBudgetError(Exception):
    """The budget ended before a step was compiled."""


@dataclass
class Trials:
    """Compiles steps until the deadline."""

    build_step: Callable[..., Any]  # called with ``recipe``, ``batch`` and options
    topology: Topology
    depth_option: str  # name of the option of ``build_step`` that is its number of layers
    options: Mapping[str, Any]  # others of ``build_step``, the same for all
    jobs: int  # compilations at once
    limits: Mapping[str, Any]  # of a compilation, as ``compiled_report`` takes them
    tell: Callable[[str], None]  # called with a line of text while waiting
    deadline: float = float("inf")  # as time.monotonic()
    _traced: dict[Trial, Traced | str] = field(default_factory=dict)
    _interrupted: bool = False

    @property
    def ended(self) -> bool:
        """Whether the budget has ended."""
        return self._interrupted or monotonic() >= self.deadline

    def trace(self, trial: Trial) -> Traced | str:
        """Return the traced step, kept until it is compiled, or why there is none.

        Raises:
            OutOfBudgetError: if the budget has ended.
        """
        if trial not in self._traced:
            if self.ended:
                raise OutOfBudgetError
            self.tell(f"{_name(trial)}: tracing")
            try:
                given = self._options_of(trial)
                self._traced[trial] = traced_on(self.topology, self.build_step, given)
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                self._traced[trial] = _reason(error)
        return self._traced[trial]

    def forget(self, trials: Iterable[Trial]) -> None:
        """Let go of traced steps that are not going to be compiled."""
        for each in trials:
            self._traced.pop(each, None)

    def run(self, trials: Iterable[Trial]) -> dict[Trial, Report | str]:
        """Return the report on each step, or why there is none; those that the budget leaves no
        time for are missing."""
        running: dict[Trial, Future[Report | str]] = {}
        done: dict[Trial, Report | str] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for trial in trials:
                    try:
                        traced = self.trace(trial)
                    except OutOfBudgetError:
                        continue
                    if isinstance(traced, str):
                        done[trial] = traced
                        continue
                    self._wait_for_a_slot(running.values())
                    running[trial] = pool.submit(self._compile, trial, traced)
                    del self._traced[trial]  # a large program, which is not compiled twice
                wait(running.values())
            except BaseException:
                self._interrupted = True  # ends the compilations, for which the pool waits
                raise
        for trial, future in running.items():
            with contextlib.suppress(OutOfBudgetError):
                done[trial] = future.result()
        return done

    def _wait_for_a_slot(self, running: Iterable[Future[Any]]) -> None:
        """Let at most one traced program wait, as it takes memory."""
        while len(pending := [each for each in running if not each.done()]) >= self.jobs:
            wait(pending, return_when=FIRST_COMPLETED)

    def _options_of(self, trial: Trial) -> dict[str, Any]:
        depth = {} if trial.depth is None else {self.depth_option: trial.depth}
        own = {"recipe": trial.way.recipe, "batch": trial.batch}
        return {**self.options, **dict(trial.way.options), **depth, **own}

    def _compile(self, trial: Trial, traced: Traced) -> Report | str:
        if self.ended:
            raise OutOfBudgetError
        shown = {**self._options_of(trial), "recipe": recipe_text(trial.way.recipe)}
        try:
            told = partial(self._waiting, trial)
            return compiled_report(traced, self.topology, shown, told, **self.limits)
        except OutOfBudgetError:
            raise
        except Exception as error:  # the compiler has many exception types
            return _reason(error)

    def _waiting(self, trial: Trial, seconds: float) -> None:
        """Called ten times a second; what it raises ends the compilation."""
        if self.ended:
            raise OutOfBudgetError
        self.tell(f"{_name(trial)}: compiling, {seconds:.0f} s")


def jobs_that_fit(max_host_mem: int) -> int:
    """Return how many compilations of so many bytes this machine can do at once, at least 1."""
    by_memory = available_memory() // max_host_mem
    return max(1, min(by_memory, (os.cpu_count() or 1) // CPUS))


def _name(trial: Trial) -> str:
    layers = "" if trial.depth is None else f", {trial.depth} layers"
    return f"{trial.way}, batch {trial.batch}{layers}"


def _reason(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, CompileError) else f"{type(error).__name__}: {words}"
