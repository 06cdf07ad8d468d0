"""How a weight of rows is cut into pieces: that of a head, or the table of an embedding. Pure
arithmetic but for methods of ``Pieces`` that take or return tensors.

Words: a *piece* is the same few rows of every rank's shard of the weight; gathered, it is
[ranks, rows, width], and each of its rows is that of one *class*, or padding.
Always true: the pieces together are all shards in order, followed by padding, so that the gradients
of the pieces, one after the other, are the gradient of the shard. No class is laid out anew: the
order of classes does not matter to a softmax, and targets find theirs by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

TILE = 16

"""Rows of a TPU tile of 16-bit elements; see ``collectives.ROWS``."""

PIECE_BYTES = 2**24

"""About what a piece takes, logits included, unless the user says how many there are."""

NO_CLASS = -1


@dataclass(frozen=True)
class Pieces:
    """Pieces of a weight [num_classes, ...], of which every rank has ``shard_rows`` rows.

    Args:
        num_classes: rows of the whole weight.
        num_ranks: how many ranks share it.
        shard_rows: of every rank, padding included.
        rows: of a shard, in a piece.
    """

    num_classes: int
    num_ranks: int
    shard_rows: int
    rows: int

    @property
    def count(self) -> int:
        """Number of pieces."""
        return -(-self.shard_rows // self.rows)

    @property
    def padded_rows(self) -> int:
        """Of a shard, with padding to whole pieces."""
        return self.count * self.rows

    def numbers(self, device: torch.device) -> Tensor:
        """Of all pieces, [pieces, 1] int32."""
        return torch.arange(self.count, dtype=torch.int32, device=device)[:, None]

    def classes(self, number: Tensor) -> Tensor:
        """Which class each row of a gathered piece is for, [ranks * rows] int32.

        Args:
            number: of the piece, [1] int32.
        """
        count = partial(torch.arange, dtype=torch.int32, device=number.device)
        row = number * self.rows + count(self.rows)
        first = count(self.num_ranks) * self.shard_rows
        found = first[:, None] + row[None, :]
        is_class = (row < self.shard_rows)[None, :] & (found < self.num_classes)
        return torch.where(is_class, found, NO_CLASS).reshape(-1)

    def places(self, classes: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Which row of a gathered piece each class is, 0 where it is none of them, and whether it
        is one; like ``classes``, int32 and bool.

        Args:
            classes: [n] int32; others than there are will do.
            number: of the piece, [1] int32.
        """
        rank = torch.div(classes, self.shard_rows, rounding_mode="floor")
        row = classes - rank * self.shard_rows - number * self.rows
        known = (classes >= 0) & (classes < self.num_classes)
        here = known & (row >= 0) & (row < self.rows)
        return torch.where(here, rank * self.rows + row, 0), here


def cut_into(num_classes: int, num_ranks: int, shard_rows: int, count: int) -> Pieces:
    """At most ``count`` pieces of as many rows; of whole tiles, where shards have enough rows."""
    rows = -(-shard_rows // count)
    whole = rows if rows < TILE else -(-rows // TILE) * TILE
    return Pieces(num_classes, num_ranks, shard_rows, whole)


def cut_by_size(num_classes: int, num_ranks: int, shard_rows: int, bytes_per_class: int) -> Pieces:
    """Pieces of up to ``PIECE_BYTES``, and of a tile at least; of the sizes near that, the one with
    the least padding.

    Args:
        num_classes: rows of the whole weight.
        num_ranks: how many ranks share it.
        shard_rows: of every rank.
        bytes_per_class: of a row of the weight, with whatever else a class takes.
    """
    tile_bytes = TILE * num_ranks * bytes_per_class
    most = max(1, min(PIECE_BYTES // tile_bytes, -(-shard_rows // TILE)))
    tiles = range(most, most * 2 // 3, -1)
    cuts = [Pieces(num_classes, num_ranks, shard_rows, each * TILE) for each in tiles]
    return min(cuts, key=lambda cut: cut.padded_rows)  # the first, and largest, of equal ones
