"""Clip gradients by value, or by their norm over all ranks.

Padding of shards is zero and adds nothing. The gradient of an unsharded parameter is the same on
every rank and counts once; so does a replicated one along a tensor-parallel axis.
Invariants: without ``error_if_nonfinite`` no function reads a value from the device, so the norm is
a lazy tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xla_fsdp.distributed.collectives import Collectives, along
from xla_fsdp.distributed.placement import known_placement
from xla_fsdp.fsdp.engine.param import (
    known_group,
    known_shard,
    owners_of_grads,
    refuse_shown,
)
from xla_fsdp.fsdp.engine.thread import with_shards
from xla_fsdp.xla import ops


class Slices(NamedTuple):
    """This rank's slices of gradients, and one of collectives for each axis that shards them: that
    of FSDP, a tensor-parallel one. Unsharded gradients have none, and are the same on all ranks."""

    grads: list[Tensor]
    collectives: list[Collectives]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their norm, as one vector over all ranks, is at most a limit.

    Like ``torch.nn.utils.clip_grad_norm_``, for parameters some or all of which are shards.

    Args:
        parameters: parameters of one or several models, the same ones on every rank.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm, or ``float("inf")``.
        error_if_nonfinite: raise if the norm is not finite; the norm is then read at once, which
            ends the step's program there.
        foreach: accepted as in torch; XLA computes all gradients in one program anyway.

    Returns:
        The norm before clipping, a lazy fp32 scalar on the device.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: if gradients are not reduced yet, if unsharded parameters are given where
            shards are needed, if parameters are stepped in backward, or if ``error_if_nonfinite``
            finds a norm that is not finite.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_shown(given, "clip_grad_norm_")
    check_gradients([known_group(param) for param in given], "clip_grad_norm_")
    norm = clip_grads(given, max_norm, norm_type)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    return norm


@with_shards()
@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm as ``torch.nn.utils.get_total_norm``, which this replaces for shards; every
    rank must call it. Of gradients as they are in ``param.grad``, or parameters: copies are not
    known to be parts of something."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    owners = owners_of_grads(given)
    check_gradients([known_group(owner) for owner in owners], "get_total_norm")
    norm = norm_over_ranks(_divided(zip(owners, given, strict=True), None), norm_type)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    return norm


def _check_finite(norm: Tensor, norm_type: float) -> None:
    if not math.isfinite(norm.item()):
        raise RuntimeError(f"the gradients' norm of order {norm_type} is {norm.item()}")


def check_gradients(groups: Sequence[Any], function: str) -> None:
    """Raise RuntimeError if the gradients are gone, stepped in backward, or not reduced yet."""
    found = [group for group in groups if group is not None]
    if any(group.steps_in_backward for group in found):
        raise RuntimeError(
            f"{function} was called on a model that is stepped in backward: its gradients are gone "
            f"by now. Do without, or step after backward: parallelize with "
            f"Recipe(step_in_backward=False), or remove() of what step_in_backward() returned"
        )
    if any(group.has_unreduced for group in found):
        raise RuntimeError(
            f"{function} was called while gradients kept by no_sync() or without gradient sync are "
            f"not reduced yet; run the last backward of the accumulation with gradient sync, "
            f"outside no_sync(), first"
        )


def clip_grads(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    over: Collectives | None = None,
) -> Tensor:
    """Clip the gradients of parameters, sharded or not, by their norm over all ranks. Norms of
    shards are combined by ``over``, or each by the collectives of its own group."""
    distinct = {id(param): param for param in parameters}.values()
    slices = _divided(((param, param.grad) for param in distinct), over)
    return clip_grads_by_norm_(slices, max_norm, norm_type)


def _divided(
    grads: Iterable[tuple[Tensor, Tensor | None]], over: Collectives | None
) -> list[Slices]:
    """Divide gradients, each with its parameter, by the ranks that share them; unsharded last."""
    found: dict[Any, Slices] = {}
    for param, grad in grads:
        by = shared_by(param, over)
        # Also without a gradient: every rank must make the same collectives.
        slices = found.setdefault(tuple(each.key for each in by), Slices([], by))
        slices.grads.extend([] if grad is None else [grad])
    return sorted(found.values(), key=lambda slices: not slices.collectives)


@torch.no_grad()
def clip_grads_by_norm_(slices: Sequence[Slices], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most ``max_norm``; return
    the norm, a lazy fp32 scalar on the device."""
    total = norm_over_ranks(slices, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in [grad for each in slices for grad in each.grads]:
        grad.mul_(scale.to(device=grad.device, dtype=grad.dtype))
    return total


def norm_over_ranks(slices: Sequence[Slices], norm_type: float) -> Tensor:
    """Return the norm of gradients over all ranks, which give the same groups in the same order."""
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    return _combined([norm for each in slices for norm in _norms_of(each, norm_type)], norm_type)


def shared_by(param: Tensor, over: Collectives | None) -> list[Collectives]:
    """Return the collectives of each axis that shards a parameter; none for an unsharded one."""
    group, shard = known_group(param), known_shard(param)
    is_expert = shard is not None and shard.is_expert
    by = [] if group is None else [over or group.collectives.of(is_expert)]
    placement = known_placement(param) if shard is None else shard.originals[0].placement
    if placement is not None and placement.dim is not None:
        by.append(along(placement.mesh))
    return by


def _norms_of(slices: Slices, p: float) -> list[Tensor]:
    """Return the norms of unsharded gradients, or one of all slices over all ranks."""
    norms = [
        torch.linalg.vector_norm(grad, p, dtype=torch.float32).to(ops.device())
        for grad in slices.grads
        if grad.numel()
    ]
    if not slices.collectives:
        return norms
    norm = _combined(norms, p)
    for collectives in slices.collectives:
        if math.isinf(p):
            norm = collectives.all_reduce("max", norm)
        else:
            norm = collectives.all_reduce("sum", norm.pow(p)).pow(1.0 / p)
    return [norm]


def _combined(norms: Sequence[Tensor], p: float) -> Tensor:
    # torch's norm of a tensor, never Python's max over scalars: that would sync for each of them.
    return torch.linalg.vector_norm(torch.stack([torch.zeros((), device=ops.device()), *norms]), p)
