"""Describe a sharded model for the files of shards.

Invariants: every name that a parameter had before wrapping is in the description once, as that of
an original or as an alias, also where units share a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from xla_fsdp.checkpoint.format import MemberRecord, ParamRecord, ShardMetadata
from xla_fsdp.distributed.collectives import Communication
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.distributed.topology import Groups
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.module_state import FSDPModuleLike, named_fsdp_modules, named_shards
from xla_fsdp.fsdp.engine.named_params import NamedShard
from xla_fsdp.fsdp.state_dict.model import cut_outside_units, refuse_cut_outside


def describe(model: nn.Module) -> ShardMetadata:
    """Return the metadata of this rank's shards of a model, the outermost sharded module.

    Raises:
        ValueError: if the model cannot be saved as files of shards: units have different meshes, or
            slices along other dims than the first; tensor parallelism has cut parameters that no
            unit shards, or along several axes, or they are sharded over groups that are of no mesh.
    """
    refuse_cut_outside(cut_outside_units(model), "files of shards")
    communication = _communication(model)
    shards = list(named_shards(model, remove_duplicate=False))
    rank, count, groups, parts = _sharing_ranks(shards, communication)
    _refuse_other_dims(shards)
    records: dict[object, ParamRecord] = {}  # by slots: a tied parameter is recorded once
    ties: dict[str, str] = {}
    for shard in shards:
        record = records.setdefault(shard.param.slots, _record(shard))
        ties.update(_ties(shard, record))
    return ShardMetadata(
        rank,
        count,
        tuple(records.values()),
        ties,
        dict(_cast_buffers(model)),
        groups=None if groups is None else tuple(tuple(group) for group in groups),
        tensor_parts=parts,
    )


def _communication(model: nn.Module) -> Communication:
    """Return who shares the parameters, which one set of files says once for all units."""
    own = cast(FSDPModuleLike, model)._fsdp_module_state.communication
    others = [
        f"{name} ({_sharing(each)})"
        for name, host in named_fsdp_modules(model)
        if not name or host._fsdp_unit.group.params
        for each in [host._fsdp_module_state.communication]
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
    """Return the ranks that share a model, the parts of tensor parallelism one after the other.

    Returns:
        This rank's number among them; their number; all such sets of ranks, if there are several;
        the number of ranks along a tensor-parallel axis.
    """
    collectives = communication.shards
    placements = [m.placement for shard in shards for m in shard.param.originals]
    meshes = [each.mesh for each in placements if each is not None and each.mesh.size() > 1]
    if not meshes:
        return collectives.rank, collectives.num_shards, communication.groups, 1
    _refuse_several(meshes)
    mesh, tensor = shards[0].group.mesh, meshes[0]
    if mesh.layout != tensor.layout:
        raise ValueError(
            "tensor-parallel parameters are sharded over ranks that are not of the same mesh; give "
            "FSDP an axis of the mesh that parallelize_module was given, as in mesh=mesh['shard']"
        )
    joint = Mesh((*tensor.axes, mesh.axes[-1]), mesh.layout)
    groups = joint.groups()
    several = groups if len(groups) > 1 else None
    return joint.place(ops.rank()), joint.size(), several, tensor.size()


def _refuse_several(meshes: Sequence[Mesh]) -> None:
    several = {repr(mesh.groups()): mesh.axis_names[0] for mesh in meshes}
    if len(several) > 1:
        found = ", ".join(f"{name!r} {groups}" for groups, name in several.items())
        raise ValueError(
            f"files of shards are of one tensor-parallel axis, but parameters were parallelized "
            f"over several: {found}. Save xla_fsdp.full_state_dict(model) and optim_state_dict"
        )


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
            MemberRecord(
                name,
                tuple(original.whole_shape),
                None if original.placement is None else original.placement.dim,
            )
            for name, original in zip(shard.names, param.originals, strict=True)
        ),
        by_rows=param.by_rows,
    )


def _ties(shard: NamedShard, record: ParamRecord) -> dict[str, str]:
    """Return the other names of the originals, to those in the record."""
    return {
        name: canonical.name
        for original, canonical in zip(shard.param.originals, record.members, strict=True)
        for name in shard.names_of(original)
        if name != canonical.name
    }


def _cast_buffers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield names and original dtypes of the buffers that units have cast."""
    for prefix, host in named_fsdp_modules(model, remove_duplicate=False):
        for name, dtype in host._fsdp_module_state.cast_buffers.items():
            yield join_name(prefix, name), _dtype_name(dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
