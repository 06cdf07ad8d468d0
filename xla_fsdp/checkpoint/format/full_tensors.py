"""Assemble full (unsharded, global) tensors from the shards of all ranks, without reading any.

Names are those of the model before it was wrapped.

Invariants: names that share memory in the shards share one ``TensorSource`` object here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from xla_fsdp.checkpoint.files.tensor_source import (
    JoinedShards,
    Part,
    TensorSource,
    TensorSpec,
    global_of,
)
from xla_fsdp.checkpoint.format.alike_files import TensorOfAll
from xla_fsdp.checkpoint.format.records import (
    MemberRecord,
    OptimizerRecord,
    OptimizerState,
    model_name,
    state_name,
)
from xla_fsdp.checkpoint.format.shard_files import Shard, of_all
from xla_fsdp.distributed.shard_layout import ShardLayout


@dataclass(frozen=True)
class ShardedEntry:
    """One sharded entry of the state dicts, sharded along dim 0.

    Args:
        members: the parameters flattened into it, in order; exactly one if ``row_shape`` is not
            empty.
        layout: of elements over the ranks of one tensor-parallel part.
        row_shape: a shard's shape without dim 0; ``()`` if the shard is a vector of elements.
        dtype: of every rank's shard.
        parts: number of tensor-parallel parts of the model.
    """

    members: tuple[MemberRecord, ...]
    layout: ShardLayout
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int = 1

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of every rank's shard."""
        rows = self.layout.shard_numel // max(1, math.prod(self.row_shape))
        return (rows, *self.row_shape)


@dataclass(frozen=True)
class MergePlan:
    """How to merge the state dicts of ``world_size`` ranks, whichever format they are in.

    Args:
        world_size: number of ranks.
        sharded: state dict key to its sharded entry.
        unsharded: state dict key of every other entry (buffers, parameters that are not sharded)
            to its name in the result. These are equal on all ranks, and rank 0's is taken.
        dtypes: state dict key to original dtype, for unsharded tensors saved in another dtype.
        ties: alias to canonical name, both as in the result. Aliases that are keys of the state
            dicts are in neither ``sharded`` nor ``unsharded``.
        optimizer: optimizer state in the shards, by state dict key.
    """

    world_size: int
    sharded: dict[str, ShardedEntry]
    unsharded: dict[str, str]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None

    def names_of(self, key: str) -> list[str]:
        """Return the names in the result of the parameters or buffer under a state dict key."""
        if key in self.sharded:
            return [member.name for member in self.sharded[key].members]
        return [self.unsharded[key]]


@dataclass(frozen=True)
class FullCheckpoint:
    """A model and its optimizer before sharding.

    Args:
        model: by name: sources of tensors, and other values; in the order of rank 0's state dict,
            aliases last.
        ties: alias to canonical name.
        optimizer: by names of the model; None if the shards hold no optimizer state.
    """

    model: dict[str, Any]
    ties: dict[str, str]
    optimizer: OptimizerState | None

    def __str__(self) -> str:
        """Return its size; tied tensors count once."""
        tensors = {id(v): v for v in self.model.values() if isinstance(v, TensorSource)}
        numel = sum(math.prod(tensor.shape) for tensor in tensors.values())
        text = f"{len(tensors)} parameters and buffers, {numel:,} elements"
        if self.optimizer is not None:
            text += f", optimizer state of {len(self.optimizer.states)}"
        return text


def full_checkpoint(plan: MergePlan, shards: Sequence[Shard], own: int = 0) -> FullCheckpoint:
    """Return the full model and optimizer from the checked shards of every rank, in rank order;
    unsharded tensors and values are those of rank ``own``."""
    optimizer = None
    if plan.optimizer is not None:
        optimizer = _full_optimizer(plan, plan.optimizer, shards, shards[own])
    return FullCheckpoint(_full_model(plan, shards, shards[own]), dict(plan.ties), optimizer)


def _full_members(
    entry: ShardedEntry, shards: Sequence[TensorSource], once: Once | None = None
) -> Iterator[tuple[str, TensorSource]]:
    """Yield the name and the full tensor of every parameter of an entry, given its shards in rank
    order; with ``once``, the same object again for the same memory."""
    start = 0
    for member in entry.members:

        def join(member: MemberRecord = member, start: int = start) -> TensorSource:
            return global_of(_parts(entry, member, shards, start), member)

        yield member.name, once.get(shards, (member.shape, start), join) if once else join()
        start += member.local_numel(entry.parts)


def _parts(
    entry: ShardedEntry, member: MemberRecord, shards: Sequence[TensorSource], start: int
) -> list[TensorSource]:
    """Return a parameter's local tensor of each tensor-parallel part; if replicated, the first.
    It is in the shards of a part from element ``start`` on."""
    parts, size = entry.parts if member.tensor_dim is not None else 1, entry.layout.num_shards
    spec = TensorSpec(shards[0].dtype, member.local_shape(entry.parts))
    width = entry.layout.shard_numel * spec.dtype.itemsize
    made = []
    for part in range(parts):
        own = shards[part * size : (part + 1) * size]
        joined = own if isinstance(own, TensorOfAll) else JoinedShards(own, width)
        data = Part(joined, start * spec.dtype.itemsize, spec.nbytes)
        made.append(TensorSource(spec, data))
    return made


def _full_model(plan: MergePlan, shards: Sequence[Shard], own: Shard) -> dict[str, Any]:
    full: dict[str, Any] = {}
    once = Once()
    for key, value in own.state_dict.items():
        if key in plan.sharded:
            sources = of_all(shards, model_name(key))
            full.update(_full_members(plan.sharded[key], sources, once))
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
    """Creates each source once for the same memory, so that tied names share it."""

    def __init__(self) -> None:
        self._results: dict[Hashable, TensorSource] = {}

    def get(
        self, sources: Sequence[TensorSource], variant: Hashable, make: Callable[[], TensorSource]
    ) -> TensorSource:
        """Return ``make()``, or its earlier result for the same memory and ``variant``."""
        identities: Hashable
        if isinstance(sources, TensorOfAll):
            identities = sources.identity
        else:
            # Only until one has none: of files that are not open yet, all have none.
            known = takewhile(lambda each: each is not None, (s.identity for s in sources))
            identities = tuple(known)
            if len(identities) < len(sources):
                return make()
        key = (variant, identities)
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]


def _full_optimizer(
    plan: MergePlan, record: OptimizerRecord, shards: Sequence[Shard], own: Shard
) -> OptimizerState:
    full = {
        (name, state): source
        for key, states in record.states.items()
        for state in states.sharded
        for name, source in _full_members(plan.sharded[key], of_all(shards, state_name(key, state)))
    }
    states = {key: own.states(key, states) for key, states in record.states.items()}
    return OptimizerState(record.groups, states).unsharded(plan.names_of, full)
