"""The two ways to look rows up in a table of which every rank has a shard.

Words: *numbers* are those of the rows that a rank asks for, [n] int32, or -1; a rank's *shard* has
``shard_rows`` rows, as it is sent. To *stream*, a loop gathers a piece of all shards at a time (one
round is one piece; see ``pieces``, and ``loop_xla_ops`` for the words of loops). To *exchange*,
every rank looks up what all ranks ask for in its own shard, and what it found is sent instead.
Always true: neither holds the table or its gradient; to exchange takes memory for the rows of all
ranks, and for their gradients in float32. Gradients are summed in float32, streaming over a rank's
own numbers, exchanging over all ranks'.
Source: the row-wise sharding of embeddings in recommendation models (Ivchenko et al., TorchRec: a
PyTorch Domain Library for Recommendation Systems, RecSys 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import Like, Loop, trace_body
from xla_fsdp.fsdp.chunked.chunks import Pieces
from xla_fsdp.fsdp.chunked.hooks import Kept
from xla_fsdp.fsdp.chunked.weights import StreamedWeights


class Way(Protocol):
    """How rows are looked up."""

    def rows(self, shards: list[Tensor], numbers: Tensor) -> Tensor:
        """[n, width] in the dtype that is sent; anything for -1."""
        ...

    def sums(self, numbers: Tensor, grad: Tensor) -> Tensor:
        """From the rows' gradients [n, width] to this rank's rows of their sum over the ranks, as
        gradients travel: divided by the first of the divisors."""
        ...


@dataclass(frozen=True)
class Streaming:
    """Piece by piece, each gathered in its own round.

    Args:
        weights: how the table travels.
        pieces: how it is cut.
        kept: loops that are there already.
    """

    weights: StreamedWeights
    pieces: Pieces
    kept: Kept

    def rows(self, shards: list[Tensor], numbers: Tensor) -> Tensor:
        """See ``Way``."""
        sent = self.weights.sent(shards, self.pieces)
        start = torch.zeros(len(numbers), sent.shape[-1], dtype=sent.dtype, device=sent.device)
        key = ("rows", self.pieces, Like.of(numbers), sent.dtype)
        loop = self.kept.get(key, lambda: self._rows_loop(start, sent, numbers))
        [found] = loop.run([start, sent, self.pieces.numbers(sent.device), numbers], None)
        return found

    def sums(self, numbers: Tensor, grad: Tensor) -> Tensor:
        """See ``Way``."""
        predivide = self.weights.group.reduction.predivide
        like = (Like.of(numbers), Like.of(grad), self.weights.dtype)
        key = ("sums", self.pieces, predivide, *like)
        loop = self.kept.get(key, lambda: self._sums_loop(numbers, grad))
        [found] = loop.run([self.pieces.numbers(grad.device), numbers, grad], None)
        return found

    def _rows_loop(self, start: Tensor, sent: Tensor, numbers: Tensor) -> Loop:
        def body(values: list[Tensor]) -> list[Tensor]:
            found, sent, number, wanted = values
            piece = self.weights.gather(sent)
            place, is_here = self.pieces.places(wanted, number)
            return [torch.where(is_here[:, None], piece[place], found)]

        likes = [Like.of(start), Like.slice_of(sent), Like((1,), torch.int32), Like.of(numbers)]
        return Loop(trace_body(body, likes, "fsdp_embedding_rows"), self.pieces.count, 1, 2)

    def _sums_loop(self, numbers: Tensor, grad: Tensor) -> Loop:
        num_rows = self.weights.num_ranks * self.pieces.rows

        def body(values: list[Tensor]) -> list[Tensor]:
            number, wanted, grad = values
            place, is_here = self.pieces.places(wanted, number)
            found = _added(num_rows, place, is_here, grad)
            return [self.weights.reduce(found.to(self.weights.dtype))]

        likes = [Like((1,), torch.int32), Like.of(numbers), Like.of(grad)]
        return Loop(trace_body(body, likes, "fsdp_embedding_sums"), self.pieces.count, 0, 1)


@dataclass(frozen=True)
class Exchanging:
    """What all ranks ask for, from each rank's own rows.

    Args:
        weights: how the table travels otherwise.
        kept: which rows are this rank's, as a value: all ranks have one program.
    """

    weights: StreamedWeights
    kept: Kept

    def rows(self, shards: list[Tensor], numbers: Tensor) -> Tensor:
        """See ``Way``. All but one rank send zeros for a row, so sums are exact."""
        by = self.weights.group.collectives
        place, is_here = self._places(by.all_gather(numbers))
        own = self.weights.sent_rows(shards)
        return by.reduce_scatter(torch.where(is_here[:, None], own[place], 0.0))

    def sums(self, numbers: Tensor, grad: Tensor) -> Tensor:
        """See ``Way``."""
        by = self.weights.group.collectives
        place, is_here = self._places(by.all_gather(numbers))
        found = _added(self.weights.shard_rows, place, is_here, by.all_gather(grad))
        reduction = self.weights.group.reduction
        return reduction.to_reduce_dtype((found / reduction.predivide).to(self.weights.dtype))

    def _places(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Which row of the own shard each is, 0 where it is none, and whether it is one."""
        row = numbers - self.kept.get("first row", self._first_row)
        is_here = (row >= 0) & (row < self.weights.shard_rows)
        return torch.where(is_here, row, 0), is_here

    def _first_row(self) -> Tensor:
        first = self.weights.group.collectives.rank * self.weights.shard_rows
        return ops.upload(torch.tensor([first], dtype=torch.int32))


def whole_gradient(num_rows: int, numbers: Tensor, grad: Tensor) -> Tensor:
    """[num_rows, width] float32, of this rank's numbers alone."""
    is_row = numbers >= 0
    return _added(num_rows, torch.where(is_row, numbers, 0), is_row, grad)


def _added(num_rows: int, places: Tensor, counts: Tensor, grad: Tensor) -> Tensor:
    """[num_rows, width] float32, where those that count are added at their places."""
    share = torch.where(counts[:, None], grad.float(), 0.0)
    start = torch.zeros(num_rows, grad.shape[-1], dtype=torch.float32, device=grad.device)
    return start.index_add(0, places, share)
