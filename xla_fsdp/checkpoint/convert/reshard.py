"""Plan what one rank of a new job reads from the files of an old job, without reading tensors.

The jobs may differ in the numbers of ranks and tensor-parallel parts, FSDP units, flattening,
sharding by rows, and sharding groups. An optimizer state of its parameter's shape is resharded with
the parameter. A state of one number (a step counter) must be equal for all parameters that are
flattened together. A state of any other shape can only be loaded by a rank with the same shard.

Invariants: a new shard has exactly the elements that one would get by merging all files and slicing
the result, and its source reads no others; all problems are reported together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from xla_fsdp.checkpoint.convert.model_files import Rule
from xla_fsdp.checkpoint.errors import (
    dtype_name,
    dtype_named,
    listed,
)
from xla_fsdp.checkpoint.files.tensor_source import (
    ByteSource,
    Joined,
    TensorSource,
    TensorSpec,
    Zeros,
    part_of,
)
from xla_fsdp.checkpoint.format.plan import MergePlan, full_checkpoint
from xla_fsdp.checkpoint.format.records import (
    UNSHARDED,
    GroupRecord,
    MemberRecord,
    OptimizerState,
    ParamRecord,
    ShardMetadata,
    StateEntry,
    StateKind,
    StateRecord,
    model_name,
)
from xla_fsdp.checkpoint.format.shard_files import Shard


@dataclass(frozen=True)
class LoadTarget:
    """The model and the optimizer of a rank of the new job.

    Args:
        metadata: of the model's shards.
        unsharded: name to shape of every other tensor in the state dict.
        groups: keys of the parameters in each of the optimizer's groups; None to load no optimizer.
    """

    metadata: ShardMetadata
    unsharded: Mapping[str, tuple[int, ...]]
    groups: Sequence[Sequence[str]] | None = None


@dataclass(frozen=True)
class Selection:
    """Which tensors are loaded, and under which names they are saved.

    Args:
        only: whether a parameter or buffer of this name in the model is loaded.
        strict: whether a selected name that is only in the checkpoint or only in the model is an
            error.
        rules: that give names in the checkpoint those in the model.
    """

    only: Callable[[str], bool] = lambda name: True
    strict: bool = True
    rules: tuple[Rule, ...] = ()


EVERYTHING = Selection()


@dataclass
class ReadPlan:
    """The tensors that a target reads, or the reasons why it cannot be loaded.

    Args:
        model: by key of the target's state dict; shards are vectors.
        optimizer: with the target's groups and keys; None if the target has no optimizer.
        ties: bytes that must be equal, as the model has one tensor where the checkpoint has two; by
            the names of these.
        problems: one line each. If there are any, the rest must not be used.
        saved_dtypes: of the tensors in ``model``, as they were saved, by the target's keys.
    """

    model: dict[str, TensorSource] = field(default_factory=dict)
    optimizer: OptimizerState | None = None
    ties: dict[tuple[str, str], tuple[ByteSource, ByteSource]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    saved_dtypes: dict[str, set[torch.dtype]] = field(default_factory=dict)


class SourceCheckpoint:
    """The files of all ranks of the old job, accessed by original names. Unsharded tensors are read
    from rank ``own``, and its shards if the target needs the same."""

    def __init__(self, plan: MergePlan, shards: Sequence[Shard], own: int) -> None:
        self.plan = plan
        self.rank = own
        self.own = shards[own]
        # Not in the original dtypes of buffers: what loads them holds them as they are saved.
        full = full_checkpoint(replace(plan, dtypes={}), shards, own)
        self.optimizer = full.optimizer
        self.key_of: dict[str, str] = {}
        self.tensors: dict[str, TensorSource] = {}
        for key in (*plan.sharded, *plan.unsharded):
            for name in plan.names_of(key):
                if isinstance(value := full.model[name], TensorSource):
                    self.key_of[name], self.tensors[name] = key, value

    def resolve(self, name: str) -> str:
        """Return the canonical name of a tied tensor, under which it is saved; else ``name``."""
        return name if name in self.key_of else self.plan.ties.get(name, name)

    def same_shard(self, record: ParamRecord, target: ShardMetadata) -> str | None:
        """Return the key of rank ``own``'s shard if the target's rank has the same shard of
        ``record``; None if the sharding differs."""
        key = self.key_of.get(self.resolve(record.members[0].name))
        entry = self.plan.sharded.get(key or "")
        if entry is None or (self.plan.world_size, self.rank) != (target.world_size, target.rank):
            return None
        own = [replace(m, name=self.resolve(m.name)) for m in record.members]
        same_members = own == list(entry.members) and entry.parts == record.parts_of(
            target.tensor_parts
        )
        layout = record.layout(target.world_size, target.tensor_parts)
        same_length = entry.layout.shard_numel == layout.shard_numel
        return key if same_members and same_length else None

    def record(self, key: str) -> StateRecord | None:
        """Return the record of the optimizer states saved under a key."""
        return None if self.plan.optimizer is None else self.plan.optimizer.states.get(key)

    def full_states(self, name: str) -> dict[str, TensorSource]:
        """Return the global optimizer states of a parameter that have the parameter's shape."""
        if self.optimizer is None:
            return {}
        is_whole, shape = self.key_of[name] in self.plan.unsharded, self.tensors[name].shape

        def has_its_shape(value: Any) -> bool:
            is_tensor = is_whole and isinstance(value, TensorSource)
            return is_tensor and value.shape == shape and not is_number(value.spec)

        return {
            state: entry.value
            for state, entry in self.optimizer.states.get(name, {}).items()
            if entry.kind is StateKind.SHARD or has_its_shape(entry.value)
        }


