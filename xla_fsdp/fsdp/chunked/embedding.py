"""``StreamedEmbedding``: an embedding of which no rank has the whole table under FSDP.

Invariant: parameters, their names and state dicts are those of ``nn.Embedding``, and so is what it
computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.distributed.xla.loop import LoopCache
from xla_fsdp.fsdp.chunked.hooks import (
    ChunkedModule,
    Compute,
    compute_of,
    end_backward,
    pieces_problems,
    reduces,
    shards_for_forward,
    start_backward,
)
from xla_fsdp.fsdp.chunked.lookup_strategies import (
    ExchangeRows,
    GatherChunks,
    LookupStrategy,
    unreduced_gradient,
)
from xla_fsdp.fsdp.chunked.weights import WEIGHT, ChunkedWeights
from xla_fsdp.fsdp.engine.autograd import mark_constants, on_device
from xla_fsdp.fsdp.engine.state import FSDPState

EXCHANGE_BYTES = 2**26
"""What the rows that all ranks ask for may take to be sent in place of a table."""


class StreamedEmbedding(nn.Embedding, ChunkedModule):
    """An ``nn.Embedding`` that, as a unit of its own under FSDP, never holds its whole table.

    Where that sends less than the table, and the rows of all ranks take up to 64 MiB, every rank
    looks up what all ranks ask for in its own shard, and rows are sent, and their gradients; all
    ranks have to ask for as many then. Else a loop gathers a piece of all shards at a time and
    takes from it what the input asks for; backward makes the gradient of a piece at a time and
    reduces it to the shards at once, so that as much is sent as for a table that is gathered whole.
    Gradients that ``no_sync`` keeps, and those that go through a user's hook, are unsharded.
    Without FSDP, and as a part of a larger unit, it is an ``nn.Embedding``.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: width of a row.
        pieces: in how many to gather the table, at most; None for pieces of up to 16 MiB, or for
            sending rows where that is less. A table that is one piece is gathered whole, like any
            unit.
        options: those of ``nn.Embedding``. With ``max_norm``, ``scale_grad_by_freq`` or ``sparse``
            the table is gathered whole, with a warning; units refuse to run the first, which
            changes the table, and XLA to train the last.

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
        """Make one with the very parameter of ``embedding``, to put in its place in a model, before
        anything is wrapped. Ties to other modules stay.

        Args:
            embedding: the layer; of transformers' models, ``model.get_input_embeddings()``.
            pieces: see the class.

        Raises:
            TypeError: if it is no ``nn.Embedding``, or one with a forward of its own (as those of
                transformers that scale their rows), which would be lost.
            ValueError: if its table is sharded already, or for ``pieces`` out of range.
        """
        if not isinstance(embedding, nn.Embedding):
            raise TypeError(
                f"from_embedding takes an nn.Embedding, got {type(embedding).__name__}; make it "
                f"before the model is wrapped"
            )
        if type(embedding).forward not in (nn.Embedding.forward, StreamedEmbedding.forward):
            raise TypeError(
                f"{type(embedding).__name__} has a forward of its own, which a StreamedEmbedding "
                f"would not run; keep it as it is"
            )
        sizes = (embedding.num_embeddings, embedding.embedding_dim)
        if embedding.weight.shape != sizes:
            raise ValueError(
                f"the embedding's table has shape {tuple(embedding.weight.shape)}, not {sizes}: it "
                f"is sharded. Make the streamed one of the plain model's, then shard that"
            )
        made = cls(
            *sizes,
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
        """Return the rows of ``input``.

        Args:
            input: row numbers, [...], int32 or int64. Where the table is never whole, a number that
                is no row's gives NaN.

        Returns:
            [..., embedding_dim].

        Raises:
            TypeError: if they are no such integers.
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
        """None for a table of one chunk."""
        weights = ChunkedWeights(unit.group, rings=False)
        chunks = weights.cut(self.pieces, 0, weights.dtype)
        if not isinstance(input, Tensor) or chunks.count == 1:
            return None
        strategy: LookupStrategy = (
            ExchangeRows(weights, loops)
            if self.pieces is None and _pays(weights, input.numel())
            else GatherChunks(weights, chunks, loops)
        )
        padding = -1 if self.padding_idx is None else self.padding_idx
        return EmbeddingCall(unit, weights, strategy, padding).rows


# ---------------------------------------------------------------- as a unit of its own


def _pays(weights: ChunkedWeights, num_rows: int) -> bool:
    """Whether to send so many rows and their gradients takes less than the table and its gradient,
    and little memory."""
    sent = weights.dtype.itemsize
    less = num_rows * 2 * sent < weights.shard_rows * (sent + weights.reduce_dtype.itemsize)
    return less and weights.num_ranks * num_rows * weights.width * sent <= EXCHANGE_BYTES


@dataclass(frozen=True)
class EmbeddingCall:
    """One forward of an embedding."""

    unit: FSDPState  # the embedding's
    weights: ChunkedWeights  # its table
    strategy: LookupStrategy  # how rows are looked up
    padding: int  # number of the row that gets no gradient, or -1

    def rows(self, numbers: Tensor) -> Tensor:
        """Return [..., width] in the dtype that is sent, from row numbers [...]; NaN for a number
        that is no row's.

        Raises:
            ValueError: for numbers in host memory.
        """
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
        """Return [n, width], from row numbers [n] int32; NaN for -1."""
        with torch.no_grad():
            rows = self.strategy.rows(shards_for_forward(self.unit, []), numbers)
            rows = torch.where((numbers >= 0)[:, None], rows, float("nan"))
            self.unit.context.forward_gate.hold([rows])
        return rows

    def backward(self, numbers: Tensor, grad: Tensor) -> list[Tensor | None]:
        """Return gradients of the unit's shards, from those of the rows."""
        unit, weights = self.unit, self.weights
        [grad] = start_backward(unit, grad)
        numbers = torch.where(numbers == self.padding, -1, numbers)
        if reduces(unit):
            of_shards = weights.finished(self.strategy.sums(numbers, grad), None)
        else:
            table = unreduced_gradient(weights.num_classes, numbers, grad).to(weights.dtype)
            of_shards = weights.reduce_by_unit(unit, {WEIGHT: table})
        end_backward(unit, None, of_shards)
        return of_shards


class _Rows(torch.autograd.Function):
    """(row numbers, shards) to rows. It keeps the row numbers alone for backward."""

    @staticmethod
    def forward(ctx: Any, call: EmbeddingCall, numbers: Tensor, *shards: Tensor) -> Tensor:
        rows = call.forward(numbers)
        ctx.call = call
        ctx.save_for_backward(numbers)
        mark_constants(ctx, [rows], [True])
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        [numbers] = ctx.saved_tensors
        return (None, None, *ctx.call.backward(numbers, grad))
