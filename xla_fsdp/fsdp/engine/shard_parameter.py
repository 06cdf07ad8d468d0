"""The leaf parameter of a rank's shard: how it is cut, what it tells of itself, deferred values.

Invariants: a shard is an ordinary parameter to every function of torch, in copies of a model and in
pickles, too. Only one that got its memory by ``to_empty`` and has no values yet acts as the
unsharded parameter, for whoever gives it some.
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
from xla_fsdp.fsdp.engine.registry import KnownGroup, KnownParam, known_group, known_shard
from xla_fsdp.fsdp.engine.tp_params import all_joined, own_parts

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def make_shard(
    tensors: Sequence[Tensor],
    layout: ShardLayout,
    rank: int,
    device: torch.device,
    row_shape: Sequence[int] = (),
    dim: int = 0,
) -> nn.Parameter:
    """Cut ``rank``'s shard out of unsharded tensors joined end to end.

    Only the slice moves to ``device``: a parameter in host memory never exists there unsharded.
    What is on the meta device stays there.

    Args:
        tensors: one, or several of any shapes.
        layout: of the joined tensors.
        rank: whose shard to cut.
        device: of the result.
        row_shape: makes the shard [rows, *row_shape], the rows along ``dim``; else it is a vector.
        dim: along which a single tensor is cut.
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


def is_sharded(param: Tensor) -> bool:
    """Whether ``param`` is a shard made by this package (or by torch_xla's FSDP)."""
    return getattr(param, "_is_sharded", False)


def distribute_tensor(tensor: Tensor, device_mesh: Mesh, placements: Any) -> Tensor:
    """Return this rank's shard of an unsharded tensor, cut as ``fully_shard`` cuts parameters.

    Args:
        tensor: the same on every rank, on any device.
        device_mesh: of one axis, or of replicas and shards.
        placements: as shards have them.

    Returns:
        A tensor on this rank's XLA device.
    """
    dim, axis = placements[-1].dim, device_mesh.axis_names[-1]
    row_shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    width = torch.Size(row_shape).numel() if tensor.dim() else 0
    layout = ShardLayout((tensor.numel(),), device_mesh.size(axis), width or LANES)
    rank = device_mesh.place(ops.rank(), axis)
    shard = make_shard([tensor], layout, rank, ops.device(), row_shape if width else (), dim)
    return shard.detach()


def whole_mesh(num_ranks: int) -> Mesh:
    """Return a mesh of all ranks along one axis."""
    return mesh_of(list(range(num_ranks)), (num_ranks,), (SHARD,))


# ---------------------------------------------------------------- the names that DTensor has


class ShardView:
    """The attributes of torch's DTensor, for shards."""

    @property
    def device_mesh(self) -> Mesh:
        """The mesh that the parameter is sharded over; a tensor-parallel axis that cuts it is the
        last one."""
        param, group = _known(self)
        cut = _tensor_parallel_cut(param)
        mesh = group.mesh
        return mesh if cut is None else Mesh((*mesh.axes, *cut[0].axes), mesh.layout)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each axis of the mesh: ``Shard(dim)``, after ``Replicate()`` for replicas."""
        from torch.distributed.tensor import Replicate, Shard  # slow to import

        param, group = _known(self)
        cut, own = _tensor_parallel_cut(param), Shard(param.packing.dim)
        by_units = (Replicate(), own) if group.mesh.ndim > 1 else (own,)
        return by_units if cut is None else (*by_units, Shard(cut[1]))

    def to_local(self) -> Tensor:
        """Return this rank's part, with padding where the ranks do not divide the dim."""
        return _as_tensor(self)

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """Return the unsharded, global tensor, on the device. Every rank must call it; it is
        computed at once, so that ranks may do different things with it."""
        full = gather_like(self, _as_tensor(self))
        ops.compute([full])
        return full


class ShardTensor(ShardView, Tensor):
    """A shard in a state dict."""

    stands_for: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a torch.Tensor."""
        return _as_tensor(self).__reduce_ex__(protocol)


class ShardParameter(ShardView, nn.Parameter):
    """The leaf parameter that a rank keeps and its optimizer sees.

    A class of its own, so that copies of a model know their shards, too. Lightning and code written
    for torch_xla's FSDP look for ``_is_sharded``.

    Attributes:
        shard_rank: rank among those that hold other shards of the same parameter.
    """

    _is_sharded = True
    shard_rank = 0

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Keep the class, which nn.Parameter would not."""
        kind = ShardParameter if isinstance(self, UninitializedShard) else type(self)
        return _restored_shard, (kind, self.detach(), self.requires_grad, vars(self))


def gather_like(shard: Any, value: Tensor) -> Tensor:
    """Gather the unsharded, global tensor of a ``value`` that is cut like ``shard``."""
    param, group = _known(shard)
    [full] = all_joined(group.gather.as_stored([param], [value]), param.members)
    return full


def view_state_dicts(module: nn.Module) -> None:
    """Let the shards in the state dicts of ``module`` be ``ShardTensor``."""
    # A partial because torch sets an attribute on this hook.
    module.register_state_dict_post_hook(partial(_view_shards))