def plan_read(source: SourceCheckpoint, target: LoadTarget, selection: Selection) -> ReadPlan:
    """Return the tensors that a rank of the new job reads of ``source``, which has its names."""
    reader = _Reader(source, target, selection)
    reader.read_model()
    if target.groups is not None:
        reader.read_optimizer(target.groups)
    return reader.plan


def shard_of(
    record: ParamRecord,
    sources: Sequence[TensorSource | None],
    rank: int,
    world_size: int,
    parts: int = 1,
) -> TensorSource:
    """Return a rank's shard as a vector, padded with zeros: of the global tensors of each parameter
    of a record, all of one dtype, or None for zeros. ``world_size`` counts the ranks of all
    parts."""
    layout = record.layout(world_size, parts)
    part, local_rank = divmod(rank, layout.num_shards)
    wanted = layout.slice_for(local_rank)
    dtype = next(source.dtype for source in sources if source is not None)
    numels = [member.local_numel(parts) for member in record.members]
    ranges: list[ByteSource] = []
    for member, source, start, numel in zip(
        record.members, sources, accumulate(numels, initial=0), numels, strict=False
    ):
        low, high = max(wanted.start - start, 0), min(wanted.stop - start, numel)
        if low < high and source is not None:
            ranges.append(part_of(source, member, part, parts).elements(low, high))
        elif low < high:
            ranges.append(Zeros((high - low) * dtype.itemsize))
    ranges.append(Zeros((layout.shard_numel - wanted.stop + wanted.start) * dtype.itemsize))
    return TensorSource(TensorSpec(dtype, (layout.shard_numel,)), Joined(ranges))


