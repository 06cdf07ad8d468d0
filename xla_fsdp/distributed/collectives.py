"""Gathers, scatters and reductions of buckets among the ranks of one group.

A bucket is one rank's tensor, [rows, width]; gathered ones of all ranks lie one below the other,
[num_shards * rows, width].
Invariants: every call is one collective (a reduction one for each axis of the TPU's torus); every
rank of the group makes the same calls in the same order; empty tensors are not sent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from xla_fsdp.distributed.buckets import buckets_for
from xla_fsdp.distributed.topology import Groups, reduction_steps
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.host import to_host

RING = 2**18
"""Elements below which a bucket is not sent around rings: its reduce-scatter is soon over."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: sums of integers and zeros change no bit, also those of NaN and -0."""


class Collectives(Protocol):
    """What a parameter group needs from the ranks it is sharded over."""

    num_shards: int
    rank: int

    @property
    def key(self) -> Hashable:
        """Equal for objects that join the same ranks."""
        ...

    def all_gather(self, bucket: Tensor) -> Tensor:
        """Gather the buckets of all ranks."""
        ...

    def reduce_scatter(self, gathered: Tensor) -> Tensor:
        """Return this rank's bucket of the sum of ``gathered`` over the ranks."""
        ...

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """Combine ``value`` over the ranks by ``op``, "sum" or "max"."""
        ...

    def split(self, size: int) -> SmallerGroups:
        """Divide the ranks into groups of ``size`` neighbours, which divides their number."""
        ...

    def in_rings(self) -> Collectives:
        """Return collectives whose reductions can run while something else is computed, where that
        is known to be possible. Where nothing else is computed, they only take more memory."""
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
        rank: the caller's index in its group.
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
        steps: Sequence[Groups] | None = None,
    ) -> None:
        self.groups = groups
        self.rank = rank
        self.num_shards = num_shards
        self._all_groups = groups or [list(range(num_shards))]
        if steps is None:
            steps = reduction_steps(self._all_groups, ops.torus_coords())
        sizes = [len(step[0]) for step in steps]
        if steps and math.prod(sizes) != num_shards:
            raise ValueError(
                f"groups of {sizes} ranks, one after the other, reduce over {math.prod(sizes)} "
                f"ranks; give steps whose sizes multiply to {num_shards}"
            )
        self.follows_torus = bool(steps)
        self._steps = list(steps) or [self._all_groups]

    @property
    def key(self) -> Hashable:
        return repr(self.groups)

    def split(self, size: int) -> SmallerGroups:
        groups = self._all_groups
        within = [g[at : at + size] for g in groups for at in range(0, len(g), size)]
        across = [group[at::size] for group in groups for at in range(size)]
        number, local_rank = divmod(self.rank, size)
        return SmallerGroups(
            XlaCollectives(within, local_rank, size),
            XlaCollectives(across, number, self.num_shards // size),
        )

    def in_rings(self) -> Collectives:
        if not self.follows_torus:
            return self
        return RingCollectives(self.groups, self.rank, self.num_shards, self._steps)

    def all_gather(self, bucket: Tensor) -> Tensor:
        return ops.all_gather(bucket, self.groups) if bucket.numel() else bucket

    def reduce_scatter(self, gathered: Tensor) -> Tensor:
        if not gathered.numel():
            return gathered
        width = gathered.shape[-1]
        rows = gathered
        for groups in self._steps:
            rows = self._scatter(rows.reshape(len(groups[0]), -1, width), groups)
        return rows.reshape(-1, width)

    def _scatter(self, chunks: Tensor, groups: Groups) -> Tensor:
        """[ranks of a group, rows, width] to [..., rows, width]."""
        return ops.reduce_scatter(chunks, len(chunks), groups)

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        return ops.all_reduce(op, value, self.groups) if value.numel() else value


class RingCollectives(XlaCollectives):
    """Real communication in which large reductions go around rings.

    The TPU compiler leaves every reduce-scatter blocking, but starts a collective-permute early and
    ends it late. The same rings hide reductions in JAX's windowed products (S. Wang et al., Overlap
    Communication with Dependent Computation via Decomposition, ASPLOS 2023). As many bytes are sent
    as by a reduce-scatter; sums are rounded to the bucket's dtype at every rank.
    """

    def _scatter(self, chunks: Tensor, groups: Groups) -> Tensor:
        if chunks.numel() < RING:
            return super()._scatter(chunks, groups)
        rank = ops.rank()
        [local_rank] = [ring.index(rank) for ring in groups if rank in ring]
        return ring_reduce_scatter(chunks, groups, local_rank)


def ring_reduce_scatter(chunks: Tensor, groups: Groups, local_rank: int) -> Tensor:
    """Return this rank's chunk of the sum over its ring.

    A partial sum of each chunk travels the ring and grows at every rank.

    Args:
        chunks: [size of the ring, rows, width], one for each rank.
        groups: the ranks of each ring, in order; every rank of the job is in one.
        local_rank: the caller's index in its ring.

    Returns:
        A tensor [rows, width].
    """
    size = len(groups[0])
    sends = [(rank, ring[(at + 1) % size]) for ring in groups for at, rank in enumerate(ring)]
    # The chunk to be added at each step; the own one comes last. On the device, not a constant:
    # every rank has the same program.
    order = [(local_rank - 1 - step) % size for step in range(size)]
    on_device = ops.upload(torch.tensor(order, dtype=torch.int32))
    partial_sum = chunks.index_select(0, on_device[:1])
    for step in range(1, size):
        received = ops.collective_permute(partial_sum, sends)
        partial_sum = received + chunks.index_select(0, on_device[step : step + 1])
    return partial_sum[0]


class LocalCollectives:
    """The same shapes without communication: every rank is taken to hold what this one holds.

    Exact with one shard; with several, to measure a program without its communication.
    """

    def __init__(self, rank: int = 0, num_shards: int = 1) -> None:
        self.rank = rank
        self.num_shards = num_shards

    @property
    def key(self) -> Hashable:
        return ("local", self.rank, self.num_shards)

    def split(self, size: int) -> SmallerGroups:
        number, local_rank = divmod(self.rank, size)
        across = LocalCollectives(number, self.num_shards // size)
        return SmallerGroups(LocalCollectives(local_rank, size), across)

    def in_rings(self) -> Collectives:
        return self

    def all_gather(self, bucket: Tensor) -> Tensor:
        return bucket.expand(self.num_shards, *bucket.shape).flatten(0, 1)

    def reduce_scatter(self, gathered: Tensor) -> Tensor:
        return gathered.chunk(self.num_shards)[self.rank] * self.num_shards

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        return value * self.num_shards if op == "sum" else value


@torch.no_grad()
def broadcast_(tensors: Sequence[Tensor], among: Collectives, device: torch.device) -> None:
    """Copy the values of ``among``'s first rank into ``tensors``, bit for bit and in place.

    Without communication every rank is taken to hold them already.

    Args:
        tensors: on any device, of the same shapes and dtypes on every rank.
        among: joins the ranks.
        device: the caller's, through which the values are sent, all at once.
    """
    if isinstance(among, LocalCollectives):
        return
    host = [tensor.detach().cpu().contiguous() for tensor in tensors]
    bits = [_as_integers(tensor) for tensor in host]
    for bucket in buckets_for(dict(enumerate(bits))):
        packed = bucket.pack(bits)
        sent = (packed if among.rank == 0 else torch.zeros_like(packed)).to(device)
        [received] = to_host([among.all_reduce("sum", sent)])
        for at, own in zip(bucket.numbers, bucket.unpack(received), strict=True):
            tensors[at].copy_(own.view(host[at].dtype).reshape(host[at].shape))


def _as_integers(tensor: Tensor) -> Tensor:
    """Return the same bits, [n]."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])
