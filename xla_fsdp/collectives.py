"""Gather, scatter and reduce lists of shards among the ranks of one group.

Words: a *shard* is one rank's tensor, flat [n] or in rows [rows, width]; a *stack* has one shard
per rank along a first dim; a *step* of a reduction is one ring per axis of the TPU's torus.
Always true: flat tensors of one call travel joined, in one collective; those in rows in one each,
so that they need not be laid out anew and the compiler can hide them under compute one by one.
Every rank of the group makes the same calls in the same order.
``XlaCollectives`` communicates; ``LocalCollectives`` has the same shapes and moves nothing, for
one rank or to measure a program without its communication. What is gathered when is decided by
``param_group``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp import xla_ops
from xla_fsdp.layout import LANES, offsets
from xla_fsdp.rings import Rings
from xla_fsdp.torus import Groups, reduction_steps

ROWS = 16
"""Rows of a TPU tile of 16-bit elements. Operands have two dims, and those that are joined a
multiple of so many rows per rank: the TPU compiler turns the reduce-scatter of a 1-D array, or of
fewer rows, into a full all-reduce and a slice."""
RING = 2**18
"""Elements below which an operand is not sent around rings: its reduce-scatter is soon over."""


class Collectives(Protocol):
    """What a parameter group needs from the ranks it is sharded over."""

    num_shards: int
    rank: int

    @property
    def key(self) -> Hashable:
        """Equal for objects that join the same ranks."""
        ...

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Shards of one dtype, [*s_i] each, to stacks [num_shards, *s_i]."""
        ...

    def reduce_scatter(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Stacks [num_shards, *s_i] of one dtype to this rank's shard [*s_i] of their sum."""
        ...

    def all_reduce_shards(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Shards of one dtype, [*s_i] each, to their sums over the ranks."""
        ...

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """``value`` combined over the ranks by ``op``, "sum" or "max"."""
        ...

    def split(self, size: int) -> SmallerGroups:
        """The ranks in neighbourhoods of ``size``, which divides their number."""
        ...

    def in_rings(self) -> Collectives:
        """The same, where reductions may travel while something else is computed, if that is known
        to be possible; where nothing else is, they only take more memory."""
        ...


@dataclass(frozen=True)
class SmallerGroups:
    """The ranks of a group, split twice: ``within`` joins neighbours, each of which holds a larger
    shard; ``across`` joins the ranks that hold the same larger shard, one of each neighbourhood."""

    within: Collectives
    across: Collectives


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
        self.follows_torus = bool(steps)
        self._steps: list[Groups] = list(steps) or [groups or [list(range(num_shards))]]

    @property
    def key(self) -> Hashable:
        """See ``Collectives``."""
        return repr(self.groups)

    def split(self, size: int) -> SmallerGroups:
        """See ``Collectives``."""
        groups = self.groups or [list(range(self.num_shards))]
        within = [g[at : at + size] for g in groups for at in range(0, len(g), size)]
        across = [group[at::size] for group in groups for at in range(size)]
        number, place = divmod(self.rank, size)
        return SmallerGroups(
            XlaCollectives(within, place, size),
            XlaCollectives(across, number, self.num_shards // size),
        )

    def in_rings(self) -> Collectives:
        """See ``Collectives``."""
        if not self.follows_torus:
            return self
        return RingCollectives(self.groups, self.rank, self.num_shards, self._steps)

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""

        def gather(rows: Tensor) -> Tensor:
            return xla_ops.all_gather(rows, self.groups)

        return _in_rows(shards, gather, stacks_in=1, stacks_out=self.num_shards)

    def reduce_scatter(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""

        def scatter(rows: Tensor) -> Tensor:
            for groups in self._steps:
                stack = rows.reshape(len(groups[0]), -1, rows.shape[-1])
                rows = self._scatter(stack, groups)
            return rows

        return _in_rows(stacks, scatter, stacks_in=self.num_shards, stacks_out=1)

    def _scatter(self, stack: Tensor, groups: Groups) -> Tensor:
        """[ranks of a group, rows, width] to [rows, width]."""
        return xla_ops.reduce_scatter(stack, len(stack), groups)[0]

    def all_reduce_shards(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""

        def add(rows: Tensor) -> Tensor:
            return xla_ops.all_reduce("sum", rows, self.groups)

        return _in_rows(shards, add, stacks_in=1, stacks_out=1)

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """See ``Collectives``."""
        return xla_ops.all_reduce(op, value, self.groups)


class RingCollectives(XlaCollectives):
    """The same, where each step of a reduction goes around rings."""

    def _scatter(self, stack: Tensor, groups: Groups) -> Tensor:
        if stack.numel() < RING:
            return super()._scatter(stack, groups)
        rank = xla_ops.rank()
        [place] = [ring.index(rank) for ring in groups if rank in ring]
        return Rings(groups, place).reduce_scatter(stack)


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

    def split(self, size: int) -> SmallerGroups:
        """See ``Collectives``."""
        number, place = divmod(self.rank, size)
        across = LocalCollectives(number, self.num_shards // size)
        return SmallerGroups(LocalCollectives(place, size), across)

    def in_rings(self) -> Collectives:
        """See ``Collectives``."""
        return self

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""
        return [shard.expand(self.num_shards, *shard.shape) for shard in shards]

    def reduce_scatter(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""
        return [stack[self.rank] * self.num_shards for stack in stacks]

    def all_reduce_shards(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ``Collectives``."""
        return [shard * self.num_shards for shard in shards]

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """See ``Collectives``."""
        return value * self.num_shards if op == "sum" else value


def _in_rows(
    tensors: Sequence[Tensor],
    collective: Callable[[Tensor], Tensor],
    *,
    stacks_in: int,
    stacks_out: int,
) -> list[Tensor]:
    """Run ``collective`` on operands [rows, width]: one for each tensor whose shards are rows, and
    one for all others joined.

    ``stacks_in`` and ``stacks_out`` are the numbers of shards in what goes in and what comes out;
    a single shard has no stacking dim.
    """
    lead_in, lead_out = _lead(stacks_in), _lead(stacks_out)
    flat = [index for index, each in enumerate(tensors) if each.dim() - len(lead_in) < 2]
    joined = _joined([tensors[index] for index in flat], collective, stacks_in, stacks_out)
    results = dict(zip(flat, joined, strict=True))
    for index, tensor in enumerate(tensors):
        if index not in results:
            width = tensor.shape[-1]
            rows = collective(xla_ops.shaped(tensor, (tensor.numel() // width, width)))
            results[index] = xla_ops.shaped(rows, (*lead_out, *tensor.shape[len(lead_in) :]))
    return [results[index] for index in range(len(tensors))]


def _joined(
    tensors: Sequence[Tensor],
    collective: Callable[[Tensor], Tensor],
    stacks_in: int,
    stacks_out: int,
) -> list[Tensor]:
    """Join flat ``tensors`` side by side, run one collective on the tiled result, and cut what
    comes back into pieces of the same widths."""
    parts = [xla_ops.shaped(each, (stacks_in, each.numel() // stacks_in)) for each in tensors]
    widths = [part.shape[1] for part in parts]
    lead = _lead(stacks_out)
    if sum(widths) == 0:
        return [tensor.new_zeros(*lead, 0) for tensor in tensors]
    joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    padded = F.pad(joined, (0, -joined.shape[1] % (ROWS * LANES)))
    result = collective(padded.reshape(-1, LANES)).reshape(stacks_out, -1)
    return [
        xla_ops.shaped(xla_ops.cut(result, 1, start, width), (*lead, width))
        for start, width in zip(offsets(widths), widths, strict=True)
    ]


def _lead(stacks: int) -> tuple[int, ...]:
    """The stacking dim, where there is one."""
    return (stacks,) if stacks > 1 else ()
