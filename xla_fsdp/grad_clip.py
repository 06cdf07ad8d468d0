"""Clip gradients by value, or by their global norm where every rank holds a slice of each.

Words: the *local norm* is over the slices of one rank; padding is zero and adds nothing. A *whole*
parameter, which FSDP was told to ignore, has the same gradient on every rank (if its user reduces
it) and counts once.
Always true: nothing here waits for the device, so the norm stays a lazy tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xla_fsdp.collectives import Collectives


@dataclass(frozen=True)
class Slices:
    """Gradients of which the ranks that ``collectives`` joins hold a slice each."""

    grads: Sequence[Tensor]
    collectives: Collectives


@torch.no_grad()
def clip_grads_by_norm_(
    sliced: Sequence[Slices],
    whole: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most ``max_norm``.

    Args:
        sliced: gradients of shards; every rank gives the same groups in the same order.
        whole: gradients that every rank has in full.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.
        device: where the norm is computed.

    Returns:
        The norm before clipping: a scalar fp32 tensor on the device.

    Raises:
        ValueError: if ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    parts = [_over_ranks(part, norm_type, device) for part in sliced]
    total = _combined([*parts, *_fp32_norms(whole, norm_type, device)], norm_type, device)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in [*(grad for part in sliced for grad in part.grads), *whole]:
        grad.mul_(scale.to(device=grad.device, dtype=grad.dtype))
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


def _over_ranks(part: Slices, p: float, device: torch.device) -> Tensor:
    local = _combined(_fp32_norms(part.grads, p, device), p, device)
    if math.isinf(p):
        return part.collectives.all_reduce("max", local)
    return part.collectives.all_reduce("sum", local.pow(p)).pow(1.0 / p)


def _combined(norms: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """The norm of vectors that have these norms."""
    # torch's norm of a tensor, never Python's max over scalars: that would sync for each of them.
    return torch.linalg.vector_norm(torch.stack([torch.zeros((), device=device), *norms]), p)


def _fp32_norms(grads: Iterable[Tensor], p: float, device: torch.device) -> list[Tensor]:
    return [
        torch.linalg.vector_norm(grad, p, dtype=torch.float32).to(device)
        for grad in grads
        if grad.numel()
    ]
