"""``fully_shard``: shard a module's parameters in place, with the interface of torch's FSDP2.

Invariants: names of parameters do not change; parameters on the meta device remain there until the
user gives them memory. Policies of ``torch.distributed.fsdp`` work, too: fields are read by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from xla_fsdp.distributed.mesh import as_fsdp_mesh
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.module_state import attach, mark_state_dicts
from xla_fsdp.fsdp.engine.shard_tensor import view_state_dicts
from xla_fsdp.fsdp.fsdp_module import class_for
from xla_fsdp.fsdp.init.build import (
    ManagedModules,
    build_unit,
    check_wrappable,
    communicate,
    refuse_subclasses,
    sharding,
)
from xla_fsdp.wrap import Ignored
from xla_fsdp.xla import ops


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit.

    Args:
        param_dtype: dtype in which parameters are gathered and used; None for their own.
        reduce_dtype: dtype in which gradients are reduced, and accumulated while they are not
            synchronized; None for the dtype they are computed in.
        output_dtype: dtype to cast floating-point outputs of the forward to; None for no cast.
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Do not offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Hold shards in host memory; ``fully_shard`` refuses it and says why."""

    pin_memory: bool = True


Modules = TypeVar("Modules", nn.Module, list[nn.Module])

NO_OFFLOADING = (
    "CPUOffloadPolicy cannot be met: torch_xla gives every program its inputs and outputs in "
    "device memory, and the TPU compiler refuses a program that marks updated shards for host "
    "memory (the layout of its outputs is not set to host memory), so none would be saved. More "
    "ranks save device memory, and so do MixedPrecisionPolicy and checkpoint_module"
)


def fully_shard(
    module: Modules,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Modules:
    """Make ``module`` one unit, in place.

    Its parameters, except those of units inside it, become this rank's shards, and are gathered
    for its forward and backward. Its class becomes FSDP<Class>, with the methods of ``FSDPModule``.
    Apply it to inner modules first, to the model last, and create the optimizer afterwards.

    Args:
        module: the module; or several that are gathered and freed together, from the first one's
            forward to the end of the last one's (for tied weights, and for small modules).
        mesh: a mesh of one axis to shard over (default: all ranks), or of two: replicas, shards.
            Made by ``init_mesh``, or a DeviceMesh of ``torch.distributed``.
        reshard_after_forward: free unsharded parameters after forward and gather them again in
            backward; False holds them until backward. None means False for the outermost unit and
            True for others. A number N shards them over groups of N neighbouring ranks until
            backward, which gathers them within these groups.
        shard_placement_fn: called with each parameter; returns None (dim 0) or a
            ``torch.distributed.tensor.Shard`` with the dim to cut. Sizes need not divide evenly.
        mp_policy: dtypes; see ``MixedPrecisionPolicy``.
        offload_policy: ``OffloadPolicy()``; ``CPUOffloadPolicy`` is refused.
        ignored_params: parameters to leave as they are: not sharded, not moved, not reduced.

    Returns:
        ``module``.

    Raises:
        TypeError: if an argument, or a result of ``shard_placement_fn``, is of a wrong type.
        ValueError: if a module is a unit already or has no forward, a dim does not exist, the
            number of ranks does not divide into groups, or offloading is asked for.
    """
    roots = _outermost([module] if isinstance(module, nn.Module) else list(module))
    if not roots:
        raise ValueError("fully_shard was given no module")
    for root in roots:
        check_wrappable(root)
    if hasattr(offload_policy, "pin_memory"):  # CPUOffloadPolicy, torch's or the one above
        raise ValueError(NO_OFFLOADING)
    config = _config(mesh, reshard_after_forward, mp_policy)
    ignored = Ignored(params=ignored_params)
    refuse_subclasses(roots, ignored)
    with ops.runtime().keep_host_rng():
        managed = ManagedModules(roots, ignored)
        communication = communicate(managed, config)
        params = [each.param for each in managed.parameters()]
        dims = dict.fromkeys(map(id, params), 0)  # as torch's, also where it has few rows
        if shard_placement_fn is not None:
            dims = {id(param): _dim(shard_placement_fn(param), param) for param in params}
        with sharding(managed, config, communication):
            states = build_unit(managed, config, communication, dims=dims)
            for root, state in zip(roots, states, strict=True):
                root.__class__ = class_for(root.__class__)
                attach(root, state)
                mark_state_dicts(root)
                view_state_dicts(root)
    return module


def _config(mesh: Any, reshard: bool | int | None, policy: Any) -> FSDPConfig:
    return FSDPConfig(
        reshard_after_forward=True if reshard is None else reshard,
        disable_reshard_on_root=reshard is None,
        compute_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        cast_root_forward_inputs=policy.cast_forward_inputs,
        shard_param_on_dim_0=True,
        mesh=None if mesh is None else as_fsdp_mesh(mesh),
    )


def _outermost(modules: list[Any]) -> list[Any]:
    """Return the modules that are inside no other one of the list, each once."""
    inside = {
        id(inner)
        for module in modules
        if isinstance(module, nn.Module)
        for inner in module.modules()
        if inner is not module
    }
    return list({id(m): m for m in modules if id(m) not in inside}.values())


def _dim(chosen: Any, param: nn.Parameter) -> int:
    """Return the dim to cut, from the result of ``shard_placement_fn``."""
    if chosen is None:
        return 0
    dim = getattr(chosen, "dim", None)
    if not isinstance(dim, int):
        raise TypeError(
            f"shard_placement_fn returned a {type(chosen).__name__}; return None or a "
            f"torch.distributed.tensor.Shard(dim)"
        )
    if not -param.dim() <= dim < max(param.dim(), 1):
        raise ValueError(
            f"shard_placement_fn returned {chosen} for a parameter of shape {tuple(param.shape)}, "
            f"which has no such dim"
        )
    return dim % param.dim() if param.dim() else 0
