"""Gather, scatter and reduce lists of shards among the ranks of one group.

Words: a *shard* is a 1-D tensor of one rank; a *stack* is [num_shards, shard length], one row per
rank. Always true: one call is one collective per dtype, however many tensors it is given, and
every rank of the group makes the same calls in the same order.
``XlaCollectives`` communicates; ``LocalCollectives`` has the same shapes and moves nothing, for
one rank or to measure a program without its communication. What is gathered when is decided by
``param_group``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp import xla_ops
from xla_fsdp.layout import LANES, offsets
from xla_fsdp.torus import reduction_steps

ROWS = 8
"""Rows of a TPU tile. Operands are [rows, 128] with rows a multiple of 8 per rank: the TPU
compiler turns the reduce-scatter of a 1-D array into a full all-reduce and a slice."""


class Collectives(Protocol):
    """What a parameter group needs from the ranks it is sharded over."""

    num_shards: int
    rank: int

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Shards of one dtype, [n_i] each, to stacks [num_shards, n_i]."""
        ...

    def reduce_scatter(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Stacks [num_shards, n_i] of one dtype to this rank's row [n_i] of their sum."""
        ...

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """``value`` combined over the ranks by ``op``, "sum" or "max"."""
        ...


class XlaCollectives:
    """Real communication over replica groups.

    Args:
        groups: the replica groups; None for one of all ranks.
        rank: the caller's place in its group.
        num_shards: the size of a group.
        steps: replica groups to reduce over one after the other, each scattering what is left
            (default: along the axes of the TPU's torus, where there is one).

    Raises:
        ValueError: if the sizes of the steps' groups do not multiply to ``num_shards``.
    """

    def __init__(
        self,
        groups: xla_ops.Groups,
        rank: int,
        num_shards: int,
        steps: Sequence[list[list[int]]] | None = None,
    ) -> None:
        self.groups = groups
        self.rank = rank
        self.num_shards = num_shards
        if steps is None:
            everyone = groups or [list(range(num_shards))]
            steps = reduction_steps(everyone, xla_ops.torus_coords())
        sizes = [len(step[0]) for step in steps]
        if steps and math.prod(sizes) != num_shards:
            raise ValueError(
                f"groups of {sizes} ranks, one after the other, reduce over {math.prod(sizes)} "
                f"ranks; give steps whose sizes multiply to {num_shards}"
            )
        self._steps: list[xla_ops.Groups] = list(steps) or [groups]

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""

        def gather(rows: Tensor) -> Tensor:
            return xla_ops.all_gather(rows, self.groups)

        return _joined(shards, gather, stacks_in=1, stacks_out=self.num_shards)

    def reduce_scatter(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""

        def scatter(rows: Tensor) -> Tensor:
            for groups in self._steps:
                size = len(groups[0]) if groups else self.num_shards
                rows = xla_ops.reduce_scatter(rows, size, groups)
            return rows

        return _joined(stacks, scatter, stacks_in=self.num_shards, stacks_out=1)

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """See ``Collectives``."""
        return xla_ops.all_reduce(op, value, self.groups)


class LocalCollectives:
    """The same shapes without communication: every rank is taken to hold what this one holds.

    With one shard this is exact.
    """

    def __init__(self, rank: int = 0, num_shards: int = 1) -> None:
        self.rank = rank
        self.num_shards = num_shards

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""
        return [shard.expand(self.num_shards, *shard.shape) for shard in shards]

    def reduce_scatter(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""
        return [stack[self.rank] * self.num_shards for stack in stacks]

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """See ``Collectives``."""
        return value * self.num_shards if op == "sum" else value


def _joined(
    tensors: Sequence[Tensor],
    collective: Callable[[Tensor], Tensor],
    *,
    stacks_in: int,
    stacks_out: int,
) -> list[Tensor]:
    """Run ``collective`` on each tensor that has rows of its own, and once on the others joined.

    ``stacks_in`` and ``stacks_out`` are the numbers of shards in what goes in and what comes out;
    one shard has no stacking dim.
    """
    results: dict[int, Tensor] = {}
    rest = []
    for index, tensor in enumerate(tensors):
        shape = tensor.shape[1:] if stacks_in > 1 else tensor.shape
        if len(shape) < 2:
            rest.append(index)
            continue
        rows = collective(tensor.reshape(-1, shape[-1]))
        results[index] = rows.reshape(*([stacks_out] if stacks_out > 1 else []), *shape)
    pieces = (
        _as_one_operand(
            [tensors[i] for i in rest], collective, rows_in=stacks_in, rows_out=stacks_out
        )
        if rest
        else []
    )
    results.update(zip(rest, pieces, strict=True))
    return [results[index] for index in range(len(tensors))]


def _as_one_operand(
    tensors: Sequence[Tensor],
    collective: Callable[[Tensor], Tensor],
    *,
    rows_in: int,
    rows_out: int,
) -> list[Tensor]:
    """Join ``tensors`` ([rows_in, n_i] or [n_i]) side by side, run one collective on the tiled
    result, and cut what comes back into pieces of the same widths ([rows_out, n_i] or [n_i])."""
    parts = [t.reshape(rows_in, -1) for t in tensors]
    widths = [part.shape[1] for part in parts]
    joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    if joined.numel() == 0:
        return [t.new_zeros((rows_out, 0) if rows_out > 1 else 0) for t in tensors]
    padded = F.pad(joined, (0, -joined.shape[1] % (ROWS * LANES)))
    result = collective(padded.reshape(-1, LANES)).reshape(rows_out, -1)
    pieces = (
        xla_ops.cut(result, 1, start, width)
        for start, width in zip(offsets(widths), widths, strict=True)
    )
    return [piece.reshape(-1) if rows_out == 1 else piece for piece in pieces]
