"""What a grouped product computes: rows of each group times the weight of that group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Multiply = Callable[[Tensor, Tensor, Tensor, bool, int], Tensor]
"""Takes (rows, weights, sizes, transposed, total) and returns the rows of each group times its
weight, in their dtype; zeros for rows behind those of all groups.

Shapes are rows [rows, width], weights [groups, width, outputs] (``transposed``: [groups, outputs,
width]), sizes [groups] int32. Rows are of ``total`` groups: with more than there are weights, the
others' rows are behind.
"""

Outer = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Takes (left, right, sizes, total) and returns for each group its rows of ``left``, transposed,
times those of ``right``: [groups, left's width, right's width] of [rows, ...], zeros for empty
groups. Sums are float32 or wider."""


@dataclass(frozen=True)
class Implementation:
    """A way to compute grouped products."""

    multiply: Multiply
    outer: Outer


def _apart(rows: Tensor, sizes: Tensor) -> Tensor:
    return rows.unflatten(0, (len(sizes), -1))


def _multiply(rows: Tensor, weight: Tensor, sizes: Tensor, transposed: bool, total: int) -> Tensor:
    weight = weight.mT if transposed else weight
    return torch.bmm(_apart(rows, sizes), weight).flatten(0, 1)


def _outer(left: Tensor, right: Tensor, sizes: Tensor, total: int) -> Tensor:
    return torch.bmm(_apart(left, sizes).mT, _apart(right, sizes))


BATCHED = Implementation(_multiply, _outer)
"""For groups of equally many rows: one batched product."""
