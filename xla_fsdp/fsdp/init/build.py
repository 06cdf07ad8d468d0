"""Make a unit of a module: check it, give it values, cut its parameters, move its buffers.

Always true: everything is checked before anything is changed, as far as it can be known by then.
What the options mean is said in ``fully_sharded``; the work is done by ``meta_init``, ``ownership``
and ``unit``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.collectives import Collectives, SmallerGroups, broadcast_
from xla_fsdp.distributed.groups import Communication, communication_for
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.chunked.hooks import forward_override_for
from xla_fsdp.fsdp.engine import guards
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.module_state import ForwardOverride, ModuleState, is_unit
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.init.managed import ManagedModules
from xla_fsdp.fsdp.init.meta_init import materialize
from xla_fsdp.fsdp.init.shard_params import move_buffers, shard_own_parameters
from xla_fsdp.wrap import Ignored, has_forward, wrap_children


@dataclass(frozen=True)
class BuiltUnit:
    """A new unit, the original dtypes of the buffers it cast, and what runs it otherwise."""

    unit: FSDPState
    communication: Communication
    cast_buffers: dict[str, torch.dtype]
    runner: ForwardOverride | None

    def attachment(self, part: int = 0) -> ModuleState:
        """For the host of one of the unit's modules; the first one's names the buffers."""
        cast = {} if part else self.cast_buffers
        return ModuleState(self.unit, self.communication, part, cast, runner=self.runner)


Placement = Callable[[nn.Parameter], int]

"""Which dim of a parameter to cut."""


def check_wrappable(module: nn.Module) -> None:
    """Raise TypeError or ValueError unless ``module`` can become a unit."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP wraps an nn.Module, got {type(module).__name__}")
    if is_unit(module):
        raise ValueError(
            "this module is sharded with FSDP already. For nested units, shard the inner modules "
            "first and then the module that holds them"
        )
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward, so FSDP cannot know when its parameters are "
            f"needed. Wrap the modules that it holds, or the module that calls them"
        )


def wrap_by_policy(
    module: nn.Module,
    policy: Callable[..., bool],
    wrapper: Callable[..., nn.Module],
    config: FSDPConfig,
    ignored: Ignored,
    others: dict[str, Any],
) -> None:
    """Wrap the descendants of ``module`` that ``policy`` selects, with the same options.

    Args:
        module: the outermost module, which is not wrapped here.
        policy: see ``wrap``.
        wrapper: called as ``wrapper(descendant, **options)``.
        config: options of the units.
        ignored: what the units leave alone.
        others: further keywords; those that are None are not passed on.

    Raises:
        TypeError: if ``policy`` or ``wrapper`` cannot be called.
        ValueError: if there are units in ``module`` already.
    """
    for what, given in (("auto_wrap_policy", policy), ("auto_wrapper_callable", wrapper)):
        if not callable(given):
            raise TypeError(
                f"{what} must be callable, got {type(given).__name__}; see xla_fsdp.wrap"
            )
    for name, inner in module.named_modules():
        if is_unit(inner):
            raise ValueError(
                f"{name} is wrapped with FSDP already; auto_wrap_policy wants a module without "
                f"FSDP units inside. Wrap by hand or by policy, not both"
            )
    more = {name: value for name, value in others.items() if value is not None}
    options = {**config.as_keywords(), **ignored.as_keywords(), **more}
    wrap_children(module, policy, lambda selected: wrapper(selected, **options), ignored)


