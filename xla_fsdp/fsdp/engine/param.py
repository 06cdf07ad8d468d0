"""One sharded parameter: its shard, its original parameters, and the attributes that hold it.

A shard replaces one original parameter, or several joined end to end (*flat*). Its *leaf* is the
parameter of the optimizer: the shard itself, or a stack of the shards of several blocks.

Invariants: outside of forward and backward the modules hold the leaf, so names, optimizers and
state dicts see it; the originals of a flat shard are then no attributes. While unsharded, the
modules hold unsharded tensors. Modules and shards are referenced weakly.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.packing import ShardPacking, shaped, viewable
from xla_fsdp.distributed.placement import TensorPlacement, placed_params
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.xla import ops
from xla_fsdp.xla.lost import LostTensor


class WeakRef:
    """A weak reference that pickling and deep copies follow: strong ones would make cycles, so that
    a model is freed only at the next garbage collection."""

    def __init__(self, target: Any = None) -> None:
        self._target = None if target is None else weakref.ref(target)

    def __call__(self) -> Any:
        return None if self._target is None else self._target()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakRef, (self(),)


# ---------------------------------------------------------------- attributes of modules


class ModuleAttr:
    """An attribute of a module that holds a parameter.

    References the module weakly: the module references the unit, and the unit references this.
    """

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = WeakRef(module)
        self.attribute = attribute

    def __eq__(self, other: object) -> bool:  # units that share a module have one each
        if not isinstance(other, ModuleAttr) or self.attribute != other.attribute:
            return False
        return self._module() is other._module()

    def __hash__(self) -> int:
        return hash((id(self._module()), self.attribute))

    @property
    def module(self) -> nn.Module:
        """The module; an empty one after it was freed, as a backward pass may outlive its model."""
        return self._module() or nn.Module()

    def point_at(self, tensor: Tensor | None) -> None:
        """Set the attribute to ``tensor``, or remove it from the module."""
        module = self.module
        if tensor is None:
            module._parameters.pop(self.attribute, None)
        else:
            # nn.Module.__setattr__ would refuse a tensor that is no nn.Parameter.
            module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):  # it computes with a list of its parameters
            # In place: a checkpoint restores the attributes that modules had before a forward.
            names = module._flat_weights_names
            module._flat_weights[:] = [module._parameters.get(name) for name in names]

    def holds(self, tensor: Tensor | None) -> bool:
        """Return whether the attribute is ``tensor``; True if the module was freed."""
        module = self._module()
        return module is None or module._parameters.get(self.attribute) is tensor


@dataclass(frozen=True)
class OriginalParam:
    """A parameter of the model before sharding."""

    names: tuple[str, ...]  # in the unit; the first is canonical, the others are ties
    shape: torch.Size  # unsharded; of the local tensor under tensor parallelism
    owners: tuple[ModuleAttr, ...]  # the attributes that hold it
    # For each name, the number of the unit's module that has it; empty if all are in the first.
    parts: tuple[int, ...] = ()
    placement: TensorPlacement | None = None  # how tensor parallelism shards it

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the global parameter."""
        return self.shape if self.placement is None else torch.Size(self.placement.shape)

    @property
    def is_cut(self) -> bool:
        """Whether ranks along a tensor-parallel axis hold different parts."""
        return self.placement is not None and self.placement.dim is not None

    @property
    def is_expert(self) -> bool:
        """Whether ranks along an axis of the mesh hold different experts of it."""
        return self.placement is not None and self.placement.is_of_experts


@dataclass(frozen=True)
class StackPart:
    """Slice ``number`` of a stack of ``length`` shards of ``shape``. A stack has other dims where
    shards are vectors of whole rows: on a TPU, vectors that are stacked lie across each other, and
    a slice would be laid out anew."""

    number: int
    length: int
    shape: torch.Size


