"""``save_checkpoint`` and ``load_checkpoint``: training to a directory, and back to any ranks.

Words: a *step* is what training calls one, and what a checkpoint is named by; a save is *pending*
until all ranks know that it is complete.
Always true: every rank calls both functions, and all raise the same error or none; nothing of the
model or optimizer is changed before everything has been read and checked; a save that follows a
pending one waits for it first.
This file only translates between live objects and ``checkpoint/``: which bytes a rank needs is
``checkpoint.reshard``'s business, when a step is complete ``checkpoint.commit``'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from xla_fsdp import xla_ops
from xla_fsdp.checkpoint.commit import LOOKED_AT, Ranks, Save
from xla_fsdp.checkpoint.commit import Place as FilePlace
from xla_fsdp.checkpoint.format import ShardMetadata
from xla_fsdp.checkpoint.load_step import LoadedStep, load_step
from xla_fsdp.checkpoint.plain_values import Packed, pack
from xla_fsdp.checkpoint.rank_file import SUFFIXES, RankContent, write_rank_file
from xla_fsdp.checkpoint.reshard import Target
from xla_fsdp.checkpoint.step_directory import Attempt, newest_complete
from xla_fsdp.checkpoint.storage import Storage, open_storage
from xla_fsdp.checkpoint.validate import CheckpointError
from xla_fsdp.cpu_ranks import current_rank_thread
from xla_fsdp.fully_sharded import XlaFullyShardedDataParallel
from xla_fsdp.optim_records import record_of, state_from, tensors_of
from xla_fsdp.optim_state import (
    OptimizerState,
    find_problems,
    find_write_problems,
    params_by_key,
    read_optimizer,
    write_optimizer,
)

# The saves that training has not waited for yet. Keys are each rank's own model, so ranks that are
# threads of one process never meet here.
_pending: WeakKeyDictionary[XlaFullyShardedDataParallel, PendingSave] = WeakKeyDictionary()


class LRScheduler(Protocol):
    """What is used of a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


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
    model: XlaFullyShardedDataParallel,
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
        model: the wrapped model.
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
    if earlier := _pending.pop(model, None):
        earlier.wait()
    ranks = _ranks()
    metadata = _metadata(model, ranks)
    save = Save(
        open_storage(directory), ranks, _file_place(metadata, file_format), number, keep_last
    )
    values = {"extra": extra, "rng": _rng_state(model)}
    if lr_scheduler is not None:
        values["lr_scheduler"] = lr_scheduler.state_dict()
    values["model"] = {k: v for k, v in model.state_dict().items() if not isinstance(v, Tensor)}
    problems: list[str] = []
    packed = _packed(values, problems)
    if optimizer is not None:
        problems += find_problems(optimizer, _params(model))
    save.begin(problems)
    state = None if optimizer is None else read_optimizer(optimizer, _params(model))
    content = _content(model, metadata, state, packed)
    save.start(lambda sink, name: write_rank_file(sink, name, content))
    pending = PendingSave(save)
    if asynchronous:
        _pending[model] = pending
    else:
        pending.wait()
    return pending


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: XlaFullyShardedDataParallel,
    optimizer: Optimizer | None = None,
    lr_scheduler: LRScheduler | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Load what ``save_checkpoint`` saved, onto any number of ranks, units and sharding groups,
    flattened or not. Every rank calls it, and reads only what it needs.

    Args:
        directory: that was saved to.
        model: the wrapped model.
        optimizer: made of its parameters, with the same groups; it need not have made a step. Its
            hyperparameters are replaced, as by its own ``load_state_dict``.
        lr_scheduler: anything with ``load_state_dict``.
        step: which one; the latest that is complete for all ranks if None.
        strict: whether names that only the checkpoint or only the model has are errors. Otherwise
            the ones are passed over, and the others stay as they are.

    Returns:
        ``{"step": ..., "extra": ...}``. On as many ranks as saved it, each rank gets its own
        ``extra`` and goes on with its own random numbers; on others every rank gets rank 0's
        ``extra``, and random numbers stay as they are.

    Raises:
        TypeError: if ``model`` is not wrapped.
        CheckpointError: on all ranks, with every problem of every rank; nothing has changed then.
    """
    _check_wrapped(model)
    if earlier := _pending.pop(model, None):
        earlier.wait()
    ranks, storage = _ranks(), open_storage(directory)
    attempt = _agreed_attempt(storage, ranks, step)
    params = _params(model)
    problems: list[str] = []
    loaded, state = None, None
    try:
        loaded = load_step(
            storage, attempt, _target(model, optimizer, params, ranks), strict=strict
        )
        if lr_scheduler is not None and "lr_scheduler" not in loaded.values:
            problems.append("the checkpoint holds no lr_scheduler; load without one")
        if optimizer is not None:
            state = state_from(loaded.groups, loaded.states, params)
            problems += find_write_problems(optimizer, params, state)
    except CheckpointError as error:
        problems += error.problems
    ranks.agree(problems)
    assert loaded is not None  # else there is a problem
    _load_model(model, loaded, strict)
    if optimizer is not None and state is not None:
        write_optimizer(optimizer, params, state)
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(loaded.values["lr_scheduler"])
    xla_ops.sync()
    if loaded.same_ranks:
        _set_rng_state(model, loaded.values.get("rng"), ranks)
    return {"step": attempt.step, "extra": loaded.values.get("extra")}


# ---------------------------------------------------------------- ranks and places


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
    if not isinstance(model, XlaFullyShardedDataParallel):
        raise TypeError(
            f"model is a {type(model).__name__}; expected the outermost "
            f"XlaFullyShardedDataParallel. Save other modules with torch.save"
        )


def _ranks() -> Ranks:
    return Ranks(xla_ops.rank(), xla_ops.world_size(), xla_ops.exchange)


def _metadata(model: XlaFullyShardedDataParallel, ranks: Ranks) -> ShardMetadata:
    data = model.get_shard_metadata()
    at = None if data["groups"] is None else ranks.rank
    return ShardMetadata.from_dict({**data, "global_rank": at})


def _file_place(metadata: ShardMetadata, file_format: str) -> FilePlace:
    groups = metadata.groups or ()
    group = next((i for i, each in enumerate(groups) if metadata.global_rank in each), 0)
    return FilePlace(metadata.rank, metadata.world_size, group, file_format)


def _agreed_attempt(storage: Storage, ranks: Ranks, step: int | None) -> Attempt:
    """The latest attempt that every rank sees as complete."""
    own: list[Attempt] = []
    problems: list[str] = []
    try:
        own = list(islice(newest_complete(storage, step), LOOKED_AT))
        if not own:
            steps = sorted({each.step for each in islice(newest_complete(storage), LOOKED_AT)})
            wanted = "no complete step" if step is None else f"no complete step {step}"
            hint = f"; there is {', '.join(map(str, steps))}" if steps else ""
            problems = [f"{storage.where} holds {wanted}{hint}"]
    except CheckpointError as error:
        problems = error.problems
    seen = [{Attempt(*pair) for pair in pairs} for pairs in ranks.agree(problems, own)]
    common = set.intersection(*seen)
    if not common:
        raise CheckpointError(
            f"{storage.where} holds no complete step that all ranks see; rank 0 sees "
            f"{', '.join(each.folder for each in sorted(seen[0]))}"
        )
    return max(common)


# ---------------------------------------------------------------- model


def _params(model: XlaFullyShardedDataParallel) -> dict[str, Tensor]:
    return params_by_key(
        model.get_original_names_and_sharded_parameters(), model.named_parameters()
    )


def _own_tensors(model: XlaFullyShardedDataParallel, metadata: ShardMetadata) -> dict[str, Tensor]:
    """The state dict's tensors, each once."""
    return {
        key: value
        for key, value in model.state_dict().items()
        if isinstance(value, Tensor) and key not in metadata.ties
    }


