"""``CheckpointManager``: save every so many steps, keep the best ones, resume from a whole one.

Invariants: every rank makes the same calls, and all get the same answers and errors; a step that
cannot be read is neither deleted nor loaded.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, NamedTuple

from torch.optim import Optimizer

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.model_files import Rule
from xla_fsdp.checkpoint.reshard import Selection
from xla_fsdp.checkpoint.save_step import Ranks
from xla_fsdp.checkpoint.step_directory import (
    Attempt,
    Best,
    Keep,
    complete_attempts,
    read_job,
    read_metrics,
)
from xla_fsdp.checkpoint.storage import Storage, open_storage
from xla_fsdp.fsdp.module_base import ShardedModule
from xla_fsdp.fsdp.train_checkpoint import (
    PendingSave,
    SaveOptions,
    Stateful,
    TrainState,
    check_wrapped,
    checked_step,
    go_on_from,
    own_ranks,
    read_state,
    start_save,
    wait_for_earlier,
)


class Restored(NamedTuple):
    """What ``CheckpointManager.restore`` loaded.

    Args:
        step: its number.
        extra: as saved; on another number of ranks, rank 0's.
        metrics: of the step.
        directory: from which it was loaded.
    """

    step: int
    extra: Any
    metrics: dict[str, Any]
    directory: str


@dataclass
class _Tier:
    """A directory of steps: when to save there, and what to keep."""

    storage: Storage
    interval: int
    keep: Keep
    damaged: set[Attempt] = field(default_factory=set)
    metrics: dict[Attempt, dict[str, Any]] = field(default_factory=dict)

    def complete(self) -> list[Attempt]:
        """Return the last complete attempt of every step, in order."""
        last = {each.step: each for each in complete_attempts(self.storage)}
        return [last[step] for step in sorted(last)]

    def metrics_of(self, attempt: Attempt) -> dict[str, Any]:
        if attempt not in self.metrics:
            self.metrics[attempt] = read_metrics(self.storage, attempt)
        return self.metrics[attempt]


class _Candidate(NamedTuple):
    attempt: Attempt
    tier: int  # the last tier is the local one, which is read faster
    metrics: dict[str, Any]


class CheckpointManager:
    """Saves and restores the steps of a run::

        with CheckpointManager("gs://bucket/run", save_interval_steps=100, keep_last=3) as manager:
            restored = manager.restore(model, optimizer)
            for step in range(restored.step + 1 if restored else 1, steps + 1):
                loss = train_step()
                manager.save(step, model, optimizer, metrics={"loss": loss})

    Args:
        directory: of the run: a path, or a URL that fsspec knows.
        save_interval_steps: a step is saved if it is a multiple of this.
        keep_last: number of the newest steps that are kept; None for all.
        keep_period: multiples of it are kept in any case.
        best: a metric whose smallest value is the best, or a ``Best``; the best steps are kept in
            any case.
        async_: whether ``save`` returns when everything is in host memory, of which it takes one
            copy of the shards. The next ``save`` that is due, ``restore`` and ``wait`` wait until
            that step is complete.
        local_directory: on a disk of each host, for steps that are saved more often.
        local_interval_steps: a step is saved there if it is a multiple of this.
        local_keep_last: number of steps that are kept there.
        take_over: become the owner of the directories though another job is.

    Raises:
        ValueError: for an interval or a number that is not positive.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_interval_steps: int = 1,
        keep_last: int | None = None,
        keep_period: int | None = None,
        best: str | Best | None = None,
        async_: bool = True,
        local_directory: str | os.PathLike[str] | None = None,
        local_interval_steps: int | None = None,
        local_keep_last: int = 1,
        take_over: bool = False,
    ) -> None:
        if (local_directory is None) != (local_interval_steps is None):
            raise ValueError("local_directory and local_interval_steps: pass both or none")
        _check_positive(
            save_interval_steps=save_interval_steps,
            keep_last=keep_last,
            keep_period=keep_period,
            local_interval_steps=local_interval_steps,
            local_keep_last=local_keep_last,
        )
        self._best = Best(best) if isinstance(best, str) else best
        self._asynchronous, self._take_over = async_, take_over
        keep = Keep(keep_last, keep_period, self._best)
        self._tiers = [_Tier(open_storage(directory), save_interval_steps, keep)]
        if local_directory is not None and local_interval_steps is not None:
            keep = Keep(local_keep_last)
            self._tiers.append(_Tier(open_storage(local_directory), local_interval_steps, keep))
        self._pending: PendingSave | None = None
        self._saved: int | None = None

    def save(
        self,
        step: int,
        model: ShardedModule,
        optimizer: Optimizer | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Any = None,
        objects: Mapping[str, Stateful] | None = None,
        force: bool = False,
    ) -> bool:
        """Save a step if it is due. Every rank calls it, outside of forward and backward.

        Args:
            step: its number, greater than those saved before.
            model: the sharded model.
            optimizer: the optimizer of its parameters.
            metrics: numbers by name; rank 0's are saved.
            extra: values of this rank, as for ``save_checkpoint``.
            objects: by name, any with ``state_dict`` and ``load_state_dict``: schedulers, data
                loaders, averages. Each rank saves its own state of them.
            force: whether to save though the step is not due, as before the end of a job.

        Returns:
            Whether it is saved.

        Raises:
            CheckpointError: on all ranks, as by ``save_checkpoint``.
        """
        number = checked_step(step)
        check_wrapped(model)
        tier = self._due(number, force)
        if tier is None or number == self._saved:
            return False
        options = SaveOptions(
            keep=replace(tier.keep, damaged=frozenset(tier.damaged)),
            asynchronous=self._asynchronous,
            take_over=self._take_over,
            metrics=_checked_metrics(metrics or {}),
        )
        self.wait()
        where, named = tier.storage.where, objects or {}
        self._pending = start_save(where, model, optimizer, named, extra, number, options)
        self._saved = number
        return True

    def restore(
        self,
        model: ShardedModule,
        optimizer: Optimizer | None = None,
        *,
        step: int | Literal["best"] | None = None,
        objects: Mapping[str, Stateful] | None = None,
        strict: bool = True,
        only: Callable[[str], bool] | Collection[str] | None = None,
        key_map: Mapping[str, str] | None = None,
    ) -> Restored | None:
        """Load the newest step that is whole, on any number of ranks. Every rank calls it.

        If a step is damaged, there is a warning that says how, and the next older one is loaded
        (for "best": the next best).

        Args:
            model: the sharded model.
            optimizer: the optimizer of its parameters; it need not have made a step.
            step: its number; "best" for the best; None for the newest.
            objects: as given to ``save``.
            strict: whether names that only the checkpoint or only the model has are errors.
            only: which parameters and buffers to load: a function of their names in the model, or
                prefixes of these names; the others do not change. None for all.
            key_map: prefixes of names in the checkpoint, and what they are in the model; the first
                that fits a name applies.

        Returns:
            What was loaded; None if there is no complete step.

        Raises:
            CheckpointError: on all ranks; nothing has changed then. If no step is whole; if
                ``step`` is not there; if the model or the objects are other ones.
        """
        check_wrapped(model)
        self.wait()
        wait_for_earlier(model)
        state, ranks = TrainState(model, optimizer, objects or {}), own_ranks()
        candidates, owners = self._candidates(ranks, step)
        selection = _selection(strict, only, key_map)
        problems: list[str] = []
        for each in candidates:
            storage = self._tiers[each.tier].storage
            loaded, found, mismatch = read_state(state, storage, each.attempt, selection)
            ranks.all_gather_or_raise(found if mismatch else [])
            try:
                ranks.all_gather_or_raise(found)
            except CheckpointError as error:
                problems += error.problems
                self._note_damage(each, error, ranks.rank)
                continue
            state.load(loaded, strict=strict and only is None)
            go_on_from(model, owners)
            extra = loaded.values.get("extra")
            return Restored(each.attempt.step, extra, each.metrics, storage.where)
        if problems:
            raise CheckpointError(problems)
        if step is not None:
            raise CheckpointError(self._absent(step, ranks))
        go_on_from(model, owners)
        return None

    def steps(self) -> list[int]:
        """Return all steps that are complete, and not known to be damaged, in order."""
        found = {
            each.step
            for tier in self._tiers
            for each in tier.complete()
            if each not in tier.damaged
        }
        return sorted(found)

    def metrics(self, step: int) -> dict[str, Any]:
        """Return the metrics that were saved with a step.

        Raises:
            CheckpointError: if there is no such step that is complete.
        """
        for tier in self._tiers:
            for attempt in tier.complete():
                if attempt.step == step:
                    return dict(tier.metrics_of(attempt))
        raise CheckpointError(f"{self._tiers[0].storage.where} holds no step {step}")

    def wait(self) -> None:
        """Wait until all that was saved is complete. Every rank calls it.

        Raises:
            CheckpointError: on all ranks, if a rank could not write its file.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        # A rank that failed must not wait for others, which may not come; what it has accepted is
        # written nevertheless. All ranks of a job that is preempted leave by SystemExit.
        if kind is None or issubclass(kind, SystemExit):
            self.wait()

    # ------------------------------------------------------------ saving

    def _due(self, step: int, force: bool) -> _Tier | None:
        """Return the first tier for which a step is due."""
        if force:
            return self._tiers[0]
        return next((tier for tier in self._tiers if step % tier.interval == 0), None)

    # ------------------------------------------------------------ restoring

    def _candidates(
        self, ranks: Ranks, step: int | str | None
    ) -> tuple[list[_Candidate], frozenset[str]]:
        """Return what all ranks see as complete, in the order in which to try it, and the jobs that
        own the directories."""
        own: list[list[tuple[Attempt, dict[str, Any]]]] = []
        owners: list[str] = []
        problems: list[str] = []
        try:
            for tier in self._tiers:
                seen = [e for e in tier.complete() if step in (None, "best", e.step)]
                own.append([(e, tier.metrics_of(e) if step == "best" else {}) for e in seen])
                owner = read_job(tier.storage)
                owners += [] if owner is None else [owner.job]
        except CheckpointError as error:
            problems = error.problems
        gathered = ranks.all_gather_or_raise(problems, [own, owners])
        found = list(_common([seen for seen, _ in gathered]))
        jobs = frozenset(job for _, of_rank in gathered for job in of_rank)
        if step == "best":
            return self._best_first(found), jobs
        return sorted(found, key=lambda e: (e.attempt, e.tier), reverse=True), jobs

    def _best_first(self, found: list[_Candidate]) -> list[_Candidate]:
        if self._best is None:
            raise ValueError('step="best": pass best= to CheckpointManager, to say of which metric')
        known = {each.attempt: each for each in found}
        ordered = self._best.ordered({each.attempt: each.metrics for each in found})
        return [known[attempt] for attempt in ordered]

    def _note_damage(self, each: _Candidate, error: CheckpointError, rank: int) -> None:
        tier = self._tiers[each.tier]
        tier.damaged.add(each.attempt)
        if rank == 0:
            warnings.warn(
                f"{tier.storage.where}/{each.attempt.folder} cannot be loaded, so an older step "
                f"is tried: {error}",
                stacklevel=3,
            )

    def _absent(self, step: int | str, ranks: Ranks) -> str:
        where = self._tiers[0].storage.where
        if step == "best" and self._best is not None:
            return f"{where} holds no complete step with the metric {self._best.metric!r}"
        there = ", ".join(map(str, self.steps())) or "none"
        return f"{where} holds no step {step} that is complete on all ranks; there is {there}"


def _common(
    by_rank: list[list[list[tuple[Attempt, dict[str, Any]]]]],
) -> Iterator[_Candidate]:
    """Yield what is complete on all ranks, with rank 0's metrics."""
    for tier, of_first in enumerate(by_rank[0]):
        seen = [{Attempt(*attempt) for attempt, _ in of_rank[tier]} for of_rank in by_rank]
        for attempt, metrics in of_first:
            if all(Attempt(*attempt) in each for each in seen):
                yield _Candidate(Attempt(*attempt), tier, metrics)


def _selection(
    strict: bool,
    only: Callable[[str], bool] | Collection[str] | None,
    key_map: Mapping[str, str] | None,
) -> Selection:
    rules = tuple(Rule(old, new) for old, new in (key_map or {}).items())
    if only is None:
        selected: Callable[[str], bool] = lambda name: True  # noqa: E731
    elif callable(only):
        selected = only
    else:
        prefixes = (only,) if isinstance(only, str) else tuple(only)
        selected = lambda name: name.startswith(prefixes)  # noqa: E731
    return Selection(selected, strict, rules)


def _check_positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or value < 1):
            raise ValueError(f"{name}={value!r}; expected a whole number, 1 or more")


def _checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers.

    Raises:
        TypeError: if one is no number.
    """
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metrics[{name!r}] is {value!r}; expected a number") from error
        if math.isfinite(number):  # JSON has no others
            checked[name] = number
    return checked
