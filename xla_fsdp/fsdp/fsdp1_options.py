"""The options of torch's ``FullyShardedDataParallel`` (FSDP1), translated into ``FSDPConfig``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from xla_fsdp.distributed.mesh import REPLICA, SHARD, Mesh, as_fsdp_mesh, init_mesh
from xla_fsdp.distributed.topology import SLICE, Coords
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.xla import ops

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
ONE_AXIS = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
FREES_PARAMETERS = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
HOLDS_PARAMETERS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass(frozen=True)
class TorchOptions:
    """Options that ``XlaFullyShardedDataParallel`` takes beside those of torch_xla's FSDP.

    Args:
        mesh: a ``Mesh`` or torch ``DeviceMesh`` of one axis to shard over, or of two axes, replicas
            and shards (hybrid sharding).
        device_mesh: another name of ``mesh``.
        process_group: accepted if it holds all ranks.
        sharding_strategy: FULL_SHARD (default); SHARD_GRAD_OP, which is FULL_SHARD with
            ``reshard_after_forward=False``; NO_SHARD, which only averages gradients; HYBRID_SHARD
            and _HYBRID_SHARD_ZERO2, which are the first two inside the groups of a mesh of two
            axes (default: a replica per TPU slice).
        mixed_precision: sets ``compute_dtype`` (its ``param_dtype``), ``buffer_dtype`` (None leaves
            buffers as they are), the dtype in which gradients are reduced, and whether inputs of
            inner units and of the outermost one are cast. ``keep_low_precision_grads`` is refused.
        use_orig_params: False means ``flatten_parameters=True``.
        sync_module_states: broadcast the first rank's parameters and buffers to all ranks.
        cpu_offload: must be off.
        backward_prefetch: BACKWARD_PRE is always on; other values are ignored with a warning.
        forward_prefetch: always on; ignored without a warning, as False is torch's default.
        limit_all_gathers: always on, by barriers; False is ignored with a warning.
        device_id: must be an XLA device; a number is ignored with a warning.
    """

    mesh: Any = None
    device_mesh: Any = None
    process_group: Any = None
    sharding_strategy: ShardingStrategy | None = None
    mixed_precision: MixedPrecision | None = None
    use_orig_params: bool | None = None
    sync_module_states: bool = False
    cpu_offload: CPUOffload | bool | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    device_id: int | torch.device | None = None


def translate(options: TorchOptions, config: FSDPConfig) -> FSDPConfig:
    """Return a copy of ``config`` with the fields that ``options`` set.

    Args:
        options: options under torch's names.
        config: made of the options of torch_xla's FSDP.

    Raises:
        ValueError: for options that contradict each other or cannot be met on XLA, all at once.
        TypeError: for a value of a wrong type.
    """
    _check_types(options)
    given = options.mesh if options.mesh is not None else options.device_mesh
    mesh = None if given is None else as_fsdp_mesh(given)
    problems = [
        *_mesh_problems(options, mesh, config),
        *_precision_problems(options.mixed_precision, config),
        *_other_problems(options, config),
    ]
    if problems:
        raise ValueError("\n".join(problems))
    _warn_about_ignored(options)
    _warn_of_evaluation(options.mixed_precision)
    changes = _precision(options.mixed_precision)
    changes["mesh"] = _mesh(options.sharding_strategy, mesh)
    if options.sharding_strategy in HOLDS_PARAMETERS:
        changes["reshard_after_forward"] = False
    if options.use_orig_params is False:
        changes["flatten_parameters"] = True
    return replace(config, **changes)


def _mesh(strategy: ShardingStrategy | None, given: Mesh | None) -> Mesh | None:
    if strategy is ShardingStrategy.NO_SHARD:
        mesh = given or init_mesh((ops.world_size(),), (SHARD,))
        has_shards_of_one = mesh.ndim == 2 and mesh.shape[1] == 1
        return mesh if has_shards_of_one else mesh.unsharded()
    if strategy in HYBRID and given is None:
        return _one_replica_per_slice(ops.runtime().torus_coords())
    return given


def _one_replica_per_slice(coords: Coords) -> Mesh:
    slices = _num_slices(coords)
    return init_mesh((slices, len(coords) // slices), (REPLICA, SHARD), coords=coords)


def _num_slices(coords: Coords) -> int:
    return len({tuple(each[SLICE:]) for each in coords})


def _mesh_problems(options: TorchOptions, mesh: Mesh | None, config: FSDPConfig) -> list[str]:
    strategy, problems = options.sharding_strategy, []
    name = strategy.name if strategy is not None else ""
    if options.mesh is not None and options.device_mesh not in (None, options.mesh):
        problems.append("mesh and device_mesh are two names of one option, and differ; give one")
    if strategy in ONE_AXIS and mesh is not None and mesh.ndim > 1:
        problems.append(
            f"{name} shards over one axis, and the mesh has {', '.join(mesh.axis_names)}; give "
            f"mesh[{SHARD!r}], or the strategy HYBRID_SHARD"
        )
    if strategy in HYBRID and mesh is not None and mesh.ndim != 2:
        problems.append(
            f"{name} wants a mesh of two axes, replicas and shards; this one has "
            f"{', '.join(mesh.axis_names)}. Make it by init_mesh((2, 4), ('replica', 'shard')), say"
        )
    if strategy in HYBRID and mesh is None and _num_slices(ops.runtime().torus_coords()) < 2:
        problems.append(
            f"{name} without a mesh makes each TPU slice a replica, and this job is not on several "
            f"slices; give device_mesh=init_mesh((2, 4), ('replica', 'shard')), say"
        )
    if strategy in FREES_PARAMETERS and not config.reshard_after_forward:
        problems.append(
            f"{name} frees parameters after forward, and reshard_after_forward=False keeps them; "
            f"for that give SHARD_GRAD_OP or _HYBRID_SHARD_ZERO2"
        )
    return problems


def _precision(given: MixedPrecision | None) -> dict[str, Any]:
    if given is None:
        return {}
    return {
        "compute_dtype": given.param_dtype,
        "buffer_dtype": given.buffer_dtype,
        "reduce_dtype": given.reduce_dtype,
        "cast_buffers": False,  # also under xla_fsdp.compat
        "cast_forward_inputs": given.cast_forward_inputs,
        "cast_root_forward_inputs": given.cast_root_forward_inputs,
    }


def _precision_problems(given: MixedPrecision | None, config: FSDPConfig) -> list[str]:
    if given is None:
        return []
    problems = [
        f"mixed_precision says {theirs}={dtype}, and {ours}={own}; give one"
        for theirs, dtype, ours, own in (
            ("param_dtype", given.param_dtype, "compute_dtype", config.compute_dtype),
            ("buffer_dtype", given.buffer_dtype, "buffer_dtype", config.buffer_dtype),
        )
        if own not in (None, dtype)
    ]
    if given.keep_low_precision_grads:
        problems.append(
            "keep_low_precision_grads=True cannot be met: torch gives a parameter gradients of its "
            "own dtype only. Shards of bf16 parameters (model.bfloat16()) have bf16 gradients"
        )
    if set(given._module_classes_to_ignore) != set(MixedPrecision._module_classes_to_ignore):
        problems.append(
            "_module_classes_to_ignore cannot be chosen: layers with running statistics compute in "
            "their own dtype, all others in param_dtype"
        )
    return problems


def _other_problems(options: TorchOptions, config: FSDPConfig) -> list[str]:
    problems = []
    if options.use_orig_params and config.flatten_parameters:
        problems.append(
            "use_orig_params=True shows every parameter, and flatten_parameters=True joins them"
        )
    offload = options.cpu_offload
    if offload.offload_params if isinstance(offload, CPUOffload) else offload:
        problems.append(
            "cpu_offload cannot be met: torch_xla gives every program its inputs and outputs in "
            "device memory. More ranks save device memory, and so do mixed_precision and "
            "checkpoint_module"
        )
    if isinstance(group := options.process_group, tuple):
        # torch's hybrid sharding takes (shard group, replica group)
        problems.append(
            "process_group is a tuple of groups, of shards and of replicas; give one mesh instead: "
            "device_mesh=init_mesh((2, 4), ('replica', 'shard')), say"
        )
    elif group is not None and group.size() != ops.world_size():
        problems.append(
            f"process_group holds {group.size()} of {ops.world_size()} ranks. Replica groups "
            f"are those of the whole job on XLA: give mesh=init_mesh(...)[axis] instead"
        )
    if isinstance(options.device_id, torch.device) and options.device_id.type != "xla":
        problems.append(
            f"device_id is {options.device_id}; every rank has one XLA device, and shards go there"
        )
    return problems


def _check_types(options: TorchOptions) -> None:
    group = options.process_group
    if not (group is None or isinstance(group, tuple) or callable(getattr(group, "size", None))):
        raise TypeError(
            f"process_group is a {type(group).__name__}; give a process group of all ranks, or a "
            f"mesh in its place"
        )
    for name, kind in (
        ("sharding_strategy", ShardingStrategy),
        ("mixed_precision", MixedPrecision),
        ("backward_prefetch", BackwardPrefetch),
    ):
        given = getattr(options, name)
        if given is not None and not isinstance(given, kind):
            raise TypeError(
                f"{name} is a {type(given).__name__}; give an xla_fsdp.{kind.__name__} (which is "
                f"torch.distributed.fsdp's)"
            )


def _warn_about_ignored(options: TorchOptions) -> None:
    if ignored := _ignored(options):
        warnings.warn(
            f"{', '.join(ignored)}: ignored. The program of a whole step is scheduled by XLA: "
            f"gathers start while the unit before computes, and optimization barriers bound how "
            f"many are ahead; every rank has one device",
            stacklevel=1,  # the same line for all callers: Python shows it once
        )


def _warn_of_evaluation(given: MixedPrecision | None) -> None:
    """Warn if torch would compute in full precision in evaluation."""
    casts = given is not None and given.param_dtype not in (None, torch.float32)
    if casts and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        warnings.warn(
            "FSDP_USE_FULL_PREC_IN_EVAL=1: ignored. Units compute in param_dtype in evaluation, "
            "too; for full precision evaluate a model without mixed_precision that has loaded the "
            "same state dict",
            stacklevel=1,  # as above
        )


def _ignored(options: TorchOptions) -> Sequence[str]:
    prefetch = options.backward_prefetch
    found = []
    if prefetch is not BackwardPrefetch.BACKWARD_PRE:
        found.append(f"backward_prefetch={prefetch.name if prefetch else None}")
    if not options.limit_all_gathers:
        found.append("limit_all_gathers=False")
    if isinstance(options.device_id, int):
        found.append(f"device_id={options.device_id}")
    return found