class ParamSlots:
    """Sets the module attributes of one shard's originals.

    Nested units may share a parameter and be unsharded at the same time. An attribute therefore
    holds the tensor of the latest ``show`` without ``hide``, or the leaf if there is none and the
    leaf is ``registered``: a flat one is not, and a stack only in the attributes of its slice 0.

    Attributes:
        shard: the leaf.
        part: slice of the leaf that is the shard, if the leaf is a stack.
        users: number of units that have the parameter.
    """

    def __init__(self, shard: nn.Parameter, *, registered: bool) -> None:
        self.shard = shard
        self.part: StackPart | None = None
        self.users = 0
        self._registered = registered
        self._shown: list[tuple[ModuleAttr, Tensor]] = []

    def stack(self, leaf: nn.Parameter, part: StackPart) -> None:
        """Replace the shard by slice ``part`` of the stack ``leaf``."""
        self.shard, self.part = leaf, part
        self._registered = part.number == 0

    def show(self, owner: ModuleAttr, tensor: Tensor, *, idle: bool) -> None:
        """Let ``owner`` hold ``tensor``. If ``idle``, no forward is about to use it, and what other
        units show takes precedence."""
        if idle and self._shown:
            self._shown.insert(0, (owner, tensor))
            self.refresh(owner)
        else:
            self._shown.append((owner, tensor))
            owner.point_at(tensor)

    def hide(self, owner: ModuleAttr, tensor: Tensor) -> None:
        """Undo the latest ``show`` of these arguments."""
        for index in reversed(range(len(self._shown))):
            if self._shown[index][1] is tensor and self._shown[index][0] == owner:
                del self._shown[index]
                break
        self.refresh(owner)

    def refresh(self, owner: ModuleAttr) -> None:
        """Set the attribute of ``owner`` to what it should hold, or remove it."""
        owner.point_at(self.held_by(owner))

    def held_by(self, owner: ModuleAttr) -> Tensor | None:
        """Return the tensor that ``owner`` should hold; None if it should have no attribute."""
        shown = (tensor for each, tensor in reversed(self._shown) if each == owner)
        return next(shown, self.shard if self._registered else None)


# ---------------------------------------------------------------- the parameter


class _Made(threading.local):  # thread-local, as ranks on CPU are threads of one process
    count = 0


_made = _Made()


