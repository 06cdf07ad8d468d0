"""The autograd node of an embedding that never holds its table: rows, from row numbers and shards.

Always true: it takes every shard parameter of the embedding's unit and gives each its gradient, as
the unit's own nodes would; between forward and backward it keeps the row numbers alone. Gradients
that are not simply reduced (they are kept, or go through a user's hook) are handed to the unit, in
full.

Runs an embedding that is a unit of its own, and whose table is large, without the whole table.

Always true: only how rows are looked up is replaced (``turns``): of the two ways in
``embedding_ways`` it takes the one that sends less, unless the user has said in how many pieces to
stream. How autograd sees them is in ``embedding_node``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.fsdp.chunked import hooks as turns
from xla_fsdp.fsdp.chunked.embedding import StreamedEmbedding
from xla_fsdp.fsdp.chunked.hooks import Kept
from xla_fsdp.fsdp.chunked.lookup_strategies import Exchanging, Streaming, Way, whole_gradient
from xla_fsdp.fsdp.chunked.weights import WEIGHT, StreamedWeights
from xla_fsdp.fsdp.engine.autograd import mark_constants, on_device
from xla_fsdp.fsdp.engine.state import FSDPState


@dataclass(frozen=True)
class Job:
    """One forward of an embedding.

    Args:
        unit: the embedding's.
        weights: how its table travels.
        way: how rows are looked up.
        padding: number of the row that gets no gradient, or -1.
    """

    unit: FSDPState
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
        job.unit.context.forward_gate.hold([rows])
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


ROWS_BYTES = 2**26

"""What the rows that all ranks ask for may take to be sent in place of a table."""


class EmbeddingRunner:
    """See ``unit_host.Runner``. It keeps no module alive and can be copied with its host."""

    def __init__(self) -> None:
        self._kept = Kept()

    def run(self, unit: FSDPState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The embedding's call.

        Raises:
            ValueError: for inputs in host memory.
        """
        job = self._job(unit, *args, **kwargs)
        if job is None:
            return unit.run(forward, args, kwargs)
        return turns.run(unit, partial(_rows, job), forward, args, kwargs)

    def _job(self, unit: FSDPState, input: Any = None, **_: Any) -> Job | None:
        """For these arguments of the embedding's forward; None if there is nothing to stream: no
        numbers, or a table of one piece."""
        embedding = cast(StreamedEmbedding, turns.module_of(unit))
        weights = StreamedWeights(unit.group, rings=False)
        pieces = weights.cut(embedding.pieces, 0, weights.dtype)
        if not isinstance(input, Tensor) or pieces.count == 1:
            return None
        sends_rows = embedding.pieces is None and _pays(weights, input.numel())
        way: Way = (
            Exchanging(weights, self._kept)
            if sends_rows
            else Streaming(weights, pieces, self._kept)
        )
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        return Job(unit, weights, way, padding)


def _pays(weights: StreamedWeights, num_rows: int) -> bool:
    """Whether to send so many rows and their gradients takes less than the table and its gradient,
    and little memory."""
    sent = weights.dtype.itemsize
    less = num_rows * 2 * sent < weights.shard_rows * (sent + weights.reduce_dtype.itemsize)
    return less and weights.num_ranks * num_rows * weights.width * sent <= ROWS_BYTES


def _rows(job: Job, numbers: Tensor) -> Tensor:
    if not on_device(numbers):
        raise ValueError(
            "StreamedEmbedding: the input is in host memory; move it to the XLA device"
        )
    is_row = (numbers >= 0) & (numbers < job.weights.num_classes)
    found = rows_of(job, torch.where(is_row, numbers, -1).reshape(-1).to(torch.int32))
    return found.reshape(*numbers.shape, job.weights.width)


def why_not(embedding: StreamedEmbedding) -> str:
    """What about the module keeps it from being streamed; empty if nothing does."""
    if placement_in(embedding, "weight") is not None:
        return "tensor parallelism has cut its table"
    if type(embedding).forward is not StreamedEmbedding.forward:
        return f"{type(embedding).__name__} has a forward of its own"
    wanted = {
        "max_norm": embedding.max_norm is not None,
        "scale_grad_by_freq": embedding.scale_grad_by_freq,
        "sparse": embedding.sparse,
    }
    found = [name for name, is_set in wanted.items() if is_set]
    return f"it has {' and '.join(found)}" if found else ""
