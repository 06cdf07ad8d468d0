"""Sharded parameters with their names in a model, which are those before wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine.packing import is_first
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.slots import OriginalParam


@dataclass(frozen=True)
class NamedShard:
    """A sharded parameter, its group, and the names of its unit's modules in a model.

    Args:
        prefixes: for each module of the unit, its names; empty if it is not in the model.
        param: the parameter.
        group: gathers the parameter.
    """

    prefixes: tuple[Sequence[str], ...]
    param: FSDPParam
    group: FSDPParamGroup

    @property
    def key(self) -> str:
        """Name of the shard in a sharded state dict."""
        if self.param.is_flat:
            return join_name(self.prefixes[0][0], self.param.key)
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """The canonical name of each original."""
        return [self.names_of(original)[0] for original in self.param.originals]

    @property
    def rank(self) -> int:
        """Rank of this process among those that share the parameter."""
        return self.group.collectives_of(self.param).rank

    def is_of(self, rank: int) -> bool:
        """Return whether this process is ``rank`` in the first replica and the first of its
        tensor-parallel group."""
        return (
            self.rank == rank and self.group.replicas.rank == 0 and is_first(self.param.originals)
        )

    @property
    def is_reachable(self) -> bool:
        """Whether every original has a name in the model."""
        return all(self.names_of(original) for original in self.param.originals)

    def names_of(self, original: OriginalParam) -> list[str]:
        """Return every name of an original, the canonical one first."""
        parts = original.parts or (0,) * len(original.names)
        return [
            join_name(prefix, name)
            for part, name in zip(parts, original.names, strict=True)
            for prefix in self.prefixes[part]
        ]
