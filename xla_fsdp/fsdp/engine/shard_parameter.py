"""What torch's DTensor says of itself, said by shards: where they are, and what they are part of.

Always true: a shard is an ordinary tensor to every function of torch; the names below are all that
it has more. In state dicts shards are tensors of a class that has these names and pickles as a
plain tensor.

Let code that initializes whole parameters initialize shards.

Words: a shard is *opened* when a function of torch is called with it: the function gets the full
parameter instead; *closing* cuts what that then holds into the shard.
Always true: only shards that got their memory by ``to_empty`` and have not been used since are
opened; those of one call are open at a time, so a device holds one more full parameter, and every
rank must make the same calls. Results are those of the plain model, as shapes (fan-in) and random
numbers are.

The leaf parameter that stands for a rank's shard, and how it is cut out of full tensors.

Always true: what is made here is an ordinary parameter to every function of torch, in copies of a
model and in pickles, too; one that has memory and no values yet acts as the full parameter for
whoever gives it some (``deferred_init``).
What else is known of a shard is said by ``sharded_param``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from xla_fsdp.distributed.mesh import SHARD, Mesh, mesh_of
from xla_fsdp.distributed.shard_layout import LANES, ShardLayout
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.packing import slice_of
from xla_fsdp.fsdp.engine.registry import known_group, known_shard
from xla_fsdp.fsdp.engine.tp_params import all_joined, own_parts

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

        placement, own = _placement(self), Shard(_param(self).packing.dim)
        by_units = (Replicate(), own) if _group(self).mesh.ndim > 1 else (own,)
        return by_units if placement is None else (*by_units, Shard(placement.dim))

    def to_local(self) -> Tensor:
        """This rank's part, with padding where the ranks do not divide the dim."""
        return _plain(self)

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """The whole tensor, on the device. Every rank must call it; it is computed at once, so that
        ranks may do different things with it."""
        from xla_fsdp.distributed.xla import ops
        from xla_fsdp.fsdp.engine.tp_params import all_joined

        param = _param(self)
        [full] = all_joined(_group(self).gather.as_stored([param], [_plain(self)]), param.members)
        ops.compute([full])
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
    from xla_fsdp.distributed.xla import ops

    dim, axis = placements[-1].dim, device_mesh.axis_names[-1]
    row_shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    width = torch.Size(row_shape).numel() if tensor.dim() else 0
    layout = ShardLayout((tensor.numel(),), device_mesh.size(axis), width or LANES)
    place = device_mesh.place(ops.rank(), axis)
    shard = make_shard([tensor], layout, place, ops.device(), row_shape if width else (), dim)
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


_OF_THE_SHARD = {"requires_grad_", "register_hook", "__repr__"}

_ATTRIBUTES_OF_THE_SHARD = {
    "requires_grad",
    "grad",
    "is_meta",
    "device",
    "dtype",
    "is_leaf",
    "retains_grad",
}


class _Open(threading.local):
    """What is open on this rank: shards and full parameters, by the shard's id."""

    def __init__(self) -> None:
        self.shards: dict[int, tuple[UninitializedShard, nn.Parameter]] = {}


_open = _Open()


