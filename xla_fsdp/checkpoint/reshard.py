"""What one rank of a new job takes from the files of an old one. Reads next to nothing.

Words: the *saved* side is the old job's files, by the names that parameters had before they were
wrapped; the *target* is the new rank: its records, its whole tensors, its optimizer's groups. To
*cut* is to say which elements of which saved tensors make up one of the target's.
Always true: a tensor cut here has exactly the elements that merging the files and slicing the
result would give, and its source reads no others; what cannot be had is reported, all at once.
Number of ranks, tensor-parallel parts, units, flattening, rows and sharding groups may all differ
between the two sides.
How full tensors come out of shards is ``full_tensors``', where a shard begins ``layout``'s; the
optimizer is cut by ``reshard_optimizer``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from xla_fsdp.checkpoint.byte_source import ByteSource
from xla_fsdp.checkpoint.errors import dtype_named
from xla_fsdp.checkpoint.format import MemberRecord, ParamRecord, ShardMetadata, state_name
from xla_fsdp.checkpoint.full_tensors import Plan, joined_members
from xla_fsdp.checkpoint.optimizer_format import GroupRecord, StateRecord
from xla_fsdp.checkpoint.safetensors_file import TensorSpec
from xla_fsdp.checkpoint.shard_files import Shard
from xla_fsdp.checkpoint.tensor_parts import part_of
from xla_fsdp.checkpoint.tensor_source import Joined, TensorSource, Zeros
from xla_fsdp.distributed.shard_layout import offsets


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
        own = [replace(m, name=self.resolve(m.name)) for m in record.members]
        same_members = own == list(piece.members) and piece.parts == target.tensor_parts
        layout = record.layout(target.world_size, target.tensor_parts)
        same_length = math.prod(piece.shard_shape) == layout.shard_numel
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


def slice_of(
    record: ParamRecord,
    sources: Sequence[TensorSource | None],
    rank: int,
    world_size: int,
    parts: int = 1,
) -> TensorSource:
    """A rank's shard, as a vector with zeros as padding.

    Args:
        record: the entry that the shard is of.
        sources: full tensor of each member, in order and of one dtype; None for zeros. At least
            one is not None.
        rank: whose shard.
        world_size: number of ranks, of all parts together.
        parts: that tensor parallelism makes of the model.
    """
    layout = record.layout(world_size, parts)
    part, place = divmod(rank, layout.num_shards)
    wanted = layout.slice_for(place)
    dtype = next(source.dtype for source in sources if source is not None)
    numels = [member.local_numel(parts) for member in record.members]
    pieces: list[ByteSource] = []
    for member, source, start in zip(record.members, sources, offsets(numels), strict=True):
        numel = member.local_numel(parts)
        low, high = max(wanted.start - start, 0), min(wanted.stop - start, numel)
        if low < high and source is not None:
            pieces.append(part_of(source, member, part, parts).elements(low, high))
        elif low < high:
            pieces.append(Zeros((high - low) * dtype.itemsize))
    pieces.append(Zeros((layout.shard_numel - wanted.stop + wanted.start) * dtype.itemsize))
    return TensorSource(TensorSpec(dtype, (layout.shard_numel,)), Joined(pieces))


def cut_model(saved: Saved, target: Target, result: Cut, *, strict: bool) -> None:
    """Fill in the model of ``result``.

    Args:
        saved: the old job's files.
        target: a rank of the new job.
        result: gets the tensors, and a line for each that cannot be had.
        strict: whether names that only one side has are problems.
    """
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
        at = (metadata.rank, metadata.world_size, metadata.tensor_parts)
        result.model[record.key] = slice_of(record, full, *at)
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
