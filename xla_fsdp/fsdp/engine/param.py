"""One sharded parameter: its shard, its original parameters, and the attributes that hold it.

A shard replaces one original parameter, or several joined end to end (*flat*). Its *leaf* is the
parameter of the optimizer: the shard itself, or a stack of the shards of several blocks. In the
order of the file: module attributes (``ParamSlots``); layout of originals in a shard
(``ShardPacking``); ``FSDPParam``; lookup of the parameter that replaced a tensor; local and global
tensors of tensor parallelism; ``ShardParameter``, the class of leaves; shards without values yet.

Invariants: outside of forward and backward the modules hold the leaf, so names, optimizers and
state dicts see it; the originals of a flat shard are then no attributes. While unsharded, the
modules hold unsharded tensors. Modules and shards are referenced weakly, and lookup tables are
keyed by tensors of one rank's model, so that ranks that are threads of one process share no entry.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import TensorPlacement, placed_params
from xla_fsdp.distributed.pytree import map_tensors, tensors_in
from xla_fsdp.distributed.shard_layout import LANES, LARGE, ROWS, ShardLayout
from xla_fsdp.fsdp.engine.param_guards import (
    COUNTS,
    GuardedShard,
    Reads,
    held_shape,
    in_forward,
    mixes_elements,
    name_of,
    read_by,
    without_values,
)
from xla_fsdp.xla import ops

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class ModuleAttr:
    """An attribute of a module that holds a parameter.

    References the module weakly: the module references the unit, and the unit references this.
    """

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ModuleAttr) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleAttr, (self._module(), self.attribute)

    @property
    def _key(self) -> tuple[int, str]:
        return id(self._module()), self.attribute

    @property
    def module(self) -> nn.Module:
        """The module; an empty one after it was freed, as a backward pass may outlive its model."""
        return self._module() or nn.Module()

    def point_at(self, tensor: Tensor) -> None:
        """Set the attribute to ``tensor``."""
        module = self.module
        # nn.Module.__setattr__ would refuse a tensor that is no nn.Parameter.
        module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        _refresh_rnn_weights(module)

    def remove(self) -> None:
        """Remove the attribute from the module."""
        module = self.module
        module._parameters.pop(self.attribute, None)
        _refresh_rnn_weights(module)

    def holds(self, tensor: Tensor | None) -> bool:
        """Return whether the attribute is ``tensor``; True if the module was freed."""
        module = self._module()
        return module is None or module._parameters.get(self.attribute) is tensor


@dataclass(frozen=True)
class OriginalParam:
    """A parameter of the model before sharding.

    Args:
        names: its names in the unit; the first is canonical, the others are ties.
        shape: unsharded shape; of the local tensor under tensor parallelism.
        owners: the attributes that hold it.
        parts: for each name, the number of the unit's module that has it; empty if all are in the
            first module.
        placement: how tensor parallelism shards it.
    """

    names: tuple[str, ...]
    shape: torch.Size
    owners: tuple[ModuleAttr, ...]
    parts: tuple[int, ...] = ()
    placement: TensorPlacement | None = None

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the global parameter."""
        return self.shape if self.placement is None else torch.Size(self.placement.shape)

    @property
    def is_cut(self) -> bool:
        """Whether ranks along a tensor-parallel axis hold different parts."""
        return self.placement is not None and self.placement.dim is not None


def _refresh_rnn_weights(module: nn.Module) -> None:
    """Update the list of parameters that recurrent layers compute with."""
    if isinstance(module, nn.RNNBase):
        # In place: a checkpoint restores the attributes that modules had before a forward.
        names = module._flat_weights_names
        module._flat_weights[:] = [module._parameters.get(name) for name in names]


@dataclass(frozen=True)
class StackPart:
    """Slice ``number`` of a stack of shards, [length, *shard shape]."""

    number: int
    length: int


