"""Gathers, scatters and reductions of buckets among the ranks of one group.

A bucket is a tensor [rows, width] of one rank; gathered, the buckets of all ranks are concatenated
in rank order to [num_shards * rows, width].
Invariants: every call is one collective (a reduction: one per axis of the TPU's torus); every rank
of the group makes the same calls in the same order; empty tensors are not sent.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.packing import buckets_for
from xla_fsdp.distributed.topology import Groups, reduction_steps
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import to_host

RING = 2**18
"""Buckets of fewer elements are not sent around rings: their reduce-scatter takes little time."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes of an element, in which adding zeros changes no bit (of NaN and -0 it
would in floating point)."""


Finish = Callable[[Tensor], Tensor]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class Collectives(ABC):
    """What a parameter group needs from the ranks it is sharded over."""

    num_shards: int
    rank: int
    follows_torus = False  # the ranks are chips of a TPU slice: all of them run one program

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Equal for objects that communicate among the same ranks."""

    @abstractmethod
    def all_gather(self, bucket: Tensor) -> Tensor:
        """Concatenate the buckets, [rows, width], of all ranks to [num_shards * rows, width]."""

    @abstractmethod
    def reduce_scatter(self, gathered: Tensor, finish: Finish = _as_it_is) -> Tensor:
        """Sum ``finish(gathered)``, [num_shards * rows, width]; return this rank's [rows, width] of
        it.

        Args:
            gathered: of each rank.
            finish: elementwise, such as a division. Where parts are summed one after the other, as
                they are added: what a kernel has made is then not written once more before.
        """

    def reduce_scatter_product(self, left: Tensor, right: Tensor, finish: Finish) -> Tensor:
        """Return ``reduce_scatter(finish(left.t() @ right))``.

        Where reductions can overlap with compute, parts of the product do.

        Args:
            left: [n, num_shards * rows].
            right: [n, width].
            finish: elementwise, such as a cast.
        """
        return self.reduce_scatter(finish(left.t() @ right))

    @abstractmethod
    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """Combine ``value`` over the ranks by ``op``, "sum" or "max"."""

    @abstractmethod
    def split(self, size: int) -> SmallerGroups:
        """Divide the ranks into groups of ``size`` neighbours; ``size`` divides ``num_shards``."""

    def of(self, expert: bool) -> Collectives:
        """Return those among the ranks that share a parameter: of experts that are cut over an axis
        of the mesh, ranks that hold the same experts."""
        return self

    @property
    def product_parts(self) -> int:
        """Into how many parts a loop should cut a product that it reduces while it computes it; 0
        if it should be whole first."""
        return 1

    def in_rings(self) -> Collectives:
        """Return collectives whose reductions can overlap with what a loop's body computes.

        They are the same ones where no such reductions are known. They take more memory, so they
        are for loops only.
        """
        return self


@dataclass(frozen=True)
class SmallerGroups:
    """A group of ranks divided into smaller ones, each of which holds all parameters once.

    Args:
        within: over the ranks of the caller's smaller group, whose shards are larger.
        across: over the ranks that hold the same larger shard, one of each smaller group.
    """

    within: Collectives
    across: Collectives


class XlaCollectives(Collectives):
    """Collectives over replica groups.

    Args:
        groups: the replica groups; None for one of all ranks.
        rank: the caller's index in its group.
        num_shards: the size of a group.
        steps: replica groups of consecutive reduce-scatters that together make one over ``groups``
            (default: one along each axis of the TPU's torus, where there is a torus).
        experts: collectives among those that hold the same experts (default: these).

    Raises:
        ValueError: if the sizes of the steps' groups do not multiply to ``num_shards``.
    """

    def __init__(
        self,
        groups: ops.Groups,
        rank: int,
        num_shards: int,
        steps: Sequence[Groups] | None = None,
        experts: Collectives | None = None,
    ) -> None:
        self._experts = experts
        self.groups = groups
        self.rank = rank
        self.num_shards = num_shards
        self._all_groups = groups or [list(range(num_shards))]
        if steps is None:
            steps = reduction_steps(self._all_groups, ops.runtime().torus_coords())
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
        return repr(self.groups), None if self._experts is None else self._experts.key

    def of(self, expert: bool) -> Collectives:
        return self._experts if expert and self._experts is not None else self

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
        experts = None if self._experts is None else self._experts.in_rings()
        return RingCollectives(self.groups, self.rank, self.num_shards, self._steps, experts)

    def all_gather(self, bucket: Tensor) -> Tensor:
        return ops.all_gather(bucket, self.groups) if bucket.numel() else bucket

    def reduce_scatter(self, gathered: Tensor, finish: Finish = _as_it_is) -> Tensor:
        if not gathered.numel():
            return gathered
        width = gathered.shape[-1]
        rows = finish(gathered)
        for step, groups in enumerate(self._steps):
            rows = self._scatter(rows.reshape(len(groups[0]), -1, width), step)
        return rows.reshape(-1, width)

    def _scatter(self, chunks: Tensor, step: int) -> Tensor:
        """Reduce [size of a group, rows, width] to this rank's [..., rows, width], in this step of
        a reduction."""
        return ops.reduce_scatter(chunks, len(chunks), self._steps[step])

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        return ops.all_reduce(op, value, self.groups) if value.numel() else value


