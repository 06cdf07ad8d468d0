"""Merge, convert, check and reshard checkpoint files. Imports no torch_xla.

This lists public names, as ``xla_fsdp`` itself does: no module of the package imports it.
"""

from __future__ import annotations

from typing import Any

from xla_fsdp.checkpoint.convert.consolidate import (
    MergeOptions,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    merge_files,
    open_shard,
    read_shards,
)
from xla_fsdp.checkpoint.convert.model_files import Kind, Layout
from xla_fsdp.checkpoint.convert.reshard_files import plan_reshard
from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.files.outputs import WriteOptions
from xla_fsdp.checkpoint.format.consistency import find_problems
from xla_fsdp.checkpoint.format.records import (
    GroupRecord,
    MemberRecord,
    OptimizerRecord,
    ParamRecord,
    ShardMetadata,
    StateRecord,
)
from xla_fsdp.checkpoint.format.shard_files import Shard
from xla_fsdp.checkpoint.steps.step_directory import Best

__all__ = [
    "Best",
    "CheckpointError",
    "CheckpointManager",
    "GroupRecord",
    "Kind",
    "Layout",
    "MemberRecord",
    "MergeOptions",
    "OptimizerRecord",
    "ParamRecord",
    "Shard",
    "ShardMetadata",
    "StateRecord",
    "WriteOptions",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
    "find_problems",
    "merge_files",
    "open_shard",
    "plan_reshard",
    "read_shards",
]


def __getattr__(name: str) -> Any:
    if name == "CheckpointManager":  # which needs torch_xla, as all that holds a model in training
        from xla_fsdp.state.checkpoint_manager import CheckpointManager

        return CheckpointManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
