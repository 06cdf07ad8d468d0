"""Fully Sharded Data Parallel for PyTorch/XLA: the catalogue of public names.

Names are loaded when they are first used, so that importing the package, merging checkpoints or
reading help texts needs no torch_xla. Wrap policies are in ``xla_fsdp.wrap``, everything about
files in ``xla_fsdp.checkpoint``.
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
    from xla_fsdp.fully_sharded import (
        XlaFullyShardedDataParallel,
        register_fsdp_forward_method,
    )
    from xla_fsdp.launcher import RankError, launch, one_rank_at_a_time
    from xla_fsdp.remat import checkpoint_module
    from xla_fsdp.save_load import PendingSave, load_checkpoint, save_checkpoint

__all__ = [
    "CheckpointError",
    "LocalCollectives",
    "PendingSave",
    "RankError",
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
    "latest_step",
    "launch",
    "load_checkpoint",
    "one_rank_at_a_time",
    "register_fsdp_forward_method",
    "save_checkpoint",
]

_HOMES = {
    "CheckpointError": "checkpoint",
    "LocalCollectives": "collectives",
    "PendingSave": "save_load",
    "RankError": "launcher",
    "XlaFullyShardedDataParallel": "fully_sharded",
    "checkpoint_module": "remat",
    "consolidate_sharded_model_checkpoints": "checkpoint",
    "consolidate_sharded_state_dicts": "checkpoint",
    "latest_step": "checkpoint.step_directory",
    "launch": "launcher",
    "load_checkpoint": "save_load",
    "one_rank_at_a_time": "launcher",
    "register_fsdp_forward_method": "fully_sharded",
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
