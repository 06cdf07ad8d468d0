"""``tune``: search for the recipe, mesh and batch of the most samples per second that fit.

The search has three parts. Every recipe on the mesh that shards over all ranks; the fastest of them
on other meshes; then the fastest of all is compiled as it is to run, until one is faster than what
is predicted of the others, and than its next larger batch. Each part is cut short by the budget.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from xla_fsdp.preflight.api import check_options, mesh_on
from xla_fsdp.preflight.compile.compiler import check_installed
from xla_fsdp.preflight.read.report import Report
from xla_fsdp.preflight.search.candidates import (
    AXES,
    RECIPES,
    Way,
    batch_sizes,
    data_ranks,
    meshes,
    recipe_of,
    ways,
)
from xla_fsdp.preflight.search.prediction import Figures, figures_at
from xla_fsdp.preflight.search.trials import (
    OutOfBudgetError,
    Trial,
    Trials,
    jobs_that_fit,
)
from xla_fsdp.preflight.search.tuned import UNTRIED, Candidate, Tuned
from xla_fsdp.preflight.topologies import GIB, find_topology

DEPTHS = (4, 8)
"""Layers of the steps that a deeper one is predicted from. Fewer would show first and last layers,
whose gathers hide under less."""

LONGER = 1.1
"""A program that grows by less from the first of these depths to the second is a loop over layers,
and takes as long to compile at any depth."""

ON_OTHER_MESHES = 2
"""How many ways are tried on other meshes: the fastest ones."""

FOR_COMPARING = 0.75
"""Of the budget, while there is something to confirm, for which the rest is."""

RECIPE, BATCH, DEPTH, LENGTH = "recipe", "batch", "depth", "length"


class InterruptedSearch(KeyboardInterrupt):
    """Ctrl-C ended a search. ``tuned`` holds what was tried until then."""

    def __init__(self, tuned: Tuned) -> None:
        super().__init__("the search was interrupted")
        self.tuned = tuned


def tune(
    build_step: Callable[..., Callable[[], Any]],
    *,
    topology: str = "v5e:4x4",
    choices: Mapping[str, Sequence[Any]] | None = None,
    tried_meshes: Sequence[Mapping[str, int]] | None = None,
    depth_option: str = DEPTH,
    budget: float | None = None,
    jobs: int | None = None,
    max_host_mem: int = 10 * GIB,
    cache_dir: str | Path | None = None,
    flags: str = "",
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Tuned:
    """Find the recipe, mesh and batch size with the most samples per second on a slice, by
    estimate, among those that fit.

        tuned = tune(build_step, topology="v5e:8x8", budget=1800, width=4096)
        tuned.save("best.json")  # which Recipe.load reads

    What is compiled is kept: the same search again compiles nothing, and one that was cut short
    goes on.

    Args:
        build_step: as for ``preflight``, with parameters ``recipe``, a ``Recipe`` that it hands to
            ``parallelize``, and ``batch``, the samples of each rank (of each group along axes
            ``tensor`` and ``context`` of the recipe's mesh). With a parameter for the number of
            layers, deep models are predicted from shallow ones; with ``length``, the tokens of a
            sample, rates are in tokens.
        topology: name of the slice, as ``find_topology`` takes it.
        choices: values to try of options of ``build_step``, by name. Those of ``recipe`` (names,
            files, ``Recipe``, or texts as "lean remat=none") and of ``batch`` take the place of the
            usual ones.
        tried_meshes: sizes by axis, to try in place of the usual ones.
        depth_option: name of the parameter for the number of layers.
        budget: seconds after which the search ends (default: when it is through).
        jobs: compilations at once (default: as many as memory and processors allow).
        max_host_mem: bytes of host memory that each may use; one that needs more is killed.
        cache_dir: as for ``preflight``.
        flags: as for ``preflight``.
        progress: called with a line of text while waiting, also from other threads.
        options: passed to ``build_step``.

    Returns:
        All that was tried, the fastest first.

    Raises:
        ValueError: if there is no such topology, recipe or axis, a mesh has other ranks, a number
            is none, or ``build_step`` does not take a recipe, a batch or the options.
        CompileError: if the TPU compiler is not installed.
        InterruptedSearch: for a KeyboardInterrupt, with what was tried until then.
    """
    slice_ = find_topology(topology)
    tried = {name: list(values) for name, values in (choices or {}).items()}
    if empty := [name for name, values in tried.items() if not values]:
        raise ValueError(f"{', '.join(empty)}: there is no value to try; give one or more")
    if own := [name for name in (RECIPE, BATCH) if name in options]:
        raise ValueError(
            f"{', '.join(own)}: a search chooses these; give what to try, as "
            f"choices={{{own[0]!r}: [{options[own[0]]!r}]}}"
        )
    try:
        tried_first = {name: each[0] for name, each in tried.items()}
        check_options(build_step, {RECIPE: None, BATCH: 1, **options, **tried_first})
    except ValueError as error:
        raise ValueError(
            f"{error}; a search gives it a {RECIPE}, to hand to parallelize(model, optimizer, "
            f"recipe), and a {BATCH}, the samples of each rank"
        ) from None
    recipes = [recipe_of(each) for each in tried.pop(RECIPE, RECIPES)]
    batches = [*tried.pop(BATCH, batch_sizes(_default(build_step, BATCH) or 1))]
    options |= {name: tried.pop(name)[0] for name in [*tried] if len(tried[name]) == 1}
    _check_depth(build_step, depth_option, tried)
    depth, length = (
        options.get(name, _default(build_step, name)) for name in (depth_option, LENGTH)
    )
    for name, numbers in {BATCH: batches, depth_option: [depth], LENGTH: [length]}.items():
        known = [each for each in numbers if each is not None]
        if wrong := [each for each in known if type(each) is not int or each < 1]:
            raise ValueError(f"{name} is {wrong[0]!r}; give whole numbers, 1 or more")
    for mesh in tried_meshes or ():
        if unknown := [str(name) for name in mesh if name not in AXES]:
            raise ValueError(
                f"the mesh {dict(mesh)} has an axis {', '.join(unknown)}; name its axes out of "
                f"{', '.join(AXES)}"
            )
        mesh_on(slice_, mesh)  # raises ValueError if it has other ranks
    check_installed()
    limits = {"max_host_mem": max_host_mem, "cache_dir": cache_dir, "flags": flags}
    jobs = jobs or jobs_that_fit(max_host_mem)
    budget = float("inf") if budget is None else budget
    tell = progress or (lambda text: None)
    trials = Trials(build_step, slice_, depth_option, options, jobs, limits, tell)
    search = _Search(trials, sorted({*batches}), depth, monotonic(), budget)
    given = tried_meshes or meshes(slice_.num_ranks)
    fixed = ways([each for each in recipes if each.mesh is not None], tried)  # have a mesh
    free = [way.on(given[0]) for way in ways([each for each in recipes if not each.mesh], tried)]

    def tuned() -> Tuned:
        found = tuple(search.candidates())
        return Tuned(topology, slice_.chip, found, None if LENGTH in tried else length)

    try:
        search.compare([*fixed, *free])
        fastest = [way for way in search.fastest_ways() if way in free]
        search.compare([way.on(mesh) for mesh in given[1:] for way in fastest])
        search.confirm()
    except KeyboardInterrupt as error:
        raise InterruptedSearch(tuned()) from error
    return tuned()


def _check_depth(build_step: Callable[..., Any], option: str, tried: Mapping[str, Any]) -> None:
    if option in tried:
        raise ValueError(f"{option} is the number of layers, and cannot be swept: give one")
    if option != DEPTH and option not in inspect.signature(build_step).parameters:
        called = getattr(build_step, "__name__", type(build_step).__name__)
        raise ValueError(f"{called} has no parameter {option!r} for its number of layers")


def _default(build_step: Callable[..., Any], name: str) -> int | None:
    """Return a whole number that a parameter has by default; None without one."""
    parameter = inspect.signature(build_step).parameters.get(name)
    value = None if parameter is None else parameter.default
    return value if isinstance(value, int) else None


@dataclass(eq=False)
class _Line:
    """What is known of one way at batches of several sizes."""

    way: Way
    # Of the step in full, predicted from shallow steps or exact, by batch.
    figures: dict[int, Figures] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)  # of those compiled in full
    failed: str = ""  # why there is nothing more to know
    failed_from: int = 0  # the batch from which on that holds
    is_loop: bool | None = None  # whether its program is as long at any depth; None: not looked at

    def fail(self, reason: str, batch: int) -> None:
        self.failed, self.failed_from = reason, batch if self.reports else 0

    def figures_at(self, batch: int) -> Figures | None:
        if batch in self.figures:
            return self.figures[batch]
        if len(self.figures) < 2:
            return None
        found = figures_at(self.figures, batch)
        # What the compiler refuses as too large it has made slower to save memory.
        refused = {each for each, report in self.reports.items() if report.memory.too_large_by}
        sound = {each: known for each, known in self.figures.items() if each not in refused}
        if len(sound) < 2:
            return found
        return dataclasses.replace(figures_at(sound, batch), needed=found.needed)


@dataclass
class _Search:
    trials: Trials
    batches: Sequence[int]
    depth: int | None  # layers of the step; None if ``build_step`` has no option for them
    started: float
    budget: float  # seconds
    lines: dict[Way, _Line] = field(default_factory=dict)
    # The way that first traced programs of these digests.
    _first_with: dict[tuple[str, ...], Way] = field(default_factory=dict)

    # ------------------------------------------------------------ from a few compilations

    def compare(self, found: Sequence[Way]) -> None:
        """Learn what each way needs at the first batch, and if it fits, at the second."""
        added = [_Line(way) for way in found]
        self.lines.update(zip(found, added, strict=True))
        jobs = self.trials.jobs
        for start in range(0, len(added), jobs):
            some = added[start : start + jobs]
            self._measure(some, self.batches[0])
            if len(self.batches) > 1:
                fitting = [each for each in some if self._fits(each, self.batches[0])]
                self._measure(fitting, self.batches[1])

    def _measure(self, lines: Sequence[_Line], batch: int) -> None:
        is_settled = self._best() is not None and self._unconfirmed() is None
        self.trials.deadline = self.started + self.budget * (1 if is_settled else FOR_COMPARING)
        wanted = {line: self._trials_of(line, batch) for line in lines if not line.failed}
        found = self.trials.run(itertools.chain(*wanted.values()))
        for line, trials in wanted.items():
            self._note(line, batch, {each: found[each] for each in trials if each in found})

    def _trials_of(self, line: _Line, batch: int) -> list[Trial]:
        """Return what to compile to know the step; nothing if that is known or fails."""
        full = [Trial(line.way, batch, self.depth)]
        shallow = [Trial(line.way, batch, each) for each in DEPTHS]
        is_shallow = self.depth is None or self.depth <= DEPTHS[-1]
        try:
            if line.is_loop is None and not self._look_at(line, full if is_shallow else shallow):
                return []
        except OutOfBudgetError:
            return []
        return full if is_shallow or line.is_loop else shallow

    def _look_at(self, line: _Line, trials: Sequence[Trial]) -> bool:
        """Trace a way's first steps; return whether they are worth compiling."""
        lengths = []
        for trial in trials:
            traced = self.trials.trace(trial)
            if isinstance(traced, str):
                line.fail(traced, trial.batch)
                return False
            lengths.append(sum(len(each.hlo) for each in traced.programs))
            digests = tuple(each.digest for each in traced.programs)
            if (earlier := self._first_with.setdefault(digests, line.way)) != line.way:
                line.fail(f"the same program as {earlier}", trial.batch)
                return False
        line.is_loop = len(lengths) > 1 and lengths[-1] < LONGER * lengths[0]
        if line.is_loop:
            self.trials.forget(trials)
        return True

    def _note(self, line: _Line, batch: int, found: Mapping[Trial, Report | str]) -> None:
        by_depth: dict[int, Figures] = {}
        for trial, outcome in found.items():
            if isinstance(outcome, str):
                is_later = bool(line.figures) and not line.reports
                line.fail(f"batch {batch}: {outcome}" if is_later else outcome, batch)
                return
            if trial.depth == self.depth:
                line.reports[batch], line.figures[batch] = outcome, Figures.of(outcome)
            else:
                by_depth[trial.depth or 0] = Figures.of(outcome)
        if len(by_depth) == len(DEPTHS):
            line.figures[batch] = figures_at(by_depth, self.depth or 0)

    def _fits(self, line: _Line, batch: int) -> bool:
        figures = line.figures.get(batch)
        return figures is not None and figures.fits(self.trials.topology.chip)

    # ------------------------------------------------------------ what follows from them

    def candidates(self) -> list[Candidate]:
        """Return what is known of each way at each batch."""
        return [each for line in self.lines.values() for each in self._candidates_of(line)]

    def _candidates_of(self, line: _Line) -> list[Candidate]:
        found = []
        for batch in self.batches:
            figures = line.figures_at(batch)
            if figures is None or (line.failed and batch >= line.failed_from):
                continue
            samples = batch * data_ranks(line.way.recipe, self.trials.topology.num_ranks)
            rate = samples / figures.seconds if figures.seconds else 0.0
            found.append(Candidate(line.way, batch, figures, rate, line.reports.get(batch)))
        if found and line.failed:  # at a larger batch
            found.append(Candidate(line.way, line.failed_from, failed=line.failed))
        reason = line.failed or UNTRIED
        return found or [Candidate(line.way, self.batches[0], failed=reason)]

    def fastest_ways(self) -> list[Way]:
        fitting = sorted(self._fitting(), key=lambda each: -each.rate)
        return list(dict.fromkeys(each.way for each in fitting))[:ON_OTHER_MESHES]

    def _fitting(self) -> list[Candidate]:
        return [each for each in self.candidates() if each.fits(self.trials.topology.chip)]

    def _best(self) -> Candidate | None:
        return max(self._fitting(), key=lambda each: each.rate, default=None)

    # ------------------------------------------------------------ the winner

    def confirm(self) -> None:
        """Compile the fastest that fits in full, until it is one that was compiled so, and so was
        the next larger batch of its way."""
        self.trials.deadline = self.started + self.budget
        while (wanted := self._unconfirmed()) is not None:
            found = self.trials.run([Trial(wanted.way, wanted.batch, self.depth)])
            if not found:  # the budget has ended
                return
            self._note(self.lines[wanted.way], wanted.batch, found)

    def _unconfirmed(self) -> Candidate | None:
        best = self._best()
        if best is None:
            return None
        own = [each for each in self._fitting() if each.way == best.way]
        # Where a larger batch turned out to be slower, those between lie on a line to it.
        larger = [each for each in own if each.batch > best.batch][:1]
        wanted = next((each for each in [best, *larger] if each.report is None), None)
        if wanted is None:
            return None
        # A line does not reach far: small batches may take other times than it says. What is
        # compiled is at most twice the largest batch that is known, or the next one.
        most = max(self.lines[best.way].figures)
        beyond = [each for each in own if most < each.batch < wanted.batch]
        near = [each for each in beyond if each.batch <= 2 * most] or beyond[:1]
        return near[-1] if wanted.batch > 2 * most and near else wanted
