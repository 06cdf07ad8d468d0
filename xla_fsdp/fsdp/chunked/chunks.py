"""How a weight of rows, that of a head or the table of an embedding, is cut into chunks.

A chunk is the same few rows of every rank's shard. Gathered it is [ranks, rows, width], and each of
its rows is that of one *class* (of an embedding: one row of the table), or padding.

Invariant: the chunks together are all shards in order, followed by padding, so that the gradients
of the chunks, one after the other, are the gradient of the shard. No class is moved: the order of
classes does not matter to a softmax, and targets find theirs by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

TILE = 16
"""Rows of a TPU tile of 16-bit elements."""

CHUNK_BYTES = 2**24
"""About what a chunk takes, logits included, unless the user says how many there are."""

NO_CLASS = -1


@dataclass(frozen=True)
class Chunks:
    """Chunks of a weight [num_classes, ...]."""

    num_classes: int  # rows of the weight
    num_ranks: int  # how many ranks share it
    shard_rows: int  # rows of every rank's shard, padding included
    rows: int  # of a shard, in a chunk

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.shard_rows // self.rows)

    @property
    def padded_rows(self) -> int:
        """Rows of a shard, padded to a multiple of a chunk's."""
        return self.count * self.rows

    def numbers(self, device: torch.device) -> Tensor:
        """Return the numbers of all chunks, [count, 1] int32."""
        return torch.arange(self.count, dtype=torch.int32, device=device)[:, None]

    def classes(self, number: Tensor) -> Tensor:
        """Return the class of each row of a gathered chunk, or ``NO_CLASS``, [ranks * rows] int32.

        Args:
            number: of the chunk, [1] int32.
        """
        count = partial(torch.arange, dtype=torch.int32, device=number.device)
        row = number * self.rows + count(self.rows)
        first = count(self.num_ranks) * self.shard_rows
        found = first[:, None] + row[None, :]
        is_class = (row < self.shard_rows)[None, :] & (found < self.num_classes)
        return torch.where(is_class, found, NO_CLASS).reshape(-1)

    def locate(self, classes: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return which row of a gathered chunk each class is, [n] int32 (0 where it is none of
        them), and whether it is one, [n] bool.

        Args:
            classes: [n] int32; may be out of range.
            number: of the chunk, [1] int32.
        """
        rank = torch.div(classes, self.shard_rows, rounding_mode="floor")
        row = classes - rank * self.shard_rows - number * self.rows
        known = (classes >= 0) & (classes < self.num_classes)
        here = known & (row >= 0) & (row < self.rows)
        return torch.where(here, rank * self.rows + row, 0), here


def cut_into(num_classes: int, num_ranks: int, shard_rows: int, count: int) -> Chunks:
    """Return at most ``count`` chunks of equal size, of whole tiles where shards have enough
    rows."""
    rows = -(-shard_rows // count)
    whole = rows if rows < TILE else -(-rows // TILE) * TILE
    return Chunks(num_classes, num_ranks, shard_rows, whole)


def cut_by_size(num_classes: int, num_ranks: int, shard_rows: int, bytes_per_class: int) -> Chunks:
    """Return chunks of up to ``CHUNK_BYTES``, and of a tile at least; of the sizes near that, the
    one with the least padding.

    Args:
        num_classes: rows of the weight.
        num_ranks: how many ranks share it.
        shard_rows: of every rank.
        bytes_per_class: of a row of the weight, with whatever else a class takes.
    """
    tile_bytes = TILE * num_ranks * bytes_per_class
    most = max(1, min(CHUNK_BYTES // tile_bytes, -(-shard_rows // TILE)))
    tiles = range(most, most * 2 // 3, -1)
    cuts = [Chunks(num_classes, num_ranks, shard_rows, each * TILE) for each in tiles]
    return min(cuts, key=lambda cut: cut.padded_rows)  # the first, and largest, of equal ones
