"""Two ways to look up rows of a sharded table without the unsharded table or gradient.

``GatherChunks`` gathers the table chunk by chunk in a loop. With ``ExchangeRows`` each rank looks
up the rows that other ranks ask for in its own shard, or in a part of the table that it gathers,
and the found rows are sent; this takes memory for the part, for the rows, and for the gradients of
both in float32.

Both map, by ``rows``, shards and row numbers, [n] int32, to rows [n, width] in the compute dtype,
undefined for -1; and by ``sums`` row numbers and gradients of these rows, [n, width], to that of
this rank's shard in the reduce dtype, summed over the ranks and divided by ``predivide``.

Source: the row-wise sharding of embeddings in recommendation models (Ivchenko et al., TorchRec: a
PyTorch Domain Library for Recommendation Systems, RecSys 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.collectives import Collectives, LocalCollectives
from xla_fsdp.distributed.shard_layout import ROWS
from xla_fsdp.nn.chunked.chunks import Chunks
from xla_fsdp.nn.chunked.weights import ChunkedWeights
from xla_fsdp.nn.embedding_grad import sum_rows
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import LoopCache, TensorSpec, traced_loop

EXCHANGE_BYTES = 2**26
"""Maximum size of the rows that a group of ranks asks for, and of the part of the table that each
of its ranks gathers, to send rows and not the whole table."""


@dataclass(frozen=True)
class GatherChunks:
    """Gather the table chunk by chunk. Gradients of equal numbers are summed as by
    ``sum_rows``."""

    weights: ChunkedWeights
    chunks: Chunks
    loops: LoopCache

    def rows(self, shards: list[Tensor], numbers: Tensor) -> Tensor:
        def body(values: list[Tensor]) -> list[Tensor]:
            found, sent, number, wanted = values
            chunk = self.weights.gather(sent)
            row, is_here = self.chunks.locate(wanted, number)
            return [torch.where(is_here[:, None], chunk[row], found)]

        sent = self.weights.sent(shards, self.chunks)
        start = torch.zeros(len(numbers), sent.shape[-1], dtype=sent.dtype, device=sent.device)
        xs, name = [sent, self.chunks.numbers(sent.device)], "fsdp_embedding_rows"
        loop = self.loops.get(
            ("rows", self.chunks, TensorSpec.of(numbers), sent.dtype),
            lambda: traced_loop(body, name, self.chunks.count, [start], xs, [numbers]),
        )
        [found] = loop.run([start, *xs, numbers], None)
        return found

    def sums(self, numbers: Tensor, grad: Tensor) -> Tensor:
        def body(values: list[Tensor]) -> list[Tensor]:
            number, wanted, grad = values
            row, is_here = self.chunks.locate(wanted, number)
            found = sum_rows(self.weights.num_ranks * self.chunks.rows, row, is_here, grad)
            return [self.weights.reduce(found.to(self.weights.dtype))]

        predivide = self.weights.group.reduction.predivide  # a constant of the program
        specs = (TensorSpec.of(numbers), TensorSpec.of(grad), self.weights.dtype)
        xs, given, name = [self.chunks.numbers(grad.device)], [numbers, grad], "fsdp_embedding_sums"
        loop = self.loops.get(
            ("sums", self.chunks, predivide, *specs),
            lambda: traced_loop(body, name, self.chunks.count, [], xs, given),
        )
        [found] = loop.run([*xs, *given], None)
        return found


@dataclass(frozen=True)
class ExchangeRows:
    """Gather a part of the table among some ranks, of which each rank of a group has another one;
    within the group send the rows that its ranks ask for. Gradients of equal numbers are summed as
    by ``sum_rows`` within the group, and those of a part then among the ranks that have gathered
    it."""

    weights: ChunkedWeights
    cache: LoopCache  # stores the number of the first row of this rank's part
    part: Collectives  # among the ranks whose shards are one part
    group: Collectives  # among ranks that together have the table

    def rows(self, shards: list[Tensor], numbers: Tensor) -> Tensor:
        row, is_here = self._locate(self.group.all_gather(numbers))
        sent = self.weights.sent_rows(shards)
        part = self.part.all_gather(F.pad(sent, (0, 0, 0, self._padding)))
        # Only one rank sends a row, the others zeros, so the sums are exact.
        found = torch.where(is_here[:, None], part[row], 0.0)
        self.weights.group.gather.log.sends_one("reduce-scatter of a table's rows", found)
        return self.group.reduce_scatter(found)

    def sums(self, numbers: Tensor, grad: Tensor) -> Tensor:
        reduction = self.weights.group.reduction
        reduction.log.sends_one("all-gather of gradients of a table's rows", grad)
        row, is_here = self._locate(self.group.all_gather(numbers))
        all_grads = self.group.all_gather(grad)
        num_rows = self.part.num_shards * (self.weights.shard_rows + self._padding)
        found = sum_rows(num_rows, row, is_here, all_grads)
        own = reduction.to_reduce_dtype((found / reduction.predivide).to(self.weights.dtype))
        return own if self.part.num_shards == 1 else self.part.reduce_scatter(own)

    @property
    def _padding(self) -> int:
        """Rows after each shard in a part of several."""
        # Without it the TPU would move all rows of the part, and of its gradient, within their
        # tiles: for 8 shards of 786 rows of width 2048, 3.5 MiB of code.
        return -self.weights.shard_rows % ROWS if self.part.num_shards > 1 else 0

    @property
    def _part_rows(self) -> int:
        return self.part.num_shards * self.weights.shard_rows

    def _locate(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row in this rank's part, with padding, for each number, [n], 0 if it is in
        another one, and whether it is in this part, [n] bool."""
        key = ("first row", self._part_rows)
        row = numbers - self.cache.get(key, self._first_row)
        is_here = (row >= 0) & (row < self._part_rows)
        shard = torch.div(row, self.weights.shard_rows, rounding_mode="floor")
        return torch.where(is_here, row + shard * self._padding, 0), is_here

    def _first_row(self) -> Tensor:
        # An input, not a constant: all ranks must have the same program.
        return ops.upload(torch.tensor([self.group.rank * self._part_rows], dtype=torch.int32))