class RingCollectives(XlaCollectives):
    """Collectives over replica groups, whose large reductions go around rings.

    The TPU compiler leaves every reduce-scatter blocking, but starts a collective-permute early and
    ends it late. A product is computed in parts, each before the round of the ring that adds it. So
    JAX's windowed products hide reductions (S. Wang et al., Overlap Communication with Dependent
    Computation via Decomposition, ASPLOS 2023). As many bytes are sent as by a reduce-scatter; sums
    are rounded to the bucket's dtype at every rank.
    """

    def __getstate__(self) -> dict[str, Any]:
        # Device tensors are neither copied nor pickled.
        return {name: each for name, each in vars(self).items() if name != "_orders"}

    @cached_property
    def _orders(self) -> dict[int, Tensor]:
        """``ring_order`` on the device, by step."""
        return {}

    @property
    def product_parts(self) -> int:
        # Along three axes, as of v4 and v5p, the compiler writes the products' factors in float32.
        return self._ring_size if len(self._steps) < 3 else 0

    @property
    def _ring_size(self) -> int:
        return len(self._steps[0][0])

    def reduce_scatter(self, gathered: Tensor, finish: Finish = _as_it_is) -> Tensor:
        width = gathered.shape[-1]
        if not self._is_large(gathered, 0):
            return super().reduce_scatter(gathered, finish)
        chunks = gathered.reshape(len(self._steps[0][0]), -1, width)

        def summand(number: Tensor) -> Tensor:
            return finish(chunks.index_select(0, number))

        return self._around(summand, width)

    def reduce_scatter_product(self, left: Tensor, right: Tensor, finish: Finish) -> Tensor:
        size, width = self._ring_size, right.shape[-1]
        if left.shape[-1] * width < RING:
            return super().reduce_scatter_product(left, right, finish)
        columns = left.reshape(len(left), size, -1)

        def summand(number: Tensor) -> Tensor:
            return finish(columns.index_select(1, number)[:, 0].t() @ right)[None]

        return self._around(summand, width, in_small_sends=True)

    def _around(
        self, summand: Callable[[Tensor], Tensor], width: int, *, in_small_sends: bool = False
    ) -> Tensor:
        rows = ring_reduce_scatter(summand, self._steps[0], self._order(0))
        for step in range(1, len(self._steps)):
            chunks = rows.reshape(len(self._steps[step][0]), -1, width)
            rows = self._scatter(chunks, step, in_small_sends=in_small_sends)
        return rows.reshape(-1, width)

    def _scatter(self, chunks: Tensor, step: int, *, in_small_sends: bool = False) -> Tensor:
        if not self._is_large(chunks, step, in_small_sends=in_small_sends):
            return super()._scatter(chunks, step)
        summand = partial(chunks.index_select, 0)
        return ring_reduce_scatter(summand, self._steps[step], self._order(step))

    def _is_large(self, chunks: Tensor, step: int, *, in_small_sends: bool = False) -> bool:
        # A ring of 16 ranks is 15 sends, 1 MiB of code. A block has a ring for each matrix and axis
        # of the torus, so not if they would be small; the product of a head is one.
        sent = chunks.numel() // len(self._steps[step][0])
        return chunks.numel() >= RING and (in_small_sends or 8 * sent >= RING)

    def _order(self, step: int) -> Tensor:
        # Uploaded once: each input of a program has a table in memory, and its slices code.
        if step not in self._orders:
            rank = ops.rank()
            [local_rank] = [ring.index(rank) for ring in self._steps[step] if rank in ring]
            order = ring_order(len(self._steps[step][0]), local_rank)
            self._orders[step] = ops.upload(order)
        return self._orders[step]


