"""Describe a sharded model by the metadata that is saved with its shards.

Invariants: every name that a parameter had before wrapping is in the metadata once, as the name of
an original or as an alias, also if units share a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from xla_fsdp.checkpoint.errors import dtype_name
from xla_fsdp.checkpoint.format.records import MemberRecord, ParamRecord, ShardMetadata
from xla_fsdp.distributed.collectives import Communication
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.topology import Groups
from xla_fsdp.fsdp.engine.module_state import FSDPModuleBase, named_fsdp_modules, named_shards
from xla_fsdp.fsdp.engine.param_group import NamedShard
from xla_fsdp.state.model import cast_buffers, cut_outside_units, refuse_cut_outside
from xla_fsdp.xla import ops


def describe(model: nn.Module) -> ShardMetadata:
    """Return the metadata of this rank's shards, of the outermost sharded module.

    Raises:
        ValueError: if the model cannot be saved as files of shards.
    """
    refuse_cut_outside(cut_outside_units(model), "files of shards")
    communication = _communication(model)
    shards = list(named_shards(model, remove_duplicate=False))
    rank, count, groups, parts = _sharing_ranks(shards, communication)
    _refuse_other_dims(shards)
    spread = any(shard.param.is_expert for shard in shards)
    records: dict[object, ParamRecord] = {}  # by slots, which units with a tied parameter share
    ties: dict[str, str] = {}
    for shard in shards:
        record = records.setdefault(shard.param.slots, _record(shard, spread))
        ties.update(_ties(shard, record))
    return ShardMetadata(
        rank,
        count,
        tuple(records.values()),
        ties,
        {name: dtype_name(dtype) for name, dtype in cast_buffers(model).items()},
        groups=None if groups is None else tuple(tuple(group) for group in groups),
        tensor_parts=parts,
    )


def _communication(model: nn.Module) -> Communication:
    """Return the communication of the outermost unit, which must be like that of all others."""
    own = cast(FSDPModuleBase, model)._fsdp_module_state.communication
    others = [
        f"{name} ({_sharing(each)})"
        for name, module in named_fsdp_modules(model)
        if not name or module._fsdp_unit.group.params
        for each in [module._fsdp_module_state.communication]
        if each.groups != own.groups or _sharing(each) != _sharing(own)
    ]
    if others:
        raise ValueError(
            f"files of shards are of one mesh, {_sharing(own)} for the outermost unit, but other "
            f"units have other meshes: {', '.join(others)}. Save xla_fsdp.full_state_dict(model) "
            f"and optim_state_dict"
        )
    return own


def _sharing(by: Communication) -> str:
    return f"{by.shards.num_shards} shards, {by.replicas.num_shards} replicas"


def _sharing_ranks(
    shards: Sequence[NamedShard], communication: Communication
) -> tuple[int, int, Groups | None, int]:
    """Return the ranks that hold different parts of a model, by tensor parallelism or by FSDP.

    Returns:
        This rank's number among them, where tensor-parallel parts come first; their number; the
        groups of such ranks, None if there is one; the number of tensor-parallel parts.
    """
    collectives = communication.shards
    placements = [original.placement for shard in shards for original in shard.param.originals]
    meshes = [each.mesh for each in placements if each is not None and each.mesh.size() > 1]
    if not meshes:
        return collectives.rank, collectives.num_shards, communication.groups, 1
    several_axes = {repr(mesh.groups()): mesh.axis_names[0] for mesh in meshes}
    if len(several_axes) > 1:
        found = ", ".join(f"{name!r} {groups}" for groups, name in several_axes.items())
        raise ValueError(
            f"files of shards are of one tensor-parallel axis, but parameters were parallelized "
            f"over several: {found}. Save xla_fsdp.full_state_dict(model) and optim_state_dict"
        )
    mesh, tensor = shards[0].group.mesh, meshes[0]
    if mesh.layout != tensor.layout:
        raise ValueError(
            "tensor-parallel parameters are sharded over ranks that are not of the same mesh; give "
            "FSDP an axis of the mesh that parallelize_module was given, as in mesh=mesh['shard']"
        )
    joint = Mesh((*tensor.axes, mesh.without(tensor).axes[-1]), mesh.layout)
    groups = joint.groups()
    several = groups if len(groups) > 1 else None
    return joint.local_rank(ops.rank()), joint.size(), several, tensor.size()


def _refuse_other_dims(shards: Sequence[NamedShard]) -> None:
    others = [f"{s.key} (along dim {s.param.packing.dim})" for s in shards if s.param.packing.dim]
    if others:
        raise ValueError(
            f"files of shards hold slices along dim 0, but shard_placement_fn has others cut: "
            f"{', '.join(others)}. Save xla_fsdp.full_state_dict(model) and optim_state_dict"
        )


def _record(shard: NamedShard, spread: bool) -> ParamRecord:
    param = shard.param
    return ParamRecord(
        key=shard.key,
        dtype=dtype_name(param.leaf.dtype),
        multiple=param.packing.layout.multiple,
        members=tuple(
            MemberRecord(
                name,
                tuple(original.whole_shape),
                None if original.placement is None else original.placement.dim,
            )
            for name, original in zip(shard.names, param.originals, strict=True)
        ),
        by_rows=param.by_rows,
        over_parts=spread and not param.is_expert,
    )


def _ties(shard: NamedShard, record: ParamRecord) -> dict[str, str]:
    """Return the names of the originals in the record, by their other names."""
    return {
        name: canonical.name
        for original, canonical in zip(shard.param.originals, record.members, strict=True)
        for name in shard.names_of(original)
        if name != canonical.name
    }
