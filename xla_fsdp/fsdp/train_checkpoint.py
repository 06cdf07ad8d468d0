"""``save_checkpoint`` and ``load_checkpoint``: training to a directory, and back to any ranks.

Invariants: every rank calls both functions, and all raise the same error or none; what is saved is
copied to host memory by one transfer; nothing of the model or optimizer is changed before all has
been read and checked; a save that follows an asynchronous one waits for it first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.checkpoint.errors import CheckpointError, raise_if
from xla_fsdp.checkpoint.format import SUFFIXES, OptimizerState, ShardMetadata, StateKind
from xla_fsdp.checkpoint.json_values import Packed, pack
from xla_fsdp.checkpoint.load_step import LoadedStep, load_step
from xla_fsdp.checkpoint.reshard import LoadTarget
from xla_fsdp.checkpoint.save_step import (
    LOOKED_AT,
    RankContent,
    Ranks,
    Save,
    ShardFile,
    write_rank_file,
)
from xla_fsdp.checkpoint.step_directory import Attempt, newest_complete
from xla_fsdp.checkpoint.storage import Storage, open_storage
from xla_fsdp.distributed.cpu_ranks import current_rank_thread
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.host import exchange
from xla_fsdp.fsdp.engine.module_state import reshard_units
from xla_fsdp.fsdp.engine.stacked_params import copy_stacks_to_host
from xla_fsdp.fsdp.fsdp1_state_dict_type import unchosen
from xla_fsdp.fsdp.module_base import ShardedModule
from xla_fsdp.fsdp.state_dict.optim import (
    OptimizerParams,
    find_problems,
    find_write_problems,
    params_by_key,
    read_optimizer,
    write_optimizer,
)


class LRScheduler(Protocol):
    """Anything that counts steps and can be saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass
