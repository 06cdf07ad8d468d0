"""Reads from one complete step what one rank of a new job needs, and nothing else.

Words: see ``reshard``. Always true: a rank reads one file's header and those of the files that hold
elements it needs, and of these files only these elements; a tensor that is read as it was written
is compared with its fingerprint; everything that is wrong is raised at once, before anybody has
changed a model.
Which step is read is decided by the caller, for all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from xla_fsdp.checkpoint.byte_source import bytes_of
from xla_fsdp.checkpoint.errors import CheckpointError, typed
from xla_fsdp.checkpoint.fingerprint import fingerprint
from xla_fsdp.checkpoint.format import state_name
from xla_fsdp.checkpoint.full_tensors import Plan
from xla_fsdp.checkpoint.optimizer_format import GroupRecord
from xla_fsdp.checkpoint.plan import make_plan
from xla_fsdp.checkpoint.reshard import Cut, CutState, Saved, Target, cut_model
from xla_fsdp.checkpoint.reshard_optimizer import cut_optimizer
from xla_fsdp.checkpoint.safetensors_file import TensorSpec
from xla_fsdp.checkpoint.shard_files import Shard
from xla_fsdp.checkpoint.shard_reader import RankFiles, TorchRankFiles
from xla_fsdp.checkpoint.shard_writer import SUFFIXES
from xla_fsdp.checkpoint.step_directory import Attempt, Marker, rank_file_name, read_marker
from xla_fsdp.checkpoint.storage import LocalStorage, Storage
from xla_fsdp.checkpoint.tensor_source import TensorSource

REMOTE_REQUESTS = 16

"""At a time: a request to an object store takes some 50 ms, whatever its size."""


@dataclass(frozen=True)
class LoadedStep:
    """What a rank takes from a step, in host memory.

    Args:
        model: by key of the state dict; shards are vectors.
        groups: of the optimizer.
        states: by key and name; tensors of kind ``SHARD`` are vectors.
        values: what was saved beside the tensors, by topic.
        same_ranks: whether as many ranks share the model as when it was saved, in as many
            tensor-parallel parts: ranks then have the places that they had.
    """

    model: dict[str, Tensor]
    groups: tuple[GroupRecord, ...]
    states: dict[str, dict[str, CutState]]
    values: dict[str, Any]
    same_ranks: bool


def load_step(
    storage: Storage, attempt: Attempt, target: Target, *, strict: bool = True
) -> LoadedStep:
    """Read what ``target`` needs of a complete attempt.

    Args:
        storage: of the calling rank.
        attempt: a complete one.
        target: what the rank holds.
        strict: whether names that only one side has are errors.

    Raises:
        CheckpointError: with every problem found.
    """
    marker = read_marker(storage, attempt)
    same_size = marker.world_size == target.metadata.world_size
    own = target.metadata.rank if same_size else 0
    files = _open(storage, attempt, marker, own)
    shards = files.shards()
    plan = make_plan(shards[own].metadata, shards[own].state_dict)
    _check(plan, shards if isinstance(files, TorchRankFiles) else [shards[own]])
    saved, found = Saved(plan, shards, own), Cut()
    cut_model(saved, target, found, strict=strict)
    if target.groups is not None:
        cut_optimizer(saved, target, target.groups, found, strict=strict)
    if found.problems:
        raise CheckpointError([f"{storage.where}/{attempt.folder}: {p}" for p in found.problems])
    parts = shards[own].metadata.get("tensor_parts", 1)
    same_ranks = same_size and parts == target.metadata.tensor_parts
    threads = 1 if isinstance(storage, LocalStorage) else REMOTE_REQUESTS
    return _read(found, typed(files.values(own), dict, "values"), threads, same_ranks)


def _open(
    storage: Storage, attempt: Attempt, marker: Marker, own: int
) -> RankFiles | TorchRankFiles:
    suffix = next(iter(marker.files), "").rpartition(".")[2]
    names = [rank_file_name(rank, marker.world_size, suffix) for rank in range(marker.world_size)]
    if suffix not in SUFFIXES or set(names) != set(marker.files):
        raise CheckpointError(
            f"{storage.where}/{attempt.folder}: the marker lists "
            f"{', '.join(marker.files) or 'no files'}; expected one for each of "
            f"{marker.world_size} ranks"
        )
    sizes = {attempt.file(name): marker.files[name] for name in names}
    if suffix == "pth":
        return TorchRankFiles(storage, sizes)
    return RankFiles(storage, sizes, first=own)


def _check(plan: Plan, shards: Iterable[Shard]) -> None:
    """That the shards have the tensors that the plan speaks of; nothing of them is read."""
    problems = [
        f"{shard.source}: {problem}" for shard in shards for problem in _shard_problems(plan, shard)
    ]
    if problems:
        raise CheckpointError(problems)


def _shard_problems(plan: Plan, shard: Shard) -> Iterator[str]:
    specs = {key: TensorSpec(p.dtype, p.shard_shape) for key, p in plan.pieces.items()}
    for key, expected in specs.items():
        source = shard.state_dict.get(key)
        if not isinstance(source, TensorSource) or source.spec != expected:
            yield f"{key} is {getattr(source, 'spec', source)}, expected {expected}"
    if plan.optimizer is None:
        return
    for key in (*plan.optimizer.states, *(k for g in plan.optimizer.groups for k in g.params)):
        if key not in specs and key not in plan.whole:
            yield f"the optimizer has {key}, which the model has not"
    for key, state in plan.optimizer.states.items():
        for name in (*state.sharded, *state.whole):
            source = shard.optimizer.get(state_name(key, name))
            shape = specs[key].shape if name in state.sharded else None
            if source is None or shape not in (None, source.shape):
                found = "missing" if source is None else f"of shape {source.shape}"
                yield f"optimizer state {name} of {key} is {found}"


# ---------------------------------------------------------------- reading


def _read(found: Cut, values: dict[str, Any], threads: int, same_ranks: bool) -> LoadedStep:
    states = [
        (key, name, state) for key, each in found.states.items() for name, state in each.items()
    ]
    wanted = [(f"model {key}", source) for key, source in found.model.items()]
    wanted += [
        (f"optimizer state {name} of {key}", state.value)
        for key, name, state in states
        if isinstance(state.value, TensorSource)
    ]
    with ThreadPoolExecutor(threads) as pool:
        tensors = dict(zip([what for what, _ in wanted], pool.map(_load, wanted), strict=True))
    loaded: dict[str, dict[str, CutState]] = {key: {} for key in found.states}
    for key, name, state in states:
        value = tensors.get(f"optimizer state {name} of {key}", state.value)
        loaded[key][name] = replace(state, value=value)
    model = {key: tensors[f"model {key}"] for key in found.model}
    return LoadedStep(model, tuple(found.groups), loaded, values, same_ranks)


def _load(wanted: tuple[str, TensorSource]) -> Tensor:
    what, source = wanted
    tensor = source.load()
    if source.fingerprint not in (None, fingerprint(bytes_of(tensor))):
        raise CheckpointError(
            f"{what} is damaged: its fingerprint is {fingerprint(bytes_of(tensor))}, but was "
            f"{source.fingerprint} when it was saved. Load an earlier step, or a copy of this one"
        )
    return tensor
