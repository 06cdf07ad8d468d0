"""Full tensors out of the shards of all ranks: which elements lie where, without reading any.

Everything that merges, converts or reshards reads the sources made here, by the names of the model
before it was wrapped.

Invariants: names that were the same memory in the shards are the same object here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from xla_fsdp.checkpoint.format import (
    GroupRecord,
    MemberRecord,
    OptimizerRecord,
    OptimizerState,
    StateEntry,
    StateKind,
    state_name,
)
from xla_fsdp.checkpoint.shard_files import Shard
from xla_fsdp.checkpoint.tensor_source import Joined, TensorSource, TensorSpec, global_of
from xla_fsdp.distributed.shard_layout import ShardLayout


@dataclass(frozen=True)
class ShardedEntry:
    """One sharded entry of the state dicts, cut along its dim 0.

    Args:
        members: the parameters joined in it, in order; exactly one if ``row_shape`` is not empty.
        layout: of the elements, or of the rows, over the ranks that share one part of the model.
        row_shape: what follows dim 0 in a shard's shape; ``()`` if it is a vector of elements.
        dtype: of every rank's shard.
        parts: of the model.
    """

    members: tuple[MemberRecord, ...]
    layout: ShardLayout
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int = 1

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape every rank's shard must have."""
        return (self.layout.shard_numel, *self.row_shape)

    @property
    def row_numel(self) -> int:
        """Elements of what the layout counts: one, or those of a row."""
        return math.prod(self.row_shape)


@dataclass(frozen=True)
class MergePlan:
    """How the state dicts of ``world_size`` ranks become one; either file format makes such plans.

    Args:
        world_size: number of ranks.
        sharded: state dict key to what is sharded under it.
        unsharded: state dict key of every other entry (buffers, parameters that are not sharded)
            to its name in the result. These are alike on all ranks, and rank 0's is taken.
        dtypes: state dict key to original dtype, for unsharded tensors that are saved in another.
        ties: alias to canonical name, both as in the result; an alias found in the state dicts
            is in neither ``sharded`` nor ``unsharded``.
        optimizer: what the shards hold of the optimizer, by state dict key.
    """

    world_size: int
    sharded: dict[str, ShardedEntry]
    unsharded: dict[str, str]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None

    def names_of(self, key: str) -> list[str]:
        """Return the full names of what is saved under a key."""
        if key in self.sharded:
            return [member.name for member in self.sharded[key].members]
        return [self.unsharded[key]]


@dataclass(frozen=True)
class FullCheckpoint:
    """A model and its optimizer as before sharding.

    Args:
        model: a source for every tensor, any other value as it is; in the order of rank 0's state
            dict, aliases last.
        ties: alias to canonical name.
        optimizer: by names of the model; None if the shards hold none.
    """

    model: dict[str, Any]
    ties: dict[str, str]
    optimizer: OptimizerState | None


def full_checkpoint(plan: MergePlan, shards: Sequence[Shard]) -> FullCheckpoint:
    """Return the full model and optimizer.

    Args:
        plan: made for these shards, which were checked against it.
        shards: of every rank, in rank order.
    """
    return FullCheckpoint(
        model=_full_model(plan, [shard.state_dict for shard in shards]),
        ties=dict(plan.ties),
        optimizer=None if plan.optimizer is None else _full_optimizer(plan, plan.optimizer, shards),
    )


def full_members(
    entry: ShardedEntry, shards: Sequence[TensorSource], once: Once | None = None
) -> Iterator[tuple[str, TensorSource]]:
    """Yield name and full tensor of every member of an entry.

    Args:
        entry: which.
        shards: of all ranks, of the entry's shape.
        once: to return the same source again for the same memory.
    """
    if entry.row_shape:
        starts, lengths = [0], [entry.layout.numel]
    else:
        lengths = [member.local_numel(entry.parts) for member in entry.members]
        starts = list(accumulate(lengths, initial=0))[:-1]
    for member, start, length in zip(entry.members, starts, lengths, strict=True):

        def join(member: MemberRecord = member, start: int = start, n: int = length) -> Any:
            return global_of(_parts(entry, member, shards, start, start + n), member)

        yield member.name, once.get(shards, (member.shape, start), join) if once else join()


def _parts(
    entry: ShardedEntry, member: MemberRecord, shards: Sequence[TensorSource], start: int, stop: int
) -> list[TensorSource]:
    """Return what each part of the model has of a member; if all have it, the first part's."""
    parts, size = entry.parts if member.tensor_dim is not None else 1, entry.layout.num_shards
    spec = TensorSpec(shards[0].dtype, member.local_shape(entry.parts))
    of_parts = [shards[part * size : (part + 1) * size] for part in range(parts)]
    return [TensorSource(spec, Joined(_ranges(entry, own, start, stop))) for own in of_parts]


def _ranges(
    entry: ShardedEntry, shards: Sequence[TensorSource], start: int, stop: int
) -> Iterator[Any]:
    """Yield where elements (or rows) ``start`` to ``stop`` of the full tensor are."""
    shard_numel = max(entry.layout.shard_numel, 1)
    row = entry.row_numel
    for rank in range(start // shard_numel, -(-stop // shard_numel)):
        held = entry.layout.slice_for(rank)
        low, high = max(start, held.start), min(stop, held.stop)
        yield shards[rank].elements((low - held.start) * row, (high - held.start) * row)


def _full_model(plan: MergePlan, state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    full: dict[str, Any] = {}
    once = Once()
    for key, value in state_dicts[0].items():
        if key in plan.sharded:
            full.update(full_members(plan.sharded[key], [s[key] for s in state_dicts], once))
        elif key in plan.unsharded:
            full[plan.unsharded[key]] = _unsharded(value, plan.dtypes.get(key), once)
    for alias, canonical in plan.ties.items():
        full[alias] = full[canonical]
    return full


def _unsharded(value: Any, dtype: torch.dtype | None, once: Once) -> Any:
    if not isinstance(value, TensorSource):
        return value
    return once.get([value], dtype, lambda: value.cast(dtype or value.dtype))


class Once:
    """Returns the same source again for the same memory, so that tied names stay tied."""

    def __init__(self) -> None:
        self._results: dict[Hashable, TensorSource] = {}

    def get(
        self, sources: Sequence[TensorSource], what: Hashable, make: Callable[[], TensorSource]
    ) -> TensorSource:
        """Return ``make()``, or what it gave before for these sources and the same ``what``."""
        identities = tuple(source.identity for source in sources)
        if None in identities:
            return make()
        key = (what, identities)
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]


def _full_optimizer(
    plan: MergePlan, record: OptimizerRecord, shards: Sequence[Shard]
) -> OptimizerState:
    states: dict[str, dict[str, StateEntry]] = {}
    for key, state in record.states.items():
        by_name: dict[str, dict[str, StateEntry]] = {name: {} for name in plan.names_of(key)}
        for what in state.sharded:
            sources = [shard.optimizer[state_name(key, what)] for shard in shards]
            for name, source in full_members(plan.sharded[key], sources):
                by_name[name][what] = StateEntry(StateKind.SHARD, source)
        for what, entry in shards[0].states(key, state).items():
            if entry.kind is not StateKind.SHARD:
                for own in by_name.values():
                    own[what] = entry
        states |= by_name
    groups = tuple(
        GroupRecord(tuple(n for key in group.params for n in plan.names_of(key)), group.options)
        for group in record.groups
    )
    return OptimizerState(groups, states)
