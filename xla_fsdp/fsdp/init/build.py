"""The steps by which both doors make a unit of the modules that it manages."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from torch import Tensor

from xla_fsdp.distributed.collectives import Collectives, broadcast_
from xla_fsdp.distributed.groups import Communication, communication_for
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.chunked.hooks import forward_override_for
from xla_fsdp.fsdp.engine import guards
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.module_state import ModuleState
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.init.managed import ManagedModules
from xla_fsdp.fsdp.init.shard_params import move_buffers, shard_parameters


def communicate(
    managed: ManagedModules, config: FSDPConfig, collectives: Collectives | None = None
) -> Communication:
    """Return how a unit's ranks communicate.

    Args:
        managed: by the unit.
        config: says over whom to shard.
        collectives: replaces the communication.

    Raises:
        ValueError: if the mesh is not one of this job's ranks, if it shards over an axis along
            which tensor parallelism has cut a parameter, or for a ``reshard_after_forward`` that
            does not divide the ranks.
    """
    communication = communication_for(
        config.mesh,
        config.sharding_groups,
        config.sharding_rank,
        config.sharding_world_size,
        collectives,
    )
    if collectives is None:
        _refuse_other_parts(managed, config)
    ranks = communication.shards.num_shards
    if (size := _smaller_group_size(config, ranks)) and ranks % size:
        raise ValueError(
            f"reshard_after_forward is {size}; to keep parameters in groups of so many ranks, "
            f"it must divide the {ranks} ranks that share them"
        )
    return communication


def broadcast_values(managed: ManagedModules, communication: Communication) -> None:
    """Give parameters and buffers the values of the first rank."""
    values = [each for each in managed.tensors() if not (is_sharded(each) or each.is_meta)]
    broadcast_(values, communication.everyone, ops.device())


def build_unit(
    managed: ManagedModules,
    config: FSDPConfig,
    communication: Communication,
    *,
    origins: Mapping[int, Tensor] | None = None,
    dims: Mapping[int, int] | None = None,
) -> list[ModuleState]:
    """Shard the managed parameters, move the buffers, and make a unit of them.

    Args:
        managed: by the unit.
        config: the unit's options.
        communication: who shares the parameters.
        origins: by the id of a parameter that was made of a meta tensor, that tensor.
        dims: by the id of a parameter, which dim of it to cut, where that is not the first.

    Returns:
        What to attach to each of the unit's root modules.

    Raises:
        ValueError: if a parameter cannot be trained, or is tied to one in another unit that is
            sharded differently.
    """
    device = ops.device()
    params = shard_parameters(
        managed, config, communication, device, origins=origins or {}, dims=dims or {}
    )
    cast_buffers = move_buffers(managed, config, device)
    guards.install()
    shards = communication.shards
    size = _smaller_group_size(config, shards.num_shards)
    smaller = shards.split(size) if size else None
    group = FSDPParamGroup(params, shards, config, communication.replicas, smaller)
    roots = managed.roots
    unit = FSDPState(group, config, device, len(roots))
    runner = forward_override_for(unit, roots[0]) if len(roots) == 1 else None
    return [
        ModuleState(unit, communication, part, {} if part else cast_buffers, runner=runner)
        for part in range(len(roots))
    ]


def free_unsharded(config: FSDPConfig) -> None:
    """Run the program that cuts the parameters, so that unsharded ones on the device are freed."""
    if config.execute_sharding_on_init:
        gc.collect()  # unsharded parameters in reference cycles would survive the sync
        ops.sync()


def _refuse_other_parts(managed: ManagedModules, config: FSDPConfig) -> None:
    """Refuse to share a parameter of which tensor parallelism gave these ranks other parts."""
    groups = config.sharding_groups or (
        config.mesh.groups() if config.mesh else [list(range(ops.world_size()))]
    )
    [own] = [group for group in groups if ops.rank() in group]
    for _, name, owner, attribute, _ in managed.parameters():
        placement = placement_in(owner, attribute)
        if placement is not None and not placement.is_same_on(own):
            raise ValueError(
                f"{name} is parallelized over axis {placement.axis!r} of a mesh, and FSDP over "
                f"ranks {own} would shard it over that axis again; give FSDP the other axes, as in "
                f"mesh=mesh['shard']"
            )


def _smaller_group_size(config: FSDPConfig, num_ranks: int) -> int | None:
    """Return the ranks in a group that keeps parameters after forward; None if there are none."""
    reshard = config.reshard_after_forward
    return None if isinstance(reshard, bool) or reshard in (1, num_ranks) else reshard