def _view_shards(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for key in [key for key in state if key.startswith(prefix)]:  # others are there, too
        shard = _shard_of(module, key.removeprefix(prefix), state[key])
        if shard is not None and not isinstance(state[key], ShardView):
            state[key] = state[key].as_subclass(ShardTensor)
            state[key].stands_for = shard


def _shard_of(module: nn.Module, name: str, value: Any) -> Tensor | None:
    if isinstance(value, Tensor) and known_shard(value) is not None:  # a slice of a stack
        return value
    owner, _, attribute = name.rpartition(".")
    try:
        found = module.get_submodule(owner)._parameters.get(attribute)
    except AttributeError:
        return None
    return found if isinstance(found, ShardView) else None


def _restored_shard(
    kind: type[ShardParameter], data: Tensor, requires_grad: bool, marks: dict[str, Any]
) -> ShardParameter:
    shard = kind(data, requires_grad=requires_grad)
    vars(shard).update(marks)
    return shard


def _known(shard: Any) -> tuple[KnownParam, KnownGroup]:
    leaf = getattr(shard, "stands_for", shard)
    param, group = known_shard(leaf), known_group(leaf)
    if param is None or group is None:
        raise RuntimeError("this shard's model is gone, so who shares it is not known any more")
    return param, group


def _tensor_parallel_cut(param: KnownParam) -> tuple[Mesh, int] | None:
    """Return the axis and dim along which tensor parallelism has cut the parameter."""
    placement = param.members[0].placement
    if placement is None or placement.dim is None:
        return None
    return placement.mesh, placement.dim


def _as_tensor(shard: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return shard.detach().as_subclass(Tensor)


# ---------------------------------------------------------------- deferred values


class UninitializedShard(ShardParameter):
    """A shard that has memory, and no values yet.

    Functions of torch that are called with it get the unsharded parameter instead, so that
    initialization gives the values, random numbers and fan-in of the original model. What they
    leave in it is cut into the shard before the next call with other shards: a device holds the
    unsharded parameters of one call at a time, and every rank must make the same calls.
    """

    has_values = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call_unsharded(func, args, kwargs or {})

    def settle(self) -> None:
        """Become a shard like others, as the values are complete."""
        for shard, _ in list(_opened.shards.values()):
            _close(shard)
        self.__class__ = ShardParameter  # type: ignore[assignment]


class _Opened(threading.local):
    """Shards whose unsharded parameter exists at present, with it, by the shard's id.

    Of one thread: CPU ranks are threads of one process.
    """

    def __init__(self) -> None:
        self.shards: dict[int, tuple[UninitializedShard, nn.Parameter]] = {}


_opened = _Opened()

_METHODS_OF_THE_SHARD = {"requires_grad_", "register_hook", "__repr__"}

_ATTRIBUTES_OF_THE_SHARD = {
    "requires_grad",
    "grad",
    "is_meta",
    "device",
    "dtype",
    "is_leaf",
    "retains_grad",
}


def _call_unsharded(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return ``func(*args, **kwargs)`` with unsharded parameters in place of shards."""
    with torch._C.DisableTorchFunctionSubclass():
        if _concerns_the_shard(func):
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        shards = {id(each): each for each in leaves if isinstance(each, UninitializedShard)}
        for shard, _ in [each for key, each in _opened.shards.items() if key not in shards]:
            _close(shard)
        unsharded = {key: _open(shard) for key, shard in shards.items()}
        args, kwargs = pytree.tree_map(lambda each: unsharded.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
    back = {id(unsharded[key]): shard for key, shard in shards.items()}
    return pytree.tree_map(lambda each: back.get(id(each), each), result)


def _concerns_the_shard(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") in _ATTRIBUTES_OF_THE_SHARD
    return name in _METHODS_OF_THE_SHARD


@torch.no_grad()
def _open(shard: UninitializedShard) -> nn.Parameter:
    if id(shard) in _opened.shards:
        return _opened.shards[id(shard)][1]
    if shard.has_values:
        value = gather_like(shard, shard)
        ops.compute([value])
    else:
        shape = _known(shard)[0].members[0].whole_shape
        value = torch.zeros(shape, dtype=shard.dtype, device=shard.device)
    unsharded = nn.Parameter(value, requires_grad=shard.requires_grad)
    _opened.shards[id(shard)] = shard, unsharded
    return unsharded


@torch.no_grad()
def _close(shard: UninitializedShard) -> None:
    """Cut the unsharded parameter into the shard."""
    _, unsharded = _opened.shards.pop(id(shard))
    param, group = known_shard(shard), known_group(shard)
    with torch._C.DisableTorchFunctionSubclass():
        if param is not None and group is not None:
            local = own_parts([unsharded.detach()], param.members)
            shard.copy_(param.slice_of(local, group.collectives.rank))
            # At once: the unsharded parameter is freed, and no program of a training step, which
            # must be the same on every rank, begins with slices that are not.
            ops.compute([shard])
    shard.has_values = True
