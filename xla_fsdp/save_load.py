"""``save_checkpoint`` and ``load_checkpoint``: training to a directory, and back to any ranks.

Words: a *step* is what training calls one, and what a checkpoint is named by; a save is *pending*
until all ranks know that it is complete.
Always true: every rank calls both functions, and all raise the same error or none; nothing of the
model or optimizer is changed before everything has been read and checked; a save that follows a
pending one waits for it first.
What a job saves and takes is ``live_job``'s business, which bytes a rank needs
``checkpoint.reshard``'s, when a step is complete ``checkpoint.commit``'s.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from xla_fsdp import host_xla_ops, xla_ops
from xla_fsdp.checkpoint.commit import LOOKED_AT, Place, Ranks, Save
from xla_fsdp.checkpoint.load_step import load_step
from xla_fsdp.checkpoint.rank_file import SUFFIXES, write_rank_file
from xla_fsdp.checkpoint.step_directory import Attempt, newest_complete
from xla_fsdp.checkpoint.storage import Storage, open_storage
from xla_fsdp.checkpoint.validate import CheckpointError
from xla_fsdp.live_job import LiveJob, LRScheduler
from xla_fsdp.sharded_module import ShardedModule

# The saves that training has not waited for yet. Keys are each rank's own model, so ranks that are
# threads of one process never meet here.
_pending: WeakKeyDictionary[ShardedModule, PendingSave] = WeakKeyDictionary()


class PendingSave:
    """A save whose bytes may still be on their way to disk."""

    def __init__(self, save: Save) -> None:
        self._save: Save | None = save

    def wait(self) -> None:
        """Return when the step is complete; at once if it is known to be. Every rank calls it.

        Raises:
            CheckpointError: if a rank could not write its file. The step is then not there.
        """
        save, self._save = self._save, None
        if save is not None:
            save.wait()


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: ShardedModule,
    optimizer: Optimizer | None = None,
    lr_scheduler: LRScheduler | None = None,
    extra: Any = None,
    step: int | None = None,
    *,
    keep_last: int | None = None,
    asynchronous: bool = False,
    file_format: str = "safetensors",
) -> PendingSave:
    """Save a training job. Every rank calls it, outside of forward and backward, and writes its
    own shards; ranks that only hold replicas write nothing.

    Whatever happens meanwhile, the last complete step stays complete, and this one counts only when
    all of it is on disk. Hosts that share no file system keep the files of their own ranks.

    Args:
        directory: for all checkpoints of a run: a path, or a URL that fsspec knows (``gs://...``).
        model: the sharded model.
        optimizer: made of its parameters.
        lr_scheduler: anything with ``state_dict``.
        extra: this rank's own: numbers, strings, tensors, numpy arrays, and lists, tuples, sets
            and dicts of them.
        step: required; not below one that is complete in ``directory``. A step that is there
            already is replaced once the new one is complete.
        keep_last: delete all but so many complete steps when this one is complete; None keeps all.
            What attempts that were cut short have left is deleted in any case.
        asynchronous: copy everything to host memory and return; a thread writes it. The next save,
            and ``wait()`` on the result, return or raise when it is done.
        file_format: "safetensors", or "pth" for files that upstream's tools read, too.

    Returns:
        A handle; without ``asynchronous`` there is nothing left to wait for.

    Raises:
        TypeError: if ``model`` is not wrapped.
        ValueError: if an argument makes no sense.
        CheckpointError: on all ranks, with every problem of every rank, also of an earlier
            asynchronous save.
    """
    number = _checked_step(step)
    _check_arguments(model, keep_last, file_format)
    _wait_for_earlier(model)
    job = LiveJob(model, optimizer, lr_scheduler)
    place = Place(job.metadata.rank, job.metadata.world_size, job.group, file_format)
    save = Save(open_storage(directory), _ranks(), place, number, keep_last)
    save.begin(job.find_save_problems(extra))
    content = job.content(extra)
    save.start(lambda sink, name: write_rank_file(sink, name, content))
    pending = PendingSave(save)
    if asynchronous:
        _pending[model] = pending
    else:
        pending.wait()
    return pending


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: ShardedModule,
    optimizer: Optimizer | None = None,
    lr_scheduler: LRScheduler | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    missing_ok: bool = False,
) -> dict[str, Any]:
    """Load what ``save_checkpoint`` saved, onto any number of ranks, units and sharding groups,
    flattened or not. Every rank calls it, and reads only what it needs.

    Args:
        directory: that was saved to.
        model: the sharded model.
        optimizer: made of its parameters, with the same groups; it need not have made a step. Its
            hyperparameters are replaced, as by its own ``load_state_dict``.
        lr_scheduler: anything with ``load_state_dict``.
        step: which one; the latest that is complete for all ranks if None.
        strict: whether names that only the checkpoint or only the model has are errors. Otherwise
            the ones are passed over, and the others stay as they are.
        missing_ok: whether a directory without a complete step is fine; nothing is loaded then.

    Returns:
        ``{"step": ..., "extra": ...}``, both None if there was nothing to load. On as many ranks as
        saved it, each rank gets its own ``extra`` and goes on with its own random numbers; on
        others every rank gets rank 0's ``extra``, and random numbers stay as they are.

    Raises:
        TypeError: if ``model`` is not wrapped.
        CheckpointError: on all ranks, with every problem of every rank; nothing has changed then.
    """
    _check_wrapped(model)
    _wait_for_earlier(model)
    job, ranks, storage = LiveJob(model, optimizer, lr_scheduler), _ranks(), open_storage(directory)
    attempt = _agreed_attempt(storage, ranks, step)
    if attempt is None and missing_ok:
        return {"step": None, "extra": None}
    if attempt is None:
        raise CheckpointError(f"{storage.where} holds no complete step that all ranks see")
    try:
        loaded = load_step(storage, attempt, job.target(), strict=strict)
        problems = job.find_load_problems(loaded)
    except CheckpointError as error:
        problems = error.problems
    ranks.agree(problems)
    job.take(loaded, strict=strict)
    return {"step": attempt.step, "extra": loaded.values.get("extra")}


# ---------------------------------------------------------------- arguments and ranks


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step={step!r}; expected a whole number, 0 or more")
    return step


def _check_arguments(model: Any, keep_last: Any, file_format: str) -> None:
    _check_wrapped(model)
    if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(f"keep_last={keep_last!r}; expected None or a whole number, 1 or more")
    if file_format not in SUFFIXES:
        raise ValueError(f"file_format={file_format!r}; expected one of {', '.join(SUFFIXES)}")


def _check_wrapped(model: Any) -> None:
    if not isinstance(model, ShardedModule):
        raise TypeError(
            f"model is a {type(model).__name__}; expected the outermost module that was wrapped "
            f"with XlaFullyShardedDataParallel or given to fully_shard. Save other modules with "
            f"torch.save"
        )


def _ranks() -> Ranks:
    return Ranks(xla_ops.rank(), xla_ops.world_size(), host_xla_ops.exchange)


def _wait_for_earlier(model: ShardedModule) -> None:
    if earlier := _pending.pop(model, None):
        earlier.wait()


def _agreed_attempt(storage: Storage, ranks: Ranks, step: int | None) -> Attempt | None:
    """The latest attempt that every rank sees as complete.

    Raises:
        CheckpointError: if ``step`` is given and not complete, or files cannot be looked at.
    """
    own: list[Attempt] = []
    others: list[int] = []
    problems: list[str] = []
    try:
        own = list(islice(newest_complete(storage, step), LOOKED_AT))
        if not own:
            others = [each.step for each in islice(newest_complete(storage), LOOKED_AT)]
    except CheckpointError as error:
        problems = error.problems
    said = ranks.agree(problems, (storage.where, own, others))
    common = set.intersection(*({Attempt(*each) for each in seen} for _, seen, _ in said))
    if not common and step is not None:
        there = sorted({each for _, _, steps in said for each in steps})
        hint = f"; there is {', '.join(map(str, there))}" if there else ""
        raise CheckpointError(f"{said[0][0]} holds no step {step} that is complete{hint}")
    return max(common, default=None)
