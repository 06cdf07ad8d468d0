"""The autograd node of an embedding that never holds its table: rows, from row numbers and shards.

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
from xla_fsdp.streamed import turns
from xla_fsdp.streamed.embedding_ways import Way, whole_gradient
from xla_fsdp.streamed.weights import WEIGHT, StreamedWeights
from xla_fsdp.unit import Unit


@dataclass(frozen=True)
class Job:
    """One forward of an embedding.

    Args:
        unit: the embedding's.
        weights: how its table travels.
        way: how rows are looked up.
        padding: number of the row that gets no gradient, or -1.
    """

    unit: Unit
    weights: StreamedWeights
    way: Way
    padding: int


def rows_of(job: Job, numbers: Tensor) -> Tensor:
    """[n, width] in the dtype that is sent, from row numbers [n] int32; NaN for -1."""
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
    with torch.no_grad():
        rows = job.way.rows(turns.shards_for_forward(job.unit, []), numbers)
        rows = torch.where((numbers >= 0)[:, None], rows, float("nan"))
        job.unit.backward.forward_gate.hold([rows])
    return rows


def _backward(job: Job, numbers: Tensor, grad: Tensor) -> list[Tensor | None]:
    unit, weights = job.unit, job.weights
    [grad] = turns.start_backward(unit, grad)
    numbers = torch.where(numbers == job.padding, -1, numbers)
    if turns.reduces(unit):
        of_shards = weights.finished(job.way.sums(numbers, grad), None)
    else:
        whole = whole_gradient(weights.num_classes, numbers, grad).to(weights.dtype)
        of_shards = turns.by_unit(unit, weights, {WEIGHT: whole})
    turns.end_backward(unit, None, of_shards)
    return of_shards