def call_in_full(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` with full parameters in place of shards."""
    with torch._C.DisableTorchFunctionSubclass():
        if _concerns_the_shard(func):
            return func(*args, **kwargs)
        found = _shards_in((args, kwargs))
        for shard, _ in [each for key, each in _open.shards.items() if key not in found]:
            _close(shard)
        full = {key: _opened(shard) for key, shard in found.items()}
        args, kwargs = pytree.tree_map(lambda each: full.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
    back = {id(full[key]): shard for key, shard in found.items()}
    return pytree.tree_map(lambda each: back.get(id(each), each), result)


def close_all() -> None:
    """Cut what is open into shards."""
    for shard, _ in list(_open.shards.values()):
        _close(shard)


def _concerns_the_shard(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") in _ATTRIBUTES_OF_THE_SHARD
    return name in _OF_THE_SHARD


def _shards_in(tree: Any) -> dict[int, UninitializedShard]:
    leaves = pytree.tree_leaves(tree)
    return {id(each): each for each in leaves if hasattr(type(each), "settle")}


def _opened(shard: UninitializedShard) -> nn.Parameter:
    if id(shard) not in _open.shards:
        _open.shards[id(shard)] = shard, _full(shard)
    return _open.shards[id(shard)][1]


@torch.no_grad()
def _full(shard: UninitializedShard) -> nn.Parameter:
    param, group = known_shard(shard), known_group(shard)
    if param is None or group is None:
        raise RuntimeError("a shard without values was initialized after its model was gone")
    if shard.was_open:
        [value] = all_joined(group.gather.as_stored([param], [shard]), param.members)
        ops.compute([value])
    else:
        value = torch.zeros(param.members[0].whole_shape, dtype=shard.dtype, device=shard.device)
    return nn.Parameter(value, requires_grad=shard.requires_grad)


@torch.no_grad()
def _close(shard: UninitializedShard) -> None:
    _, full = _open.shards.pop(id(shard))
    param, group = known_shard(shard), known_group(shard)
    with torch._C.DisableTorchFunctionSubclass():
        if param is not None and group is not None:
            local = own_parts([full.detach()], param.members)
            shard.copy_(param.slice_of(local, group.collectives.rank))
            # At once: the full parameter is freed, and no program of a training step, which must be
            # the same on every rank, begins with slices that are not.
            ops.compute([shard])
    shard.was_open = True


class ShardParameter(ShardView, nn.Parameter):
    """The leaf parameter that a rank keeps and its optimizer sees.

    A class of its own, so that copies of a model know their shards, too. Lightning and code written
    for upstream look for ``_is_sharded``.

    Attributes:
        shard_rank: place of this rank among those that hold other shards of the same parameter.
    """

    _is_sharded = True
    shard_rank = 0

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled as what it is; nn.Parameter would come back as one of its own class."""
        kind = ShardParameter if isinstance(self, UninitializedShard) else type(self)
        return _restored_shard, (kind, self.detach(), self.requires_grad, vars(self))


class UninitializedShard(ShardParameter):
    """A shard that has got memory, and no values yet: see ``deferred_init``."""

    was_open = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_in_full(func, args, kwargs or {})

    def settle(self) -> None:
        """The values are complete; from now on it is a shard like others."""
        close_all()
        self.__class__ = ShardParameter  # type: ignore[assignment]


def make_shard(
    tensors: Sequence[Tensor],
    layout: ShardLayout,
    rank: int,
    device: torch.device,
    row_shape: Sequence[int] = (),
    dim: int = 0,
) -> nn.Parameter:
    """Cut ``rank``'s shard, [rows, *row_shape], out of full tensors joined end to end; of a single
    one along ``dim``, where the rows then are.

    Only the slice moves to ``device``: a parameter in host memory never exists there in full. What
    is on the meta device stays there.
    """
    flat = slice_of([t.movedim(dim, 0) if dim else t for t in tensors], layout, rank)
    rows = flat.reshape(-1, *row_shape).movedim(0, dim).contiguous()
    shard = ShardParameter(
        rows if rows.is_meta else rows.to(device),
        requires_grad=any(tensor.requires_grad for tensor in tensors),
    )
    shard.shard_rank = rank
    if len(tensors) == 1:  # such as a mark that an optimizer's grouping looks for
        vars(shard).update(vars(tensors[0]))
    return shard


def _restored_shard(
    kind: type[ShardParameter], data: Tensor, requires_grad: bool, marks: dict[str, Any]
) -> ShardParameter:
    shard = kind(data, requires_grad=requires_grad)
    vars(shard).update(marks)
    return shard


def is_sharded(param: Tensor) -> bool:
    """Whether ``param`` is a shard made by this package (or by upstream's)."""
    return getattr(param, "_is_sharded", False)
