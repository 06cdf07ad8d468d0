"""``CheckpointManager``: save every so many steps, keep the best ones, resume from a whole one; and
``load_checkpoint``, which resumes from the newest one or none.

Invariants: every rank makes the same calls, and all get the same answers and errors; a step that
cannot be read is neither deleted nor loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch.optim import Optimizer

from xla_fsdp.checkpoint.convert.model_files import Rule, check_prefixes
from xla_fsdp.checkpoint.convert.reshard import Selection
from xla_fsdp.checkpoint.errors import CheckpointError, number_or_none, raise_if, whole_number
from xla_fsdp.checkpoint.files.checksum import digest
from xla_fsdp.checkpoint.files.storage import Storage, open_storage
from xla_fsdp.checkpoint.steps.save_step import Ranks, disagreements
from xla_fsdp.checkpoint.steps.step_directory import (
    Attempt,
    Best,
    Keep,
    all_attempts,
    complete_attempts,
    owner_of,
    read_metrics,
)
from xla_fsdp.fsdp.module_base import ShardedModule
from xla_fsdp.state.train_checkpoint import (
    LR_SCHEDULER,
    PendingSave,
    Stateful,
    TrainState,
    check_wrapped,
    go_on_from,
    own_ranks,
    read_state,
    start_save,
    wait_for_earlier,
)

LOOKS = 3
"""How often ranks look for a step that all see: another job may save and delete meanwhile."""

RUN = "run"  # a file in a local directory: the directory of the run


class Loaded(TypedDict):
    """What ``load_checkpoint`` returns: the step, None if there was none, and what was given to
    ``save_checkpoint`` as ``extra``."""

    step: int | None
    extra: Any


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
    metrics: dict[str, float]
    directory: str


@dataclass
class _Tier:
    """A directory of steps: when to save there, and what to keep."""

    storage: Storage
    interval: int
    keep: Keep
    run: str | None = None  # of a local directory: that of the run to which it belongs
    damaged: set[Attempt] = field(default_factory=set)
    metrics: dict[Attempt, dict[str, float]] = field(default_factory=dict)

    def complete(self) -> list[Attempt]:
        """Return the last complete attempt of every step, in order."""
        last = {each.step: each for each in complete_attempts(self.storage)}
        return [last[step] for step in sorted(last)]

    def check_run(self) -> bytes | None:
        """Return the name of the run to which a local directory belongs, if that is known; raise
        CheckpointError if it is another one."""
        owner = None if self.run is None else self.storage.find(RUN)
        if owner is not None and owner != (self.run or "").encode():
            raise CheckpointError(
                f"{self.storage.where} is the local directory of the run in "
                f"{owner.decode(errors='replace')}, not of {self.run}: use another one, or "
                f"delete it"
            )
        return owner

    def claim(self) -> None:
        """Say to which run a local directory belongs."""
        if self.run is not None and self.check_run() is None:
            self.storage.put(RUN, self.run.encode())

    def metrics_of(self, attempt: Attempt) -> dict[str, float]:
        if attempt not in self.metrics:
            self.metrics[attempt] = read_metrics(self.storage, attempt)
        return self.metrics[attempt]


class _Candidate(NamedTuple):
    attempt: Attempt
    tier: int  # the last tier is the local one, which is read faster
    metrics: dict[str, float]


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
        ValueError: for an argument of another kind, or a number that is not positive.
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
        if not isinstance(best, str | Best | None):
            raise ValueError(
                f"best={best!r}; expected the name of a metric, or Best(name, mode, keep)"
            )
        for name, flag in (("async_", async_), ("take_over", take_over)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name}={flag!r}; expected True or False")
        self._best = Best(best) if isinstance(best, str) else best
        self._asynchronous, self._take_over = async_, take_over
        keep = Keep(
            number_or_none("keep_last", keep_last),
            number_or_none("keep_period", keep_period),
            self._best,
        )
        interval = whole_number("save_interval_steps", save_interval_steps, 1)
        local_keep = Keep(whole_number("local_keep_last", local_keep_last, 1))
        local_interval = number_or_none("local_interval_steps", local_interval_steps)
        self._tiers = [_Tier(open_storage(directory), interval, keep)]
        if local_directory is not None and local_interval is not None:
            local, run = open_storage(local_directory), self._tiers[0].storage.where.rstrip("/")
            self._tiers.append(_Tier(local, local_interval, local_keep, run))
        # load_checkpoint raises where ``restore`` falls back to an older step, or finds none.
        self._falls_back = self._missing_ok = True
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
        number = whole_number("step", step, 0)
        check_wrapped(model)
        due = [tier for tier in self._tiers if force or number % tier.interval == 0]
        if not due or number == self._saved:
            return False
        self.wait()
        tier = due[0]
        with own_ranks().failing_together():
            tier.claim()
        self._pending = start_save(
            tier.storage.where,
            model,
            optimizer,
            objects or {},
            extra,
            number,
            replace(tier.keep, damaged=frozenset(tier.damaged)),
            asynchronous=self._asynchronous,
            take_over=self._take_over,
            metrics=metrics,
        )
        self._saved = number
        return True

    @torch.inference_mode(False)  # which would make all that is loaded unfit for training
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
            ValueError: if ``step`` is neither a whole number nor "best".
            CheckpointError: on all ranks; nothing has changed then. If no step is whole; if
                ``step`` is not there; if the model or the objects are other ones.
        """
        if step is not None and step != "best":
            step = whole_number("step", step, 0)
        check_wrapped(model)
        self.wait()
        wait_for_earlier(model)
        ranks = own_ranks()
        with ranks.failing_together():
            state = TrainState(model, optimizer, objects or {})
            names = state.names()
            selection = _selection(names, only, key_map, strict=strict)
            selected = list(filter(selection.only, names))
            agreed = {
                "step": step,
                "strict": strict,
                "optimizer": state.kind_of_optimizer,
                "key_map": str(key_map),
                "only": f"{len(selected)} names, {digest(repr(selected).encode())[:15]}",
            }
        candidates, owners = self._candidates(ranks, step, agreed)
        problems: list[str] = []
        for each in candidates:
            storage = self._tiers[each.tier].storage
            with ranks.failing_together():
                metrics = self._tiers[each.tier].metrics_of(each.attempt)
            loaded, found, mismatch = read_state(state, storage, each.attempt, selection)
            ranks.all_gather_or_raise(found if mismatch or not self._falls_back else [])
            try:
                ranks.all_gather_or_raise(found)
            except CheckpointError as error:
                problems += error.problems
                self._note_damage(each, error, ranks.rank)
                continue
            with ranks.failing_together():  # what fails nevertheless
                state.load(loaded, strict=strict and only is None)
            ranks.all_gather_or_raise([])
            go_on_from(model, owners)
            self._saved = None  # what is trained from here on may be saved under the same number
            extra = loaded.values.get("extra")
            return Restored(each.attempt.step, extra, dict(metrics), storage.where)
        if problems:
            raise CheckpointError(problems)
        if step is not None:
            raise CheckpointError(self._absent(step))
        if not self._missing_ok:
            where = self._tiers[0].storage.where
            raise CheckpointError(f"{where} holds no complete step that all ranks see")
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

    def metrics(self, step: int) -> dict[str, float]:
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

    # ------------------------------------------------------------ restoring

    def _candidates(
        self, ranks: Ranks, step: int | str | None, agreed: Mapping[str, Any], looks: int = LOOKS
    ) -> tuple[list[_Candidate], frozenset[str]]:
        """Return what all ranks see as complete, in the order in which to try it, and the jobs that
        own the directories. Ranks must give equal ``agreed``."""
        own: list[list[tuple[Attempt, dict[str, float]]]] = []
        owners: list[str] = []
        problems: list[str] = []
        some = False  # steps, complete or not
        try:
            for tier in self._tiers:
                tier.check_run()
                seen = [e for e in tier.complete() if step in (None, "best", e.step)]
                own.append([(e, tier.metrics_of(e) if step == "best" else {}) for e in seen])
                owner = owner_of(tier.storage)
                owners += [] if owner is None else [owner.job]
                some = some or bool(all_attempts(tier.storage))
        except CheckpointError as error:
            problems = error.problems
        gathered = ranks.all_gather_or_raise(problems, [own, owners, some, agreed])
        raise_if(list(disagreements([asked for *_, asked in gathered])))
        found = list(_common([seen for seen, *_ in gathered]))
        if not found and looks > 1 and any(some for *_, some, _ in gathered):
            return self._candidates(ranks, step, agreed, looks - 1)
        jobs = frozenset(job for _, of_rank, *_ in gathered for job in of_rank)
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
                stacklevel=4,
            )

    def _absent(self, step: int | str) -> str:
        where = self._tiers[0].storage.where
        if step == "best" and self._best is not None:
            return f"{where} holds no complete step with the metric {self._best.metric!r}"
        there = ", ".join(map(str, self.steps())) or "none"
        return f"{where} holds no step {step} that is complete on all ranks; there is {there}"