class _Reader:
    """Collects a ``ReadPlan``."""

    def __init__(self, source: SourceCheckpoint, target: LoadTarget, selection: Selection) -> None:
        self._source, self._target, self._metadata = source, target, target.metadata
        self._only, self._strict = selection.only, selection.strict
        self._records = {record.key: record for record in target.metadata.params}
        self.plan = ReadPlan()
        self._problems = self.plan.problems
        self._used: set[str] = set()

    # ------------------------------------------------------------ the model

    def read_model(self) -> None:
        source, metadata, model = self._source, self._metadata, self.plan.model
        for record in metadata.params:
            names = self._names_of_members(record.key, record.members)
            if not names:
                continue
            self.plan.saved_dtypes[record.key] = {source.tensors[name].dtype for name in names}
            if same := source.same_shard(record, metadata):
                model[record.key] = source.own.content[model_name(same)]
                continue
            dtype = dtype_named(record.dtype)
            full = [source.tensors[name].cast(dtype) for name in names]
            model[record.key] = self._shard_of(record, full)
        for name, shape in self._target.unsharded.items():
            for found in self._names_of_members(name, (MemberRecord(name, shape),)):
                model[name] = source.tensors[found]
                self.plan.saved_dtypes[name] = {model[name].dtype}
        for alias, name in metadata.ties.items():
            if alias in source.key_of and name in self._used and self._only(name):
                self._add_tie(alias, name)
        if self._strict:
            self._problems += [
                f"{name} is in the checkpoint, but not in the model"
                for name in source.key_of
                if name not in self._used and self._only(name)
            ]

    def _add_tie(self, alias: str, name: str) -> None:
        """Have this rank's part of two names' bytes compared: torch saves each name of a tensor."""
        self._used.add(alias)
        first, second = self._source.tensors[name], self._source.tensors[alias]
        rank, size = self._metadata.rank, self._metadata.world_size
        if first.spec != second.spec:
            self._problems.append(
                f"{alias} is tied to {name} in the model, but in the checkpoint it is "
                f"{dtype_name(second.dtype)} of shape {second.shape}, and {name} "
                f"{dtype_name(first.dtype)} of shape {first.shape}"
            )
            return
        numel = math.prod(first.shape)
        low, high = numel * rank // size, numel * (rank + 1) // size
        self.plan.ties[alias, name] = first.elements(low, high), second.elements(low, high)

    def _names_of_members(self, key: str, members: Sequence[MemberRecord]) -> list[str]:
        """Return the names under which these parameters are saved; [] if any is missing or has
        another shape."""
        found, missing = [], []
        selected = [member.name for member in members if self._only(member.name)]
        if selected and len(selected) < len(members):
            others = listed((m.name for m in members if m.name not in selected), len(members))
            self._problems.append(
                f"{selected[0]} is to be loaded, but it is a part of {key}, together with "
                f"{others}; load all of it or nothing"
            )
        if len(selected) < len(members):
            return []
        for member in members:
            name = self._source.resolve(member.name)
            if name not in self._source.tensors:
                missing.append(member.name)
                continue
            self._used.add(name)
            shape = self._source.tensors[name].shape
            if shape == member.shape:
                found.append(name)
            else:
                self._problems.append(
                    f"{member.name} has shape {shape} in the checkpoint, but {member.shape} in the "
                    f"model"
                )
        if self._strict or found:  # a flat parameter must be loaded completely or not at all
            part = f" (a part of {key})" if len(members) > 1 else ""
            self._problems += [
                f"{name}{part} is in the model, but not in the checkpoint" for name in missing
            ]
        return found if len(found) == len(members) else []

    # ------------------------------------------------------------ the optimizer

    def read_optimizer(self, target_groups: Sequence[Sequence[str]]) -> None:
        old = self._source.optimizer
        if old is None:
            self._problems.append("the checkpoint holds no optimizer state; load without one")
            return
        group_of = {name: i for i, group in enumerate(old.groups) for name in group.params}
        used: set[str] = set()
        groups: list[GroupRecord] = []
        states: dict[str, dict[str, StateEntry]] = {}
        for index, keys in enumerate(target_groups):
            names = [name for key in keys for name in self._names(key)]
            used.update(names)
            options = self._options(index, names, group_of, old.groups)
            groups.append(GroupRecord(tuple(keys), options))
            for key in keys:
                if key in self.plan.model:  # otherwise reported already, or ignored if not strict
                    states |= self._states(key)
        if self._strict:
            self._problems += [
                f"the checkpoint has optimizer state of {name}, which is in no group of the "
                f"optimizer"
                for name in group_of
                if name not in used
                and self._only(name)
                and self._source.record(self._source.key_of[name])
            ]
        self.plan.optimizer = OptimizerState(tuple(groups), states)

    def _names(self, key: str) -> list[str]:
        """Return the names under which the parameters of a target's key are saved."""
        record = self._records.get(key)
        members = [member.name for member in record.members] if record else [key]
        return [self._source.resolve(name) for name in members]

    def _options(
        self,
        index: int,
        names: Sequence[str],
        group_of: Mapping[str, int],
        old: Sequence[GroupRecord],
    ) -> dict[str, Any]:
        """Return the hyperparameters that all parameters of a new group had; report if they
        differed."""
        if not names:  # a group without parameters, which its place tells
            return old[index].options if index < len(old) and not old[index].params else {}
        wanted = [name for name in names if self._only(name)]
        if self._strict:
            self._problems += [
                f"{name} is in group {index} of the optimizer, but in none of the checkpoint's"
                for name in wanted
                if name not in group_of
            ]
        by_group: dict[int, str] = {}
        for name in wanted:
            if name in group_of:
                by_group.setdefault(group_of[name], name)
        found = [old[each].options for each in by_group]
        if any(options != found[0] for options in found):
            self._problems.append(
                f"group {index} of the optimizer joins parameters of several groups of the "
                f"checkpoint with different settings: "
                f"{listed(by_group.values(), len(by_group), 5)}. Create the "
                f"optimizer with the same groups (flatten_parameters joins parameters, too)"
            )
        return found[0] if found else {}

    def _states(self, key: str) -> dict[str, dict[str, StateEntry]]:
        """Return ``{key: its states}``; {} if none are saved."""
        names, source = self._names(key), self._source
        records = {
            old: record
            for old in dict.fromkeys(source.key_of[name] for name in names)
            if (record := source.record(old)) is not None
        }
        if not records:
            return {}
        if (same := self._same(key, names)) is not None:
            return {key: source.own.states(same, records[same])}
        states = dict(self._states_cut_anew(key, names))
        for old, record in records.items():
            for state, entry in self._other_states(old, record):
                self._add_common(key, state, entry, states)
        return {key: states}

    def _same(self, key: str, names: Sequence[str]) -> str | None:
        """Return the key in the checkpoint of what this rank takes as it is, if there is one."""
        if (record := self._records.get(key)) is not None:
            return self._source.same_shard(record, self._metadata)
        old = self._source.key_of[names[0]]
        return old if old in self._source.plan.unsharded else None

    def _states_cut_anew(self, key: str, names: Sequence[str]) -> Iterator[tuple[str, StateEntry]]:
        record = self._records.get(key)
        full = [self._source.full_states(name) for name in names]
        for state in dict.fromkeys(state for states in full for state in states):
            # Parameters without state that are now flattened with others get zeros: the state that
            # gradients of zero would have left.
            sources = [states.get(state) for states in full]
            if record is None:
                yield state, StateEntry(StateKind.DEVICE, sources[0])
            else:
                yield state, StateEntry(StateKind.SHARD, self._shard_of(record, sources))

    def _shard_of(
        self, record: ParamRecord, sources: Sequence[TensorSource | None]
    ) -> TensorSource:
        dtype = next(source.dtype for source in sources if source is not None)
        sources = [source and source.cast(dtype) for source in sources]
        own = self._metadata
        return shard_of(record, sources, own.rank, own.world_size, own.tensor_parts)

    def _other_states(self, old: str, record: StateRecord) -> Iterator[tuple[str, StateEntry]]:
        """Yield the states of an old key that do not have its parameter's shape."""
        of_same_shape = self._source.full_states(self._source.plan.names_of(old)[0])
        for state, entry in self._source.own.states(old, record).items():
            if state in of_same_shape:
                continue
            if (
                entry.kind is StateKind.VALUE
                or is_number(entry.value.spec)
                or state.startswith(UNSHARDED)
            ):
                yield state, entry
            else:
                self._problems.append(
                    f"optimizer state {state} of {old} has shape {entry.value.shape}, neither that "
                    f"of the parameter nor one number, so it cannot be cut anew. Load it with the "
                    f"wrapping and the {self._source.plan.world_size} ranks that it was saved "
                    f"with, or load without optimizer"
                )

    def _add_common(
        self, key: str, state: str, new: StateEntry, states: dict[str, StateEntry]
    ) -> None:
        """Add a state to ``states``; report if it differs from another parameter's in ``key``."""
        known = states.setdefault(state, new)
        if known is new or _equal(known.value, new.value):
            return
        problem = (
            f"{key} joins parameters whose optimizer state {state} differs. Load with the wrapping "
            f"that was used for saving"
        )
        if problem not in self._problems:
            self._problems.append(problem)


def is_number(spec: TensorSpec) -> bool:
    """Return whether a tensor of optimizer state is one number of its parameter, or none."""
    # torch_xla's optimizers have empty tensors for the states they do not use.
    return spec.shape in ((), (0,), (1,))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, TensorSource) and isinstance(second, TensorSource):
        return first.spec == second.spec and torch.equal(first.load(), second.load())
    return type(first) is type(second) and first == second
