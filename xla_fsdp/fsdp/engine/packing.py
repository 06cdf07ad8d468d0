"""Where the originals of a shard lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.shard_layout import ShardLayout, row_numel, sent_shape
from xla_fsdp.xla import ops


class ShardPacking:
    """Converts between the original parameters of one shard and the shards of all ranks.

    Args:
        shapes: of the original parameters, in the order in which they are joined.
        layout: how the joined originals, flat, are sharded.
        dim: along which a single original is sharded; ``layout`` is of it with this dim first.

    Attributes:
        row_shape: shape of a single original without ``dim``.
        row_numel: of ``shard_layout.row_numel``.
        sent_shape: shape in which a shard is sent: [rows, width], or flat [n].
    """

    def __init__(self, shapes: Sequence[torch.Size], layout: ShardLayout, dim: int = 0) -> None:
        self.shapes = tuple(shapes)
        self.layout = layout
        self.dim = dim
        first = self.shapes[0]
        self.row_shape = torch.Size([*first[:dim], *first[dim + 1 :]])
        self.row_numel = row_numel(self.shapes, layout, dim)
        self.sent_shape = sent_shape(self.shapes, layout, self.row_numel)
        self._padding = layout.padded_numel - layout.numel
        # Whether shards are whole rows of one original. Padding is whole rows then, too: cutting
        # single elements off a matrix would make the device lay out all of it again.
        self._by_rows = (
            len(self.shapes) == 1
            and self.row_numel > (0 if dim else 1)
            and self.layout.shard_numel % self.row_numel == 0
        )

    def in_rows(self, value: Tensor) -> Tensor:
        """Move the sharded dim of the parameter to the front, after any leading (stack) dims."""
        if not self.dim:
            return value
        first = value.dim() - len(self.row_shape) - 1
        return value.movedim(first + self.dim, first)

    def from_rows(self, rows: Tensor, *length: int) -> Tensor:
        """Undo ``in_rows``; ``rows`` may have any shape with the same elements. With ``length``,
        they are of so many shards, and the result is [length, *shape of a shard]."""
        each = rows.reshape(*length, -1, *self.row_shape)
        return each.movedim(len(length), len(length) + self.dim).contiguous()

    def cut(self, unsharded: Sequence[Tensor], rank: int, *, by_rows: bool) -> Tensor:
        """Return ``rank``'s shard, padded with zeros: [shard_numel], or if ``by_rows`` in the shape
        of whole rows."""
        wanted = self.layout.slice_for(rank)
        pieces, start = [], 0
        for tensor in unsharded:
            begin, end = max(wanted.start - start, 0), min(wanted.stop - start, tensor.numel())
            if begin < end:
                pieces.append(self.in_rows(tensor.detach()).reshape(-1)[begin:end])
            start += tensor.numel()
        padding = self.layout.shard_numel - wanted.stop + wanted.start
        if padding or not pieces:  # cat needs one
            pieces.append(unsharded[0].detach().new_zeros(padding))
        flat = torch.cat(pieces)
        return self.from_rows(flat) if by_rows else flat

    def unpack(self, gathered: Tensor) -> list[Tensor]:
        """Return the unsharded tensors, one for each original.

        They are copies, as views would keep all of ``gathered`` in memory.

        Args:
            gathered: shards of all ranks, [num_shards, n] or [num_shards * rows, width].
        """
        if self._by_rows and self.dim:
            return [self.from_rows(self._without_padding(gathered))]
        if self._by_rows or not (self._padding or len(self.shapes) > 1):
            return [ops.copied(self._without_padding(gathered), self.shapes[0])]
        joined = ops.shaped(gathered, (self.layout.padded_numel,))
        numels = [shape.numel() for shape in self.shapes]
        pieces = zip(self.shapes, numels, accumulate(numels, initial=0), strict=False)
        return [
            ops.copied_slice(joined, start, numel)
            if len(shape) == 1
            else ops.copied(ops.cut(joined, 0, start, numel), shape)
            for shape, numel, start in pieces
        ]

    def pack(self, unsharded: Sequence[Tensor]) -> Tensor:
        """Undo ``unpack``, with zeros as padding."""
        if self._by_rows:
            rows = self.in_rows(unsharded[0])
            joined = ops.shaped(rows, (rows.numel() // self.row_numel, self.row_numel))
            padding = [0, 0, 0, self._padding // self.row_numel]
        else:
            flat = [ops.shaped(each, (each.numel(),)) for each in unsharded]
            joined = torch.cat(flat) if len(flat) > 1 else flat[0]
            padding = [0, self._padding]
        padded = F.pad(joined, padding) if self._padding else joined
        num_shards, sent = self.layout.num_shards, self.sent_shape
        by_rows = len(sent) > 1
        return ops.shaped(
            padded, (num_shards * sent[0], sent[1]) if by_rows else (num_shards, *sent)
        )

    def _without_padding(self, gathered: Tensor) -> Tensor:
        if not self._padding:
            return gathered
        rows = ops.shaped(gathered, (self.layout.padded_numel // self.row_numel, self.row_numel))
        return ops.cut(rows, 0, 0, self.layout.numel // self.row_numel)


@lru_cache(maxsize=4096)
def packing_of(shapes: tuple[torch.Size, ...], layout: ShardLayout, dim: int = 0) -> ShardPacking:
    """Return the packing for these arguments, which parameters of equal shapes share."""
    return ShardPacking(shapes, layout, dim)