def exchange_of(weights: ChunkedWeights, cache: LoopCache, num_rows: int) -> ExchangeRows | None:
    """Return how to send ``num_rows`` rows to each rank, or None if the table is no more."""
    size = part_size(weights, num_rows)
    if size is None:
        return None
    return ExchangeRows(weights, cache, *_divided(weights.group.collectives, size))


def part_size(weights: ChunkedWeights, num_rows: int) -> int | None:
    """Return of how many shards each rank gathers a part, so that sending ``num_rows`` rows to
    each rank, and their gradients, sends the least; None if gathering the whole table and reducing
    its gradient sends no more, or nothing fits ``EXCHANGE_BYTES``."""
    sent, ranks = weights.dtype.itemsize, weights.num_ranks
    of_row, of_shard = 2 * sent, weights.shard_rows * (sent + weights.reduce_dtype.itemsize)

    def held(size: int) -> int:  # a rank's own shard is there in any case
        of_part = size * weights.shard_rows if size > 1 else 0
        return (ranks // size * num_rows + of_part) * weights.width * sent

    def traffic(size: int) -> int:
        return (ranks // size - 1) * num_rows * of_row + (size - 1) * of_shard

    # A part of all shards is the whole table.
    sizes = [each for each in range(1, ranks + 1) if ranks % each == 0]
    fitting = [each for each in sizes[:-1] if held(each) <= EXCHANGE_BYTES]
    best = min([*fitting, ranks], key=traffic)
    return None if traffic(best) >= traffic(ranks) else best


def _divided(collectives: Collectives, size: int) -> tuple[Collectives, Collectives]:
    """Return collectives among ``size`` neighbours, and among one of each such neighbours."""
    if size == 1:
        return LocalCollectives(), collectives
    smaller = collectives.split(size)
    return smaller.within, smaller.across


def unreduced_gradient(num_rows: int, numbers: Tensor, grad: Tensor) -> Tensor:
    """Return the unsharded gradient of the table, [num_rows, width], from this rank's rows alone,
    in the dtype of ``sum_rows``."""
    is_row = numbers >= 0
    return sum_rows(num_rows, torch.where(is_row, numbers, 0), is_row, grad)
