"""Tensors joined into the operands of collectives, and apart again.

Words: an *operand* is what one collective carries, [rows, width]: one tensor in rows, or several
*flat* ones, [n] each, joined end to end and laid out in rows of lanes. A *shard* is one rank's
tensor; a *stack* has the shards of all ranks, [num_shards, n], or joined along the rows.
Always true: what is cast or divided between joining and sending is so once for all that an operand
holds; what comes out is tensors of their own, not views, which would keep the whole alive.
Which tensors travel in rows is decided by ``shard_cut``, how an operand travels by ``collectives``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.shard_layout import LANES
from xla_fsdp.distributed.xla import ops

TILE = 16 * LANES

"""Elements of a TPU tile of 16-bit elements, of which joined flat tensors fill a multiple per rank:
the TPU compiler turns the reduce-scatter of a 1-D array, or of fewer rows, into a full all-reduce
and a slice."""

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Operand:
    """What one collective carries. Compared by identity, as those of a plan that is kept.

    Args:
        numbers: of the tensors in it.
        shapes: of their shards.
        dtype: in which they travel.
    """

    numbers: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def in_rows(self) -> bool:
        """Whether it holds a tensor in rows."""
        return len(self.shapes[0]) > 1

    @property
    def sizes(self) -> list[int]:
        """Elements of the shards of flat tensors."""
        return [size for (size,) in self.shapes]

    def join(self, shards: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """[rows, width], a new tensor, from the shards of all tensors, of any shapes."""
        if self.in_rows:
            return ops.copied(shards[self.numbers[0]], self.shapes[0])
        pairs = zip(self.numbers, self.shapes, strict=True)
        return self.laid_out([ops.shaped(shards[at], shape) for at, shape in pairs])

    def join_stacks(self, stacks: Mapping[int, Tensor]) -> Tensor:
        """[num_shards * rows, width] from the stacks of all tensors."""
        if self.in_rows:
            return stacks[self.numbers[0]]
        return self.laid_out([stacks[at] for at in self.numbers])

    def laid_out(self, flat: Sequence[Tensor]) -> Tensor:
        """Flat tensors side by side, [..., n] each, in rows."""
        joined = torch.cat(list(flat), dim=-1)
        missing = -joined.shape[-1] % TILE
        return (F.pad(joined, (0, missing)) if missing else joined).reshape(-1, LANES)

    def apart(self, rows: Tensor) -> list[Tensor]:
        """What ``join`` was given, in the shapes in which it is sent."""
        return [rows] if self.in_rows else self._pieces(rows.reshape(-1))

    def stacks_apart(self, rows: Tensor, num_shards: int) -> list[Tensor]:
        """What ``join_stacks`` was given."""
        return [rows] if self.in_rows else self._pieces(rows.reshape(num_shards, -1))

    def _pieces(self, joined: Tensor) -> list[Tensor]:
        sizes = self.sizes
        if not joined.numel():
            return [joined for _ in sizes]
        padding = joined.shape[-1] - sum(sizes)
        return ops.pieces(joined, [*sizes, padding] if padding else sizes)[: len(sizes)]


def operands_of(
    shapes: Mapping[int, Shape], dtypes: Mapping[int, torch.dtype], limit: float, copies: int = 1
) -> tuple[Operand, ...]:
    """As few operands as there can be: one for each tensor in rows, and one for the flat ones of a
    dtype, or for those of a bucket. Empty tensors have one each, of which nothing is sent.

    Args:
        shapes: in which shards travel, by number of the tensor.
        dtypes: likewise.
        limit: bytes that a bucket may hold, if it holds more than one tensor.
        copies: how many shards of each tensor count towards it.
    """
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for number in shapes:
        by_dtype[dtypes[number]].append(number)
    return tuple(
        Operand(tuple(joined), tuple(shapes[at] for at in joined), dtype)
        for dtype, numbers in by_dtype.items()
        for bucket in _buckets(numbers, shapes, limit / (dtype.itemsize * copies))
        for joined in _joined(bucket, shapes)
    )


def operands_for(tensors: Mapping[int, Tensor], limit: float = math.inf) -> tuple[Operand, ...]:
    """Of tensors that travel as they are: those of several dims in rows."""
    shapes = {number: _in_rows(each.shape) for number, each in tensors.items()}
    return operands_of(shapes, {number: each.dtype for number, each in tensors.items()}, limit)


def carried(
    operands: Iterable[Operand], send: Callable[[Operand], list[Tensor]]
) -> dict[int, Tensor]:
    """By number, what ``send`` makes of the tensors of each operand."""
    return {
        number: result
        for operand in operands
        for number, result in zip(operand.numbers, send(operand), strict=True)
    }


def _buckets(numbers: Sequence[int], shapes: Mapping[int, Shape], limit: float) -> list[list[int]]:
    """Runs of tensors that hold at most ``limit`` elements, but at least one tensor."""
    buckets: list[list[int]] = []
    size = 0.0
    for number in numbers:
        numel = torch.Size(shapes[number]).numel()
        if not buckets or size + numel > limit:
            buckets.append([])
            size = 0.0
        buckets[-1].append(number)
        size += numel
    return buckets


def _joined(bucket: Sequence[int], shapes: Mapping[int, Shape]) -> list[list[int]]:
    """The flat tensors of a bucket together, and each one that is in rows, or empty, alone."""
    flat = [at for at in bucket if len(shapes[at]) < 2 and 0 not in shapes[at]]
    alone = [[number] for number in bucket if number not in flat]
    return [flat, *alone] if flat else alone


def _in_rows(shape: torch.Size) -> Shape:
    return (shape[:-1].numel(), shape[-1]) if len(shape) > 1 else tuple(shape)
