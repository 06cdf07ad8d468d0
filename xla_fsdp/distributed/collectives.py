"""Gather, scatter and reduce operands among the ranks of one group.

Words: an *operand* is one rank's tensor, [rows, width]; a *stack* has the operands of all ranks,
one below the other, [num_shards * rows, width]; a *step* of a reduction is one ring per axis of the
TPU's torus.
Always true: every call is one collective (a reduction one for each step), and nothing is laid out
anew. Every rank of the group makes the same calls in the same order.
``XlaCollectives`` communicates; ``LocalCollectives`` has the same shapes and moves nothing, for
one rank or to measure a program without its communication. What an operand holds is decided by
``operands``, what is gathered when by ``shard_gather`` and ``unit``.

A reduce-scatter made of sends around a ring, which the TPU compiler hides under compute.

Words: a *ring* is a replica group whose ranks each send to the next one, the last to the first; a
*chunk* is what one rank is to end up with; its *partial sum* travels the ring and grows at each
rank.
Always true: every rank has the same program, as its place is a value and not a constant; as many
bytes are sent as by a reduce-scatter. Sums are rounded to the operand's dtype at every rank.
Why: the TPU compiler leaves every reduce-scatter blocking, but starts a collective-permute early
and ends it late. The same rings hide reductions in JAX's windowed products (S. Wang et al., Overlap
Communication with Dependent Computation via Decomposition, ASPLOS 2023).
Which operands are reduced so is decided by ``collectives``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from xla_fsdp.distributed.topology import Groups, reduction_steps
from xla_fsdp.distributed.xla import ops

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

    def all_gather(self, operand: Tensor) -> Tensor:
        """An operand of every rank to their stack."""
        ...

    def reduce_scatter(self, stack: Tensor) -> Tensor:
        """A stack to this rank's operand of its sum over the ranks."""
        ...

    def all_reduce_operand(self, operand: Tensor) -> Tensor:
        """An operand of every rank to their sum."""
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
        groups: ops.Groups,
        rank: int,
        num_shards: int,
        steps: Sequence[list[list[int]]] | None = None,
    ) -> None:
        self.groups = groups
        self.rank = rank
        self.num_shards = num_shards
        if steps is None:
            everyone = groups or [list(range(num_shards))]
            steps = reduction_steps(everyone, ops.torus_coords())
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

    def all_gather(self, operand: Tensor) -> Tensor:
        """See ``Collectives``."""
        return ops.all_gather(operand, self.groups) if operand.numel() else operand

    def reduce_scatter(self, stack: Tensor) -> Tensor:
        """See ``Collectives``."""
        if not stack.numel():
            return stack
        width = stack.shape[-1]
        rows = stack
        for groups in self._steps:
            rows = self._scatter(rows.reshape(len(groups[0]), -1, width), groups)
        return rows.reshape(-1, width)

    def _scatter(self, stack: Tensor, groups: Groups) -> Tensor:
        """[ranks of a group, rows, width] to [..., rows, width]."""
        return ops.reduce_scatter(stack, len(stack), groups)

    def all_reduce_operand(self, operand: Tensor) -> Tensor:
        """See ``Collectives``."""
        return self.all_reduce("sum", operand) if operand.numel() else operand

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """See ``Collectives``."""
        return ops.all_reduce(op, value, self.groups)


class RingCollectives(XlaCollectives):
    """The same, where each step of a reduction goes around rings."""

    def _scatter(self, stack: Tensor, groups: Groups) -> Tensor:
        if stack.numel() < RING:
            return super()._scatter(stack, groups)
        rank = ops.rank()
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

    def all_gather(self, operand: Tensor) -> Tensor:
        """See ``Collectives``."""
        return operand.expand(self.num_shards, *operand.shape).flatten(0, 1)

    def reduce_scatter(self, stack: Tensor) -> Tensor:
        """See ``Collectives``."""
        return stack.chunk(self.num_shards)[self.rank] * self.num_shards

    def all_reduce_operand(self, operand: Tensor) -> Tensor:
        """See ``Collectives``."""
        return operand * self.num_shards

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """See ``Collectives``."""
        return value * self.num_shards if op == "sum" else value


class Rings:
    """Rings over replica groups of one size.

    Args:
        groups: the ranks of each ring, in order; every rank of the job is in one.
        place: the caller's place in its ring.
    """

    def __init__(self, groups: Groups, place: int) -> None:
        self.size = len(groups[0])
        self._sends = [
            (rank, ring[(at + 1) % self.size]) for ring in groups for at, rank in enumerate(ring)
        ]
        # Of the chunk of which a partial sum is sent at each step; the own one comes last.
        chunks = [(place - 1 - step) % self.size for step in range(self.size)]
        self._chunks = ops.upload(torch.tensor(chunks, dtype=torch.int32))

    def reduce_scatter(self, stack: Tensor) -> Tensor:
        """Stack [size, rows, width] to this rank's chunk [rows, width] of the sum over the ring."""
        partial_sum = self._chunk(stack, 0)
        for step in range(1, self.size):
            received = ops.collective_permute(partial_sum, self._sends)
            partial_sum = received + self._chunk(stack, step)
        return partial_sum[0]

    def _chunk(self, stack: Tensor, step: int) -> Tensor:
        return stack.index_select(0, self._chunks[step : step + 1])