def _target(
    model: XlaFullyShardedDataParallel,
    optimizer: Optimizer | None,
    params: Mapping[str, Tensor],
    ranks: Ranks,
) -> Target:
    metadata = _metadata(model, ranks)
    sharded = {record.key for record in metadata.params}
    tensors = _own_tensors(model, metadata)
    whole = {key: tuple(t.shape) for key, t in tensors.items() if key not in sharded}
    if optimizer is None:
        return Target(metadata, whole)
    if problems := find_problems(optimizer, params):
        raise CheckpointError(problems)
    keys = {id(param): key for key, param in params.items()}
    groups = [[keys[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return Target(metadata, whole, groups)


def _load_model(model: XlaFullyShardedDataParallel, loaded: LoadedStep, strict: bool) -> None:
    live = model.state_dict()
    state: dict[str, Any] = {
        key: tensor.reshape(live[key].shape) for key, tensor in loaded.model.items()
    }
    for alias, canonical in model.get_shard_metadata()["ties"].items():
        key = canonical if canonical in state else None
        if key is not None and alias in live:
            state[alias] = state[key]
    state.update(loaded.values.get("model", {}))
    model.load_state_dict(state, strict=strict)


# ---------------------------------------------------------------- what is saved


def _packed(values: dict[str, Any], problems: list[str]) -> Packed:
    packed: list[Packed] = []
    try:
        packed.append(pack(values, "values"))
    except CheckpointError as error:
        problems += [problem.removeprefix("values.") for problem in error.problems]
    return packed[0] if packed else Packed({}, [])


def _content(
    model: XlaFullyShardedDataParallel,
    metadata: ShardMetadata,
    state: OptimizerState | None,
    values: Packed,
) -> RankContent:
    """Everything in host memory, by one transfer."""
    tensors = _own_tensors(model, metadata)
    states = {} if state is None else tensors_of(state)
    names = [(key, name) for key, each in states.items() for name in each]
    live = [*tensors.values(), *(states[key][name] for key, name in names), *values.tensors]
    copies = iter(xla_ops.to_host(live))
    model_copies = {key: next(copies) for key in tensors}
    state_copies: dict[str, dict[str, Tensor]] = {key: {} for key in states}
    for key, name in names:
        state_copies[key][name] = next(copies)
    return RankContent(
        metadata=replace(metadata, optimizer=None if state is None else record_of(state)),
        model=model_copies,
        states=state_copies,
        values=Packed(values.json, list(copies)),
    )


# ---------------------------------------------------------------- random numbers


def _rng_state(model: XlaFullyShardedDataParallel) -> dict[str, Any]:
    return {"device": xla_ops.get_rng_state(model.xla_device), "host": torch.get_rng_state()}


def _set_rng_state(model: XlaFullyShardedDataParallel, state: Any, ranks: Ranks) -> None:
    if not isinstance(state, dict):
        return
    xla_ops.set_rng_state(state["device"], model.xla_device)
    if current_rank_thread() is None or ranks.rank == 0:  # threads share the host's generator
        torch.set_rng_state(state["host"])
