"""How evenly experts are used: metrics that a step returns, and that nothing in it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from xla_fsdp.distributed.collectives import all_ranks


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Return how many tokens of all ranks each expert has, [num_experts] int32, not read from the
    device.

    Args:
        experts: numbers of experts, integers of any shape: a router's top-k indices.
        num_experts: of the layer.
    """
    each = torch.arange(num_experts, dtype=torch.int32, device=experts.device)
    own = (experts.reshape(-1, 1).to(torch.int32) == each).sum(0, dtype=torch.int32)
    return all_ranks().all_reduce("sum", own)


def imbalance(counts: Tensor) -> Tensor:
    """Return the tokens of the busiest expert over those of an even share, [] float32: 1 if all
    experts have as many, their number if one has all."""
    counts = counts.float()
    return counts.max() / counts.mean().clamp(min=1e-9)
