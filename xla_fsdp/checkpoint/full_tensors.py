"""Shards of all ranks in, full tensors out: what lies where, without reading any of it.

Words: a *plan* is what both file formats are translated into; a *piece* is one sharded entry of
the state dict, cut along its dim 0 (the only dim, unless parameters were sharded by rows); *whole*
entries (buffers, parameters that are not sharded) are the same kind of tensor on every rank, and
rank 0's is taken. A *full* model or optimizer has the names of the model before it was wrapped.
Always true: this is the one merge; everything that reads, writes or reshards full tensors reads
the sources made here. Names that were the same memory in the shards are the same object here.
That shards fit the plan is checked by ``checks``; where elements lie is decided by ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_fsdp.checkpoint.format import MemberRecord, state_name
from xla_fsdp.checkpoint.optimizer_format import GroupRecord, OptimizerRecord
from xla_fsdp.checkpoint.safetensors_file import TensorSpec
from xla_fsdp.checkpoint.shard_files import Shard
from xla_fsdp.checkpoint.tensor_parts import whole_of
from xla_fsdp.checkpoint.tensor_source import Joined, TensorSource
from xla_fsdp.distributed.shard_layout import ShardLayout, offsets


@dataclass(frozen=True)
class Piece:
    """One sharded entry of the state dicts.

    Args:
        members: the parameters joined in it, in order; exactly one if ``row_shape`` is not empty.
        layout: of the elements, or of the rows, over the ranks.
        row_shape: what follows dim 0 in a shard's shape; ``()`` if it is a vector of elements.
        dtype: of every rank's shard.
        parts: of the model; the layout is that of one part, over the ranks that share it.
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
        return TensorSpec(torch.uint8, self.row_shape).nbytes


@dataclass(frozen=True)
class Plan:
    """How the state dicts of ``world_size`` ranks become one.

    Args:
        pieces: state dict key to what is sharded under it.
        whole: state dict key of every other entry to its name in the result.
        dtypes: state dict key to original dtype, for whole tensors that are saved in another.
        ties: alias to canonical name, both as in the result; an alias found in the state dicts
            is in neither ``pieces`` nor ``whole``.
        optimizer: what the shards hold of the optimizer, by state dict key.
    """

    world_size: int
    pieces: dict[str, Piece]
    whole: dict[str, str]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None

    def names_of(self, key: str) -> list[str]:
        """The full names of what is saved under a key."""
        if key in self.pieces:
            return [member.name for member in self.pieces[key].members]
        return [self.whole[key]]


@dataclass(frozen=True)
class FullOptimizer:
    """Optimizer state by full name: tensors as sources, other values as they are."""

    groups: tuple[GroupRecord, ...]
    states: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class FullCheckpoint:
    """A model as it was before sharding.

    Args:
        model: a source for every tensor, any other value as it is; in the order of rank 0's state
            dict, aliases last.
        ties: alias to canonical name.
        optimizer: None if the shards hold none.
    """

    model: dict[str, Any]
    ties: dict[str, str]
    optimizer: FullOptimizer | None


def full_checkpoint(plan: Plan, shards: Sequence[Shard]) -> FullCheckpoint:
    """The full model and optimizer.

    Args:
        plan: made for these shards, which were checked against it.
        shards: of every rank, in rank order.
    """
    return FullCheckpoint(
        model=_full_model(plan, [shard.state_dict for shard in shards]),
        ties=dict(plan.ties),
        optimizer=None if plan.optimizer is None else _full_optimizer(plan, plan.optimizer, shards),
    )


def _full_model(plan: Plan, state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    full: dict[str, Any] = {}
    once = _Once()
    for key, value in state_dicts[0].items():
        if key in plan.pieces:
            full.update(joined_members(plan.pieces[key], [s[key] for s in state_dicts], once))
        elif key in plan.whole:
            full[plan.whole[key]] = _whole(value, plan.dtypes.get(key), once)
    for alias, canonical in plan.ties.items():
        full[alias] = full[canonical]
    return full


def _whole(value: Any, dtype: torch.dtype | None, once: _Once) -> Any:
    if not isinstance(value, TensorSource):
        return value
    return once.get([value], dtype, lambda: value.cast(dtype or value.dtype))


# ---------------------------------------------------------------- members of a piece


def joined_members(
    piece: Piece, shards: Sequence[TensorSource], once: _Once | None = None
) -> Iterator[tuple[str, TensorSource]]:
    """Name and full tensor of every member, from all ranks' shards of a piece's shape."""
    if piece.row_shape:
        starts, lengths = [0], [piece.layout.numel]
    else:
        lengths = [member.local_numel(piece.parts) for member in piece.members]
        starts = offsets(lengths)
    for member, start, length in zip(piece.members, starts, lengths, strict=True):

        def join(member: MemberRecord = member, start: int = start, n: int = length) -> Any:
            return whole_of(_local(piece, member, shards, start, start + n), member)

        what = (member.shape, start)
        yield member.name, once.get(shards, what, join) if once else join()


def _local(
    piece: Piece, member: MemberRecord, shards: Sequence[TensorSource], start: int, stop: int
) -> list[TensorSource]:
    """What each part of the model has of a member; of one that all have, the first part's."""
    parts, size = piece.parts if member.tensor_dim is not None else 1, piece.layout.num_shards
    spec = TensorSpec(shards[0].dtype, member.local_shape(piece.parts))
    of_parts = [shards[part * size : (part + 1) * size] for part in range(parts)]
    return [TensorSource(spec, Joined(_parts(piece, own, start, stop))) for own in of_parts]


def _parts(piece: Piece, shards: Sequence[TensorSource], start: int, stop: int) -> Iterator[Any]:
    """Where elements (or rows) ``start`` to ``stop`` of the full tensor are."""
    shard_numel = max(piece.layout.shard_numel, 1)
    row = piece.row_numel
    for rank in range(start // shard_numel, -(-stop // shard_numel)):
        held = piece.layout.slice_for(rank)
        low, high = max(start, held.start), min(stop, held.stop)
        yield shards[rank].elements((low - held.start) * row, (high - held.start) * row)


class _Once:
    """Hands out the same source again for the same memory, so that tied names stay tied."""

    def __init__(self) -> None:
        self._results: dict[Hashable, TensorSource] = {}

    def get(
        self,
        sources: Sequence[TensorSource],
        what: Hashable,
        make: Callable[[], TensorSource],
    ) -> TensorSource:
        """``make()``, or what it gave before for these sources and the same ``what``."""
        identities = tuple(source.identity for source in sources)
        if None in identities:
            return make()
        key = (what, identities)
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]


# ---------------------------------------------------------------- optimizer


def _full_optimizer(plan: Plan, record: OptimizerRecord, shards: Sequence[Shard]) -> FullOptimizer:
    states: dict[str, dict[str, Any]] = {}
    for key, state in record.states.items():
        by_name: dict[str, dict[str, Any]] = {name: {} for name in plan.names_of(key)}
        for what in state.sharded:
            sources = [shard.optimizer[state_name(key, what)] for shard in shards]
            for name, source in joined_members(plan.pieces[key], sources):
                by_name[name][what] = source
        for own in by_name.values():
            own |= {what: shards[0].optimizer[state_name(key, what)] for what in state.whole}
            own |= state.values
        states |= by_name
    groups = tuple(
        GroupRecord(tuple(n for key in group.params for n in plan.names_of(key)), group.options)
        for group in record.groups
    )
    return FullOptimizer(groups, states)