class ParamSlots:
    """Sets the module attributes of one shard's originals.

    Nested units may share a parameter and be unsharded at the same time. An attribute therefore
    holds the tensor of the latest ``show`` without ``hide``, or the leaf if there is none.

    Args:
        shard: the leaf.
        registered: whether attributes hold the leaf while nothing is shown; False for a flat
            shard, whose originals are no attributes then.

    Attributes:
        part: slice of the leaf that is the shard, if the leaf is a stack. Only the attributes of
            slice 0 hold the stack.
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

    def held_by(self, owner: ModuleAttr) -> Tensor | None:
        """Return the tensor that ``owner`` should hold; None if it should have no attribute."""
        for shown, tensor in reversed(self._shown):
            if shown == owner:
                return tensor
        return self.shard if self._registered else None

    def refresh(self, owner: ModuleAttr) -> None:
        """Set or remove the attribute of ``owner`` as ``held_by`` says."""
        tensor = self.held_by(owner)
        if tensor is None:
            owner.remove()
        else:
            owner.point_at(tensor)


class ShardPacking:
    """Converts between the original parameters of one shard and the shards of all ranks.

    Args:
        shapes: of the original parameters, in the order in which they are joined.
        layout: how the joined originals, flat, are sharded.
        dim: along which a single original is sharded; ``layout`` is of it with this dim first.

    Attributes:
        row_shape: shape of a single original without ``dim``.
        row_numel: its number of elements; 0 if the original has no dims.
        sent_shape: shape in which a shard is sent: [rows, width], or flat [n].
    """

    def __init__(self, shapes: Sequence[torch.Size], layout: ShardLayout, dim: int = 0) -> None:
        self.shapes = tuple(shapes)
        self.layout = layout
        self.dim = dim
        first = self.shapes[0]
        self.row_shape = torch.Size([*first[:dim], *first[dim + 1 :]])
        self.row_numel = self.row_shape.numel() if first else 0
        self.sent_shape = self._sent_shape()
        self._numels = [shape.numel() for shape in self.shapes]
        self._starts = list(accumulate(self._numels, initial=0))[:-1]
        self._padding = layout.padded_numel - layout.numel
        # Whether shards are whole rows of one original. Padding is whole rows then, too: cutting
        # single elements off a matrix would make the device lay out all of it again.
        self._by_rows = (
            len(self.shapes) == 1
            and self.row_numel > (0 if dim else 1)
            and self.layout.shard_numel % self.row_numel == 0
        )

    def in_rows(self, value: Tensor) -> Tensor:
        """Move the sharded dim of the parameter to the front, after any leading (stack) dims."""
        if not self.dim:
            return value
        first = value.dim() - len(self.row_shape) - 1
        return value.movedim(first + self.dim, first)

    def from_rows(self, rows: Tensor, *length: int) -> Tensor:
        """Undo ``in_rows``; ``rows`` may have any shape with the same elements. With ``length``,
        they are of so many shards, and the result is [length, *shape of a shard]."""
        each = rows.reshape(*length, -1, *self.row_shape)
        return each.movedim(len(length), len(length) + self.dim).contiguous()

    def unpack(self, gathered: Tensor) -> list[Tensor]:
        """Return the unsharded tensors, one for each original.

        They are copies, as views would keep all of ``gathered`` in memory.

        Args:
            gathered: shards of all ranks, [num_shards, n] or [num_shards * rows, width].
        """
        if self._by_rows and self.dim:
            return [self.from_rows(self._without_padding(gathered))]
        if self._by_rows or not (self._padding or len(self.shapes) > 1):
            return [ops.copied(self._without_padding(gathered), self.shapes[0])]
        joined = ops.shaped(gathered, (self.layout.padded_numel,))
        pieces = zip(self.shapes, self._numels, self._starts, strict=True)
        return [
            ops.copied_slice(joined, start, numel)
            if len(shape) == 1
            else ops.copied(ops.cut(joined, 0, start, numel), shape)
            for shape, numel, start in pieces
        ]

    def pack(self, unsharded: Sequence[Tensor]) -> Tensor:
        """Undo ``unpack``, with zeros as padding."""
        if self._by_rows:
            rows = self.in_rows(unsharded[0])
            joined = ops.shaped(rows, (rows.numel() // self.row_numel, self.row_numel))
            padding = [0, 0, 0, self._padding // self.row_numel]
        else:
            flat = [ops.shaped(each, (each.numel(),)) for each in unsharded]
            joined = torch.cat(flat) if len(flat) > 1 else flat[0]
            padding = [0, self._padding]
        padded = F.pad(joined, padding) if self._padding else joined
        num_shards, sent = self.layout.num_shards, self.sent_shape
        by_rows = len(sent) > 1
        return ops.shaped(
            padded, (num_shards * sent[0], sent[1]) if by_rows else (num_shards, *sent)
        )

    def _without_padding(self, gathered: Tensor) -> Tensor:
        if not self._padding:
            return gathered
        rows = ops.shaped(gathered, (self.layout.padded_numel // self.row_numel, self.row_numel))
        return ops.cut(rows, 0, 0, self.layout.numel // self.row_numel)

    def _sent_shape(self) -> tuple[int, ...]:
        # Whole rows if a shard consists of such, so that the gathered tensor is the parameter
        # without a change of layout. That change for 50 million elements takes the TPU compiler
        # minutes, and the program as much code as 20 transformer blocks.
        size = self.layout.shard_numel
        width = self.row_numel if len(self.shapes) == 1 else 0
        if not width or width % LANES or size % (width * ROWS) or size < LARGE:
            return (size,)
        return (size // width, width)


class ParamState(Enum):
    """Whether the modules hold the leaf or unsharded tensors."""

    SHARDED = auto()
    UNSHARDED = auto()


class _Made(threading.local):  # thread-local, as ranks on CPU are threads of one process
    count = 0


_made = _Made()


class FSDPParam:
    """This rank's shard of one parameter, or of several that were flattened together.

    Args:
        key: name of the shard in the unit's state dict.
        originals: the original parameters, in the order in which they are joined.
        shard: leaf parameter of ``layout.shard_numel`` elements on the rank's device: [n], or
            [rows, ...] where whole rows along a dim are sharded.
        layout: how the joined originals are sharded, with ``dim`` moved to the front.
        compute_dtype: dtype in which parameters are gathered and used; None for the shard's own.
        home: for a flat shard, the module that registers it under ``key``; otherwise None.
        slots: of another unit's parameter that has the same shard.
        dim: along which a single original is sharded.
        everywhere: whether every rank of the job has this parameter.
    """

    def __init__(
        self,
        key: str,
        originals: Sequence[OriginalParam],
        shard: nn.Parameter,
        layout: ShardLayout,
        compute_dtype: torch.dtype | None,
        home: nn.Module | None = None,
        slots: ParamSlots | None = None,
        dim: int = 0,
        *,
        everywhere: bool = False,
    ) -> None:
        self.key = key
        _made.count += 1
        self._fact = f"{key} (sharded parameter {_made.count})" if everywhere else ""
        self.originals = tuple(originals)
        self.packing = ShardPacking([original.shape for original in originals], layout, dim)
        self.compute_dtype = compute_dtype
        self.state = ParamState.SHARDED
        self.slots = slots or ParamSlots(shard, registered=home is None)
        self.slots.users += 1
        self._home = home
        self._unsharded: list[Tensor] = []
        self._owners = [owner for original in originals for owner in original.owners]
        if home is not None:
            home.register_parameter(key, shard)
            for original in originals:
                for owner in original.owners:
                    name_in_state_dicts(owner, original.whole_shape, shard.dtype)
        for owner in self._owners:
            self.slots.refresh(owner)

    def __repr__(self) -> str:
        shapes = " + ".join(f"{each.names[0]} {list(each.shape)}" for each in self.originals)
        dtype, layout = self.slots.shard.dtype, self.packing.layout
        return (
            f"{type(self).__name__}({shapes}: {layout.shard_numel} elements {dtype} on each of "
            f"{layout.num_shards} ranks, computes in {self.compute_dtype or dtype}, "
            f"{self.state.name})"
        )

    def expect_on_all_ranks(self, what: str) -> None:
        """Tell CPU ranks that every one of them traces ``what`` of this parameter now.

        Buckets of other parameters may have the same size, so that the sizes of collectives do not
        show that one rank runs another layer, or has a gradient of another parameter.
        """
        if self._fact:
            ops.runtime().expect_on_all_ranks(lambda: f"{what} of {self._fact}")

    @property
    def leaf(self) -> nn.Parameter:
        """The leaf parameter, for the optimizer."""
        self.settle()
        return self.slots.shard

    def settle(self) -> None:
        """Turn a leaf that was waiting for values into a common shard."""
        leaf = self.slots.shard
        if type(leaf) is UninitializedShard:  # isinstance is slow: nn.Parameter overrides it
            leaf.settle()

    @property
    def shard(self) -> Tensor:
        """This rank's shard: the leaf, or a view of a slice of it."""
        part = self.slots.part
        return self.leaf if part is None else ops.viewable(self.leaf).select(0, part.number)

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of the shard."""
        shape = held_shape(self.slots.shard)
        return shape if self.slots.part is None else shape[1:]

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the shard; zeros if it is in a stack and only other slices have one."""
        part, grad = self.slots.part, self.leaf.grad
        return grad if part is None or grad is None else grad[part.number]

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        part = self.slots.part
        if part is None:
            self.leaf.grad = grad
        elif grad is not None or self.leaf.grad is not None:
            stack = self.leaf.grad
            new = torch.zeros_like(self.leaf) if stack is None else stack.detach().clone()
            new[part.number] = 0 if grad is None else grad
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
        ``length``, of so many shards: [length, *shard shape]."""
        if self.packing.dim:
            return self.packing.from_rows(rows, *length)
        return ops.shaped(rows, (*length, *self.shard_shape))

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
        rows = [self.packing.in_rows(tensor) for tensor in unsharded]
        return self.as_shard(cut_shard(rows, self.packing.layout, rank))

    def to_unsharded(self, unsharded: Sequence[Tensor], *, idle: bool = False) -> None:
        """Point the modules at unsharded tensors; call ``check_owners`` before.

        Args:
            unsharded: one for each original.
            idle: no forward is about to use them, so the tensors of another unit whose forward
                runs take precedence.
        """
        self._move(ParamState.SHARDED, ParamState.UNSHARDED)
        self._unsharded = list(unsharded)
        for original, tensor in zip(self.originals, unsharded, strict=True):
            for owner in original.owners:
                self.slots.show(owner, tensor, idle=idle)

    @property
    def waits_for_memory(self) -> bool:
        """Whether a module holds the shard on the meta device."""
        return any(tensor.is_meta for tensor in self._owned())

    def _owned(self) -> list[Tensor]:
        owned = (owner.module._parameters.get(owner.attribute) for owner in self._owners)
        return [tensor for tensor in owned if tensor is not None]

    def take_memory(self, *, has_values: bool) -> None:
        """Replace a shard on the meta device by the tensor that the user has put into the module.

        Args:
            has_values: whether the new tensor is initialized; if not, the shard acts as the
                unsharded parameter until its values are complete.

        Raises:
            ValueError: if the shapes differ.
        """
        if self.slots.shard.is_meta:
            new = next((tensor for tensor in self._owned() if not tensor.is_meta), None)
            if new is None:
                return
            self._replace(new, has_values=has_values)
        for owner in self._owners:
            self.slots.refresh(owner)

    def _replace(self, new: Tensor, *, has_values: bool) -> None:
        old = self.slots.shard
        if held_shape(new) != held_shape(old):
            raise ValueError(
                f"{self.key} is on the meta device as a shard of shape {tuple(held_shape(old))}, "
                f"and was given a tensor of shape {tuple(held_shape(new))}; give it this rank's "
                f"shard (distribute_tensor), or memory first (to_empty) and then full tensors"
            )
        kind = ShardParameter if has_values else UninitializedShard
        # A copy: torch_xla would trace what is computed from an alias from its earlier values.
        values = new.detach().to(ops.device(), copy=True)
        self.slots.shard = kind(values, requires_grad=old.requires_grad)
        vars(self.slots.shard).update(vars(old))
        group = known_group(old)
        remember(self, [self.slots.shard])
        if group is not None:
            remember_group(self.slots.shard, group)

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
        self._move(ParamState.UNSHARDED, ParamState.SHARDED)
        unsharded, self._unsharded = self._unsharded, []
        for original, tensor in zip(self.originals, unsharded, strict=True):
            for owner in original.owners:
                self.slots.hide(owner, tensor)

    def check_owners(self) -> None:
        """Raise ValueError if the user has replaced the parameter of a module, as FSDP would not
        train the new one."""
        if self.state is not ParamState.SHARDED:
            return
        expected = [(owner, self.slots.held_by(owner)) for owner in self._owners]
        if self._home is not None:
            expected = [(ModuleAttr(self._home, self.key), self.leaf)]
        for owner, tensor in expected:
            if not owner.holds(tensor):
                raise ValueError(
                    f"{self.key} was replaced after wrapping (by load_state_dict(assign=True), by "
                    f"moving the module to another device, by tying weights, or by "
                    f"torch.func.functional_call). FSDP trains the shard that it made. Load "
                    f"without assign, leave the module on its device, tie weights before wrapping, "
                    f"and differentiate with respect to parameters by torch.autograd.grad."
                )

    def _move(self, expected: ParamState, new: ParamState) -> None:
        if self.state is not expected:
            raise RuntimeError(
                f"{self.key} is {self.state.name}, but to become {new.name} it must be "
                f"{expected.name}"
            )
        self.state = new


# ---------------------------------------------------------------- lookup by tensor


class _Gather(Protocol):
    def as_stored(self, params: Any, shards: Sequence[Tensor]) -> list[Tensor]: ...


class KnownGroup(Protocol):
    """The part of ``FSDPParamGroup`` used here; importing the class would be circular."""

    @property
    def collectives(self) -> Collectives: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def gather(self) -> _Gather: ...
    @property
    def has_unreduced(self) -> bool: ...
    @property
    def steps_in_backward(self) -> bool: ...


_param_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_group_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_materialized: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_unsharded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(param: FSDPParam, tensors: Iterable[Tensor]) -> None:
    """Register ``param`` as the replacement of ``tensors``: originals, meta tensors, its shard."""
    for tensor in tensors:
        _param_of[tensor] = weakref.ref(param)


def known_shard(tensor: Tensor) -> FSDPParam | None:
    """Return the parameter that has replaced ``tensor``, or None."""
    reference = _param_of.get(tensor)
    return reference() if reference is not None else None


def remember_group(shard: Tensor, group: KnownGroup) -> None:
    """Register ``group`` as the one that gathers ``shard``, unless another unit's group does."""
    if known_group(shard) is None:
        _group_of[shard] = weakref.ref(group)


