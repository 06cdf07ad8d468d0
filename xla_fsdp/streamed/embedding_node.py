"""The autograd node of a streamed embedding: rows, from row numbers and shards.

Always true: it takes every shard parameter of the embedding's unit and gives each its gradient, as
the unit's own nodes would; between forward and backward it keeps the row numbers alone. Gradients
that are not simply reduced (they are kept, or go through a user's hook) are handed to the unit, in
full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xla_fsdp.graph_nodes import mark_constants
from xla_fsdp.scan_xla_ops import Like
from xla_fsdp.streamed import turns
from xla_fsdp.streamed.embedding_program import Plan, backward_loop, forward_loop
from xla_fsdp.streamed.weights import WEIGHT, StreamedWeights
from xla_fsdp.unit import Unit


@dataclass(frozen=True)
class Job:
    """One forward of an embedding.

    Args:
        unit: the embedding's.
        weights: how its table travels.
        plan: what the loops depend on.
        loops: those that are there already.
    """

    unit: Unit
    weights: StreamedWeights
    plan: Plan
    loops: turns.Loops


def rows_of(job: Job, numbers: Tensor) -> Tensor:
    """[n, width] in the dtype that is sent, from row numbers [n] int32."""
    shards = job.unit.group.shards
    if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards):
        return _Rows.apply(job, numbers, *shards)
    return _forward(job, numbers)


class _Rows(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx: Any, job: Job, numbers: Tensor, *shards: Tensor) -> Tensor:
        rows = _forward(job, numbers)
        ctx.job = job
        ctx.save_for_backward(numbers)
        mark_constants(ctx, [rows], [True])
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        [numbers] = ctx.saved_tensors
        return (None, None, *_backward(ctx.job, numbers, grad))


def _forward(job: Job, numbers: Tensor) -> Tensor:
    weights, pieces = job.weights, job.plan.pieces
    with torch.no_grad():
        sent = weights.sent(turns.shards_for_forward(job.unit, []), pieces)
        start = torch.full(
            (len(numbers), weights.width), float("nan"), dtype=sent.dtype, device=sent.device
        )
        key = ("forward", job.plan, Like.of(numbers), sent.dtype)
        loop = job.loops.get(key, lambda: forward_loop(job.plan, weights, numbers))
        [rows] = loop.run([start, sent, turns.numbered(pieces, sent.device), numbers], None)
        job.unit.backward.forward_gate.hold([rows])
    return rows


def _backward(job: Job, numbers: Tensor, grad: Tensor) -> list[Tensor | None]:
    unit, weights, pieces = job.unit, job.weights, job.plan.pieces
    grad, _ = turns.start_backward(unit, grad)
    reduced = turns.reduces(unit)
    like = (Like.of(numbers), Like.of(grad), weights.dtype)
    key = ("backward", job.plan, reduced, unit.group.reduction.predivide, *like)
    loop = job.loops.get(
        key, lambda: backward_loop(job.plan, weights, numbers, grad, reduced=reduced)
    )
    [of_pieces] = loop.run([turns.numbered(pieces, grad.device), numbers, grad], None)
    if reduced:
        of_shards = weights.finished(of_pieces, None)
    else:
        of_shards = turns.by_unit(unit, weights, {WEIGHT: weights.whole(of_pieces, pieces)})
    turns.end_backward(unit, None, of_shards)
    return of_shards
