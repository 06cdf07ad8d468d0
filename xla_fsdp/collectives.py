"""Gather, scatter and reduce lists of shards among the ranks of one group.

Words: a *shard* is a 1-D tensor of one rank; a *stack* is [num_shards, shard length], one row per
rank. Always true: one call is one collective per dtype, however many tensors it is given, and
every rank of the group makes the same calls in the same order.
``XlaCollectives`` communicates; ``LocalCollectives`` has the same shapes and moves nothing, for
one rank or to measure a program without its communication. What is gathered when is decided by
``param_group``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp import xla_ops
from xla_fsdp.layout import LANES, offsets

ROWS = 8
"""Rows of a TPU tile. Operands are [rows, 128] with rows a multiple of 8 per rank: the TPU
compiler turns the reduce-scatter of a 1-D array into a full all-reduce and a slice."""


class Collectives(Protocol):
    """What a parameter group needs from the ranks it is sharded over."""

    num_shards: int
    rank: int

    @property
    def key(self) -> Hashable:
        """Equal for objects that join the same ranks."""
        ...

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
    """Real communication over replica groups; ``rank`` is the caller's place in its group."""

    def __init__(self, groups: xla_ops.Groups, rank: int, num_shards: int) -> None:
        self.groups = groups
        self.rank = rank
        self.num_shards = num_shards

    @property
    def key(self) -> Hashable:
        """See ``Collectives``."""
        return repr(self.groups)

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""

        def gather(rows: Tensor) -> Tensor:
            return xla_ops.all_gather(rows, self.groups)

        return _as_one_operand(shards, gather, rows_in=1, rows_out=self.num_shards)

    def reduce_scatter(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""

        def scatter(rows: Tensor) -> Tensor:
            return xla_ops.reduce_scatter(rows, self.num_shards, self.groups)

        return _as_one_operand(stacks, scatter, rows_in=self.num_shards, rows_out=1)

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

    @property
    def key(self) -> Hashable:
        """See ``Collectives``."""
        return ("local", self.rank, self.num_shards)

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""
        return [shard.expand(self.num_shards, -1) for shard in shards]

    def reduce_scatter(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""
        return [stack[self.rank] * self.num_shards for stack in stacks]

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """See ``Collectives``."""
        return value * self.num_shards if op == "sum" else value


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
