"""Names and types of options that are passed on to the wrapper, for type checkers.

A test holds them to those of the wrapper and of ``TorchOptions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from xla_fsdp.distributed.collectives import Collectives


class TorchOptionTypes(TypedDict, total=False):
    """The fields of ``TorchOptions``."""

    mesh: Any
    device_mesh: Any
    process_group: Any
    sharding_strategy: ShardingStrategy | None
    mixed_precision: MixedPrecision | None
    use_orig_params: bool | None
    sync_module_states: bool
    cpu_offload: CPUOffload | bool | None
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    device_id: int | torch.device | None


class WrapperOptionTypes(TorchOptionTypes, total=False):
    """What ``parallelize`` passes on: the wrapper's options but for the policy."""

    reshard_after_forward: bool | int
    flatten_parameters: bool
    execute_sharding_on_init: bool
    optimization_barrier_in_forward: bool
    optimization_barrier_in_backward: bool
    sync_on_finalization: bool
    disable_reshard_on_root: bool
    compute_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    fp32_reduce_scatter: bool
    sharding_groups: list[list[int]] | None
    sharding_rank: int | None
    sharding_world_size: int | None
    shard_param_on_dim_0: bool
    pin_layout_in_collective_ops: bool
    reduce_scatter_bucket_size_mb: float | None
    coalesce_all_gather_ops: bool
    auto_wrapper_callable: Callable[..., nn.Module] | None
    param_init_fn: Callable[[nn.Module], None] | None
    collectives: Collectives | None
    ignored_modules: Iterable[nn.Module] | None
    ignored_params: Iterable[nn.Parameter] | None
    ignored_states: Iterable[nn.Module | nn.Parameter] | None
    scan_layers: bool | str | Iterable[str] | None
    scan_stacked: bool
