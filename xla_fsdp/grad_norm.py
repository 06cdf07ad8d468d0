"""Clip gradients by their global norm, where every rank holds a slice of each.

Words: the *local norm* is over the slices of one rank; padding is zero and adds nothing.
Always true: nothing here waits for the device, so the norm stays a lazy tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from xla_fsdp.collectives import Collectives


@torch.no_grad()
def clip_grads_(
    grads: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    collectives: Collectives,
    device: torch.device,
) -> Tensor:
    """Scale ``grads`` in place so that their norm over all ranks is at most ``max_norm``.

    Args:
        grads: this rank's slices.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.
        collectives: the ranks that hold the other slices.
        device: where the norm goes if there are no gradients.

    Returns:
        The norm before clipping: a scalar fp32 tensor on the device.

    Raises:
        ValueError: if ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    total = _global_norm(grads, norm_type, collectives, device)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return total


def _global_norm(
    grads: Sequence[Tensor], p: float, collectives: Collectives, device: torch.device
) -> Tensor:
    norms = _fp32_norms(grads, p) or [torch.zeros((), device=device)]
    local = torch.stack(norms)
    # torch's max over a tensor, never Python's over scalars: that would sync at each comparison.
    if math.isinf(p):
        return collectives.all_reduce("max", local.max())
    return collectives.all_reduce("sum", local.pow(p).sum()).pow(1.0 / p)


def _fp32_norms(grads: Iterable[Tensor], p: float) -> list[Tensor]:
    return [
        torch.linalg.vector_norm(grad, p, dtype=torch.float32) for grad in grads if grad.numel()
    ]
