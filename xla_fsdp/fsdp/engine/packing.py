"""How the original parameters in a shard are joined, padded and cut, and put together again.

*Rows* have one index each along the dim that is cut, which comes first. Only shapes are known here;
what depends on them alone is worked out once, as it is needed in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.shard_layout import LANES, LARGE, ROWS, ShardLayout, offsets
from xla_fsdp.distributed.xla import ops


class ShardPacking:
    """How the original parameters of one shard are cut.

    Args:
        shapes: of the original parameters, in joining order.
        layout: how they are cut, joined end to end; with another ``dim``, that dim comes first.
        dim: which dim of a single original parameter is cut.
    """

    def __init__(self, shapes: Sequence[torch.Size], layout: ShardLayout, dim: int = 0) -> None:
        self.shapes = tuple(shapes)
        self.layout = layout
        self.dim = dim
        first = self.shapes[0]
        # Of a row of a single original parameter; 0 elements where that has no dims.
        self.row_shape = torch.Size([*first[:dim], *first[dim + 1 :]])
        self.row_numel = self.row_shape.numel() if first else 0
        self.sent_shape = self._sent_shape()
        self._numels = [shape.numel() for shape in self.shapes]
        self._starts = offsets(self._numels)
        self._gathered_shape = self._as_gathered(self.sent_shape)
        self._padding = layout.padded_numel - layout.numel
        # Whether shards are rows of one original parameter. Only rows are padded and cut off then:
        # elements of a padded matrix would be laid out anew.
        self._by_rows = (
            len(self.shapes) == 1
            and self.row_numel > (0 if dim else 1)
            and self.layout.shard_numel % self.row_numel == 0
        )

    def in_rows(self, value: Tensor) -> Tensor:
        """Move the dim that is cut to the front, behind any dims before those of the parameter."""
        if not self.dim:
            return value
        first = value.dim() - len(self.row_shape) - 1
        return value.movedim(first + self.dim, first)

    def from_rows(self, rows: Tensor, *length: int) -> Tensor:
        """Return the inverse of ``in_rows``, of any shapes; with ``length``, of so many shards."""
        each = rows.reshape(*length, -1, *self.row_shape)
        return each.movedim(len(length), len(length) + self.dim).contiguous()

    def unpack(self, gathered: Tensor) -> list[Tensor]:
        """Return the unsharded tensors out of the shards of all ranks, [num_shards, n] or rows.

        They are copies, not views, which would keep all of ``gathered`` alive.
        """
        if self._by_rows and self.dim:
            return [self.from_rows(self._without_padding(gathered))]
        if self._by_rows or not (self._padding or len(self.shapes) > 1):
            return [ops.copied(self._without_padding(gathered), self.shapes[0])]
        joined = ops.shaped(gathered, (self.layout.padded_numel,))
        pieces = zip(self.shapes, self._numels, self._starts, strict=True)
        return [
            ops.copied_slice(joined, start, numel)
            if len(shape) == 1
            else ops.copied(ops.cut(joined, 0, start, numel), shape)
            for shape, numel, start in pieces
        ]

    def pack(self, unsharded: Sequence[Tensor]) -> Tensor:
        """Return the inverse of ``unpack``, with zeros as padding."""
        if self._by_rows:
            rows = self.in_rows(unsharded[0])
            joined = ops.shaped(rows, (rows.numel() // self.row_numel, self.row_numel))
            padding = [0, 0, 0, self._padding // self.row_numel]
        else:
            flat = [ops.shaped(each, (each.numel(),)) for each in unsharded]
            joined = torch.cat(flat) if len(flat) > 1 else flat[0]
            padding = [0, self._padding]
        padded = F.pad(joined, padding) if self._padding else joined
        return ops.shaped(padded, self._gathered_shape)

    def _without_padding(self, gathered: Tensor) -> Tensor:
        if not self._padding:
            return gathered
        rows = ops.shaped(gathered, (self.layout.padded_numel // self.row_numel, self.row_numel))
        return ops.cut(rows, 0, 0, self.layout.numel // self.row_numel)

    def _as_gathered(self, sent: tuple[int, ...]) -> tuple[int, ...]:
        shards = self.layout.num_shards
        return (shards, *sent) if len(sent) < 2 else (shards * sent[0], sent[1])

    def _sent_shape(self) -> tuple[int, ...]:
        """Return the shape in which a shard travels: [rows, width], or flat [n]."""
        # Whole rows where a shard consists of such, so that gathered ones are the parameter as it
        # is. Laying 50 million elements out anew takes the TPU compiler minutes, and the program as
        # much code as 20 transformer blocks.
        size = self.layout.shard_numel
        width = self.row_numel if len(self.shapes) == 1 else 0
        if not width or width % LANES or size % (width * ROWS) or size < LARGE:
            return (size,)
        return (size // width, width)


def slice_of(tensors: Sequence[Tensor], layout: ShardLayout, rank: int) -> Tensor:
    """Return ``rank``'s shard of tensors joined end to end, [shard_numel], padded with zeros."""
    wanted = layout.slice_for(rank)
    numels = [tensor.numel() for tensor in tensors]
    pieces = []
    for tensor, numel, start in zip(tensors, numels, offsets(numels), strict=True):
        begin, end = max(wanted.start - start, 0), min(wanted.stop - start, numel)
        if begin < end:
            pieces.append(tensor.detach().reshape(-1)[begin:end])
    # A shard that is all padding has no piece, and cat needs one.
    pieces.append(tensors[0].detach().new_zeros(layout.shard_numel - wanted.stop + wanted.start))
    return torch.cat(pieces)
