"""Policies of ``fully_shard``, with the names and fields that they have in torch.

Always true: a policy is plain data; ``fully_shard`` turns it into the unit's ``FSDPConfig``. Code
that imports the policies from ``torch.distributed.fsdp`` may pass those: fields are read by name.

``fully_shard``: shard a module's parameters in place, with the interface of torch's FSDP2.

Words: see ``unit``, ``fsdp_module`` and ``policies``. Always true: everything is checked, and all
problems are reported, before anything is changed; parameters keep their names, and each is cut
along one of its dims; what is on the meta device stays there until the user gives it memory.
Making the unit is ``construction``'s job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from xla_fsdp.distributed.mesh import as_mesh
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.module_state import attach, mark_state_dicts
from xla_fsdp.fsdp.engine.shard_parameter import view_state_dicts
from xla_fsdp.fsdp.fsdp_module import class_for
from xla_fsdp.fsdp.init.build import build_unit, check_wrappable, finish_unit
from xla_fsdp.wrap import Ignored


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit.

    Args:
        param_dtype: in which parameters are gathered and used; None for their own.
        reduce_dtype: in which gradients are reduced, and kept while they are not synchronized; None
            for the one they are computed in.
        output_dtype: what floating-point outputs of the forward are cast to; None for no cast.
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards in host memory; ``fully_shard`` refuses it and says why.

    Args:
        pin_memory: accepted as in torch.
    """

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
    """Make ``module`` one unit, in place: its parameters, but for those of units inside it, become
    this rank's shards, and are gathered for its forward and backward. Its class becomes
    FSDP<Class>, with the methods of ``FSDPModule``. Apply it to inner modules first, to the model
    last, and create the optimizer afterwards.

    Args:
        module: the module; or several that are gathered and freed together, from the first one's
            forward to the end of the last one's (for tied weights, and for small modules).
        mesh: a mesh of one axis to shard over (default: all ranks), or of two: replicas, shards.
            ``init_mesh`` makes one; a ``torch.distributed`` DeviceMesh is understood, too.
        reshard_after_forward: free full parameters after forward and gather them again in backward;
            False keeps them. None frees them, but for the outermost unit. A number keeps them in
            shards of groups of so many neighbouring ranks, which gather again among themselves.
        shard_placement_fn: called with each parameter; returns None or a
            ``torch.distributed.tensor.Shard`` with the dim to cut, any size of which will do.
        mp_policy: dtypes; see ``MixedPrecisionPolicy``.
        offload_policy: ``OffloadPolicy()``; ``CPUOffloadPolicy`` is refused.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.

    Returns:
        ``module``.

    Raises:
        TypeError: if something is of a wrong type.
        ValueError: if a module is a unit already or has no forward, a dim does not exist, the
            number of ranks cannot be split, or parameters were to be offloaded.
    """
    parts = _outermost([module] if isinstance(module, nn.Module) else list(module))
    config = _config(mesh, reshard_after_forward, mp_policy)
    _check(parts, offload_policy)
    ignored = Ignored(params=ignored_params)
    placement = None if shard_placement_fn is None else partial(_dim, shard_placement_fn)
    with ops.runtime().keep_host_rng():
        built = build_unit(
            parts, config, ignored, None, None, placement=placement, stays_on_meta=True
        )
        for number, part in enumerate(parts):
            part.__class__ = class_for(part.__class__)
            attach(part, built.attachment(number))
            mark_state_dicts(part)
            view_state_dicts(part)
        finish_unit(config)
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
        cast_buffers=False,
        shard_param_on_dim_0=True,
        mesh=None if mesh is None else as_mesh(mesh),
    )


def _check(parts: Sequence[nn.Module], offload_policy: Any) -> None:
    if not parts:
        raise ValueError("fully_shard was given no module")
    for part in parts:
        check_wrappable(part)
    if hasattr(offload_policy, "pin_memory"):  # torch's or ours
        raise ValueError(NO_OFFLOADING)


def _outermost(modules: list[Any]) -> list[Any]:
    """Without those that lie in others of the list."""
    inside = {
        id(inner)
        for module in modules
        if isinstance(module, nn.Module)
        for inner in module.modules()
        if inner is not module
    }
    return list({id(m): m for m in modules if id(m) not in inside}.values())


def _dim(choose: Callable[[nn.Parameter], Any], param: nn.Parameter) -> int:
    """Which dim to cut, of a user's choice."""
    chosen = choose(param)
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