def _common(
    by_rank: list[list[list[tuple[Attempt, dict[str, float]]]]],
) -> Iterator[_Candidate]:
    """Yield what is complete on all ranks, with rank 0's metrics."""
    for tier, of_first in enumerate(by_rank[0]):
        seen = [{Attempt(*attempt) for attempt, _ in of_rank[tier]} for of_rank in by_rank]
        for attempt, metrics in of_first:
            if all(Attempt(*attempt) in each for each in seen):
                yield _Candidate(Attempt(*attempt), tier, metrics)


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: ShardedModule,
    optimizer: Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    missing_ok: bool = False,
) -> Loaded:
    """Load a checkpoint of ``save_checkpoint`` onto any number of ranks, units and sharding groups,
    flattened or not. Every rank calls it, and reads only what it needs.

    Args:
        directory: the argument of ``save_checkpoint``.
        model: the sharded model.
        optimizer: the optimizer of its parameters, with the same groups; it need not have made a
            step. Its hyperparameters are replaced, as by its own ``load_state_dict``.
        lr_scheduler: any object with ``load_state_dict``.
        step: the step to load; None for the latest one that is complete for all ranks.
        strict: whether names that only the checkpoint or only the model has are errors. Otherwise
            names that only the checkpoint has are ignored, and tensors that it lacks do not change.
        missing_ok: return without loading if there is no complete step, rather than raise.

    Returns:
        ``{"step": ..., "extra": ...}``, both None if there was nothing to load. On as many ranks as
        saved it, each rank gets its own ``extra`` and the states of its random number generators;
        otherwise every rank gets rank 0's ``extra``, and the generators do not change. Of replicas
        one is saved, and all get what was its own.

    Raises:
        TypeError: if ``model`` is not sharded by FSDP.
        ValueError: if ``step`` is no whole number.
        CheckpointError: on all ranks, with every problem of every rank; nothing has changed then.
    """
    check_wrapped(model)
    if step is not None:
        step = whole_number("step", step, 0)
    with own_ranks().failing_together():
        manager = CheckpointManager(directory)
    manager._falls_back, manager._missing_ok = False, missing_ok
    objects = {} if lr_scheduler is None else {LR_SCHEDULER: lr_scheduler}
    restored = manager.restore(model, optimizer, step=step, objects=objects, strict=strict)
    if restored is None:
        return {"step": None, "extra": None}
    return {"step": restored.step, "extra": restored.extra}


def _selection(
    names: Sequence[str],
    only: Callable[[str], bool] | Collection[str] | None,
    key_map: Mapping[str, str] | None,
    *,
    strict: bool,
) -> Selection:
    if not isinstance(key_map, Mapping | None) or not all(
        isinstance(text, str) for pair in (key_map or {}).items() for text in pair
    ):
        raise CheckpointError(f"key_map={key_map!r}; expected a dict of prefixes")
    rules = tuple(Rule(old, new) for old, new in (key_map or {}).items())
    if only is None:
        return Selection(strict=strict, rules=rules)
    if callable(only):
        if not any(map(only, names)):
            raise CheckpointError("only: selects no parameter or buffer of the model")
        return Selection(only, strict, rules)
    prefixes = (only,) if isinstance(only, str) else tuple(only)
    if not all(isinstance(prefix, str) for prefix in prefixes):
        raise CheckpointError(f"only={only!r}; expected a function, or prefixes of names")
    check_prefixes(prefixes, names)
    return Selection(lambda name: name.startswith(prefixes), strict, rules)
