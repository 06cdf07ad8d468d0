"""Sharded parameters by the names that they have in a model, which are those before wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine.param import FSDPParam, OriginalParam
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.tp_params import is_first


@dataclass(frozen=True)
class NamedShard:
    """A sharded parameter, its group, and the names of its unit in the model at hand.

    Args:
        prefixes: names of each module of the unit; none for one that is not in the model.
        param: the parameter.
        group: with which it is gathered.
    """

    prefixes: tuple[Sequence[str], ...]
    param: FSDPParam
    group: FSDPParamGroup

    @property
    def key(self) -> str:
        """Name of the shard in a state dict of shards."""
        if self.param.is_flat:
            return join_name(self.prefixes[0][0], self.param.key)
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """The canonical name of each member."""
        return [self.names_of(member)[0] for member in self.param.members]

    @property
    def rank(self) -> int:
        """Rank of this process among those that share the parameter."""
        return self.group.collectives.rank

    def is_of(self, rank: int) -> bool:
        """Whether this process is ``rank`` of the first replica and tensor-parallel part."""
        return self.rank == rank and self.group.replicas.rank == 0 and is_first(self.param.members)

    @property
    def is_reachable(self) -> bool:
        """Whether it has a name in the model."""
        return all(self.names_of(member) for member in self.param.members)

    def names_of(self, member: OriginalParam) -> list[str]:
        """Return every name of a member, the canonical one first."""
        parts = member.parts or (0,) * len(member.names)
        return [
            join_name(prefix, name)
            for part, name in zip(parts, member.names, strict=True)
            for prefix in self.prefixes[part]
        ]
