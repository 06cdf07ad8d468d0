"""Optimizers for replicated, sharded and 16-bit models."""

from __future__ import annotations

from xla_fsdp.optim.distributed_optimizer import DistributedOptimizer
from xla_fsdp.optim.high_precision import HighPrecisionOptimizer, masters_of
from xla_fsdp.optim.in_backward import StepInBackward, step_in_backward
from xla_fsdp.optim.model_averagers import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)
from xla_fsdp.optim.whole_parameters import WholeParameterOptimizer
from xla_fsdp.optim.zero import ZeroRedundancyOptimizer

__all__ = [
    "DistributedOptimizer",
    "HierarchicalModelAverager",
    "HighPrecisionOptimizer",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "StepInBackward",
    "WholeParameterOptimizer",
    "ZeroRedundancyOptimizer",
    "masters_of",
    "step_in_backward",
]
