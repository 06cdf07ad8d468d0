"""Policies of ``fully_shard``, with the names and fields that they have in torch.

Always true: a policy is plain data; ``fully_shard`` turns it into the unit's ``FSDPConfig``. Code
that imports the policies from ``torch.distributed.fsdp`` may pass those: fields are read by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
