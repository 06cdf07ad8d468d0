"""Shards of all ranks in, full tensors out. No files, no metadata: a plan says what goes where.

Words: a *plan* is what both file formats are translated into; a *piece* is one sharded entry of
the state dict, cut along its dim 0 (the only dim, unless parameters were sharded by rows); *whole*
entries (buffers, parameters that are not sharded) are the same kind of tensor on every rank, and
rank 0's is taken.
Always true: one full parameter is built at a time, straight from the shards; nothing in the result
shares memory with a shard; names that shared memory in the shards share it in the result.
That shards fit the plan is checked by ``checks``; where elements lie is decided by ``layout``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.checkpoint.format import MemberRecord
from xla_fsdp.layout import ShardLayout, offsets


@dataclass(frozen=True)
class Piece:
    """One sharded entry of the state dicts.

    Args:
        members: the parameters joined in it, in order; exactly one if ``row_shape`` is not empty.
        layout: of the elements, or of the rows, over the ranks.
        row_shape: what follows dim 0 in a shard's shape; ``()`` if it is a vector of elements.
        dtype: of every rank's shard.
    """

    members: tuple[MemberRecord, ...]
    layout: ShardLayout
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape every rank's shard must have."""
        return (self.layout.shard_numel, *self.row_shape)


@dataclass(frozen=True)
class Plan:
    """How the state dicts of ``world_size`` ranks become one.

    Args:
        pieces: state dict key to what is sharded under it.
        whole: state dict key of every other entry to its name in the result.
        dtypes: state dict key to original dtype, for whole tensors that are saved in another.
        ties: alias to canonical name, both as in the result; an alias found in the state dicts
            is in neither ``pieces`` nor ``whole``.
    """

    world_size: int
    pieces: dict[str, Piece]
    whole: dict[str, str]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)


def merge(plan: Plan, state_dicts: Sequence[Mapping[str, Any]]) -> OrderedDict[str, Any]:
    """The full state dict, on the CPU, in the order of rank 0's.

    Args:
        plan: made for these state dicts, which were checked against it.
        state_dicts: of every rank, in rank order.
    """
    full: OrderedDict[str, Any] = OrderedDict()
    once = _Once()
    for key, value in state_dicts[0].items():
        if key in plan.pieces:
            shards = [state_dict[key].detach() for state_dict in state_dicts]
            full.update(_joined_members(plan.pieces[key], shards, once))
        elif key in plan.whole:
            full[plan.whole[key]] = _own_copy(value, plan.dtypes.get(key), once)
    for alias, canonical in plan.ties.items():
        full[alias] = full[canonical]
    return full


def _joined_members(
    piece: Piece, shards: Sequence[Tensor], once: _Once
) -> Iterator[tuple[str, Tensor]]:
    if piece.row_shape:
        starts, lengths = [0], [piece.layout.numel]
    else:
        lengths = [member.numel for member in piece.members]
        starts = offsets(lengths)
    for member, start, length in zip(piece.members, starts, lengths, strict=True):

        def join(start: int = start, stop: int = start + length) -> Tensor:
            return _elements(piece, shards, start, stop)

        joined = once.get(shards, (member.shape, start), join)
        yield member.name, joined.view(member.shape)


def _elements(piece: Piece, shards: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Elements (or rows) ``start`` to ``stop`` of the full tensor."""
    full = torch.empty((stop - start, *piece.row_shape), dtype=piece.dtype)
    shard_numel = max(piece.layout.shard_numel, 1)
    for rank in range(start // shard_numel, -(-stop // shard_numel)):
        held = piece.layout.slice_for(rank)
        low, high = max(start, held.start), min(stop, held.stop)
        full[low - start : high - start] = shards[rank][low - held.start : high - held.start]
    return full


def _own_copy(value: Any, dtype: torch.dtype | None, once: _Once) -> Any:
    """A copy on the CPU: the value itself may be a view of a file that is mapped into memory."""
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach()
    return once.get(
        [tensor], dtype, lambda: tensor.to("cpu", dtype=dtype or tensor.dtype, copy=True)
    )


class _Once:
    """Hands out the same result again for the same memory, so that tied names stay tied."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Tensor] = {}

    def get(self, tensors: Sequence[Tensor], what: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """``make()``, or what it gave before for the memory of ``tensors`` and the same ``what``"""
        if any(tensor.device.type != "cpu" or tensor.numel() == 0 for tensor in tensors):
            return make()  # no address to tell it by
        key = (what, *((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors))
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]
