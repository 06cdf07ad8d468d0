"""``StreamedEmbedding``: an embedding whose table is never unsharded under FSDP.

Invariant: parameters, their names, state dicts and results are those of ``nn.Embedding``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.higher_order import differentiable_once
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.fsdp.engine.autograd import mark_constants, on_device
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.nn.chunked.hooks import (
    ChunkedModule,
    Compute,
    compute_of,
    end_backward,
    pieces_problems,
    shards_for_forward,
    start_backward,
)
from xla_fsdp.nn.chunked.lookup_strategies import (
    ExchangeRows,
    GatherChunks,
    exchange_of,
    unreduced_gradient,
)
from xla_fsdp.nn.chunked.weights import WEIGHT, ChunkedWeights
from xla_fsdp.xla.loop import LoopCache


class StreamedEmbedding(nn.Embedding, ChunkedModule):
    """An ``nn.Embedding`` whose table is never unsharded, as a unit of its own under FSDP.

    If this sends less than the whole table, each rank looks up the rows that a group of ranks asks
    for in a part of the table, and only rows and their gradients are sent within the group; all
    ranks must then ask for the same number of rows. The part is the rank's own shard, or is
    gathered from ranks beside it, so that the group is smaller: whatever sends the least, with at
    most 64 MiB for rows and part. Otherwise a loop gathers one piece of all shards at a time and
    copies the rows of the input from it; backward computes the gradient of one piece at a time and
    reduces it to the shards immediately. This sends as much as gathering the table at once.
    Gradients that ``no_sync`` accumulates, or that a user's hook reduces, are unsharded. Without
    FSDP, or as a part of a larger unit, this is an ``nn.Embedding``.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: width of a row.
        pieces: maximum number of pieces in which to gather the table; None for pieces of up to 16
            MiB, or an eighth of the table if that is more, or to send rows if that sends less. A
            table of one piece is gathered like any unit.
        options: those of ``nn.Embedding``. With ``max_norm``, ``scale_grad_by_freq`` or ``sparse``
            the table is gathered like any unit, with a warning; units refuse to run with
            ``max_norm``, which changes the table, and XLA cannot train with ``sparse``.

    Raises:
        ValueError: if ``pieces`` is not a number from 1, or None.
    """

    _fsdp_unsharded = "its whole table"
    _fsdp_without_reshard = "is, too, as backward needs no table"

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, pieces: int | None = None, **options: Any
    ) -> None:
        if problems := pieces_problems(pieces):
            raise ValueError(f"StreamedEmbedding: {problems[0]}")
        super().__init__(num_embeddings, embedding_dim, **options)
        self.pieces = pieces

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, pieces: int | None = None
    ) -> StreamedEmbedding:
        """Make one that shares the parameter of ``embedding``, to replace it in a model before any
        module is wrapped. Ties to other modules are preserved.

        Args:
            embedding: the layer; for models of transformers, ``model.get_input_embeddings()``.
            pieces: see the class.

        Raises:
            TypeError: if it is not an ``nn.Embedding``, or has a forward of its own (as layers of
                transformers that scale their rows), which would be lost.
            ValueError: if its table is sharded already, or for ``pieces`` out of range.
        """
        cls._check_source(embedding, nn.Embedding, "num_embeddings", "embedding_dim")
        made = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            pieces=pieces,
            padding_idx=embedding.padding_idx,
            max_norm=embedding.max_norm,
            norm_type=embedding.norm_type,
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            sparse=embedding.sparse,
            device="meta",
            dtype=embedding.weight.dtype,
        )
        made.weight = embedding.weight
        return made.train(embedding.training)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ``input``, [..., embedding_dim].

        Args:
            input: row numbers, [...], int32 or int64. If the table is not unsharded, a number out
                of range gives NaN.

        Raises:
            TypeError: if ``input`` has another dtype.
        """
        if input.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"the input of {type(self).__name__} is {input.dtype}; give row numbers, as int32 "
                f"or int64"
            )
        return compute_of(self, super().forward)(input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pieces={self.pieces}"

    def _fsdp_why_unsharded(self) -> str:
        if placement_in(self, "weight") is not None:
            return "tensor parallelism has cut its table"
        if type(self).forward is not StreamedEmbedding.forward:
            return f"{type(self).__name__} has a forward of its own"
        options = {
            "max_norm": self.max_norm is not None,
            "scale_grad_by_freq": self.scale_grad_by_freq,
            "sparse": self.sparse,
        }
        found = [name for name, is_set in options.items() if is_set]
        return f"it has {' and '.join(found)}" if found else ""

    def _fsdp_compute_for(
        self, unit: FSDPState, loops: LoopCache, input: Any = None, **_: Any
    ) -> Compute | None:
        weights = ChunkedWeights(unit.group, rings=False)
        chunks = weights.cut(self.pieces, 0, weights.dtype)
        if not isinstance(input, Tensor) or chunks.count == 1:  # no use in a loop of one chunk
            return None
        exchange = exchange_of(weights, loops, input.numel()) if self.pieces is None else None
        strategy = exchange or GatherChunks(weights, chunks, loops)
        padding = -1 if self.padding_idx is None else self.padding_idx
        return EmbeddingCall(unit, weights, strategy, padding).rows


# ---------------------------------------------------------------- as a unit of its own


@dataclass(frozen=True)
class EmbeddingCall:
    """One forward of an embedding."""

    unit: FSDPState
    weights: ChunkedWeights
    strategy: GatherChunks | ExchangeRows
    padding: int  # number of the row that gets no gradient, or -1

    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows [..., width] in the compute dtype, for row numbers [...]; NaN for numbers out
        of range."""
        if not on_device(numbers):
            raise ValueError(
                "StreamedEmbedding: the input is in host memory; move it to the XLA device"
            )
        is_row = (numbers >= 0) & (numbers < self.weights.num_classes)
        flat = torch.where(is_row, numbers, -1).reshape(-1).to(torch.int32)
        shards = self.unit.group.shards
        if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards):
            found = _Rows.apply(self, flat, *shards)
        else:
            found = self.forward(flat)
        return found.reshape(*numbers.shape, self.weights.width)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return rows [n, width] for row numbers [n] int32; NaN for -1."""
        with torch.no_grad():
            rows = self.strategy.rows(shards_for_forward(self.unit, []), numbers)
            rows = torch.where((numbers >= 0)[:, None], rows, float("nan"))
            self.unit.schedule.after_loop([rows])
        return rows

    def backward(self, numbers: Tensor, grad: Tensor) -> list[Tensor | None]:
        """Return the gradients of the unit's shards from that of the rows, [n, width]."""
        unit, weights = self.unit, self.weights
        [grad] = start_backward(unit, grad)
        numbers = torch.where(numbers == self.padding, -1, numbers)
        if unit.reduces_plainly:
            of_shards = weights.finished(self.strategy.sums(numbers, grad), None)
        else:
            table = unreduced_gradient(weights.num_classes, numbers, grad).to(weights.dtype)
            of_shards = weights.reduce_by_unit(unit, {WEIGHT: table})
        end_backward(unit, None, of_shards)
        return of_shards


class _Rows(torch.autograd.Function):
    """Map (row numbers, shards) to rows; save only the row numbers for backward."""

    @staticmethod
    def forward(ctx: Any, call: EmbeddingCall, numbers: Tensor, *shards: Tensor) -> Tensor:
        rows = call.forward(numbers)
        ctx.call = call
        ctx.save_for_backward(numbers)
        mark_constants(ctx, [rows], [True])
        return rows

    @staticmethod
    @differentiable_once(
        "StreamedEmbedding reduces the gradient of its table piece by piece, without a graph. Use "
        "nn.Embedding in its place"
    )
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        [numbers] = ctx.saved_tensors
        return (None, None, *ctx.call.backward(numbers, grad))
