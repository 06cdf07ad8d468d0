"""Describe a sharded model in the words of the checkpoint format.

Words: see ``checkpoint.format``. Always true: every name a parameter had before wrapping is in the
description once, as a member or as an alias, also where units share a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from xla_fsdp.checkpoint.format import MemberRecord, ParamRecord, ShardMetadata
from xla_fsdp.names import join_name
from xla_fsdp.sharded_param import ShardedParam


@dataclass(frozen=True)
class UnitContent:
    """What one unit saves: its name in the model, its shards, and its buffers' original dtypes."""

    name: str
    params: Sequence[ShardedParam]
    cast_buffers: Mapping[str, torch.dtype]


def describe(
    units: Sequence[UnitContent],
    rank: int,
    world_size: int,
    groups: Sequence[Sequence[int]] | None = None,
) -> ShardMetadata:
    """The metadata of one rank's shards of all ``units``.

    Args:
        units: of the whole model.
        rank: among those that share the model.
        world_size: how many these are.
        groups: all sharding groups, if there are several.
    """
    records: dict[int, ParamRecord] = {}  # by the shard's id: a tied one is recorded once
    ties: dict[str, str] = {}
    for unit in units:
        for param in unit.params:
            own = _record(unit.name, param)
            record = records.setdefault(id(param.shard), own)
            ties.update(_ties(unit.name, param, record))
    buffers = {
        join_name(unit.name, name): _dtype_name(dtype)
        for unit in units
        for name, dtype in unit.cast_buffers.items()
    }
    return ShardMetadata(
        rank,
        world_size,
        tuple(records.values()),
        ties,
        buffers,
        groups=None if groups is None else tuple(tuple(group) for group in groups),
    )


def _record(unit: str, param: ShardedParam) -> ParamRecord:
    return ParamRecord(
        key=join_name(unit, param.key),
        dtype=_dtype_name(param.shard.dtype),
        multiple=param.layout.multiple,
        members=tuple(
            MemberRecord(join_name(unit, member.names[0]), tuple(member.shape))
            for member in param.members
        ),
        by_rows=param.by_rows,
    )


def _ties(unit: str, param: ShardedParam, record: ParamRecord) -> dict[str, str]:
    """Names of the members other than those in the record that stands for them."""
    return {
        join_name(unit, name): canonical.name
        for member, canonical in zip(param.members, record.members, strict=True)
        for name in member.names
        if join_name(unit, name) != canonical.name
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
