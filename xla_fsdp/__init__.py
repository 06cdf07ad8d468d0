"""Fully Sharded Data Parallel for PyTorch/XLA: the catalogue of public names.

Names are loaded when they are first used, so that importing the package, merging checkpoints or
reading help texts needs no torch_xla. Wrap policies are in ``xla_fsdp.wrap``, everything about
files in ``xla_fsdp.checkpoint``, optimizers over the ranks in ``xla_fsdp.optim``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_fsdp.checkpoint import (
        CheckpointError,
        consolidate_sharded_model_checkpoints,
        consolidate_sharded_state_dicts,
    )
    from xla_fsdp.checkpoint.step_directory import latest_step
    from xla_fsdp.collectives import LocalCollectives
    from xla_fsdp.dcp_state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )
    from xla_fsdp.fsdp_module import FSDPModule, UnshardHandle
    from xla_fsdp.fully_shard import fully_shard
    from xla_fsdp.fully_sharded import XlaFullyShardedDataParallel
    from xla_fsdp.grad_clip import clip_grad_norm_
    from xla_fsdp.grad_scaler import ShardedGradScaler
    from xla_fsdp.init_source import init_from_checkpoint
    from xla_fsdp.launcher import RankError, launch, one_rank_at_a_time
    from xla_fsdp.mesh import Mesh, init_mesh
    from xla_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from xla_fsdp.preemption import Preemption
    from xla_fsdp.remat import checkpoint_module, checkpoint_wrapper
    from xla_fsdp.save_load import PendingSave, load_checkpoint, save_checkpoint
    from xla_fsdp.scan import BlockScan, name_activation, scan_blocks
    from xla_fsdp.shard_view import distribute_tensor
    from xla_fsdp.state_dicts import (
        full_state_dict,
        load_full_state_dict,
        load_optim_state_dict,
        load_sharded_state_dict,
        optim_state_dict,
    )
    from xla_fsdp.streamed import LinearCrossEntropy, StreamedEmbedding
    from xla_fsdp.sync_batch_norm import SyncBatchNorm
    from xla_fsdp.torch_names import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictSettings,
        StateDictType,
    )
    from xla_fsdp.unit_host import register_fsdp_forward_method

__all__ = [
    "BackwardPrefetch",
    "BlockScan",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LinearCrossEntropy",
    "LocalCollectives",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "Mesh",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PendingSave",
    "Preemption",
    "RankError",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictOptions",
    "StateDictSettings",
    "StateDictType",
    "StreamedEmbedding",
    "SyncBatchNorm",
    "UnshardHandle",
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "checkpoint_wrapper",
    "clip_grad_norm_",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
    "distribute_tensor",
    "full_state_dict",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "init_from_checkpoint",
    "init_mesh",
    "latest_step",
    "launch",
    "load_checkpoint",
    "load_full_state_dict",
    "load_optim_state_dict",
    "load_sharded_state_dict",
    "name_activation",
    "one_rank_at_a_time",
    "optim_state_dict",
    "register_fsdp_forward_method",
    "save_checkpoint",
    "scan_blocks",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_HOMES = {
    "BackwardPrefetch": "torch_names",
    "BlockScan": "scan",
    "CPUOffload": "torch_names",
    "CPUOffloadPolicy": "policies",
    "CheckpointError": "checkpoint",
    "FSDPModule": "fsdp_module",
    "FullOptimStateDictConfig": "torch_names",
    "FullStateDictConfig": "torch_names",
    "LinearCrossEntropy": "streamed",
    "StreamedEmbedding": "streamed",
    "LocalCollectives": "collectives",
    "LocalOptimStateDictConfig": "torch_names",
    "LocalStateDictConfig": "torch_names",
    "Mesh": "mesh",
    "MixedPrecision": "torch_names",
    "MixedPrecisionPolicy": "policies",
    "OffloadPolicy": "policies",
    "PendingSave": "save_load",
    "Preemption": "preemption",
    "RankError": "launcher",
    "ShardedGradScaler": "grad_scaler",
    "ShardedOptimStateDictConfig": "torch_names",
    "ShardedStateDictConfig": "torch_names",
    "ShardingStrategy": "torch_names",
    "StateDictOptions": "dcp_state_dict",
    "StateDictSettings": "torch_names",
    "StateDictType": "torch_names",
    "SyncBatchNorm": "sync_batch_norm",
    "UnshardHandle": "fsdp_module",
    "XlaFullyShardedDataParallel": "fully_sharded",
    "checkpoint_module": "remat",
    "checkpoint_wrapper": "remat",
    "clip_grad_norm_": "grad_clip",
    "consolidate_sharded_model_checkpoints": "checkpoint",
    "consolidate_sharded_state_dicts": "checkpoint",
    "distribute_tensor": "shard_view",
    "full_state_dict": "state_dicts",
    "fully_shard": "fully_shard",
    "get_model_state_dict": "dcp_state_dict",
    "get_optimizer_state_dict": "dcp_state_dict",
    "get_state_dict": "dcp_state_dict",
    "init_from_checkpoint": "init_source",
    "init_mesh": "mesh",
    "latest_step": "checkpoint.step_directory",
    "launch": "launcher",
    "load_checkpoint": "save_load",
    "load_full_state_dict": "state_dicts",
    "load_optim_state_dict": "state_dicts",
    "load_sharded_state_dict": "state_dicts",
    "name_activation": "scan",
    "one_rank_at_a_time": "launcher",
    "optim_state_dict": "state_dicts",
    "register_fsdp_forward_method": "unit_host",
    "save_checkpoint": "save_load",
    "scan_blocks": "scan",
    "set_model_state_dict": "dcp_state_dict",
    "set_optimizer_state_dict": "dcp_state_dict",
    "set_state_dict": "dcp_state_dict",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