class FSDPParam:
    """This rank's shard of one parameter, or of several that were flattened together.

    Args:
        key: name of the shard in the unit's state dict.
        originals: the original parameters, in the order in which they are joined.
        shard: the leaf, on the rank's device: [n], or [rows, ...] of whole rows along a dim.
        packing: how the originals are joined and cut.
        compute_dtype: in which parameters are gathered and used; None for the shard's own.
        home: for a flat shard, the module that registers it under ``key``; otherwise None.
        slots: of another unit's parameter that has the same shard.
        everywhere: whether every rank of the job has this parameter.

    Attributes:
        is_expert: whether ranks along an axis of the mesh hold different experts of it.
        number: of the parameter, the same on all ranks of the job; 0 if not all have it.
        group: the ``FSDPParamGroup`` that gathers it, weakly.
    """

    def __init__(
        self,
        key: str,
        originals: Sequence[OriginalParam],
        shard: nn.Parameter,
        packing: ShardPacking,
        compute_dtype: torch.dtype | None,
        home: nn.Module | None = None,
        slots: ParamSlots | None = None,
        *,
        everywhere: bool = False,
    ) -> None:
        self.key = key
        _made.count += 1
        self.number = _made.count if everywhere else 0
        self.group = WeakRef()
        self.originals = tuple(originals)
        self.is_expert = self.originals[0].is_expert  # as are all that are joined
        self.packing = packing
        self.compute_dtype = compute_dtype
        self.slots = slots or ParamSlots(shard, registered=home is None)
        self.slots.users += 1
        self._home = home
        self._unsharded: Sequence[Tensor] = ()
        if home is not None:
            home.register_parameter(key, shard)
            for original in originals:
                print_without(original)
                name_in_state_dicts(original, shard.dtype)
        for owner in self.owners:
            self.slots.refresh(owner)

    def __repr__(self) -> str:
        shapes = " + ".join(f"{each.names[0]} {list(each.shape)}" for each in self.originals)
        dtype, layout = self.slots.shard.dtype, self.packing.layout
        return (
            f"{type(self).__name__}({shapes}: {layout.shard_numel} elements {dtype} on each of "
            f"{layout.num_shards} ranks, computes in {self.compute_dtype or dtype}, "
            f"{'UNSHARDED' if self._unsharded else 'SHARDED'})"
        )

    @property
    def owners(self) -> list[ModuleAttr]:
        """The attributes of modules that hold the originals."""
        return [owner for original in self.originals for owner in original.owners]

    def with_name(self, what: str) -> str:
        """Return ``what`` is done to the parameter, with its name, for errors of CPU ranks."""
        group = self.group()
        unit = "" if group is None or group.log.unit == "root" else group.log.unit
        return f"{what} of {join_name(unit, self.key)} (sharded parameter {self.number})"

    @property
    def collectives(self) -> Collectives:
        """Communication among the ranks that share the parameter."""
        return self.group().collectives.of(self.is_expert)

    @property
    def mesh(self) -> Mesh:
        """Mesh of the ranks that share the parameter."""
        placement, mesh = self.originals[0].placement, self.group().mesh
        return mesh.without(placement.mesh) if self.is_expert and placement else mesh

    @property
    def leaf(self) -> nn.Parameter:
        """The leaf parameter, for the optimizer."""
        self.finalize()
        return self.slots.shard

    def finalize(self) -> None:
        """Turn a leaf that was waiting for values into a common shard."""
        leaf = self.slots.shard
        if getattr(type(leaf), "waits_for_values", False):
            leaf.finalize()  # type: ignore[attr-defined]

    @property
    def version(self) -> int:
        """How often the leaf was changed in place; 0 in inference mode, which counts no changes."""
        with torch._C.DisableTorchFunctionSubclass():
            leaf = self.leaf
            return 0 if leaf.is_inference() else leaf._version

    @property
    def shard(self) -> Tensor:
        """This rank's shard: the leaf, or a view of a slice of it. Raises RuntimeError if a run
        that failed was to compute it."""
        leaf, part = self.leaf, self.slots.part
        if isinstance(leaf, LostTensor):  # callers compute without torch functions of classes
            raise leaf.error("all_gather")
        if part is None:
            return leaf
        with torch._C.DisableTorchFunctionSubclass():  # a forward of the user's may run
            return viewable(leaf).select(0, part.number).view(part.shape)

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of the shard."""
        part = self.slots.part
        return held_shape(self.slots.shard) if part is None else part.shape

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the shard; zeros if it is in a stack and only other slices have one."""
        part, grad = self.slots.part, self.leaf.grad
        return grad if part is None or grad is None else grad[part.number].view(part.shape)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        part = self.slots.part
        if part is None:
            self.leaf.grad = grad
        elif grad is not None or self.leaf.grad is not None:
            stack = self.leaf.grad
            new = torch.zeros_like(self.leaf) if stack is None else stack.detach().clone()
            new[part.number] = 0 if grad is None else grad.view(new.shape[1:])
            self.leaf.grad = new

    @property
    def is_flat(self) -> bool:
        """Whether the shard is registered under ``key``, not in place of its originals."""
        return self._home is not None

    def is_whole(self, shard: Tensor) -> bool:
        """Return whether ``shard``, or what is computed from it, is of the whole parameter."""
        return self.packing.layout.num_shards == 1 and shard.shape == self.originals[0].whole_shape

    @property
    def by_rows(self) -> bool:
        """Whether the shard has the shape of whole rows."""
        return len(self.shard_shape) > 1

    def as_shard(self, rows: Tensor, *length: int) -> Tensor:
        """Return the elements of a shard, with the sharded dim first, in the shard's shape; with
        ``length``, of so many shards of a stack, in its shape."""
        if self.packing.dim:
            return self.packing.from_rows(rows, *length)
        shape = held_shape(self.slots.shard)[1:] if length else self.shard_shape
        return shaped(rows, (*length, *shape))

    def as_grad(self, mean: Tensor, *length: int) -> Tensor:
        """Return a mean of gradients, as ``as_shard`` does, in the shard's dtype."""
        if (part := self.slots.part) is not None and not length:
            note_grads(self.slots.shard, [part.number])
        return self.as_shard(mean.to(self.slots.shard.dtype), *length)

    def is_cut_like(self, other: FSDPParam | None) -> bool:
        """Return whether shards of both have the same elements of parameters of the same shapes."""
        mine = self.packing
        return other is not None and (mine.shapes, mine.layout, mine.dim) == (
            other.packing.shapes,
            other.packing.layout,
            other.packing.dim,
        )

    def slice_of(self, unsharded: Sequence[Tensor], rank: int) -> Tensor:
        """Return ``rank``'s shard of unsharded tensors, one for each original, on their device."""
        return self.packing.cut(unsharded, rank, by_rows=self.by_rows)

    def cut(self, full: Sequence[Tensor]) -> Tensor:
        """Return this rank's shard of global tensors, as ``slice_of`` does of local ones."""
        return self.slice_of(own_parts(full, self.originals), self.collectives.rank)

    def to_unsharded(self, unsharded: Sequence[Tensor], *, idle: bool = False) -> None:
        """Point the modules at unsharded tensors, one for each original; call ``check_owners``
        before. ``idle`` as for ``ParamSlots.show``."""
        self._unsharded = list(unsharded)
        for original, tensor in zip(self.originals, unsharded, strict=True):
            for owner in original.owners:
                self.slots.show(owner, tensor, idle=idle)

    def owned(self) -> list[Tensor]:
        """Return the parameters that the modules hold now."""
        owned = (owner.module._parameters.get(owner.attribute) for owner in self.owners)
        return [tensor for tensor in owned if tensor is not None]

    @contextlib.contextmanager
    def without_shard(self) -> Iterator[None]:
        """Remove a flat shard from its module inside the block, while the module holds the
        originals."""
        if self._home is None:
            yield
            return
        del self._home._parameters[self.key]
        try:
            yield
        finally:
            self._home._parameters[self.key] = self.leaf

    def to_sharded(self) -> None:
        """Point the modules back at the leaf; for a flat shard, remove the originals from them."""
        unsharded, self._unsharded = self._unsharded, ()
        for original, tensor in zip(self.originals, unsharded, strict=True):
            for owner in original.owners:
                self.slots.hide(owner, tensor)

    def check_owners(self) -> None:
        """Raise ValueError if the user has replaced the parameter of a module, as FSDP would not
        train the new one."""
        if self._unsharded:
            return
        if self._home is None:
            as_expected = all(owner.holds(self.slots.held_by(owner)) for owner in self.owners)
        else:
            as_expected = ModuleAttr(self._home, self.key).holds(self.leaf)
        if not as_expected:
            raise ValueError(
                f"{self.key} was replaced after wrapping (by load_state_dict(assign=True), by "
                f"moving the module to another device, by tying weights, or by "
                f"torch.func.functional_call). FSDP trains the shard that it made. Load "
                f"without assign, leave the module on its device, tie weights before wrapping, "
                f"and differentiate with respect to parameters by torch.autograd.grad."
            )


