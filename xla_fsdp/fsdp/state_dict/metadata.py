"""Describe a sharded model for the files of shards.

Invariants: every name that a parameter had before wrapping is in the description once, as a member
or as an alias, also where units share a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from xla_fsdp.checkpoint.format import MemberRecord, ParamRecord, ShardMetadata
from xla_fsdp.distributed.groups import Communication
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.named_params import NamedShard
from xla_fsdp.fsdp.engine.param import OriginalParam


@dataclass(frozen=True)
class SharingRanks:
    """The ranks that share a model, the parts of tensor parallelism one after the other.

    Args:
        rank: of the caller among them.
        count: number of them.
        groups: all such sets of ranks, if there are several.
        parts: number of ranks along a tensor-parallel axis.
    """

    rank: int
    count: int
    groups: Sequence[Sequence[int]] | None
    parts: int = 1


def sharing_ranks(shards: Sequence[NamedShard], communication: Communication) -> SharingRanks:
    """Return the ranks that share a model.

    Args:
        shards: of the whole model.
        communication: of its outermost unit.

    Raises:
        ValueError: if tensor-parallel parameters are sharded over groups that are of no mesh, or
            cut along several axes.
    """
    collectives = communication.shards
    placements = [m.placement for shard in shards for m in shard.param.members]
    meshes = [each.mesh for each in placements if each is not None and each.mesh.size() > 1]
    if not meshes:
        return SharingRanks(collectives.rank, collectives.num_shards, communication.groups)
    _refuse_several(meshes)
    mesh, tensor = shards[0].group.mesh, meshes[0]
    if mesh.layout != tensor.layout:
        raise ValueError(
            "tensor-parallel parameters are sharded over ranks that are not of the same mesh; give "
            "FSDP an axis of the mesh that parallelize_module was given, as in mesh=mesh['shard']"
        )
    joint = Mesh((*tensor.axes, mesh.axes[-1]), mesh.layout)
    groups = joint.groups()
    rank = joint.place(ops.rank())
    return SharingRanks(rank, joint.size(), groups if len(groups) > 1 else None, tensor.size())


def _refuse_several(meshes: Sequence[Mesh]) -> None:
    several = {repr(mesh.groups()): mesh.axis_names[0] for mesh in meshes}
    if len(several) > 1:
        found = ", ".join(f"{name!r} {groups}" for groups, name in several.items())
        raise ValueError(
            f"files of shards are of one tensor-parallel axis, but parameters were parallelized "
            f"over several: {found}. Save xla_fsdp.full_state_dict(model) and optim_state_dict"
        )


def describe(
    shards: Sequence[NamedShard],
    cast_buffers: Mapping[str, torch.dtype],
    ranks: SharingRanks,
) -> ShardMetadata:
    """Return the metadata of one rank's ``shards``.

    Args:
        shards: of the whole model.
        cast_buffers: original dtypes of buffers, by name.
        ranks: those that share the model.
    """
    _refuse_other_dims(shards)
    records: dict[object, ParamRecord] = {}  # by slots: a tied parameter is recorded once
    ties: dict[str, str] = {}
    for shard in shards:
        record = records.setdefault(shard.param.slots, _record(shard))
        ties.update(_ties(shard, record))
    buffers = {name: _dtype_name(dtype) for name, dtype in cast_buffers.items()}
    return ShardMetadata(
        ranks.rank,
        ranks.count,
        tuple(records.values()),
        ties,
        buffers,
        groups=None if ranks.groups is None else tuple(tuple(group) for group in ranks.groups),
        tensor_parts=ranks.parts,
    )


def refuse_other_groups(units: Sequence[tuple[str, Communication]]) -> None:
    """Raise ValueError unless all units share parameters as the first, the outermost one, does.

    Args:
        units: names, and who shares the parameters.
    """
    # One set of files says once which slices its ranks hold.
    first = units[0][1]
    others = [f"{name} ({_sharing(each)})" for name, each in units if _differs(each, first)]
    if others:
        raise ValueError(
            f"files of shards are of one mesh, {_sharing(first)} for the outermost unit, but other "
            f"units have other meshes: {', '.join(others)}. Save xla_fsdp.full_state_dict(model) "
            f"and optim_state_dict"
        )


def _differs(a: Communication, b: Communication) -> bool:
    return a.groups != b.groups or _sharing(a) != _sharing(b)


def _sharing(by: Communication) -> str:
    return f"{by.shards.num_shards} shards, {by.replicas.num_shards} replicas"


def _refuse_other_dims(shards: Sequence[NamedShard]) -> None:
    others = [f"{s.key} (along dim {s.param.packing.dim})" for s in shards if s.param.packing.dim]
    if others:
        raise ValueError(
            f"files of shards hold slices along dim 0, but shard_placement_fn has others cut: "
            f"{', '.join(others)}. Save xla_fsdp.full_state_dict(model) and optim_state_dict"
        )


def _record(shard: NamedShard) -> ParamRecord:
    param = shard.param
    return ParamRecord(
        key=shard.key,
        dtype=_dtype_name(param.leaf.dtype),
        multiple=param.packing.layout.multiple,
        members=tuple(
            MemberRecord(name, tuple(member.whole_shape), _tensor_dim(member))
            for name, member in zip(shard.names, param.members, strict=True)
        ),
        by_rows=param.by_rows,
    )


def _tensor_dim(member: OriginalParam) -> int | None:
    return None if member.placement is None else member.placement.dim


def _ties(shard: NamedShard, record: ParamRecord) -> dict[str, str]:
    """Return the other names of the members, to those in the record."""
    return {
        name: canonical.name
        for member, canonical in zip(shard.param.members, record.members, strict=True)
        for name in shard.names_of(member)
        if name != canonical.name
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
