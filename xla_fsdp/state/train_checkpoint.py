"""``save_checkpoint``: save a training job; what loads one, on any number of ranks.

Invariants: every rank makes the same calls, and all raise the same error or none; a save copies all
tensors to host memory first, an asynchronous one over the copies of the save before, which it waits
for; a load changes nothing before all has been read and checked.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from xla_fsdp.checkpoint.convert.reshard import LoadTarget, Selection
from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    MismatchError,
    find_bad_names,
    lines_of,
    number_or_none,
    raise_if,
    whole_number,
)
from xla_fsdp.checkpoint.files.json_values import Packed, pack
from xla_fsdp.checkpoint.files.storage import Storage, open_storage
from xla_fsdp.checkpoint.format.records import (
    SUFFIXES,
    VALUE_PREFIX,
    OptimizerState,
    ShardMetadata,
    StateEntry,
    StateKind,
    model_name,
)
from xla_fsdp.checkpoint.steps.load_step import LoadedStep, load_step
from xla_fsdp.checkpoint.steps.save_step import (
    Job,
    RankContent,
    Ranks,
    Save,
    ShardFile,
    write_rank_file,
)
from xla_fsdp.checkpoint.steps.step_directory import (
    Attempt,
    Keep,
    job_token,
)
from xla_fsdp.distributed.cpu_ranks import current_rank_thread
from xla_fsdp.fsdp.engine.module_state import reshard_units
from xla_fsdp.fsdp.engine.param import held_shape
from xla_fsdp.fsdp.engine.stacked_params import HostCopies
from xla_fsdp.fsdp.module_base import ShardedModule
from xla_fsdp.optim.guards import holds_shards
from xla_fsdp.state.fsdp1_state_dict_type import unchosen
from xla_fsdp.state.metadata import describe
from xla_fsdp.state.optim import (
    OptimizerParams,
    find_problems,
    find_write_problems,
    params_by_key,
    read_optimizer,
    write_optimizer,
)
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import exchange

LR_SCHEDULER = "lr_scheduler"


@dataclass
class TrainState:
    """The objects that one rank trains; converts their state to and from the contents of files."""

    model: ShardedModule
    optimizer: Optimizer | None
    objects: Mapping[str, Stateful]
    metadata: ShardMetadata = field(init=False)
    params: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        reshard_units(self.model)
        own = describe(self.model)
        self.metadata = replace(own, global_rank=None if own.groups is None else ops.rank())
        self.params = params_by_key(self.model)

    @property
    def kind_of_optimizer(self) -> str | None:
        return None if self.optimizer is None else type(self.optimizer).__name__

    def find_save_problems(self, extra: Any) -> list[str]:
        """Return the reasons why this state cannot be saved, one line each."""
        problems = [] if self.optimizer is None else find_problems(self.optimizer, self.params)
        problems += find_bad_names(dict.fromkeys([*self._tensors(), *self._names()]))
        if holds_shards(extra) and ops.world_size() > 1:
            warnings.warn(
                f"extra holds rank {ops.rank()}'s shards. Only as many ranks can load them, as on "
                f"others each gets those of rank 0. Save whole tensors, as full_state_dict has",
                stacklevel=4,
            )
        try:
            self._values(extra)
        except CheckpointError as error:
            problems += [problem.removeprefix("values.") for problem in error.problems]
        return problems

    def content(self, extra: Any, host: HostCopies) -> RankContent:
        """Return this rank's tensors and values, copied to ``host``.

        Call it only if ``find_save_problems`` found none.
        """
        metadata, values = self.metadata, self._values(extra)
        live = {model_name(key): tensor for key, tensor in self._tensors().items()}
        if self.optimizer is not None:
            state = read_optimizer(self.optimizer, self.params)
            metadata = replace(metadata, optimizer=state.record())
            live |= state.named_tensors()
        live |= {f"{VALUE_PREFIX}{i}": tensor for i, tensor in enumerate(values.tensors)}
        copies = zip(live, host.take(list(live.values())), strict=True)
        return RankContent(metadata, dict(copies), values.json)

    def _values(self, extra: Any) -> Packed:
        """Pack everything that is not sharded."""
        state = self._state()
        values = {
            "extra": extra,
            "model": {key: part for key, part in state.items() if not isinstance(part, Tensor)},
            "rng": {
                "device": ops.get_rng_state(self.model._fsdp_unit.device),
                "host": torch.get_rng_state(),
            },
        }
        for name, each in self.objects.items():
            with _naming(f"{name}.state_dict()"):
                values[_topic(name)] = each.state_dict()
        return pack(values, "values")

    def _tensors(self) -> dict[str, Tensor]:
        """Return the state dict's tensors, tied ones once."""
        return {
            key: value
            for key, value in self._state().items()
            if isinstance(value, Tensor) and key not in self.metadata.ties
        }

    def _state(self) -> dict[str, Any]:
        """Return this rank's shards, whatever state dict type the user has chosen."""
        with unchosen(self.model):
            return self.model.state_dict()

    def target(self) -> LoadTarget:
        """Return the tensors that this rank needs, by key and shape."""
        sharded = {record.key for record in self.metadata.params}
        tensors = self._tensors()
        unsharded = {key: tuple(t.shape) for key, t in tensors.items() if key not in sharded}
        if self.optimizer is None:
            return LoadTarget(self.metadata, unsharded)
        raise_if(find_problems(self.optimizer, self.params))
        known = OptimizerParams(self.params)
        groups = [known.keys(*group["params"]) for group in self.optimizer.param_groups]
        return LoadTarget(self.metadata, unsharded, groups)

    def names(self) -> list[str]:
        """Return the names of all parameters and buffers of the model before it was wrapped."""
        return [*self._names(), *self.target().unsharded]

    def _names(self) -> list[str]:
        members = [member.name for record in self.metadata.params for member in record.members]
        return [*members, *self.metadata.ties]

    def find_load_problems(self, loaded: LoadedStep) -> list[str]:
        """Return the reasons why ``loaded`` does not fit, one line each."""
        problems = [
            f"the checkpoint holds no {name}; load without one"
            for name in self.objects
            if _topic(name) not in loaded.values
        ]
        if self.optimizer is not None:
            state = self._optimizer_state(loaded)
            problems += find_write_problems(self.optimizer, self.params, state)
        return problems

    def load(self, loaded: LoadedStep, *, strict: bool) -> None:
        """Change model, optimizer and other objects to the loaded state.

        Call it only if ``find_load_problems`` found none on any rank.
        """
        self._load_model(loaded, strict)
        if self.optimizer is not None:
            state = self._optimizer_state(loaded)
            cast = {
                key
                for key, param in self.params.items()
                if loaded.saved_dtypes.get(key, {param.dtype}) != {param.dtype}
            }
            write_optimizer(self.optimizer, self.params, state, cast=cast)
        for name, each in self.objects.items():
            with _naming(f"{name}.load_state_dict()"):
                each.load_state_dict(loaded.values[_topic(name)])
        ops.sync()
        if loaded.same_ranks:
            self._set_rng_state(loaded.values.get("rng"))

    def _optimizer_state(self, loaded: LoadedStep) -> OptimizerState:
        """Return the loaded optimizer state with sharded tensors in the shapes of the shards, and
        the present state of parameters that are not loaded."""
        if loaded.optimizer is None or self.optimizer is None:
            raise CheckpointError("no optimizer state was loaded")
        own: dict[str, dict[str, StateEntry]] = {}
        if not self.params.keys() <= loaded.model.keys():  # those that do not change
            states = read_optimizer(self.optimizer, self.params).states
            own = {key: dict(s) for key, s in states.items() if key not in loaded.model}
        states = {
            key: {
                name: replace(entry, value=entry.value.reshape(held_shape(self.params[key])))
                if entry.kind is StateKind.SHARD
                else entry
                for name, entry in entries.items()
            }
            for key, entries in loaded.optimizer.states.items()
        }
        return replace(loaded.optimizer, states={**own, **states})

    def _load_model(self, loaded: LoadedStep, strict: bool) -> None:
        live = self._state()
        state: dict[str, Any] = {
            key: tensor.reshape(live[key].shape) for key, tensor in loaded.model.items()
        }
        for alias, canonical in self.metadata.ties.items():
            if alias in live and canonical in state:
                state[alias] = state[canonical]
        state.update(loaded.values.get("model", {}))
        with unchosen(self.model):
            self.model.load_state_dict(state, strict=strict)

    def _set_rng_state(self, state: Any) -> None:
        if not isinstance(state, dict):
            return
        ops.set_rng_state(state["device"], self.model._fsdp_unit.device)
        # CPU ranks are threads that share the generator of the process.
        if current_rank_thread() is None or ops.rank() == 0:
            torch.set_rng_state(state["host"])


