"""Clip gradients by value, or by their global norm where every rank holds a slice of each.

Words: the *local norm* is over the slices of one rank; padding is zero and adds nothing. A *whole*
parameter, which FSDP was told to ignore, has the same gradient on every rank (if its user reduces
it) and counts once.
Always true: nothing here waits for the device, so the norm stays a lazy tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from xla_fsdp.collectives import Collectives
from xla_fsdp.sharded_param import is_sharded


@torch.no_grad()
def clip_grads_by_norm_(
    params: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    collectives: Collectives,
    device: torch.device,
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most ``max_norm``.

    Args:
        params: parameters that have a gradient: shards, and whole ones.
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
    sliced, whole = _grads(params, sharded=True), _grads(params, sharded=False)
    total = _global_norm(sliced, whole, norm_type, collectives, device)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in (*sliced, *whole):
        grad.mul_(scale.to(grad.dtype))
    return total


@torch.no_grad()
def clip_grads_by_value_(params: Sequence[nn.Parameter], clip_value: float) -> None:
    """Clamp the gradients of ``params`` in place into [-clip_value, clip_value].

    Raises:
        ValueError: if ``clip_value`` is negative or not a number.
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_value must not be negative, got {clip_value}")
    for param in params:
        if param.grad is not None:
            param.grad.clamp_(-clip_value, clip_value)


def _grads(params: Iterable[nn.Parameter], *, sharded: bool) -> list[Tensor]:
    found = [param.grad for param in params if is_sharded(param) == sharded]
    return [grad for grad in found if grad is not None]


def _global_norm(
    sliced: Sequence[Tensor],
    whole: Sequence[Tensor],
    p: float,
    collectives: Collectives,
    device: torch.device,
) -> Tensor:
    norms = torch.stack(_fp32_norms(sliced, p) or [torch.zeros((), device=device)])
    others = _fp32_norms(whole, p)
    # torch's max over a tensor, never Python's over scalars: that would sync at each comparison.
    if math.isinf(p):
        largest = collectives.all_reduce("max", norms.max())
        return torch.stack([largest, *others]).max()
    total = collectives.all_reduce("sum", norms.pow(p).sum())
    return torch.stack([total, *(norm.pow(p) for norm in others)]).sum().pow(1.0 / p)


def _fp32_norms(grads: Iterable[Tensor], p: float) -> list[Tensor]:
    return [
        torch.linalg.vector_norm(grad, p, dtype=torch.float32) for grad in grads if grad.numel()
    ]
