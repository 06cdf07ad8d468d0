"""Between local parameters, which units gather and reduce, and the global ones of which tensor
parallelism has cut them.

Every rank along the axis must gather the same tensors in the same order. What is cut like a
parameter (a gradient, optimizer state) is gathered and cut like it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import TensorPlacement
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.registry import KnownMember


def own_part(whole: Tensor, placement: TensorPlacement | None) -> Tensor:
    """Return this rank's local part of a global tensor, on its device."""
    return whole if placement is None else placement.slice_of(whole, _own_rank(placement))


def own_parts(whole: Sequence[Tensor], members: Sequence[KnownMember]) -> list[Tensor]:
    """Return the local parts of several members."""
    return [own_part(t, member.placement) for t, member in zip(whole, members, strict=True)]


def joined(local: Tensor, placement: TensorPlacement | None) -> Tensor:
    """Gather the global tensor of the local parts, on the device."""
    if placement is None or placement.dim is None:
        return local
    return AxisComm(placement.mesh).all_gather(local, placement.dim)


def all_joined(local: Sequence[Tensor], members: Iterable[KnownMember]) -> list[Tensor]:
    """Gather the global tensors of several members."""
    return [joined(t, member.placement) for t, member in zip(local, members, strict=True)]


def is_first(members: Iterable[KnownMember]) -> bool:
    """Whether this rank is the first along the axes that cut the members."""
    placements = (member.placement for member in members)
    return all(each is None or _own_rank(each) == 0 for each in placements)


def _own_rank(placement: TensorPlacement) -> int:
    return placement.mesh.place(ops.rank())