class TrainState:
    """What one rank trains, between live objects and files.

    Args:
        model: the outermost sharded module.
        optimizer: made of its parameters, or None.
        lr_scheduler: or None.
    """

    model: ShardedModule
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    metadata: ShardMetadata = field(init=False)
    params: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        reshard_units(self._module)
        data = self.model.get_shard_metadata()
        at = None if data["groups"] is None else ops.rank()
        self.metadata = ShardMetadata.from_dict({**data, "global_rank": at})
        self.params = params_by_key(
            self.model.get_original_names_and_sharded_parameters(), self._module.named_parameters()
        )

    @property
    def _module(self) -> nn.Module:
        return self.model._fsdp_module()

    @property
    def group(self) -> int:
        """The index of this rank's sharding group; all groups hold the same."""
        at, groups = self.metadata.global_rank, self.metadata.groups or ()
        return next((index for index, group in enumerate(groups) if at in group), 0)

    def find_save_problems(self, extra: Any) -> list[str]:
        """Return why this cannot be saved, one line each."""
        problems = [] if self.optimizer is None else find_problems(self.optimizer, self.params)
        try:
            self._values(extra)
        except CheckpointError as error:
            problems += [problem.removeprefix("values.") for problem in error.problems]
        return problems

    def content(self, extra: Any) -> RankContent:
        """Return all that this rank saves; ``find_save_problems`` has found none."""
        state = None
        if self.optimizer is not None:
            state = read_optimizer(self.optimizer, self.params)
        model, states = self._tensors(), {} if state is None else state.tensors()
        values = self._values(extra)
        names = [(key, name) for key, each in states.items() for name in each]
        live = [*model.values(), *(states[key][name] for key, name in names), *values.tensors]
        copies = iter(copy_stacks_to_host(live))
        model = {key: next(copies) for key in model}
        for key, name in names:
            states[key][name] = next(copies)
        metadata = replace(self.metadata, optimizer=None if state is None else state.record())
        return RankContent(metadata, model, states, Packed(values.json, list(copies)))

    def _values(self, extra: Any) -> Packed:
        """Pack everything that has no shards."""
        state = self._state()
        values = {
            "extra": extra,
            "model": {key: part for key, part in state.items() if not isinstance(part, Tensor)},
            "rng": {
                "device": ops.get_rng_state(self.model._fsdp_unit.device),
                "host": torch.get_rng_state(),
            },
        }
        if self.lr_scheduler is not None:
            values["lr_scheduler"] = self.lr_scheduler.state_dict()
        return pack(values, "values")

    def _tensors(self) -> dict[str, Tensor]:
        """Return the state dict's tensors, each once."""
        return {
            key: value
            for key, value in self._state().items()
            if isinstance(value, Tensor) and key not in self.metadata.ties
        }

    def _state(self) -> dict[str, Any]:
        """Return this rank's shards, whichever type of state dict the user has chosen."""
        with unchosen(self._module):
            return self._module.state_dict()

    def target(self) -> LoadTarget:
        """Return what this rank needs.

        Raises:
            CheckpointError: if state cannot be written to the optimizer.
        """
        sharded = {record.key for record in self.metadata.params}
        tensors = self._tensors()
        unsharded = {key: tuple(t.shape) for key, t in tensors.items() if key not in sharded}
        if self.optimizer is None:
            return LoadTarget(self.metadata, unsharded)
        raise_if(find_problems(self.optimizer, self.params))
        known = OptimizerParams(self.params)
        groups = [known.keys(*group["params"]) for group in self.optimizer.param_groups]
        return LoadTarget(self.metadata, unsharded, groups)

    def find_load_problems(self, loaded: LoadedStep) -> list[str]:
        """Return why what was loaded cannot be taken, one line each."""
        problems = []
        if self.lr_scheduler is not None and "lr_scheduler" not in loaded.values:
            problems.append("the checkpoint holds no lr_scheduler; load without one")
        if self.optimizer is not None:
            state = self._optimizer_state(loaded)
            problems += find_write_problems(self.optimizer, self.params, state)
        return problems

    def load(self, loaded: LoadedStep, *, strict: bool) -> None:
        """Go on from what was loaded; ``find_load_problems`` has found none."""
        self._load_model(loaded, strict)
        if self.optimizer is not None:
            write_optimizer(self.optimizer, self.params, self._optimizer_state(loaded))
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(loaded.values["lr_scheduler"])
        ops.sync()
        if loaded.same_ranks:
            self._set_rng_state(loaded.values.get("rng"))

    def _optimizer_state(self, loaded: LoadedStep) -> OptimizerState:
        """Return what was loaded, in the shapes of the parameters."""
        if loaded.optimizer is None:
            raise CheckpointError("no optimizer state was loaded")
        states = {
            key: {
                name: replace(entry, value=entry.value.reshape(self.params[key].shape))
                if entry.kind is StateKind.SHARD
                else entry
                for name, entry in entries.items()
            }
            for key, entries in loaded.optimizer.states.items()
        }
        return replace(loaded.optimizer, states=states)

    def _load_model(self, loaded: LoadedStep, strict: bool) -> None:
        live = self._state()
        state: dict[str, Any] = {
            key: tensor.reshape(live[key].shape) for key, tensor in loaded.model.items()
        }
        for alias, canonical in self.metadata.ties.items():
            if alias in live and canonical in state:
                state[alias] = state[canonical]
        state.update(loaded.values.get("model", {}))
        with unchosen(self._module):
            self._module.load_state_dict(state, strict=strict)

    def _set_rng_state(self, state: Any) -> None:
        if not isinstance(state, dict):
            return
        ops.set_rng_state(state["device"], self.model._fsdp_unit.device)
        if current_rank_thread() is None or ops.rank() == 0:  # threads share the host's
            torch.set_rng_state(state["host"])


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
    state = TrainState(model, optimizer, lr_scheduler)
    metadata = state.metadata
    file = ShardFile(metadata.rank, metadata.world_size, state.group, file_format)
    save = Save(open_storage(directory), _ranks(), file, number, keep_last)
    save.begin(state.find_save_problems(extra))
    content = state.content(extra)
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
    state = TrainState(model, optimizer, lr_scheduler)
    ranks, storage = _ranks(), open_storage(directory)
    attempt = _agreed_attempt(storage, ranks, step)
    if attempt is None and missing_ok:
        return {"step": None, "extra": None}
    if attempt is None:
        raise CheckpointError(f"{storage.where} holds no complete step that all ranks see")
    try:
        loaded = load_step(storage, attempt, state.target(), strict=strict)
        problems = state.find_load_problems(loaded)
    except CheckpointError as error:
        problems = error.problems
    ranks.all_gather_or_raise(problems)
    state.load(loaded, strict=strict)
    return {"step": attempt.step, "extra": loaded.values.get("extra")}


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
    return Ranks(ops.rank(), ops.world_size(), exchange)


def _wait_for_earlier(model: ShardedModule) -> None:
    if earlier := _pending.pop(model, None):
        earlier.wait()


def _agreed_attempt(storage: Storage, ranks: Ranks, step: int | None) -> Attempt | None:
    """Return the latest attempt that every rank sees as complete.

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
    said = ranks.all_gather_or_raise(problems, (storage.where, own, others))
    common = set.intersection(*({Attempt(*each) for each in seen} for _, seen, _ in said))
    if not common and step is not None:
        there = sorted({each for _, _, steps in said for each in steps})
        hint = f"; there is {', '.join(map(str, there))}" if there else ""
        raise CheckpointError(f"{said[0][0]} holds no step {step} that is complete{hint}")
    return max(common, default=None)
