"""What torch's DTensor says of itself, said by shards: where they are, and what they are part of.

Always true: a shard is an ordinary tensor to every function of torch; the names below are all that
it has more. In state dicts shards are tensors of a class that has these names and pickles as a
plain tensor.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from xla_fsdp.layout import LANES, ShardLayout
from xla_fsdp.mesh import SHARD, Mesh, mesh_of
from xla_fsdp.ties import known_group, known_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class ShardView:
    """Mixed into the classes of shards."""

    @property
    def device_mesh(self) -> Mesh:
        """The mesh that the parameter is sharded over; with the tensor-parallel axis, if there is
        one that cuts it, as the last one."""
        mesh, placement = _group(self).mesh, _placement(self)
        return mesh if placement is None else Mesh((*mesh.axes, *placement.mesh.axes), mesh.layout)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each axis of the mesh: ``Shard(dim)``, after ``Replicate()`` for replicas."""
        from torch.distributed.tensor import Replicate, Shard  # slow to import

        placement, own = _placement(self), Shard(_param(self).cut.dim)
        by_units = (Replicate(), own) if _group(self).mesh.ndim > 1 else (own,)
        return by_units if placement is None else (*by_units, Shard(placement.dim))

    def to_local(self) -> Tensor:
        """This rank's part, with padding where the ranks do not divide the dim."""
        return _plain(self)

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """The whole tensor, on the device. Every rank must call it; it is computed at once, so that
        ranks may do different things with it."""
        from xla_fsdp import xla_ops
        from xla_fsdp.whole_params import all_joined

        param = _param(self)
        [full] = all_joined(_group(self).gather.as_stored([param], [_plain(self)]), param.members)
        xla_ops.compute([full])
        return full


class ShardTensor(ShardView, Tensor):
    """A shard in a state dict."""

    stands_for: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor."""
        return _plain(self).__reduce_ex__(protocol)


def view_state_dicts(module: nn.Module) -> None:
    """Let the shards in the state dicts of ``module`` have the names above."""
    module.register_state_dict_post_hook(partial(_view))


def distribute_tensor(tensor: Tensor, device_mesh: Mesh, placements: Any) -> Tensor:
    """This rank's shard of a full tensor, as ``fully_shard`` cuts parameters.

    Args:
        tensor: the same on every rank, on any device.
        device_mesh: of one axis, or of replicas and shards.
        placements: as shards have them.

    Returns:
        A tensor on this rank's XLA device.
    """
    from xla_fsdp import xla_ops
    from xla_fsdp.shard_parameter import make_shard

    dim, axis = placements[-1].dim, device_mesh.axis_names[-1]
    row_shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    width = torch.Size(row_shape).numel() if tensor.dim() else 0
    layout = ShardLayout((tensor.numel(),), device_mesh.size(axis), width or LANES)
    place = device_mesh.place(xla_ops.rank(), axis)
    shard = make_shard([tensor], layout, place, xla_ops.device(), row_shape if width else (), dim)
    return shard.detach()


def whole_mesh(num_ranks: int) -> Mesh:
    """All ranks along one axis."""
    return mesh_of(list(range(num_ranks)), (num_ranks,), (SHARD,))


def _view(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:  # others are there, too
        stands_for = _parameter(module, key.removeprefix(prefix), state[key])
        if stands_for is not None and not isinstance(state[key], ShardView):
            state[key] = _as_view(state[key], stands_for)


def _parameter(module: nn.Module, name: str, value: Any) -> Tensor | None:
    """What ``value`` stands for; a slice of a stack is known itself."""
    if isinstance(value, Tensor) and known_shard(value) is not None:
        return value
    owner, _, attribute = name.rpartition(".")
    try:
        found = module.get_submodule(owner)._parameters.get(attribute)
    except AttributeError:
        return None
    return found if isinstance(found, ShardView) else None


def _as_view(value: Tensor, stands_for: Tensor) -> Tensor:
    view = value.as_subclass(ShardTensor)
    view.stands_for = stands_for
    return view


def _plain(shard: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return shard.detach().as_subclass(Tensor)


def _group(shard: Any) -> Any:
    group = known_group(getattr(shard, "stands_for", shard))
    if group is None:
        raise RuntimeError("this shard's model is gone, so who shares it is not known any more")
    return group


def _placement(shard: Any) -> Any:
    """How tensor parallelism has cut the parameter, if it has."""
    [member, *_] = _param(shard).members
    return member.placement if member.is_cut else None


def _param(shard: Any) -> Any:
    return known_shard(getattr(shard, "stands_for", shard))
