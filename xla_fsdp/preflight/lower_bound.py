"""The least that a sharded model has to put on the wire in one step.

Words: see ``unit`` and ``sharded_param``. Always true: counted is what the wrapping asks for, each
parameter gathered for its unit's forward, once more for backward where it is freed between, and its
gradient reduced once, as a shard also over replicas, without padding, in rings. Remat gathers
nothing more; an embedding that sends rows in place of its table may need less.
What the compiler makes of it is found by ``traffic``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

from xla_fsdp.distributed.collectives import Collectives, XlaCollectives
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.preflight.program import ParameterTraffic


def live_units() -> list[FSDPState]:
    """Every FSDP unit of this process."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is FSDPState]


def parameter_traffic(units: Iterable[FSDPState]) -> tuple[ParameterTraffic, ...]:
    """The minimum, by parameter."""
    return tuple(each for unit in units for each in _of_unit(unit))


def _of_unit(unit: FSDPState) -> list[ParameterTraffic]:
    group: FSDPParamGroup = unit.group
    others = group.collectives.num_shards - 1
    replicas = group.replicas.num_shards
    over_replicas = 2 * (replicas - 1) / replicas  # of a shard
    off_torus = _off_torus(group.collectives)
    gathered = others + _others_in_backward(unit)
    found = []
    for param in group.params:
        shard_numel = param.packing.layout.numel / param.packing.layout.num_shards
        dtype = param.compute_dtype or param.leaf.dtype
        reduced = unit.config.gradient_dtype or dtype
        needs_grad = param.leaf.requires_grad
        found.append(
            ParameterTraffic(
                name=param.members[0].names[0],
                numel=param.packing.layout.numel,
                padded=param.packing.layout.padded_numel,
                gathered_bytes=round(gathered * shard_numel * dtype.itemsize),
                reduced_bytes=round(
                    (others + over_replicas) * shard_numel * reduced.itemsize * needs_grad
                ),
                off_torus=off_torus if needs_grad else (),
                is_cut=any(member.is_cut for member in param.members),
            )
        )
    return found


def _off_torus(collectives: Collectives) -> tuple[int, ...]:
    """The first group of ranks, if the groups do not follow the torus."""
    if not isinstance(collectives, XlaCollectives) or collectives.follows_torus:
        return ()
    groups = collectives.groups
    return tuple(groups[0] if groups else range(collectives.num_shards))


def _others_in_backward(unit: FSDPState) -> int:
    """How many shards of others a rank has to get again for backward."""
    if not unit.settings.reshards_after_forward:
        return 0
    smaller = unit.group.smaller
    if smaller is None:
        return unit.group.collectives.num_shards - 1
    return (smaller.within.num_shards - 1) * smaller.across.num_shards