def known_group(shard: Tensor) -> KnownGroup | None:
    """Return the group that gathers ``shard``, or None."""
    reference = _group_of.get(shard)
    return reference() if reference is not None else None


def owners_of_grads(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameter of each gradient, if ranks may hold different parts of it; else the
    tensor itself."""
    # Looked up only here, so that accumulating gradients costs nothing. list() of a dict is atomic:
    # other threads may add to it.
    live = [reference() for reference in list(_group_of.data)]
    owners = {
        id(param.grad): param
        for param in [*(each for each in live if each is not None), *placed_params()]
        if param.grad is not None
    }
    return [owners.get(id(grad), grad) for grad in grads]


def remember_shown(unsharded: Iterable[Tensor]) -> None:
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


def remember_materialized(origin: Tensor, param: Tensor) -> None:
    """Register the ignored ``param`` as the one made of the meta tensor ``origin``."""
    _materialized[origin] = param


def known_materialized(origin: Tensor) -> Tensor | None:
    """Return the ignored parameter that was made of the meta tensor ``origin``, or None."""
    return _materialized.get(origin)


# ---------------------------------------------------------------- tensor parallelism


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
    return placement.mesh.place(ops.rank())


# ---------------------------------------------------------------- the leaf


def cut_shard(tensors: Sequence[Tensor], layout: ShardLayout, rank: int) -> Tensor:
    """Return ``rank``'s shard of tensors joined end to end, [shard_numel], padded with zeros."""
    wanted = layout.slice_for(rank)
    numels = [tensor.numel() for tensor in tensors]
    pieces = []
    for tensor, numel, start in zip(tensors, numels, accumulate(numels, initial=0), strict=False):
        begin, end = max(wanted.start - start, 0), min(wanted.stop - start, numel)
        if begin < end:
            pieces.append(tensor.detach().reshape(-1)[begin:end])
    # A shard that is all padding has no piece, and cat needs one.
    pieces.append(tensors[0].detach().new_zeros(layout.shard_numel - wanted.stop + wanted.start))
    return torch.cat(pieces)


def make_shard(
    tensors: Sequence[Tensor],
    layout: ShardLayout,
    rank: int,
    device: torch.device,
    row_shape: Sequence[int] = (),
    dim: int = 0,
) -> nn.Parameter:
    """Cut ``rank``'s shard out of unsharded tensors joined end to end.

    Only the shard is copied to ``device``, so that no parameter is unsharded there. Meta tensors
    give a meta tensor.

    Args:
        tensors: one, or several of any shapes.
        layout: of the joined tensors.
        rank: whose shard to cut.
        device: of the result.
        row_shape: shape of a row without ``dim``; if empty, the shard is a vector.
        dim: along which a single tensor is sharded.
    """
    flat = cut_shard([t.movedim(dim, 0) if dim else t for t in tensors], layout, rank)
    rows = flat.reshape(-1, *row_shape).movedim(0, dim).contiguous()
    if rows.device.type == "cpu" and device.type == "xla":
        rows = ops.upload(rows)  # now: ``to`` leaves it to the next program
    elif not rows.is_meta:
        # A copy also on the device, where a leaf that is a view of another tensor keeps that alive.
        rows = rows.to(device, copy=True)
    shard = ShardParameter(rows, requires_grad=any(tensor.requires_grad for tensor in tensors))
    shard.shard_rank = rank
    if len(tensors) == 1:  # attributes that the user has set, for groups of an optimizer say
        vars(shard).update(vars(tensors[0]))
    return shard


def is_sharded(param: Tensor) -> bool:
    """Whether ``param`` is a shard made by this package (or by torch_xla's FSDP)."""
    return getattr(param, "_is_sharded", False)


def distribute_tensor(tensor: Tensor, device_mesh: Mesh, placements: Any) -> Tensor:
    """Return this rank's shard of an unsharded tensor, sharded as ``fully_shard`` does.

    Args:
        tensor: the same on every rank, on any device.
        device_mesh: of one axis, or of replicas and shards.
        placements: those of a sharded parameter; the last one is ``Shard(dim)``.

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


# ---------------------------------------------------------------- DTensor's attributes


class ShardView:
    """Attributes of torch's DTensor, for shards.

    In a forward, torch functions raise that would compute with a shard where the model means the
    full parameter; a shape is that of the full one. Outside, those raise that mix elements.
    """

    __torch_function__ = GuardedShard()

    @classmethod
    def _fsdp_in_forward(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function that a forward has called with shards, unless it computes."""
        kwargs, reads = kwargs or {}, read_by(func, args, ShardView)
        with torch._C.DisableTorchFunctionSubclass():
            if reads is Reads.SHAPE:
                args, kwargs = map_tensors(_without_values, (args, kwargs))
            elif reads is Reads.VALUES:
                return _computed_in_forward(func, args, kwargs)
            return func(*args, **kwargs)

    @classmethod
    def _fsdp_outside(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function that was called with shards outside of forwards, unless its result
        on several shards is not that on the full parameter.

        What is computed from a shard with gradients is a shard, too, unless it is one number. A
        leaf's shape is that of the whole parameter, by which groups of optimizers are made.
        """
        kwargs = kwargs or {}
        reads = read_by(func, args, ShardView)
        if reads is Reads.SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(_as_whole(args[0], func), *args[1:], **kwargs)
        if reads is Reads.VALUES:
            tensors = tensors_in((args, kwargs))
            if name := mixes_elements(func, args):
                _refuse_mixed(name, tensors)
            _refuse_others(func, tensors)
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if name_of(func) == "squeeze" and isinstance(args[0], ShardView):
            return _squeezed(func, args, kwargs, result)
        return _marked(result, tensors) if reads is Reads.VALUES else result

    @property
    def device_mesh(self) -> Mesh:
        """The mesh that the parameter is sharded over; a tensor-parallel axis is its last one."""
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
        by_fsdp = (Replicate(), own) if group.mesh.ndim > 1 else (own,)
        return by_fsdp if cut is None else (*by_fsdp, Shard(cut[1]))

    def to_local(self) -> Tensor:
        """Return this rank's shard, padded if the number of ranks does not divide the dim."""
        return _as_tensor(self)

    @torch.no_grad()
    @in_forward(False)
    def full_tensor(self) -> Tensor:
        """Return the unsharded, global tensor on the device. Every rank must call it. It is
        computed at once, so that ranks may go on with different programs."""
        full = gather_like(self, _as_tensor(self))
        ops.compute([full])
        return full


class ShardTensor(ShardView, Tensor):
    """A shard in a state dict."""

    stands_for: Tensor
    whole: Tensor | None = None  # without values, of the whole tensor's shape, where that is known

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy, which is a shard of the same parameter."""
        return _view_of(self, super().clone(*args, **kwargs).as_subclass(Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_tensor(self).__reduce_ex__(protocol)  # a file needs torch only


class ShardParameter(ShardView, nn.Parameter):
    """The leaf parameter: this rank's shard, which its optimizer steps.

    A class of its own, so that shards in a copied model are known as such, too. Lightning and code
    written for torch_xla's FSDP look for ``_is_sharded``.

    Attributes:
        shard_rank: rank of this process among those that share the parameter.
    """

    _is_sharded = True
    shard_rank = 0

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle with the class and attributes, which ``nn.Parameter`` drops."""
        kind = ShardParameter if isinstance(self, UninitializedShard) else type(self)
        return _restored_shard, (kind, _as_tensor(self), self.requires_grad, vars(self))


def gather_like(shard: Any, value: Tensor) -> Tensor:
    """Return the unsharded, global tensor of a ``value`` that is sharded like ``shard``."""
    param, group = _known(shard)
    [full] = all_joined(group.gather.as_stored([param], [value]), param.originals)
    return full


def name_in_state_dicts(owner: ModuleAttr, shape: torch.Size, dtype: torch.dtype) -> None:
    """Let the state dict of a module alone, inside a unit, name a parameter that was flattened, by
    a tensor on the meta device: PEFT asks each module for its names, and looks up the values in the
    full state dict. ``drop_names`` removes them from state dicts of units."""
    hook = partial(_add_name, name=owner.attribute, shape=shape, dtype=dtype)
    owner.module.register_state_dict_post_hook(hook)


def _add_name(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    *,
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
) -> None:
    if prefix + name not in state:
        state[prefix + name] = named = torch.empty(shape, dtype=dtype, device="meta")
        named.only_names_a_part = True  # type: ignore[attr-defined]


def drop_names(state: dict[str, Any], prefix: str) -> None:
    """Remove what ``name_in_state_dicts`` has added below a unit."""
    for key in [key for key in state if key.startswith(prefix)]:
        if hasattr(state[key], "only_names_a_part"):
            del state[key]


def view_state_dicts(module: nn.Module) -> None:
    """Let state dicts of ``module`` hold shards as ``ShardTensor``."""
    # A partial because torch sets an attribute on this hook.
    module.register_state_dict_post_hook(partial(_view_shards))


def _view_shards(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for key in [key for key in state if key.startswith(prefix)]:  # others are of outer modules
        shard = _shard_of(module, key.removeprefix(prefix), state[key])
        if shard is not None and not isinstance(state[key], ShardView):
            state[key] = _view_of(shard, state[key])


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


def _known(shard: Any) -> tuple[FSDPParam, KnownGroup]:
    leaf = getattr(shard, "stands_for", shard)
    param, group = known_shard(leaf), known_group(leaf)
    if param is None or group is None:
        raise RuntimeError("this shard's model is gone, so who shares it is not known any more")
    return param, group


def _tensor_parallel_cut(param: FSDPParam) -> tuple[Mesh, int] | None:
    """Return the mesh axis and dim along which tensor parallelism shards the parameter."""
    placement = param.originals[0].placement
    if placement is None or placement.dim is None:
        return None
    return placement.mesh, placement.dim


def _as_tensor(shard: Any) -> Tensor:
    """Return the shard as a common tensor: what every way to look at a leaf goes through."""
    if id(shard) in _opened.shards:
        _close(shard)
    with torch._C.DisableTorchFunctionSubclass():
        return shard.detach().as_subclass(Tensor)


# ---------------------------------------------------------------- shards in a forward

_ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "lerp", "copy", "clone", "zero"})


def _computed_in_forward(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a shard computed from shards element by element, as moving averages are.

    Raises:
        RuntimeError: if it is computed otherwise, or with gradients.
    """
    name, tensors = name_of(func), tensors_in((args, kwargs))
    shards = [each for each in tensors if isinstance(each, ShardView)]
    params = [_param_behind(each) for each in shards]
    first = params[0]
    if first is None:  # of ZeRO, say
        return func(*args, **kwargs)
    elementwise = name.rstrip("_") in _ELEMENTWISE and not torch.is_grad_enabled()
    alike = len(shards) == len(tensors) and all(first.is_cut_like(each) for each in params)
    if name not in ("detach", "data") and not (elementwise and alike):
        raise _used_in_forward(first, name)
    result = func(*args, **kwargs)
    return result if isinstance(result, ShardView) else _view_of(shards[0], result)


def _refuse_mixed(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise RuntimeError if one of ``tensors`` is a parameter of which ranks hold different
    parts."""
    for tensor in tensors:
        param = _param_behind(tensor) if isinstance(tensor, ShardParameter) else None
        if param is not None and param.packing.layout.num_shards > 1:
            raise RuntimeError(
                f"the shard of {_names_of(param)} was used (by {name}) as if it were the full "
                f"parameter. Each rank holds another part of it, and would compute something else. "
                f"Read or change full parameters inside summon_full_params; where a gradient is "
                f"needed, compute with them in the forward of the FSDP unit that has them, or in a "
                f"method registered by register_fsdp_forward_method. Initialize parameters before "
                f"sharding, or on the meta device. This rank's part is to_local() of the shard"
            )


def _refuse_others(func: Any, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError unless a shard computes with shards, numbers, and tensors of its own
    shape."""
    with torch._C.DisableTorchFunctionSubclass():
        shards = [each for each in tensors if isinstance(each, ShardView)]
        shapes = {each.shape for each in shards}
        others = [
            each
            for each in tensors
            if not isinstance(each, ShardView)
            and each.shape not in shapes
            and (each.dim() > 0 or each.requires_grad)
        ]
        found = [(each, _param_behind(each)) for each in shards] if others else []
        parts = [param for each, param in found if param is not None and not param.is_whole(each)]
    if parts:
        raise RuntimeError(
            f"the shard of {_names_of(parts[0])} was used (by {name_of(func)}) with a tensor of "
            f"shape {tuple(others[0].shape)} outside of the forward of its FSDP unit. Each rank "
            f"holds another part of the parameter: outside, a shard computes with other shards, "
            f"numbers without gradients and tensors of its own shape, as penalties and moving "
            f"averages do. Let the unit compute with it, in its forward or in a method registered "
            f"by register_fsdp_forward_method; or, where no gradient is needed, read it inside "
            f"summon_full_params"
        )


def _marked(result: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a result of shards outside of forwards, as shards where it has gradients."""
    first = next(each for each in tensors if isinstance(each, ShardView))
    param = _param_behind(first)
    if param is None or not torch.is_grad_enabled():
        return result
    with torch._C.DisableTorchFunctionSubclass():
        if param.is_whole(first):
            return result
        for each in tensors_in(result):
            if type(each) is Tensor and each.requires_grad and each.dim():
                view: Any = each
                view.__class__ = ShardTensor
                view.stands_for = getattr(first, "stands_for", first)
    return result


def refuse_shards(tensors: Iterable[Tensor], use: str) -> None:
    """Raise RuntimeError if one of ``tensors``, which a forward is given or returns, is a shard;
    ``use`` says what was done with it."""
    for tensor in tensors:
        param = _param_behind(tensor) if isinstance(tensor, ShardView) else None
        if param is not None:
            raise _used_in_forward(param, use)


def _param_behind(shard: Any) -> FSDPParam | None:
    return known_shard(getattr(shard, "stands_for", shard))


class ShardUsedError(RuntimeError):
    """A shard was used in a forward of which its unit is no part.

    Args:
        param: the shard's.
        text: what was done, and what to do.
    """

    def __init__(self, param: FSDPParam, text: str) -> None:
        super().__init__(text)
        self.param = param


def _used_in_forward(param: FSDPParam, name: str) -> RuntimeError:
    return ShardUsedError(
        param,
        f"the shard of {_names_of(param)} was used (by {name}) in a forward. Each rank holds "
        f"another part of the parameter; it is full only in the forward of the FSDP unit that has "
        f"it. Let that unit compute with it, in its forward or in a method registered by "
        f"register_fsdp_forward_method; or move it to the outer unit, which reads it, by not "
        f"making its module a unit; or, where no gradient is needed, read it inside "
        f"summon_full_params",
    )


def _names_of(param: FSDPParam) -> str:
    return ", ".join(original.names[0] for original in param.originals)


def _view_of(shard: Any, value: Tensor) -> ShardTensor:
    view = value.as_subclass(ShardTensor)
    view.stands_for = getattr(shard, "stands_for", shard)
    return view


def _as_whole(shard: Any, func: Any) -> Tensor:
    """Return a stand-in, of which ``func`` reads the shape outside of forwards."""
    if isinstance(shard, ShardTensor):
        return shard if shard.whole is None else shard.whole
    param = _param_behind(shard) if isinstance(shard, ShardParameter) else None
    if param is None or len(param.originals) > 1:
        return shard
    shape = param.originals[0].whole_shape
    # A stack has the shape of one block's parameter, as the plain model's, and the size of all.
    stacked = getattr(shard, "is_stack", False) and name_of(func) in COUNTS
    return without_values((len(shard), *shape) if stacked else shape, shard.dtype)


def _squeezed(func: Any, args: Any, kwargs: Any, result: Tensor) -> ShardTensor:
    """Return a squeezed shard, which has the dims of the squeezed whole, whatever its data has:
    rules for groups of optimizers ask for them."""
    view = _view_of(args[0], result)
    with torch._C.DisableTorchFunctionSubclass():
        view.whole = func(_as_whole(args[0], func), *args[1:], **kwargs)
    return view


def _without_values(tensor: Tensor) -> Tensor:
    """Return a stand-in for the full parameter if ``tensor`` is its shard, else ``tensor``."""
    param = _param_behind(tensor) if isinstance(tensor, ShardView) else None
    if param is None or len(param.originals) > 1:
        return tensor
    return without_values(param.originals[0].shape, tensor.dtype)


# ---------------------------------------------------------------- deferred values


class UninitializedShard(ShardParameter):
    """A shard that has memory but no values yet.

    Torch functions called with it compute with an unsharded parameter, so that initialization sees
    the shape (fan-in) and draws the random numbers of the original model. The result is cut into
    the shard before the next call with other shards, so the device holds the unsharded parameters
    of one call only. Every rank must make the same calls.
    """

    has_values = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call_unsharded(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.settle()
        return nn.Parameter.__deepcopy__(self, memo)

    def settle(self) -> None:
        """Become a ``ShardParameter``, as the values are complete."""
        for shard, _ in list(_opened.shards.values()):
            _close(shard)
        self.__class__ = ShardParameter  # type: ignore[assignment]


class _Opened(threading.local):
    def __init__(self) -> None:
        # By id of the shard: the shard and its unsharded parameter.
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
        shape = _known(shard)[0].originals[0].whole_shape
        value = torch.zeros(shape, dtype=shard.dtype, device=shard.device)
    unsharded = nn.Parameter(value, requires_grad=shard.requires_grad)
    _opened.shards[id(shard)] = shard, unsharded
    return unsharded


@torch.no_grad()
def _close(shard: UninitializedShard) -> None:
    _, unsharded = _opened.shards.pop(id(shard))
    param, group = known_shard(shard), known_group(shard)
    with torch._C.DisableTorchFunctionSubclass():
        if param is not None and group is not None:
            local = own_parts([unsharded.detach()], param.originals)
            shard.copy_(param.slice_of(local, group.collectives.rank))
            # At once, to free the unsharded parameter, and because the slice depends on the rank,
            # while the programs of training steps must be the same on all ranks.
            ops.compute([shard])
    shard.has_values = True