# ---------------------------------------------------------------- parts of tensor parallelism


def own_part(tensor: Tensor, placement: TensorPlacement | None) -> Tensor:
    """Return this rank's local part of a global tensor, on the same device."""
    return tensor if placement is None else placement.slice_of(tensor, _own_rank(placement))


def own_parts(tensors: Sequence[Tensor], originals: Sequence[OriginalParam]) -> list[Tensor]:
    """Return the local parts of the global tensors of several originals."""
    return [own_part(t, original.placement) for t, original in zip(tensors, originals, strict=True)]


def joined(local: Tensor, placement: TensorPlacement | None) -> Tensor:
    """Return the global tensor, gathered from the local parts on the device."""
    if placement is None or placement.dim is None:
        return local
    return AxisComm(placement.mesh).all_gather(local, placement.dim)


def all_joined(local: Sequence[Tensor], originals: Iterable[OriginalParam]) -> list[Tensor]:
    """Return the global tensors of several originals, gathered from the local parts."""
    return [joined(t, original.placement) for t, original in zip(local, originals, strict=True)]


def is_first(originals: Iterable[OriginalParam]) -> bool:
    """Return whether this rank is the first along the originals' tensor-parallel axes."""
    placements = (original.placement for original in originals)
    return all(each is None or _own_rank(each) == 0 for each in placements)


def _own_rank(placement: TensorPlacement) -> int:
    return placement.mesh.local_rank(ops.rank())


# ---------------------------------------------------------------- modules that lack a parameter


def name_in_state_dicts(original: OriginalParam, dtype: torch.dtype) -> None:
    """Let the state dict of a module alone, inside a unit, name a parameter that was flattened, by
    a tensor on the meta device: PEFT asks each module for its names, and looks up the values in the
    full state dict. ``drop_names`` removes them from state dicts of units."""
    for owner in original.owners:
        hook = partial(_add_name, owner.attribute, original.whole_shape, dtype)
        owner.module.register_state_dict_post_hook(hook)


def _add_name(
    name: str, shape: torch.Size, dtype: torch.dtype, module: Any, state: Any, prefix: str, _: Any
) -> None:
    if prefix + name not in state:
        state[prefix + name] = named = torch.empty(shape, dtype=dtype, device="meta")
        named.only_names_a_part = True  # type: ignore[attr-defined]


