"""What one rank of a new job takes from the files of an old one. Reads next to nothing.

Words: the *saved* side is the old job's files, by the names that parameters had before they were
wrapped; the *target* is the new rank: its records, its whole tensors, its optimizer's groups. To
*cut* is to say which elements of which saved tensors make up one of the target's.
Always true: a tensor cut here has exactly the elements that merging the files and slicing the
result would give, and its source reads no others; what cannot be had is reported, all at once.
Number of ranks, units, flattening, rows and sharding groups may all differ between the two sides.
How full tensors come out of shards is ``full_tensors``', where a shard begins ``layout``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from xla_fsdp.checkpoint.byte_source import ByteSource
from xla_fsdp.checkpoint.format import MemberRecord, ParamRecord, ShardMetadata, state_name
from xla_fsdp.checkpoint.full_tensors import Plan, joined_members
from xla_fsdp.checkpoint.optimizer_format import GroupRecord, StateRecord
from xla_fsdp.checkpoint.safetensors_file import TensorSpec
from xla_fsdp.checkpoint.shard_files import Shard
from xla_fsdp.checkpoint.tensor_source import Joined, TensorSource, Zeros
from xla_fsdp.checkpoint.validate import dtype_named
from xla_fsdp.layout import offsets

SHOWN = 5


@dataclass(frozen=True)
class Target:
    """What a rank of the new job holds.

    Args:
        metadata: of its model.
        whole: name to shape of every other tensor in its state dict.
        groups: keys of the parameters in each of the optimizer's groups; None without optimizer.
    """

    metadata: ShardMetadata
    whole: Mapping[str, tuple[int, ...]]
    groups: Sequence[Sequence[str]] | None = None


class Kind(Enum):
    """What an optimizer state is to the target; see ``optim_state.Place``."""

    SHARD = "shard"
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class CutState:
    """One optimizer state of one key: a source for a tensor, any other value as it is."""

    kind: Kind
    value: Any


@dataclass
class Cut:
    """All that a target takes, and why it cannot have the rest.

    Args:
        model: by key of the target's state dict. Sharded ones are vectors.
        groups: of the optimizer, in the target's order.
        states: by key, then name.
        problems: one line each. With any, the rest is of no use.
    """

    model: dict[str, TensorSource] = field(default_factory=dict)
    groups: list[GroupRecord] = field(default_factory=list)
    states: dict[str, dict[str, CutState]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Saved:
    """The files of all ranks of the old job, by original names.

    Args:
        plan: of the shards.
        shards: of every rank, in rank order; their tensors are not read.
        own: the rank whose whole tensors are taken.
    """

    def __init__(self, plan: Plan, shards: Sequence[Shard], own: int) -> None:
        self.plan = plan
        self.rank = own
        self.own = shards[own]
        self._shards = shards
        self.key_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for key, piece in plan.pieces.items():
            for member in piece.members:
                self.key_of[member.name], self.shapes[member.name] = key, member.shape
        for key, name in plan.whole.items():
            if isinstance(value := self.own.state_dict[key], TensorSource):
                self.key_of[name], self.shapes[name] = key, value.shape
        # Joined when they are asked for: a full tensor is as many parts as there are ranks.
        self._full: dict[str, dict[str, TensorSource]] = {}
        self._states: dict[str, dict[str, dict[str, TensorSource]]] = {}

    def full(self, name: str) -> TensorSource:
        """The tensor saved as ``name``."""
        key = self.key_of[name]
        if key not in self.plan.pieces:
            return self.own.state_dict[key]
        if key not in self._full:
            sources = [shard.state_dict[key] for shard in self._shards]
            self._full[key] = dict(joined_members(self.plan.pieces[key], sources))
        return self._full[key][name]

    def resolve(self, name: str) -> str:
        """The name under which the tensor ``name`` is saved; other tied names are aliases."""
        return name if name in self.key_of else self.plan.ties.get(name, name)

    def same_shard(self, record: ParamRecord, target: ShardMetadata) -> str | None:
        """The key under which ``own`` holds the very shard that the target's rank has of
        ``record``; None if it was cut differently."""
        key = self.key_of.get(self.resolve(record.members[0].name))
        piece = self.plan.pieces.get(key or "")
        if piece is None or (self.plan.world_size, self.rank) != (target.world_size, target.rank):
            return None
        shapes = [member.shape for member in record.members]
        names = [self.resolve(member.name) for member in record.members]
        same_members = names == [m.name for m in piece.members] and shapes == [
            m.shape for m in piece.members
        ]
        same_length = math.prod(piece.shard_shape) == record.layout(target.world_size).shard_numel
        return key if same_members and same_length else None

    def record(self, key: str) -> StateRecord | None:
        """What is saved of the optimizer under a key."""
        return None if self.plan.optimizer is None else self.plan.optimizer.states.get(key)

    def cut_states(self, name: str) -> dict[str, TensorSource]:
        """The optimizer states of a parameter that have its shape, in full."""
        key = self.key_of[name]
        if key not in self._states:
            self._states[key] = dict(self._joined_states(key))
        return {state: by_name[name] for state, by_name in self._states[key].items()}

    def _joined_states(self, key: str) -> Iterator[tuple[str, dict[str, TensorSource]]]:
        record = self.record(key)
        for state in record.sharded if record else ():
            sources = [shard.optimizer[state_name(key, state)] for shard in self._shards]
            yield state, dict(joined_members(self.plan.pieces[key], sources))
        if record and key in self.plan.whole:
            name = self.plan.whole[key]
            for state in record.whole:
                source = self.own.optimizer[state_name(key, state)]
                if source.shape == self.shapes[name] and source.shape not in ((), (1,)):
                    yield state, {name: source}


def cut(saved: Saved, target: Target, *, strict: bool = True) -> Cut:
    """What ``target`` takes from ``saved``.

    Args:
        saved: the old job's files.
        target: a rank of the new job.
        strict: whether names that only one side has are problems.
    """
    result = Cut()
    _cut_model(saved, target, result, strict)
    if target.groups is not None:
        if saved.plan.optimizer is None:
            result.problems.append("the checkpoint holds no optimizer state; load without one")
        else:
            _OptimizerCutter(saved, target, result, strict).run(target.groups)
    return result


def slice_of(
    record: ParamRecord, sources: Sequence[TensorSource | None], rank: int, world_size: int
) -> TensorSource:
    """A rank's shard, as a vector with zeros as padding.

    Args:
        record: the entry that the shard is of.
        sources: full tensor of each member, in order and of one dtype; None for zeros. At least
            one is not None.
        rank: whose shard.
        world_size: number of ranks.
    """
    layout = record.layout(world_size)
    wanted = layout.slice_for(rank)
    dtype = next(source.dtype for source in sources if source is not None)
    numels = [member.numel for member in record.members]
    parts: list[ByteSource] = []
    for source, start, numel in zip(sources, offsets(numels), numels, strict=True):
        low, high = max(wanted.start - start, 0), min(wanted.stop - start, numel)
        if low < high and source is not None:
            parts.append(source.elements(low, high))
        elif low < high:
            parts.append(Zeros((high - low) * dtype.itemsize))
    parts.append(Zeros((layout.shard_numel - wanted.stop + wanted.start) * dtype.itemsize))
    return TensorSource(TensorSpec(dtype, (layout.shard_numel,)), Joined(parts))


# ---------------------------------------------------------------- model


def _cut_model(saved: Saved, target: Target, result: Cut, strict: bool) -> None:
    used: set[str] = set()
    metadata = target.metadata
    for record in metadata.params:
        names = _names(saved, record.key, record.members, used, result, strict)
        if not names:
            continue
        if old := saved.same_shard(record, metadata):
            result.model[record.key] = saved.own.state_dict[old]
            continue
        dtype = dtype_named(record.dtype)
        full = [saved.full(name).cast(dtype) for name in names]
        result.model[record.key] = slice_of(record, full, metadata.rank, metadata.world_size)
    for name, shape in target.whole.items():
        for found in _names(saved, name, (MemberRecord(name, shape),), used, result, strict):
            result.model[name] = saved.full(found)
    if strict:
        result.problems += [
            f"{name} is in the checkpoint, but not in the model"
            for name in saved.key_of
            if name not in used
        ]


def _names(
    saved: Saved,
    key: str,
    members: Sequence[MemberRecord],
    used: set[str],
    result: Cut,
    strict: bool,
) -> list[str]:
    """Under which names these members are saved; [] if not all can be had."""
    found, missing = [], []
    for member in members:
        name = saved.resolve(member.name)
        shape = saved.shapes.get(name)
        if shape is None:
            missing.append(member.name)
            continue
        used.add(name)
        if shape == member.shape:
            found.append(name)
        else:
            result.problems.append(
                f"{member.name} has shape {shape} in the checkpoint, but {member.shape} in the "
                f"model"
            )
    if strict or found:  # a part of a flat parameter cannot be left as it is
        part = f" (a part of {key})" if len(members) > 1 else ""
        result.problems += [
            f"{name}{part} is in the model, but not in the checkpoint" for name in missing
        ]
    return found if len(found) == len(members) else []


# ---------------------------------------------------------------- optimizer


class _OptimizerCutter:
    """Cuts optimizer state for one target."""

    def __init__(self, saved: Saved, target: Target, result: Cut, strict: bool) -> None:
        self._saved = saved
        self._metadata = target.metadata
        self._records = {record.key: record for record in target.metadata.params}
        self._result = result
        self._strict = strict
        assert saved.plan.optimizer is not None
        self._old_groups = saved.plan.optimizer.groups
        self._group_of = {
            name: index
            for index, group in enumerate(self._old_groups)
            for key in group.params
            for name in saved.plan.names_of(key)
        }

    def run(self, groups: Sequence[Sequence[str]]) -> None:
        """Fill groups and states of the result."""
        used: set[str] = set()
        for index, keys in enumerate(groups):
            names = [name for key in keys for name in self._names(key)]
            used.update(names)
            self._result.groups.append(GroupRecord(tuple(keys), self._options(index, names)))
            for key in keys:
                if key in self._result.model:  # else it has been reported, or is passed over
                    self._cut_key(key)
        if self._strict:
            self._result.problems += [
                f"the checkpoint has optimizer state of {name}, which is in no group of the "
                f"optimizer"
                for name in self._group_of
                if name not in used and self._saved.record(self._saved.key_of[name])
            ]

    def _names(self, key: str) -> list[str]:
        """Under which names the members of a target's key are saved."""
        record = self._records.get(key)
        members = [member.name for member in record.members] if record else [key]
        return [self._saved.resolve(name) for name in members]

    def _options(self, index: int, names: Sequence[str]) -> dict[str, Any]:
        """Hyperparameters of a group: those that all its parameters had."""
        if self._strict:
            self._result.problems += [
                f"{name} is in group {index} of the optimizer, but in none of the checkpoint's"
                for name in names
                if name not in self._group_of
            ]
        by_group: dict[int, str] = {}
        for name in names:
            if name in self._group_of:
                by_group.setdefault(self._group_of[name], name)
        found = [self._old_groups[each].options for each in by_group]
        if not found:
            return {}
        if any(options != found[0] for options in found):
            self._result.problems.append(
                f"group {index} of the optimizer joins parameters of several groups of the "
                f"checkpoint with different settings: {_listed(by_group.values())}. Create the "
                f"optimizer with the same groups (flatten_parameters joins parameters, too)"
            )
        return found[0]

    def _cut_key(self, key: str) -> None:
        names = self._names(key)
        old_keys = list(dict.fromkeys(self._saved.key_of[name] for name in names))
        if not any(self._saved.record(old) for old in old_keys):
            return
        states = dict(self._cut_sharded(key, names))
        for old in old_keys:
            for state, value in self._whole_states(key, old):
                self._agree(key, state, value, states)
        self._result.states[key] = states

    def _cut_sharded(self, key: str, names: Sequence[str]) -> Iterator[tuple[str, CutState]]:
        record, saved = self._records.get(key), self._saved
        old = None if record is None else saved.same_shard(record, self._metadata)
        state_record = None if old is None else saved.record(old)
        if old is not None and state_record is not None:
            for state in state_record.sharded:
                yield state, CutState(Kind.SHARD, saved.own.optimizer[state_name(old, state)])
            return
        full = [saved.cut_states(name) for name in names]
        for state in dict.fromkeys(state for states in full for state in states):
            sources = [states.get(state) for states in full]
            if record is None:
                yield state, CutState(Kind.DEVICE, sources[0])
            else:
                yield state, CutState(Kind.SHARD, self._joined(record, sources))

    def _joined(self, record: ParamRecord, sources: Sequence[TensorSource | None]) -> TensorSource:
        dtype = next(source.dtype for source in sources if source is not None)
        alike = [source and source.cast(dtype) for source in sources]
        return slice_of(record, alike, self._metadata.rank, self._metadata.world_size)

    def _whole_states(self, key: str, old: str) -> Iterator[tuple[str, CutState]]:
        record = self._saved.record(old)
        if record is None:
            return
        in_full = self._saved.cut_states(self._saved.plan.names_of(old)[0])
        for state in record.whole:
            source = self._saved.own.optimizer[state_name(old, state)]
            if state in in_full:
                continue
            if _is_number(source.spec) or self._fits_as_it_is(key, old):
                yield state, CutState(Kind.HOST if state in record.host else Kind.DEVICE, source)
            else:
                self._result.problems.append(
                    f"optimizer state {state} of {old} has shape {source.shape}, neither that of "
                    f"the parameter nor one number, so it cannot be cut anew. Load it with the "
                    f"wrapping and the {self._saved.plan.world_size} ranks that it was saved with, "
                    f"or load without optimizer"
                )
        for state, value in record.values.items():
            yield state, CutState(Kind.HOST, value)

    def _fits_as_it_is(self, key: str, old: str) -> bool:
        record = self._records.get(key)
        if record is None:
            return old in self._saved.plan.whole
        return self._saved.same_shard(record, self._metadata) == old

    def _agree(self, key: str, state: str, new: CutState, states: dict[str, CutState]) -> None:
        """Add a value that all parameters joined in ``key`` must have in common."""
        known = states.setdefault(state, new)
        if known is new or _equal(known.value, new.value):
            return
        problem = (
            f"{key} joins parameters whose optimizer state {state} differs. Load with the wrapping "
            f"that was used for saving"
        )
        if problem not in self._result.problems:
            self._result.problems.append(problem)


def _is_number(spec: TensorSpec) -> bool:
    """One number, or the empty tensor that torch_xla's optimizers keep for what they do not use."""
    return spec.shape in ((), (0,), (1,))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, TensorSource) and isinstance(second, TensorSource):
        return first.spec == second.spec and torch.equal(first.load(), second.load())
    return type(first) is type(second) and first == second


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more
