"""Where parameters lie in shards, and shards in what is sent.

A shard is of one original parameter, or of several joined end to end. It is *sent* flat, [n], or in
rows, [rows, width]; a bucket is what one collective sends. To trace a step in less time, operations
that change nothing (such as a reshape to the same shape) are left out, and a copy in another shape
is a single one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.shard_layout import LANES, ShardLayout, row_numel, sent_shape

# ---------------------------------------------------------------- shards


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
        padding: number of elements in all shards that are of no original.
    """

    def __init__(self, shapes: Sequence[torch.Size], layout: ShardLayout, dim: int = 0) -> None:
        self.shapes = tuple(shapes)
        self.layout = layout
        self.dim = dim
        first = self.shapes[0]
        self.row_shape = torch.Size([*first[:dim], *first[dim + 1 :]])
        self.row_numel = row_numel(self.shapes, layout, dim)
        self.sent_shape = sent_shape(self.shapes, layout, self.row_numel)
        self.padding = layout.padded_numel - layout.numel
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
        rows = [self.in_rows(tensor.detach()) for tensor in unsharded]
        wanted = self.layout.slice_for(rank)
        pieces, start = [], 0
        for tensor in rows:
            begin, end = max(wanted.start - start, 0), min(wanted.stop - start, tensor.numel())
            if begin < end:
                pieces.append(tensor.reshape(-1)[begin:end])
            start += tensor.numel()
        padding = self.layout.shard_numel - wanted.stop + wanted.start
        if padding or not pieces:  # cat needs one
            pieces.append(rows[0].new_zeros(padding))
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
        if self._by_rows or not (self.padding or len(self.shapes) > 1):
            return [copied(self._without_padding(gathered), self.shapes[0])]
        joined = shaped(gathered, (self.layout.padded_numel,))
        numels = [shape.numel() for shape in self.shapes]
        pieces = zip(self.shapes, numels, accumulate(numels, initial=0), strict=False)
        return [
            copied_slice(joined, start, numel)
            if len(shape) == 1
            else copied(narrowed(joined, 0, start, numel), shape)
            for shape, numel, start in pieces
        ]

    def pack(self, unsharded: Sequence[Tensor]) -> Tensor:
        """Undo ``unpack``, with zeros as padding."""
        if self._by_rows:
            rows = self.in_rows(unsharded[0])
            joined = shaped(rows, (rows.numel() // self.row_numel, self.row_numel))
            padding = [0, 0, 0, self.padding // self.row_numel]
        else:
            flat = [shaped(each, (each.numel(),)) for each in unsharded]
            joined = torch.cat(flat) if len(flat) > 1 else flat[0]
            padding = [0, self.padding]
        padded = F.pad(joined, padding) if self.padding else joined
        num_shards, sent = self.layout.num_shards, self.sent_shape
        by_rows = len(sent) > 1
        return shaped(padded, (num_shards * sent[0], sent[1]) if by_rows else (num_shards, *sent))

    def _without_padding(self, gathered: Tensor) -> Tensor:
        if not self.padding:
            return gathered
        rows = shaped(gathered, (self.layout.padded_numel // self.row_numel, self.row_numel))
        return narrowed(rows, 0, 0, self.layout.numel // self.row_numel)


@lru_cache(maxsize=4096)
def packing_of(shapes: tuple[torch.Size, ...], layout: ShardLayout, dim: int = 0) -> ShardPacking:
    """Return the packing for these arguments, which parameters of equal shapes share."""
    return ShardPacking(shapes, layout, dim)


# ---------------------------------------------------------------- buckets

TILE = 16 * LANES
"""Elements of a TPU tile of 16-bit elements. Flat buckets are padded to whole tiles: the TPU
compiler turns the reduce-scatter of a 1-D array, or of fewer rows, into an all-reduce and a slice.
"""

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)  # hashed by identity: buckets of a plan are keys of dicts
class Bucket:
    """The tensors that one collective sends.

    Args:
        numbers: the caller's numbers of these tensors.
        shapes: shapes of one rank's shards: several [n], or one [rows, width].
        dtype: dtype in which they are sent.
    """

    numbers: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def in_rows(self) -> bool:
        """Whether it holds one tensor of shape [rows, width], and no flat ones."""
        return len(self.shapes[0]) > 1

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each shard, of flat tensors."""
        return [size for (size,) in self.shapes]

    @property
    def _in_tiles(self) -> bool:
        return all(size and size % TILE == 0 for size in self.sizes)

    def pack(self, shards: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """Copy the shards, by number and of any shapes, into one tensor [rows, width]."""
        if self.in_rows:
            return copied(shards[self.numbers[0]], self.shapes[0])
        pairs = zip(self.numbers, self.shapes, strict=True)
        return self.pack_flat([shaped(shards[at], shape) for at, shape in pairs])

    def pack_gathered(self, gathered: Mapping[int, Tensor]) -> Tensor:
        """Pack the shards of all ranks into one tensor [num_shards * rows, width].

        Args:
            gathered: by number, [num_shards, n] for flat tensors, else [num_shards * rows, width].
        """
        if self.in_rows:
            return gathered[self.numbers[0]]
        return self.pack_flat([gathered[at] for at in self.numbers])

    def pack_flat(self, flat: Sequence[Tensor]) -> Tensor:
        """Concatenate flat tensors, [..., n] each, and pad them to whole tiles, [rows, LANES]."""
        if self._in_tiles:  # joined as they are laid out: the TPU moves no element within a tile
            rows = [each.reshape(*each.shape[:-1], -1, LANES) for each in flat]
            return torch.cat(rows, dim=-2).reshape(-1, LANES)
        packed = torch.cat(list(flat), dim=-1)
        missing = -packed.shape[-1] % TILE
        return (F.pad(packed, (0, missing)) if missing else packed).reshape(-1, LANES)

    def unpack(self, rows: Tensor, num_shards: int | None = None) -> list[Tensor]:
        """Undo ``pack``, or with ``num_shards`` ``pack_gathered``; the shards are in ``shapes``."""
        if self.in_rows:
            return [rows]
        sizes = self.sizes
        if num_shards is not None and self._in_tiles:
            joined = rows.reshape(num_shards, -1, LANES)
            found = copied_pieces(joined, [size // LANES for size in sizes], dim=-2)
            return [each.reshape(num_shards, -1) for each in found]
        flat = rows.reshape(-1) if num_shards is None else rows.reshape(num_shards, -1)
        if not flat.numel():
            return [flat for _ in sizes]
        padding = flat.shape[-1] - sum(sizes)
        return copied_pieces(flat, [*sizes, padding] if padding else sizes)[: len(sizes)]


def plan_buckets(
    shapes: Mapping[int, Shape],
    dtypes: Mapping[int, torch.dtype],
    limit: float,
    copies: int = 1,
    of_experts: Container[int] = (),
) -> tuple[Bucket, ...]:
    """Distribute tensors over as few buckets as possible.

    Flat tensors of one dtype share buckets. Each tensor [rows, width] has its own, and so has each
    empty one, for which nothing is sent.

    Args:
        shapes: shapes in which shards are sent, by number of the tensor.
        dtypes: dtypes in which shards are sent, by number of the tensor.
        limit: bytes of consecutive tensors that may share a bucket; one tensor may be larger.
        copies: number of shards of each tensor that count towards the limit.
        of_experts: numbers of those that go to other ranks, and share no bucket with the others.
    """
    by_kind: dict[tuple[torch.dtype, bool], list[int]] = defaultdict(list)
    for number in shapes:
        by_kind[dtypes[number], number in of_experts].append(number)
    return tuple(
        Bucket(tuple(packed), tuple(shapes[at] for at in packed), dtype)
        for (dtype, _), numbers in by_kind.items()
        for run in _runs(numbers, shapes, limit / (dtype.itemsize * copies))
        for packed in _flat_together(run, shapes)
    )


def buckets_for(
    tensors: Mapping[int, Tensor], limit: float = math.inf, of_experts: Container[int] = ()
) -> tuple[Bucket, ...]:
    """Plan buckets for tensors, by number, that are sent in their own dtypes.

    A tensor of several dims is sent as [rows, size of the last dim].
    """
    shapes = {
        number: (each.shape[:-1].numel(), each.shape[-1]) if each.dim() > 1 else tuple(each.shape)
        for number, each in tensors.items()
    }
    dtypes = {number: each.dtype for number, each in tensors.items()}
    return plan_buckets(shapes, dtypes, limit, of_experts=of_experts)


def _runs(numbers: Sequence[int], shapes: Mapping[int, Shape], limit: float) -> list[list[int]]:
    """Divide tensors into runs of at most ``limit`` elements, or of one larger tensor."""
    runs: list[list[int]] = []
    size = 0.0
    for number in numbers:
        numel = math.prod(shapes[number])
        if not runs or size + numel > limit:
            runs.append([])
            size = 0.0
        runs[-1].append(number)
        size += numel
    return runs


def _flat_together(run: Sequence[int], shapes: Mapping[int, Shape]) -> list[list[int]]:
    """Return the flat tensors of a run as one list, and every other (or empty) one as its own."""
    flat = [at for at in run if len(shapes[at]) < 2 and 0 not in shapes[at]]
    alone = [[number] for number in run if number not in flat]
    return [flat, *alone] if flat else alone


# ---------------------------------------------------------------- shapes


def viewable(tensor: Tensor) -> Tensor:
    """Return ``tensor``; in inference mode, where torch_xla makes no views of tensors from outside
    of it, an alias that was made there."""
    outside = torch.is_inference_mode_enabled() and not tensor.is_inference()
    return tensor.detach() if outside else tensor


def narrowed(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return ``tensor.narrow(dim, start, length)``, also for length 0, which XLA refuses."""
    if length == 0:
        shape = list(tensor.shape)
        shape[dim] = 0
        return tensor.new_zeros(shape)
    return tensor if length == tensor.shape[dim] else tensor.narrow(dim, start, length)


def shaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``tensor.reshape(shape)``; ``tensor`` itself if that is its shape."""
    return tensor if tensor.shape == tuple(shape) else tensor.reshape(shape)


def copied(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a copy of ``tensor`` in ``shape``."""
    if tensor.shape == tuple(shape):
        return tensor.clone()
    return torch.view_copy(tensor, shape)


def copied_slice(tensor: Tensor, start: int, length: int) -> Tensor:
    """Return a copy of ``tensor[start:start + length]``."""
    return torch.slice_copy(tensor, 0, start, start + length) if length else tensor.new_zeros(0)


def copied_pieces(tensor: Tensor, sizes: Sequence[int], dim: int = -1) -> list[Tensor]:
    """Return copies of consecutive slices along ``dim``, made in one operation."""
    split: Any = torch.split_with_sizes_copy
    return list(split(tensor, list(sizes), dim))