@contextmanager
def _naming(call: str) -> Iterator[None]:
    """Name a method of the user's in whatever it raises."""
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise CheckpointError([f"{call}: {line}" for line in lines_of(error)]) from error


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers of Python."""
    if not isinstance(metrics, Mapping):
        raise CheckpointError(f"metrics is {metrics!r}; expected numbers by name")
    plain: dict[str, float] = {}
    problems: list[str] = []
    for name, value in metrics.items():
        try:
            plain[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            problems.append(f"metrics[{name!r}] is {value!r}; expected a number")
    raise_if(problems)
    return plain


def _topic(name: str) -> str:
    """Return the name under which an object's state is among a file's values."""
    return name if name == LR_SCHEDULER else f"object {name}"


# Keys are each rank's own model, so CPU ranks, which are threads of one process, do not share
# entries.
_pending: WeakKeyDictionary[ShardedModule, PendingSave] = WeakKeyDictionary()
"""The last save of each model, which may still be written, or deleting older steps."""
_replaced: WeakKeyDictionary[ShardedModule, frozenset[str]] = WeakKeyDictionary()
"""Tokens of the jobs from whose directories the model was loaded, which it goes on from."""


_saved_places: WeakKeyDictionary[ShardedModule, tuple[int, str, int]] = WeakKeyDictionary()
"""Where each model was saved last: rank, directory and step."""
_saved_lock = threading.Lock()


def _find_other_model(model: ShardedModule, place: tuple[int, str, int]) -> Iterator[str]:
    """Yield a line if another model of this job has just saved the same step, which this one would
    replace; a model that was loaded goes on for another one."""
    with _saved_lock:
        others = [each for each, known in _saved_places.items() if known == place]
    if not _replaced.get(model) and any(each is not model for each in others):
        yield (
            f"{place[1]}: step {place[2]} was saved there by another model, whose files this "
            f"one would replace; save each model to a directory of its own"
        )


class PendingSave:
    """A save that a thread may still be writing."""

    def __init__(self, save: Save, host: HostCopies | None) -> None:
        self._save, self._host = save, host
        self._done = False
        self.reusable: HostCopies | None = None  # once nothing reads them any more

    def wait(self) -> None:
        """Wait until the step is complete on disk. Every rank must call it.

        Raises:
            CheckpointError: if a rank could not write its file. The step does not count then.
        """
        done, self._done = self._done, True
        if not done:
            self._save.wait()
            self.reusable = self._host

    def finish(self) -> None:
        """Wait until older steps are deleted, too. Every rank must call it.

        Raises:
            CheckpointError: as ``wait``.
        """
        self.wait()
        self._save.finish()


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: ShardedModule,
    optimizer: Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    extra: Any = None,
    step: int | None = None,
    *,
    keep_last: int | None = None,
    asynchronous: bool = False,
    file_format: Literal["safetensors", "pth"] = "safetensors",
    take_over: bool = False,
) -> PendingSave:
    """Save a training job. Every rank calls it, outside of forward and backward, and writes its
    own shards; ranks that only hold replicas write nothing.

    If the save fails or the job is killed, earlier complete steps remain; the new step counts only
    when all of it is on disk. Hosts without a shared file system store their own ranks' files.

    The first save of a job makes it the owner of ``directory``, if that has none, or if the model
    was loaded from there since; any other job that saves there then raises an error.

    Args:
        directory: of all checkpoints of a run: a path, or a URL that fsspec knows (``gs://...``).
        model: the sharded model.
        optimizer: the optimizer of its parameters.
        lr_scheduler: any object with ``state_dict``.
        extra: values of this rank: numbers, strings, tensors, numpy arrays, and lists, tuples, sets
            and dicts of them.
        step: required; not below the latest complete step in ``directory``. If it is equal, the old
            files are replaced once the new ones are complete.
        keep_last: number of complete steps to leave when this one is complete; older ones are
            deleted. None deletes none. Remains of incomplete saves are deleted in any case.
        asynchronous: copy everything to host memory and return; a thread writes it. The next save
            and load, and ``wait()`` of the result, wait for the thread and raise its errors. If
            none of these comes, the process ends only when the step is complete, or else says so
            and ends with exit code 1.
        file_format: "safetensors", or "pth" for files that the tools of torch_xla read, too.
        take_over: become the owner of ``directory`` though another job is.

    Returns:
        A handle; without ``asynchronous`` its ``wait()`` returns at once.

    Raises:
        TypeError: if ``model`` is not sharded by FSDP.
        ValueError: for a wrong ``step``, ``keep_last`` or ``file_format``.
        CheckpointError: on all ranks, with every problem of every rank, also of an earlier
            asynchronous save; if ranks disagree about ``step``, ``keep_last`` or ``file_format``;
            if another job owns ``directory``.
    """
    number = whole_number("step", step, 0)
    keep = Keep(number_or_none("keep_last", keep_last))
    check_wrapped(model)
    if file_format not in SUFFIXES:
        raise ValueError(f"file_format={file_format!r}; expected one of {', '.join(SUFFIXES)}")
    objects = {} if lr_scheduler is None else {LR_SCHEDULER: lr_scheduler}
    return start_save(
        directory,
        model,
        optimizer,
        objects,
        extra,
        number,
        keep,
        asynchronous=asynchronous,
        take_over=take_over,
        file_format=file_format,
    )


@torch.inference_mode(False)  # or no later save could write over the copies
def start_save(
    directory: str | os.PathLike[str],
    model: ShardedModule,
    optimizer: Optimizer | None,
    objects: Mapping[str, Stateful],
    extra: Any,
    step: int,
    keep: Keep,
    *,
    asynchronous: bool,
    take_over: bool,
    file_format: str = "safetensors",
    metrics: Mapping[str, Any] | None = None,
) -> PendingSave:
    """Save as ``save_checkpoint``, with any objects beside the model, and metrics of the step."""
    host, ranks = wait_for_earlier(model) or HostCopies(), own_ranks()
    with ranks.failing_together():
        state = TrainState(model, optimizer, objects)
        file = ShardFile(state.metadata.rank, state.metadata.world_size, file_format)
        job = Job(job_token(), _replaced.get(model, frozenset()), take_over)
        plain = plain_metrics(metrics or {})
        problems = [
            f"objects: the name {name!r} is a {type(name).__name__}, expected a string"
            for name in objects
            if not isinstance(name, str)
        ]
        problems += state.find_save_problems(extra)
        same = {"optimizer": state.kind_of_optimizer}
        storage = open_storage(directory)
        place = (ranks.rank, storage.where, step)
        problems += _find_other_model(model, place)
        save = Save(storage, ranks, file, step, keep, job, plain, same)
    save.begin(problems)
    with _saved_lock:
        _saved_places[model] = place
    try:
        content = state.content(extra, host)
    except Exception as error:  # raised by wait(), on all ranks: none may wait for this one
        save.give_up(error)
    else:
        save.start(content, write_rank_file)
    pending = _pending[model] = PendingSave(save, host if asynchronous else None)
    if not asynchronous:
        pending.wait()
    return pending


def read_state(
    state: TrainState, storage: Storage, attempt: Attempt, selection: Selection
) -> tuple[Any, list[str], bool]:
    """Return what a rank needs of an attempt, the reasons why it cannot be loaded, and whether the
    attempt may be whole nevertheless. Changes nothing."""
    try:
        loaded = load_step(storage, attempt, state.target(), selection)
        where = f"{storage.where}/{attempt.folder}"
        problems = [f"{where}: {problem}" for problem in state.find_load_problems(loaded)]
    except Exception as error:  # raised by all ranks, once they know of each other's
        damaged = isinstance(error, CheckpointError) and not isinstance(error, MismatchError)
        return None, lines_of(error), not damaged
    return loaded, problems, bool(problems)


def go_on_from(model: ShardedModule, owners: frozenset[str]) -> None:
    """Let saves of ``model`` replace those of the jobs that owned the directories it has loaded
    from."""
    _replaced[model] = _replaced.get(model, frozenset()) | owners


def check_wrapped(model: Any) -> None:
    if not isinstance(model, ShardedModule):
        raise TypeError(
            f"model is a {type(model).__name__}; expected the outermost module that was wrapped "
            f"with XlaFullyShardedDataParallel or given to fully_shard. Save other modules with "
            f"torch.save"
        )


def own_ranks() -> Ranks:
    """Return the ranks of this job, as the calling one sees them."""
    return Ranks(ops.rank(), ops.world_size(), exchange)


def wait_for_earlier(model: ShardedModule) -> HostCopies | None:
    """Wait until the last save of ``model`` is complete, and older steps are deleted; return the
    host memory that it used, if it was asynchronous."""
    earlier = _pending.pop(model, None)
    if earlier is None:
        return None
    earlier.finish()
    return earlier.reusable
