"""How the values of a shard's members are joined, padded and cut, and put together again.

Words: members are *joined* end to end; a *stack* has one shard per rank along a first dim; a *row*
is what has one index along the dim that is cut.
Always true: only shapes are known here, no module and no rank; what depends on shapes alone is
worked out once, as it is needed in every step.
The lengths come from ``layout``; how shards travel is left to ``shard_gather`` and
``grad_reduction``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.shard_layout import LANES, LARGE, ROWS, ShardLayout, offsets
from xla_fsdp.distributed.xla import ops


class ShardPacking:
    """How one shard's members are cut.

    Args:
        shapes: of the members, in joining order.
        layout: how the joined members are cut; along another dim, how the member is with that dim
            moved to the front.
        dim: which dim of a single member is cut.
    """

    def __init__(self, shapes: Sequence[torch.Size], layout: ShardLayout, dim: int = 0) -> None:
        self.shapes = tuple(shapes)
        self.layout = layout
        self.dim = dim
        first = self.shapes[0]
        self.row_shape = torch.Size([*first[:dim], *first[dim + 1 :]])
        """Shape of a row of a single member."""
        self.row_numel = self.row_shape.numel() if first else 0
        """Elements of a row; 0 where the member has no dims."""
        self.sent_shape = self._sent_shape()
        """Shape in which a shard travels: flat, or in rows."""
        self._numels = [shape.numel() for shape in self.shapes]
        self._starts = offsets(self._numels)
        self._stack_shape = self._as_stack(self.sent_shape)
        self._padding = layout.padded_numel - layout.numel
        # Whether shards are rows of the one member. Only rows are padded and cut off then: elements
        # of a padded matrix would be laid out anew.
        self._by_rows = (
            len(self.shapes) == 1
            and self.row_numel > (0 if dim else 1)
            and self.layout.shard_numel % self.row_numel == 0
        )

    def in_rows(self, shard: Tensor) -> Tensor:
        """What is cut like the shard, with the dim that is cut in front."""
        return shard.movedim(self.dim, 0) if self.dim else shard

    def from_rows(self, rows: Tensor) -> Tensor:
        """The inverse, of rows of any shape."""
        return rows.reshape(-1, *self.row_shape).movedim(0, self.dim).contiguous()

    def all_in_rows(self, shards: Tensor) -> Tensor:
        """``in_rows`` of each of what has a first dim more."""
        return shards.movedim(1 + self.dim, 1) if self.dim else shards

    def all_from_rows(self, rows: Tensor) -> Tensor:
        """``from_rows`` of each of what has a first dim more."""
        each = rows.reshape(len(rows), -1, *self.row_shape)
        return each.movedim(1, 1 + self.dim).contiguous()

    def split(self, stack: Tensor) -> list[Tensor]:
        """The members' full tensors out of a gathered stack: [num_shards, n], or rows.

        The results are tensors of their own, not views: a view would keep the whole stack alive.
        """
        if self._by_rows and self.dim:
            return [self.from_rows(self._without_padding(stack))]
        if self._by_rows or not (self._padding or len(self.shapes) > 1):
            return [ops.copied(self._without_padding(stack), self.shapes[0])]
        joined = ops.shaped(stack, (self.layout.padded_numel,))
        pieces = zip(self.shapes, self._numels, self._starts, strict=True)
        return [
            ops.copied_slice(joined, start, numel)
            if len(shape) == 1
            else ops.copied(ops.cut(joined, 0, start, numel), shape)
            for shape, numel, start in pieces
        ]

    def stack(self, full: Sequence[Tensor]) -> Tensor:
        """The inverse of ``split``, with zeros as padding."""
        if self._by_rows:
            rows = self.in_rows(full[0])
            joined = ops.shaped(rows, (rows.numel() // self.row_numel, self.row_numel))
            padding = [0, 0, 0, self._padding // self.row_numel]
        else:
            flat = [ops.shaped(each, (each.numel(),)) for each in full]
            joined = torch.cat(flat) if len(flat) > 1 else flat[0]
            padding = [0, self._padding]
        padded = F.pad(joined, padding) if self._padding else joined
        return ops.shaped(padded, self._stack_shape)

    def _without_padding(self, stack: Tensor) -> Tensor:
        """Of the one member; in rows, where it is cut so."""
        if not self._padding:
            return stack
        rows = ops.shaped(stack, (self.layout.padded_numel // self.row_numel, self.row_numel))
        return ops.cut(rows, 0, 0, self.layout.numel // self.row_numel)

    def _as_stack(self, sent: tuple[int, ...]) -> tuple[int, ...]:
        shards = self.layout.num_shards
        return (shards, *sent) if len(sent) < 2 else (shards * sent[0], sent[1])

    def _sent_shape(self) -> tuple[int, ...]:
        """Whole rows of the parameter where a shard consists of such, so that the gathered stack is
        the parameter as it is; else flat. Laying 50 million elements out anew takes the TPU
        compiler minutes and the program as much code as 20 transformer blocks."""
        size = self.layout.shard_numel
        width = self.row_numel if len(self.shapes) == 1 else 0
        if not width or width % LANES or size % (width * ROWS) or size < LARGE:
            return (size,)
        return (size // width, width)


def slice_of(tensors: Sequence[Tensor], layout: ShardLayout, rank: int) -> Tensor:
    """``rank``'s part of full tensors joined end to end, on their device: [shard_numel], zeros as
    padding."""
    wanted = layout.slice_for(rank)
    numels = [tensor.numel() for tensor in tensors]
    pieces = []
    for tensor, numel, start in zip(tensors, numels, offsets(numels), strict=True):
        begin, end = max(wanted.start - start, 0), min(wanted.stop - start, numel)
        if begin < end:
            pieces.append(tensor.detach().reshape(-1)[begin:end])
    # A shard that lies wholly in the padding has no piece, and cat needs one.
    pieces.append(tensors[0].detach().new_zeros(layout.shard_numel - wanted.stop + wanted.start))
    return torch.cat(pieces)
