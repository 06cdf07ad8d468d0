"""Who a unit's ranks are to each other: those that share its parameters, those that repeat them.

Words: *replicas* are ranks that hold equal shards; a *sharding group* is the ranks that together
hold the parameters once.
Always true: every rank is in one sharding group and in one group of replicas; where groups are
given by hand (``sharding_groups``), what lies between them is the user's affair.
What is sent is ``collectives``' business, when ``param_group``'s and ``unit``'s.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from xla_fsdp.distributed.collectives import Collectives, LocalCollectives, XlaCollectives
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.topology import Groups
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.config import FSDPConfig


@dataclass(frozen=True)
class Communication:
    """What a unit communicates by.

    Args:
        shards: joins the ranks that share the parameters.
        replicas: joins the ranks that hold the same shards; of one rank, if there are no others.
        everyone: joins all of these ranks.
        groups: all sharding groups, if there are several.
        covers_all: whether all ranks of the job hold the same model.
    """

    shards: Collectives
    everyone: Collectives
    replicas: Collectives = field(default_factory=LocalCollectives)
    groups: Groups | None = None
    covers_all: bool = True


def communication_for(config: FSDPConfig, given: Collectives | None) -> Communication:
    """As ``config`` says, or over ``given`` alone.

    Raises:
        ValueError: if the mesh is not one of this job's ranks.
        RuntimeError: if torchrun started processes that do not know of each other.
    """
    if given is not None:
        return Communication(given, given)
    _refuse_lone_processes()
    if config.mesh is not None:
        return _over_mesh(config.mesh)
    rank, size = config.sharding_rank, config.sharding_world_size
    if config.sharding_groups is None or rank is None or size is None:
        everyone = all_ranks()
        return Communication(everyone, everyone)
    groups = config.sharding_groups
    own = _over(groups, rank, size)
    return Communication(own, own, groups=groups, covers_all=False)


def all_ranks() -> Collectives:
    """Joins all ranks of the job."""
    return _over(None, ops.rank(), ops.world_size())


def _refuse_lone_processes() -> None:
    """Under torchrun XLA has to be told; processes that are not joined train one model each, and
    nothing else would say so."""
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
    if mesh.world_size != ops.world_size():
        raise ValueError(
            f"the mesh lays out {mesh.world_size} ranks, but the job has {ops.world_size()}; "
            f"make it by init_mesh on the ranks that train"
        )
    shard = mesh.axis_names[-1]
    groups = mesh.groups(shard)
    return Communication(
        along(mesh[shard]),
        along(mesh),
        along(mesh[mesh.axis_names[0]]) if mesh.ndim > 1 else LocalCollectives(),
        groups if len(groups) > 1 else None,
        covers_all=mesh.size() == mesh.world_size,
    )


def along(mesh: Mesh) -> Collectives:
    """Joins this rank and those that differ from it only on the mesh's axes."""
    return _over(mesh.groups(), mesh.place(ops.rank()), mesh.size())


def _over(groups: Groups | None, rank: int, size: int) -> Collectives:
    return LocalCollectives() if size == 1 else XlaCollectives(groups, rank, size)