def ring_order(size: int, local_rank: int) -> Tensor:
    """Return the ranks of a ring for whose chunks one of them computes summands, in turn, [size]
    int32: first those for what is sent onward, ever nearer ones, its own last, then those for what
    is sent back."""
    path = folded(size)
    place, rounds = path.index(local_rank), size // 2
    ahead = [path[(place + rounds - step) % size] for step in range(rounds + 1)]
    behind = [path[(place + rounds + 1 + step) % size] for step in range(size - 1 - rounds)]
    return torch.tensor([*ahead, *behind], dtype=torch.int32)


def ring_reduce_scatter(
    summand: Callable[[Tensor], Tensor], groups: Groups, order: Tensor
) -> Tensor:
    """Return this rank's chunk of the sum over its ring.

    Two partial sums of each chunk travel toward its rank, one from either side, and grow at every
    rank on the way. As many bytes are sent as by one that goes all the way around, in half as many
    rounds.

    Args:
        summand: computes, from a rank's number in the ring, [1] int32, what the caller adds to the
            chunk of that rank, [1, rows, width].
        groups: the ranks of each ring, in order; every rank of the job is in one.
        order: what ``ring_order`` returns for the caller, on its device. It is an input of the
            program, not a constant, so that every rank has the same program.

    Returns:
        A tensor [rows, width].
    """
    size = len(groups[0])
    path = folded(size)
    onward = [(ring[at], ring[to]) for ring in groups for at, to in pairwise([*path, path[0]])]
    back = [(to, at) for at, to in onward]
    rounds = size // 2
    steps_back = size - 1 - rounds

    def own(number: int) -> Tensor:
        return summand(order[number : number + 1])

    total = own(0)
    from_ahead = own(rounds + 1) if steps_back else None
    for step in range(1, rounds + 1):
        total = ops.collective_permute(total, onward) + own(step)
        if from_ahead is not None and step <= steps_back:
            from_ahead = ops.collective_permute(from_ahead, back)
            if step < steps_back:
                from_ahead = from_ahead + own(rounds + 1 + step)
    return (total if from_ahead is None else total + from_ahead)[0]


def folded(size: int) -> list[int]:
    """Return the order in which a ring visits the ranks of a line: there by every second one, and
    back by the others.

    No send passes more than two links. On slices of more than 16 v5e chips the compiler leaves
    longer ones blocking, also where the torus would close the ring.
    """
    there = list(range(0, size, 2))
    return there + [at for at in reversed(range(size)) if at % 2]


