"""Tensor, sequence and loss parallelism.

Names and arguments are those of ``torch.distributed.tensor.parallel``; layouts are torch's own.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard

from xla_fsdp.distributed.placement import TensorPlacement
from xla_fsdp.tensor_parallel.api import parallelize_module
from xla_fsdp.tensor_parallel.loss_parallel import loss_parallel, parallel_cross_entropy
from xla_fsdp.tensor_parallel.parallel_module import ParallelStyle
from xla_fsdp.tensor_parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from xla_fsdp.tensor_parallel.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "Partial",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "TensorPlacement",
    "loss_parallel",
    "parallel_cross_entropy",
    "parallelize_module",
]
