"""Clip gradients by value, or by their global norm where every rank holds a slice of each.

Words: the *local norm* is over the slices of one rank; padding is zero and adds nothing. A *whole*
parameter, which FSDP was told to ignore, has the same gradient on every rank (if its user reduces
it) and counts once.
Always true: nothing here waits for the device, so the norm stays a lazy tensor.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp import xla_ops
from xla_fsdp.collectives import Collectives
from xla_fsdp.param_group import ParamGroup
from xla_fsdp.sharded_param import is_sharded


@dataclass(frozen=True)
class Slices:
    """Gradients of which the ranks that ``collectives`` joins hold a slice each."""

    grads: Sequence[Tensor]
    collectives: Collectives


def slices_of(
    groups: Iterable[ParamGroup],
    over: Collectives | None = None,
    only: Container[int] | None = None,
) -> list[Slices]:
    """Gradients of all shards in ``groups``, those that are shared by the same ranks together.

    Args:
        groups: of any units; a shard that is tied across units counts once.
        over: join these ranks, instead of those that share the shards.
        only: ids of the shards to take.
    """
    grads: dict[Any, list[Tensor]] = {}
    collectives: dict[Any, Collectives] = {}
    seen: set[int] = set()
    for group in groups:
        by = over or group.collectives
        collectives.setdefault(by.key, by)
        for shard in group.shards:
            wanted = id(shard) not in seen and (only is None or id(shard) in only)
            if shard.grad is not None and wanted:
                grads.setdefault(by.key, []).append(shard.grad)
            seen.add(id(shard))
    return [Slices(grads.get(key, []), by) for key, by in collectives.items()]


def refuse_kept(groups: Iterable[ParamGroup], method: str) -> None:
    """Raise RuntimeError if ``no_sync`` kept gradients that are not reduced yet."""
    if any(group.has_kept for group in groups):
        raise RuntimeError(
            f"{method} was called while gradients kept by no_sync() are not reduced yet; run "
            f"the last backward of the accumulation outside no_sync() first"
        )


def clip_shards_by_norm_(
    groups: Sequence[ParamGroup], params: Sequence[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """Scale the gradients of ``params`` so that their norm, as one vector over all ranks, is at
    most ``max_norm``.

    Args:
        groups: of all units that the shards may belong to; every rank gives the same.
        params: shards, and parameters whose gradients every rank has in full.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm, or ``inf``.

    Returns:
        The norm before clipping: a lazy fp32 scalar on the device.

    Raises:
        ValueError: if a shard is in none of the groups, or ``norm_type`` is not positive.
        RuntimeError: if ``no_sync`` kept gradients that no backward has reduced since.
    """
    refuse_kept(groups, "clip_grad_norm_")
    wanted = {id(param) for param in params if is_sharded(param)}
    unknown = len(wanted - {id(shard) for group in groups for shard in group.shards})
    if unknown:
        raise ValueError(
            f"{unknown} of the parameters to clip are shards of a model that is not known here, so "
            f"neither are the ranks that hold the rest of them. Prepare that model, too"
        )
    whole = [p.grad for p in params if p.grad is not None and not is_sharded(p)]
    sliced = slices_of(groups, only=wanted)
    return clip_grads_by_norm_(sliced, whole, max_norm, norm_type, xla_ops.device())


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