class LocalCollectives(Collectives):
    """Collectives without communication, which assume that every rank holds what this one holds.

    Exact with one shard. With several, the shapes are right, to measure a program without its
    communication.
    """

    def __init__(self, rank: int = 0, num_shards: int = 1) -> None:
        self.rank = rank
        self.num_shards = num_shards

    @property
    def key(self) -> Hashable:
        """Equal for objects of the same rank among as many shards."""
        return ("local", self.rank, self.num_shards)

    def split(self, size: int) -> SmallerGroups:
        """Divide the ranks into groups of ``size``; ``size`` divides ``num_shards``."""
        number, local_rank = divmod(self.rank, size)
        across = LocalCollectives(number, self.num_shards // size)
        return SmallerGroups(LocalCollectives(local_rank, size), across)

    def all_gather(self, bucket: Tensor) -> Tensor:
        """Repeat the bucket, [rows, width], to [num_shards * rows, width]."""
        return bucket.expand(self.num_shards, *bucket.shape).flatten(0, 1)

    def reduce_scatter(self, gathered: Tensor, finish: Finish = _as_it_is) -> Tensor:
        """Return this rank's [rows, width] of ``finish(gathered)``, [num_shards * rows, width],
        times ``num_shards``."""
        return finish(gathered).chunk(self.num_shards)[self.rank] * self.num_shards

    def all_reduce(self, op: str, value: Tensor) -> Tensor:
        """Return ``value``, for ``op`` "sum" times ``num_shards``."""
        return value * self.num_shards if op == "sum" else value


@torch.no_grad()
def broadcast_(tensors: Sequence[Tensor], among: Collectives, device: torch.device) -> None:
    """Copy the values of the first rank of ``among`` into ``tensors``, bit for bit and in place.

    Args:
        tensors: on any device, of the same shapes and dtypes on every rank.
        among: the ranks; nothing is done for ``LocalCollectives``.
        device: the caller's XLA device, which must have room for all values at once.
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
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])


# ---------------------------------------------------------------- the ranks of an FSDP module


_NO_REPLICAS = LocalCollectives()


@dataclass(frozen=True)
class Communication:
    """Collectives of an FSDP module.

    Args:
        shards: over the ranks that together hold the parameters once.
        everyone: over all ranks that hold the same model, replicas included.
        replicas: over the ranks that hold the same shards; of one rank without replication.
        groups: the replica groups of ``shards``, if there are several.
        covers_all: whether all ranks of the job hold the same model.
    """

    shards: Collectives
    everyone: Collectives
    replicas: Collectives = _NO_REPLICAS
    groups: Groups | None = None
    covers_all: bool = True


def communication_for(
    mesh: Mesh | None = None,
    sharding_groups: Groups | None = None,
    sharding_rank: int | None = None,
    sharding_world_size: int | None = None,
    collectives: Collectives | None = None,
    experts: Mesh | None = None,
) -> Communication:
    """Return the collectives of an FSDP module.

    ``collectives`` come first, then ``mesh``, whose last axis shards and whose first of two
    replicates, then the ``sharding_`` arguments; the default is to shard over all ranks.
    ``experts`` is the axis of the mesh that the unit's experts are cut over.

    Raises:
        ValueError: if the mesh is not one of this job's ranks.
        RuntimeError: if torchrun started processes that do not know of each other.
    """
    if collectives is not None:
        return Communication(collectives, collectives)
    _refuse_lone_processes()
    if mesh is not None:
        return _over_mesh(mesh, experts)
    if sharding_groups is None or sharding_rank is None or sharding_world_size is None:
        everyone = all_ranks()
        return Communication(everyone, everyone)
    own = over(sharding_groups, sharding_rank, sharding_world_size)
    return Communication(own, own, groups=sharding_groups, covers_all=False)


def all_ranks() -> Collectives:
    """Return collectives over all ranks of the job."""
    known = _of_all_ranks.setdefault(ops.runtime(), {})
    rank, size = ops.rank(), ops.world_size()
    if (rank, size) not in known:
        known[rank, size] = over(None, rank, size)
    return known[rank, size]


_of_all_ranks: WeakKeyDictionary[ops.RankRuntime, dict[tuple[int, int], Collectives]]
_of_all_ranks = WeakKeyDictionary()
"""By rank and number of ranks. Units share them: a pod's coordinates are read once."""


def _refuse_lone_processes() -> None:
    # torchrun alone does not join processes to one XLA job. Without this error each process would
    # silently train a model of its own.
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


def _over_mesh(mesh: Mesh, experts: Mesh | None) -> Communication:
    check_mesh(mesh)
    shard = mesh.axis_names[-1]
    groups = mesh.groups(shard)

    def among(axes: Mesh) -> Collectives:
        return along(axes, None if experts is None else along(axes.without(experts)))

    return Communication(
        among(mesh[shard]),
        among(mesh),
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


def along(mesh: Mesh, experts: Collectives | None = None) -> Collectives:
    """Return collectives over this rank's group along all axes of ``mesh``; ``experts`` are those
    among ranks that hold the same experts."""
    return over(mesh.groups(), mesh.local_rank(ops.rank()), mesh.size(), experts)


def over(
    groups: Groups | None, rank: int, size: int, experts: Collectives | None = None
) -> Collectives:
    """Return collectives over groups of ``size`` ranks, of which the caller is number ``rank``."""
    if size == 1:
        return LocalCollectives()
    return XlaCollectives(groups, rank, size, experts=experts)