def drop_names(state: dict[str, Any], prefix: str) -> None:
    """Remove what ``name_in_state_dicts`` has added below a unit."""
    for key in [key for key in state if key.startswith(prefix)]:
        if hasattr(state[key], "only_names_a_part"):
            del state[key]


class _ExtraRepr:
    """``extra_repr`` of a module that lacks parameters: they are there for it, without values."""

    def __init__(self) -> None:
        self.lacking: list[tuple[ModuleAttr, torch.Size]] = []

    def __call__(self) -> str:
        module = self.lacking[0][0].module
        absent = [each for each in self.lacking if each[0].attribute not in module._parameters]
        for owner, shape in absent:
            owner.point_at(torch.empty(shape, device="meta"))
        try:
            return type(module).extra_repr(module)
        finally:
            for owner, _ in absent:
                owner.point_at(None)


def print_without(original: OriginalParam) -> None:
    """Let the modules of a parameter be printed while a flat shard or a stack has it for them:
    layers ask for their biases then, and PEFT prints the layers that it has adapted."""
    for owner in original.owners:
        module = owner.module
        if not isinstance(module.__dict__.get("extra_repr"), _ExtraRepr):
            module.__dict__["extra_repr"] = _ExtraRepr()
        module.__dict__["extra_repr"].lacking.append((owner, original.shape))


# ---------------------------------------------------------------- what is known of a tensor


def held_shape(param: Tensor) -> torch.Size:
    """Return the shape of what this rank holds of a parameter: that of its data, not that of the
    whole parameter, which shards answer outside of optimizers' steps."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.shape


def held_bytes(param: Tensor) -> int:
    """Return the bytes of what this rank holds of a parameter."""
    return held_shape(param).numel() * param.dtype.itemsize


# Keys are tensors of one rank's model, so that ranks that are threads of one process share no
# entry.
_param_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_unsharded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_with_grads: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(param: FSDPParam, tensors: Iterable[Tensor]) -> None:
    """Register ``param`` as the replacement of ``tensors``: originals, meta tensors, its shard."""
    for tensor in tensors:
        _param_of[tensor] = weakref.ref(param)


def known_shard(tensor: Tensor) -> FSDPParam | None:
    """Return the parameter that has replaced ``tensor``, or None."""
    reference = _param_of.get(tensor)
    return reference() if reference is not None else None


def known_group(shard: Tensor) -> Any:
    """Return the ``FSDPParamGroup`` that gathers ``shard``, or None."""
    param = known_shard(shard)
    return None if param is None else param.group()


def owners_of_grads(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameter of each gradient, if ranks may hold different parts of it; else the
    tensor itself."""
    # Looked up only here, so that accumulating gradients costs nothing. list() of a dict is atomic:
    # other threads may add to it.
    live = [reference() for reference in list(_param_of.data)]
    shards = [each for each in live if getattr(each, "_is_sharded", False)]
    params = [*shards, *placed_params()]
    owners = {id(param.grad): param for param in params if param.grad is not None}
    return [owners.get(id(grad), grad) for grad in grads]


def note_grads(stack: Tensor, numbers: Iterable[int]) -> None:
    """Note that these slices of a stack of shards have got a gradient."""
    _with_grads.setdefault(stack, set()).update(numbers)


def slices_without_grads(stack: Tensor, length: int) -> list[int]:
    """Return the slices that got no gradient since the last step, although others did; and begin
    anew.

    A stack has one gradient and is stepped as one. A slice of zeros in it would be decayed, and
    moved by its momentum, where torch leaves a parameter without a gradient as it is.
    """
    noted = _with_grads.pop(stack, None)
    return [number for number in range(length) if number not in noted] if noted else []


def register_unsharded_views(unsharded: Iterable[Tensor]) -> None:
    """Register unsharded parameters that ``parameters()`` returns in place of shards."""
    for tensor in unsharded:
        _unsharded[tensor] = True


def refuse_shown(params: Iterable[Tensor], function: str) -> None:
    """Raise RuntimeError if ``function`` was given unsharded parameters in place of shards."""
    if any(param in _unsharded for param in params):
        raise RuntimeError(
            f"{function} was given full parameters, which units show after unshard() or with "
            f"set_reshard_after_backward(False); the gradients are those of the shards. Call "
            f"model.clip_grad_norm_(max_norm) on the outermost sharded module, or reshard() of "
            f"these units before model.parameters()"
        )
