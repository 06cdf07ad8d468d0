"""Who a unit's ranks are to each other: those that share its parameters, those that repeat them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from xla_fsdp.distributed.collectives import Collectives, LocalCollectives, XlaCollectives
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.topology import Groups
from xla_fsdp.distributed.xla import ops


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
