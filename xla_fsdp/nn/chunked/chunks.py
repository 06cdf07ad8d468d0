"""Cut the weight of a head or of an embedding into chunks.

A chunk consists of the same few rows of every rank's shard. Gathered, it is [ranks, rows, width];
each row belongs to one *class* (for an embedding: one row of the table), or is padding.

Invariant: the chunks of a shard are its rows in order, followed by padding, so the concatenated
gradients of the chunks are the gradient of the shard. A gathered chunk therefore has classes from
all shards; a softmax does not depend on their order, and targets are found by class number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

TILE = 16
"""Rows of a tile of 16-bit elements in TPU memory."""

CHUNK_BYTES = 2**24
"""Approximate size of the smallest chunk with its logits, if the user does not give the number of
chunks."""

MAX_CHUNKS = 8
"""Chunks of a weight that is so large that ``CHUNK_BYTES`` would make more, without logits."""

NO_CLASS = -1


@dataclass(frozen=True)
class Chunks:
    """Chunks of a weight [num_classes, ...]."""

    num_classes: int  # rows of the weight
    num_ranks: int  # ranks over which the weight is sharded
    shard_rows: int  # rows of each shard, padding included
    rows: int  # rows of each shard in one chunk

    @property
    def count(self) -> int:
        return -(-self.shard_rows // self.rows)

    @property
    def padded_rows(self) -> int:
        """Rows of a shard, padded to a multiple of ``rows``."""
        return self.count * self.rows

    def numbers(self, device: torch.device) -> Tensor:
        """Return the indices of all chunks, [count, 1] int32."""
        return torch.arange(self.count, dtype=torch.int32, device=device)[:, None]

    def classes(self, number: Tensor) -> Tensor:
        """Return the class of each row of the gathered chunk ``number``, [1] int32: [ranks * rows]
        int32, ``NO_CLASS`` for padding."""
        count = partial(torch.arange, dtype=torch.int32, device=number.device)
        row = number * self.rows + count(self.rows)
        first = count(self.num_ranks) * self.shard_rows
        found = first[:, None] + row[None, :]
        is_class = (row < self.shard_rows)[None, :] & (found < self.num_classes)
        return torch.where(is_class, found, NO_CLASS).reshape(-1)

    def locate(self, classes: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Find classes, [n] int32, also out of range, in the gathered chunk ``number``, [1] int32:
        return the row of each, [n] int32, 0 if it is in another chunk, and whether it is in this
        one, [n] bool."""
        rank = torch.div(classes, self.shard_rows, rounding_mode="floor")
        row = classes - rank * self.shard_rows - number * self.rows
        known = (classes >= 0) & (classes < self.num_classes)
        here = known & (row >= 0) & (row < self.rows)
        return torch.where(here, rank * self.rows + row, 0), here


def cut_into(num_classes: int, num_ranks: int, shard_rows: int, count: int) -> Chunks:
    """Return at most ``count`` chunks of equal size; one of ``TILE`` rows or more is a multiple of
    ``TILE``."""
    rows = -(-shard_rows // count)
    rounded = rows if rows < TILE else -(-rows // TILE) * TILE
    return Chunks(num_classes, num_ranks, shard_rows, rounded)


def cut_by_size(
    num_classes: int, num_ranks: int, shard_rows: int, width: int, num_rows: int, itemsize: int
) -> Chunks:
    """Return chunks of at most ``CHUNK_BYTES``, or of a large weight's part of ``MAX_CHUNKS``, but
    of as many classes as the weight has columns, or at least one tile; of the sizes from two thirds
    of that on, choose the one with the least padding.

    Each chunk reads all tokens and adds to their gradients, so many chunks take time. Logits of as
    many classes as columns take what the hidden states take. Without logits the limit follows from
    the weight alone, so chunks are the same on ranks whose batches differ in length.

    Args:
        num_classes: rows of the weight.
        num_ranks: ranks over which it is sharded.
        shard_rows: rows of each shard.
        width: columns of the weight.
        num_rows: rows of logits, 0 without.
        itemsize: bytes of an element of both.
    """
    chunk_bytes = max(CHUNK_BYTES, num_classes * width * itemsize // MAX_CHUNKS)
    tile_classes = TILE * num_ranks
    tiles = chunk_bytes // (tile_classes * (width + num_rows) * itemsize)
    most = max(1, min(max(tiles, width // tile_classes), -(-shard_rows // TILE)))
    sizes = range(most, most * 2 // 3, -1)
    cuts = [Chunks(num_classes, num_ranks, shard_rows, each * TILE) for each in sizes]
    return min(cuts, key=lambda cut: cut.padded_rows)  # the largest of equal ones
