"""Grouped products in torch operations, for devices without a kernel.

Each expert's rows are cut into blocks of one height, padded with zeros: at most twice as many as
there are experts, each of which is multiplied by a copy of its expert's weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xla_fsdp.nn.experts.products import Implementation


class _Blocks(NamedTuple):
    experts: Tensor  # [blocks] int64, the expert of each block
    rows: Tensor  # [blocks * height] int64, the row at each place of a block
    is_row: Tensor  # [blocks * height, 1] bool, whether there is one, or padding
    places: Tensor  # [rows] int64, the place of each row
    has_place: Tensor  # [rows, 1] bool, whether the row is of an expert

    @classmethod
    def of(cls, num_rows: int, sizes: Tensor) -> _Blocks:
        height = max(1, -(-num_rows // len(sizes)))
        count = -(-num_rows // height) + len(sizes) - 1
        sizes = sizes.long()
        ends = sizes.cumsum(0)
        last_blocks = torch.div(sizes + height - 1, height, rounding_mode="floor").cumsum(0)
        blocks = torch.arange(count, device=sizes.device)
        experts = _interval(blocks, last_blocks)
        first = _starts(last_blocks).index_select(0, experts)
        within = torch.arange(height, device=sizes.device)
        position = (blocks - first).unsqueeze(1) * height + within
        is_row = position < sizes.index_select(0, experts).unsqueeze(1)
        rows = _starts(ends).index_select(0, experts).unsqueeze(1) + position
        numbers = torch.arange(num_rows, device=sizes.device)
        own = _interval(numbers, ends)
        from_first = numbers - _starts(ends).index_select(0, own)
        places = _starts(last_blocks).index_select(0, own) * height + from_first
        return cls(
            experts,
            rows.flatten().clamp(0, num_rows - 1),
            is_row.flatten().unsqueeze(1),
            places.clamp(0, count * height - 1),
            (numbers < ends[-1]).unsqueeze(1),
        )

    def cut(self, rows: Tensor) -> Tensor:
        """Return [blocks, height, width] of [rows, width]."""
        placed = torch.where(self.is_row, rows.index_select(0, self.rows), 0.0)
        return placed.unflatten(0, (len(self.experts), -1))

    def join(self, blocks: Tensor) -> Tensor:
        """Return [rows, width] of [blocks, height, width]; rows of no expert are zero."""
        return torch.where(self.has_place, blocks.flatten(0, 1).index_select(0, self.places), 0.0)


def _starts(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends[:-1]])


def _interval(numbers: Tensor, ends: Tensor) -> Tensor:
    """Return in which of consecutive intervals, which have these ends, each number is; the last
    one for those behind."""
    behind = (numbers.unsqueeze(1) >= ends).sum(1)
    return behind.clamp(max=len(ends) - 1)


def _multiply(rows: Tensor, weight: Tensor, sizes: Tensor, transposed: bool, total: int) -> Tensor:
    blocks = _Blocks.of(len(rows), sizes)
    weights = weight.index_select(0, blocks.experts)
    return blocks.join(blocks.cut(rows) @ (weights.mT if transposed else weights))


def _outer(left: Tensor, right: Tensor, sizes: Tensor, total: int) -> Tensor:
    blocks = _Blocks.of(len(left), sizes)
    products = blocks.cut(left).mT @ blocks.cut(right)
    wide = torch.promote_types(left.dtype, torch.float32)
    start = torch.zeros(len(sizes), *products.shape[1:], dtype=wide, device=left.device)
    return start.index_add(0, blocks.experts, products.to(wide)).to(left.dtype)


SEGMENTS = Implementation(_multiply, _outer)
