"""Between the parameters that units gather and the plain model's, of which tensor parallelism has
cut them.

Words: see ``tensor_placement``: what units call full is *local*, the plain model's is *whole*.
Always true: a parameter without placement is whole as it is, and nothing is sent for it; what is
cut like a parameter (a gradient, optimizer state) is joined and cut like it.
Every rank along the axis must join the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import TensorPlacement
from xla_fsdp.distributed.xla import ops

if TYPE_CHECKING:
    from xla_fsdp.fsdp.engine.param import OriginalParam


def own_part(whole: Tensor, placement: TensorPlacement | None) -> Tensor:
    """This rank's local part of a whole tensor, on its device."""
    return whole if placement is None else placement.slice_of(whole, own_place(placement))


def own_parts(whole: Sequence[Tensor], members: Sequence[OriginalParam]) -> list[Tensor]:
    """The same for several members."""
    return [own_part(t, member.placement) for t, member in zip(whole, members, strict=True)]


def joined(local: Tensor, placement: TensorPlacement | None) -> Tensor:
    """The whole tensor of the local parts, on the device."""
    if placement is None or placement.dim is None:
        return local
    return AxisComm(placement.mesh).all_gather(local, placement.dim)


def all_joined(local: Sequence[Tensor], members: Iterable[OriginalParam]) -> list[Tensor]:
    """The same for several members."""
    return [joined(t, member.placement) for t, member in zip(local, members, strict=True)]


def own_place(placement: TensorPlacement) -> int:
    """This rank's place on the axis."""
    return placement.mesh.place(ops.rank())


def is_first(members: Iterable[OriginalParam]) -> bool:
    """Whether this rank is the first of those that share each of the members."""
    placements = (member.placement for member in members)
    return all(each is None or own_place(each) == 0 for each in placements)
