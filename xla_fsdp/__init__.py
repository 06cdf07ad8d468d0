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
    from xla_fsdp.fully_sharded import XlaFullyShardedDataParallel
    from xla_fsdp.grad_scaler import ShardedGradScaler
    from xla_fsdp.init_source import init_from_checkpoint
    from xla_fsdp.launcher import RankError, launch, one_rank_at_a_time
    from xla_fsdp.remat import checkpoint_module, checkpoint_wrapper
    from xla_fsdp.save_load import PendingSave, load_checkpoint, save_checkpoint
    from xla_fsdp.state_dicts import (
        full_state_dict,
        load_full_state_dict,
        load_optim_state_dict,
        load_sharded_state_dict,
        optim_state_dict,
    )
    from xla_fsdp.sync_batch_norm import SyncBatchNorm
    from xla_fsdp.unit_module import register_fsdp_forward_method

__all__ = [
    "CheckpointError",
    "LocalCollectives",
    "PendingSave",
    "RankError",
    "ShardedGradScaler",
    "SyncBatchNorm",
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "checkpoint_wrapper",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
    "full_state_dict",
    "init_from_checkpoint",
    "latest_step",
    "launch",
    "load_checkpoint",
    "load_full_state_dict",
    "load_optim_state_dict",
    "load_sharded_state_dict",
    "one_rank_at_a_time",
    "optim_state_dict",
    "register_fsdp_forward_method",
    "save_checkpoint",
]

_HOMES = {
    "CheckpointError": "checkpoint",
    "LocalCollectives": "collectives",
    "PendingSave": "save_load",
    "RankError": "launcher",
    "ShardedGradScaler": "grad_scaler",
    "SyncBatchNorm": "sync_batch_norm",
    "XlaFullyShardedDataParallel": "fully_sharded",
    "checkpoint_module": "remat",
    "checkpoint_wrapper": "remat",
    "consolidate_sharded_model_checkpoints": "checkpoint",
    "consolidate_sharded_state_dicts": "checkpoint",
    "full_state_dict": "state_dicts",
    "init_from_checkpoint": "init_source",
    "latest_step": "checkpoint.step_directory",
    "launch": "launcher",
    "load_checkpoint": "save_load",
    "load_full_state_dict": "state_dicts",
    "load_sharded_state_dict": "state_dicts",
    "load_optim_state_dict": "state_dicts",
    "one_rank_at_a_time": "launcher",
    "optim_state_dict": "state_dicts",
    "register_fsdp_forward_method": "unit_module",
    "save_checkpoint": "save_load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