def build_unit(
    parts: Sequence[nn.Module],
    config: FSDPConfig,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
    collectives: Collectives | None,
    *,
    placement: Placement | None = None,
    stays_on_meta: bool = False,
    sync_module_states: bool = False,
) -> BuiltUnit:
    """Make a unit of what the modules ``parts`` hold outside of other units.

    Args:
        parts: usually one; several are gathered and freed together.
        config: the unit's options.
        ignored: what it leaves alone.
        param_init_fn: gives modules on the meta device their values.
        collectives: replaces the communication.
        placement: of each parameter (default: the first dim).
        stays_on_meta: do not give memory to what is on the meta device; the user will.
        sync_module_states: take over the first rank's values.

    Raises:
        ValueError: if the unit cannot be made.
    """
    scope = ManagedModules(parts, ignored)
    _refuse_cuda_layers(scope)
    origins = {} if stays_on_meta else materialize(scope, param_init_fn)
    device = ops.device()
    communication = communication_for(
        config.mesh,
        config.sharding_groups,
        config.sharding_rank,
        config.sharding_world_size,
        collectives,
    )
    if collectives is None:
        _refuse_other_parts(scope, config)
    smaller = _smaller_groups(config.reshard_after_forward, communication.shards)
    if sync_module_states:
        broadcast_(_values(scope), communication.everyone, device)
    params = shard_own_parameters(
        scope,
        config,
        communication=communication,
        device=device,
        origins=origins,
        dims=_dims(scope, placement),
    )
    cast_buffers = move_buffers(scope, config, device)
    guards.install()
    group = FSDPParamGroup(params, communication.shards, config, communication.replicas, smaller)
    unit = FSDPState(group, config, device, len(parts))
    runner = forward_override_for(unit, parts[0]) if len(parts) == 1 else None
    return BuiltUnit(unit, communication, cast_buffers, runner)


def _refuse_other_parts(scope: ManagedModules, config: FSDPConfig) -> None:
    """Ranks that hold other parts of a tensor-parallel parameter cannot share it."""
    ranks = range(ops.world_size())
    groups = config.sharding_groups or (config.mesh.groups() if config.mesh else [list(ranks)])
    [own] = [group for group in groups if ops.rank() in group]
    for _, name, owner, attribute, _ in scope.parameters():
        placement = placement_in(owner, attribute)
        if placement is not None and not placement.is_same_on(own):
            raise ValueError(
                f"{name} is parallelized over axis {placement.axis!r} of a mesh, and FSDP over "
                f"ranks {own} would shard it over that axis again; give FSDP the other axes, as in "
                f"mesh=mesh['shard']"
            )


def _values(scope: ManagedModules) -> list[Tensor]:
    """Parameters and buffers, each once."""
    params = [param for _, _, _, _, param in scope.parameters()]
    buffers = [each for _, module in scope.modules() for each in module._buffers.values()]
    found = {id(each): each for each in (*params, *buffers) if each is not None}
    return [each for each in found.values() if not (is_sharded(each) or each.is_meta)]


def _dims(scope: ManagedModules, placement: Placement | None) -> dict[int, int]:
    """By the id of a parameter, the dim that the user wants it cut along."""
    if placement is None:
        return {}
    return {id(param): placement(param) for _, _, _, _, param in scope.parameters()}


def _smaller_groups(reshard: bool | int, collectives: Collectives) -> SmallerGroups | None:
    if isinstance(reshard, bool) or reshard in (1, collectives.num_shards):
        return None
    if reshard < 1 or collectives.num_shards % reshard:
        raise ValueError(
            f"reshard_after_forward is {reshard}; to keep parameters in groups of so many ranks, "
            f"it must divide the {collectives.num_shards} ranks that share them"
        )
    return collectives.split(reshard)


def _refuse_cuda_layers(scope: ManagedModules) -> None:
    for name, layer in scope.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(
                f"{name or 'the module'} is torch.nn.SyncBatchNorm, which only runs on CUDA. "
                f"Convert the model before wrapping it: "
                f"xla_fsdp.SyncBatchNorm.convert_sync_batchnorm(model)"
            )


def finish_unit(config: FSDPConfig) -> None:
    """What comes after a unit is made: run what cuts the parameters, so that full ones on the
    device are freed."""
    if config.execute_sharding_on_init:
        gc.collect()  # full parameters in reference cycles would survive the sync
        ops.sync()
