"""Gathers, scatters and reductions of buckets among the ranks of one group.

A bucket is one rank's tensor, [rows, width]; gathered ones of all ranks lie one below the other,
[num_shards * rows, width].
Invariants: every call is one collective (a reduction one for each axis of the TPU's torus); every
rank of the group makes the same calls in the same order; empty tensors are not sent.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.shard_layout import LANES
from xla_fsdp.distributed.topology import Groups, reduction_steps
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.host import to_host

TILE = 16 * LANES
"""Elements of a TPU tile of 16-bit elements, of which flat tensors fill a multiple per rank: the
TPU compiler turns the reduce-scatter of a 1-D array, or of fewer rows, into a full all-reduce and a
slice."""

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)  # by identity: plans are kept, and their buckets are keys
class Bucket:
    """Which tensors one collective sends.

    Args:
        numbers: of the tensors in it.
        shapes: of one rank's shards, [n] or [rows, width].
        dtype: in which they travel.
    """

    numbers: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def in_rows(self) -> bool:
        """Whether it holds one tensor in rows."""
        return len(self.shapes[0]) > 1

    @property
    def sizes(self) -> list[int]:
        """Elements of the shards of flat tensors."""
        return [size for (size,) in self.shapes]

    def pack(self, shards: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """Copy the shards of all tensors, by number and of any shapes, to [rows, width]."""
        if self.in_rows:
            return ops.copied(shards[self.numbers[0]], self.shapes[0])
        pairs = zip(self.numbers, self.shapes, strict=True)
        return self.pack_flat([ops.shaped(shards[at], shape) for at, shape in pairs])

    def pack_gathered(self, gathered: Mapping[int, Tensor]) -> Tensor:
        """Pack the shards of all ranks, [num_shards, n] or rows, to [num_shards * rows, width]."""
        if self.in_rows:
            return gathered[self.numbers[0]]
        return self.pack_flat([gathered[at] for at in self.numbers])

    def pack_flat(self, flat: Sequence[Tensor]) -> Tensor:
        """Lay flat tensors side by side, [..., n] each, and pad them to [rows, width]."""
        joined = torch.cat(list(flat), dim=-1)
        missing = -joined.shape[-1] % TILE
        return (F.pad(joined, (0, missing)) if missing else joined).reshape(-1, LANES)

    def unpack(self, rows: Tensor, num_shards: int | None = None) -> list[Tensor]:
        """Return what ``pack`` was given, in ``shapes``; with ``num_shards``, ``pack_gathered``."""
        if self.in_rows:
            return [rows]
        flat = rows.reshape(-1) if num_shards is None else rows.reshape(num_shards, -1)
        sizes = self.sizes
        if not flat.numel():
            return [flat for _ in sizes]
        padding = flat.shape[-1] - sum(sizes)
        return ops.pieces(flat, [*sizes, padding] if padding else sizes)[: len(sizes)]


def plan_buckets(
    shapes: Mapping[int, Shape], dtypes: Mapping[int, torch.dtype], limit: float, copies: int = 1
) -> tuple[Bucket, ...]:
    """Return as few buckets as possible: one for each tensor in rows, and others for flat ones of a
    dtype. Empty tensors have one each, of which nothing is sent.

    Args:
        shapes: in which shards travel, by number of the tensor.
        dtypes: likewise.
        limit: bytes of consecutive tensors that may share a bucket; one tensor may be larger.
        copies: how many shards of each tensor count towards it.
    """
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for number in shapes:
        by_dtype[dtypes[number]].append(number)
    return tuple(
        Bucket(tuple(packed), tuple(shapes[at] for at in packed), dtype)
        for dtype, numbers in by_dtype.items()
        for run in _runs(numbers, shapes, limit / (dtype.itemsize * copies))
        for packed in _flat_together(run, shapes)
    )


def buckets_for(tensors: Mapping[int, Tensor], limit: float = math.inf) -> tuple[Bucket, ...]:
    """Return buckets for tensors, by number, that travel as they are; with several dims in rows."""
    shapes = {
        number: (each.shape[:-1].numel(), each.shape[-1]) if each.dim() > 1 else tuple(each.shape)
        for number, each in tensors.items()
    }
    return plan_buckets(shapes, {number: each.dtype for number, each in tensors.items()}, limit)


def by_number(
    buckets: Iterable[Bucket], unpacked: Callable[[Bucket], list[Tensor]]
) -> dict[int, Tensor]:
    """Return by number the tensors into which ``unpacked`` turns each bucket."""
    return {
        number: result
        for bucket in buckets
        for number, result in zip(bucket.numbers, unpacked(bucket), strict=True)
    }


def _runs(numbers: Sequence[int], shapes: Mapping[int, Shape], limit: float) -> list[list[int]]:
    """Return runs of tensors that hold at most ``limit`` elements, but at least one tensor."""
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
    """Return the flat tensors of a run together, and each that is in rows, or empty, alone."""
    flat = [at for at in run if len(shapes[at]) < 2 and 0 not in shapes[at]]
    alone = [[number] for number in run if number not in flat]
    return [flat, *alone] if flat else alone


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


# ---------------------------------------------------------------- the ranks of a unit


@dataclass(frozen=True)
class Communication:
    """Collectives of a unit.

    Args:
        shards: over the ranks that together hold the parameters once.
        everyone: over all ranks that hold them.
        replicas: over the ranks that hold the same shards; of one rank, if there are no others.
        groups: all groups of ranks that share parameters, if there are several.
        covers_all: whether all ranks of the job hold the same model.
    """

    shards: Collectives
    everyone: Collectives
    replicas: Collectives = field(default_factory=LocalCollectives)
    groups: Groups | None = None
    covers_all: bool = True


def communication_for(
    mesh: Mesh | None = None,
    sharding_groups: Groups | None = None,
    sharding_rank: int | None = None,
    sharding_world_size: int | None = None,
    collectives: Collectives | None = None,
) -> Communication:
    """Return the communication over ``collectives`` if given, else over a mesh, else over groups
    given by hand, else over all ranks.

    Raises:
        ValueError: if the mesh is not one of this job's ranks.
        RuntimeError: if torchrun started processes that do not know of each other.
    """
    if collectives is not None:
        return Communication(collectives, collectives)
    _refuse_lone_processes()
    if mesh is not None:
        return _over_mesh(mesh)
    if sharding_groups is None or sharding_rank is None or sharding_world_size is None:
        everyone = all_ranks()
        return Communication(everyone, everyone)
    own = _over(sharding_groups, sharding_rank, sharding_world_size)
    return Communication(own, own, groups=sharding_groups, covers_all=False)


def all_ranks() -> Collectives:
    """Return collectives over all ranks of the job."""
    return _over(None, ops.rank(), ops.world_size())


def _refuse_lone_processes() -> None:
    # Under torchrun XLA has to be told; processes that are not joined train one model each, and
    # nothing else would say so.
    if not torch.distributed.is_torchelastic_launched():
        return
    started, joined = int(os.environ.get("WORLD_SIZE", "1")), ops.world_size()
    if started > joined:
        raise RuntimeError(
            f"torchrun started {started} processes, but this one is rank {ops.rank()} of "
            f"{joined} XLA ranks, so each would train on its own. On TPU, call "
            f"torch.distributed.init_process_group('xla', init_method='xla://') before anything "
            f"uses an XLA device. On CPU, processes cannot be joined: run the script by "
            f"python -m xla_fsdp.launch --num_ranks {started}"
        )


def _over_mesh(mesh: Mesh) -> Communication:
    check_mesh(mesh)
    shard = mesh.axis_names[-1]
    groups = mesh.groups(shard)
    return Communication(
        along(mesh[shard]),
        along(mesh),
        along(mesh[mesh.axis_names[0]]) if mesh.ndim > 1 else LocalCollectives(),
        groups if len(groups) > 1 else None,
        covers_all=mesh.size() == mesh.world_size,
    )


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError unless the mesh lays out the ranks of this job."""
    if mesh.world_size != ops.world_size():
        raise ValueError(
            f"the mesh lays out {mesh.world_size} ranks, but the job has {ops.world_size()}; "
            f"make it by init_mesh on the ranks that train"
        )


def along(mesh: Mesh) -> Collectives:
    """Return collectives over the ranks that differ from this one only on the mesh's axes."""
    return _over(mesh.groups(), mesh.local_rank(ops.rank()), mesh.size())


def _over(groups: Groups | None, rank: int, size: int) -> Collectives:
    return LocalCollectives() if size == 1 else XlaCollectives(groups, rank, size)
