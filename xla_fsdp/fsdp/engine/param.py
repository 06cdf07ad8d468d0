"""One parameter under FSDP: the leaf that the optimizer sees, what it stands for, how to find it.

A shard stands for one original parameter, or for several joined end to end (*flat*). Its *leaf* is
what the optimizer sees: the shard itself, or the stack of several blocks' shards that it is in. In
the order of the file: what the modules hold (``ParamSlots``); how originals are packed into a
shard; ``FSDPParam``; which parameter has replaced a tensor; local and global tensors of tensor
parallelism; the leaf as a ``ShardParameter``, also before it has values.

Invariants: outside a forward or backward pass of its units, the modules hold the leaf (so names,
optimizers and state dicts see it), and the originals of a flat shard are no attributes at all;
while unsharded, the modules hold unsharded tensors. No module and no shard is kept alive from here.
Keys of what is remembered are tensors of one rank's own model, so ranks that are threads of one
process never share an entry.
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
from xla_fsdp.distributed.mesh import SHARD, Mesh, mesh_of
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import TensorPlacement
from xla_fsdp.distributed.shard_layout import LANES, LARGE, ROWS, ShardLayout
from xla_fsdp.distributed.xla import ops

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class ModuleAttr:
    """An attribute of a module that holds a parameter.

    The module is not kept alive: it may itself be what holds the unit that holds this.

    Args:
        module: the module.
        attribute: name of the attribute.
    """

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ModuleAttr) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled with the module."""
        return ModuleAttr, (self._module(), self.attribute)

    @property
    def _key(self) -> tuple[int, str]:
        return id(self._module()), self.attribute

    @property
    def module(self) -> nn.Module:
        """The module; an empty one once it is gone, when only a backward pass is left to do."""
        return self._module() or nn.Module()

    def point_at(self, tensor: Tensor) -> None:
        """Make the module's attribute this tensor."""
        module = self.module
        # Past nn.Module.__setattr__, which refuses tensors that are not leaf parameters.
        module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        _refresh_rnn_weights(module)

    def remove(self) -> None:
        """Take the attribute off the module."""
        module = self.module
        module._parameters.pop(self.attribute, None)
        _refresh_rnn_weights(module)

    def holds(self, tensor: Tensor | None) -> bool:
        """Return whether the attribute is this tensor; True where the module is gone."""
        module = self._module()
        return module is None or module._parameters.get(self.attribute) is tensor


@dataclass(frozen=True)
class OriginalParam:
    """A parameter of the module as the user gave it.

    Args:
        names: in the unit, the canonical one first, then ties.
        shape: of the parameter; where tensor parallelism has cut it, of the local tensor.
        owners: the attributes that hold it.
        parts: numbers of the unit's modules in which the names are; none means the first.
        placement: how tensor parallelism has cut it.
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
    """nn.RNN and its kin compute with a list of their parameters that they keep on the side."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


@dataclass(frozen=True)
class StackPart:
    """The slice of a stack, [length, *shape of the shard], that a shard is."""

    number: int
    length: int


class ParamSlots:
    """The module attributes of one shard's originals, and what each holds.

    Several units may share a parameter of a module that they share, one inside the other, and be
    unsharded at once: an attribute holds what was shown there last and is not hidden yet, and the
    leaf when nothing is shown.

    Args:
        shard: the leaf.
        registered: whether attributes hold the leaf; the originals of a flat shard are no
            attributes when nothing is shown.

    Attributes:
        part: slice of the leaf that is the shard, if the leaf is a stack; the attributes of the
            first slice hold it.
        users: number of units that have the parameter.
    """

    def __init__(self, shard: nn.Parameter, *, registered: bool) -> None:
        self.shard = shard
        self.part: StackPart | None = None
        self.users = 0
        self._registered = registered
        self._shown: list[tuple[ModuleAttr, Tensor]] = []

    def stack(self, leaf: nn.Parameter, part: StackPart) -> None:
        """Let the shard be this part of ``leaf`` from now on."""
        self.shard, self.part = leaf, part
        self._registered = part.number == 0

    def show(self, owner: ModuleAttr, tensor: Tensor, *, idle: bool) -> None:
        """Let ``owner`` hold ``tensor``; where no forward is about to use it (``idle``), only if
        nothing else is shown."""
        if idle and self._shown:
            self._shown.insert(0, (owner, tensor))
            self.refresh(owner)
        else:
            self._shown.append((owner, tensor))
            owner.point_at(tensor)

    def hide(self, owner: ModuleAttr, tensor: Tensor) -> None:
        """Undo one ``show``."""
        for index in reversed(range(len(self._shown))):
            if self._shown[index][1] is tensor and self._shown[index][0] == owner:
                del self._shown[index]
                break
        self.refresh(owner)

    def held_by(self, owner: ModuleAttr) -> Tensor | None:
        """Return what the owner should hold; None for no attribute."""
        for shown, tensor in reversed(self._shown):
            if shown == owner:
                return tensor
        return self.shard if self._registered else None

    def refresh(self, owner: ModuleAttr) -> None:
        """Let ``owner`` hold what it should."""
        tensor = self.held_by(owner)
        if tensor is None:
            owner.remove()
        else:
            owner.point_at(tensor)


class ShardPacking:
    """How the original parameters of one shard are cut.

    Args:
        shapes: of the original parameters, in joining order.
        layout: how they are cut, joined end to end; with another ``dim``, that dim comes first.
        dim: which dim of a single original parameter is cut.
    """

    def __init__(self, shapes: Sequence[torch.Size], layout: ShardLayout, dim: int = 0) -> None:
        self.shapes = tuple(shapes)
        self.layout = layout
        self.dim = dim
        first = self.shapes[0]
        # Of a row of a single original parameter; 0 elements where that has no dims.
        self.row_shape = torch.Size([*first[:dim], *first[dim + 1 :]])
        self.row_numel = self.row_shape.numel() if first else 0
        self.sent_shape = self._sent_shape()
        self._numels = [shape.numel() for shape in self.shapes]
        self._starts = list(accumulate(self._numels, initial=0))[:-1]
        self._gathered_shape = self._as_gathered(self.sent_shape)
        self._padding = layout.padded_numel - layout.numel
        # Whether shards are rows of one original parameter. Only rows are padded and cut off then:
        # elements of a padded matrix would be laid out anew.
        self._by_rows = (
            len(self.shapes) == 1
            and self.row_numel > (0 if dim else 1)
            and self.layout.shard_numel % self.row_numel == 0
        )

    def in_rows(self, value: Tensor) -> Tensor:
        """Move the dim that is cut to the front, behind any dims before those of the parameter."""
        if not self.dim:
            return value
        first = value.dim() - len(self.row_shape) - 1
        return value.movedim(first + self.dim, first)

    def from_rows(self, rows: Tensor, *length: int) -> Tensor:
        """Return the inverse of ``in_rows``, of any shapes; with ``length``, of so many shards."""
        each = rows.reshape(*length, -1, *self.row_shape)
        return each.movedim(len(length), len(length) + self.dim).contiguous()

    def unpack(self, gathered: Tensor) -> list[Tensor]:
        """Return the unsharded tensors out of the shards of all ranks, [num_shards, n] or rows.

        They are copies, not views, which would keep all of ``gathered`` alive.
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
        """Return the inverse of ``unpack``, with zeros as padding."""
        if self._by_rows:
            rows = self.in_rows(unsharded[0])
            joined = ops.shaped(rows, (rows.numel() // self.row_numel, self.row_numel))
            padding = [0, 0, 0, self._padding // self.row_numel]
        else:
            flat = [ops.shaped(each, (each.numel(),)) for each in unsharded]
            joined = torch.cat(flat) if len(flat) > 1 else flat[0]
            padding = [0, self._padding]
        padded = F.pad(joined, padding) if self._padding else joined
        return ops.shaped(padded, self._gathered_shape)

    def _without_padding(self, gathered: Tensor) -> Tensor:
        if not self._padding:
            return gathered
        rows = ops.shaped(gathered, (self.layout.padded_numel // self.row_numel, self.row_numel))
        return ops.cut(rows, 0, 0, self.layout.numel // self.row_numel)

    def _as_gathered(self, sent: tuple[int, ...]) -> tuple[int, ...]:
        shards = self.layout.num_shards
        return (shards, *sent) if len(sent) < 2 else (shards * sent[0], sent[1])

    def _sent_shape(self) -> tuple[int, ...]:
        """Return the shape in which a shard travels: [rows, width], or flat [n]."""
        # Whole rows where a shard consists of such, so that gathered ones are the parameter as it
        # is. Laying 50 million elements out anew takes the TPU compiler minutes, and the program as
        # much code as 20 transformer blocks.
        size = self.layout.shard_numel
        width = self.row_numel if len(self.shapes) == 1 else 0
        if not width or width % LANES or size % (width * ROWS) or size < LARGE:
            return (size,)
        return (size // width, width)


class ParamState(Enum):
    """What the attributes of a shard's originals hold."""

    SHARDED = auto()
    UNSHARDED = auto()


class FSDPParam:
    """This rank's shard of one parameter, or of several that were flattened together.

    Args:
        key: name of the shard in the unit's state dict.
        originals: the original parameters, in the order in which they are joined.
        shard: leaf parameter of ``layout.shard_numel`` elements on the rank's device: [n], or
            [rows, ...] where whole rows along a dim are sharded.
        layout: how the joined originals are cut; of a dim other than the first, how the original
            is with that dim moved to the front.
        compute_dtype: dtype in which parameters are gathered and used; None for the shard's own.
        home: for a flat shard, the module that registers it under ``key``; otherwise None.
        places: of another unit's parameter that has the same shard.
        dim: along which a single original is cut.
    """

    def __init__(
        self,
        key: str,
        originals: Sequence[OriginalParam],
        shard: nn.Parameter,
        layout: ShardLayout,
        compute_dtype: torch.dtype | None,
        home: nn.Module | None = None,
        places: ParamSlots | None = None,
        dim: int = 0,
    ) -> None:
        self.key = key
        self.originals = tuple(originals)
        self.packing = ShardPacking([original.shape for original in originals], layout, dim)
        self.compute_dtype = compute_dtype
        self.state = ParamState.SHARDED
        self.slots = places or ParamSlots(shard, registered=home is None)
        self.slots.users += 1
        self._home = home
        self._full: list[Tensor] = []
        self._owners = [owner for original in originals for owner in original.owners]
        if home is not None:
            home.register_parameter(key, shard)
        for owner in self._owners:
            self.slots.refresh(owner)

    @property
    def leaf(self) -> nn.Parameter:
        """The leaf parameter, which the optimizer sees."""
        self.settle()
        return self.slots.shard

    def settle(self) -> None:
        """Let a leaf that was waiting for values act as any other from now on."""
        leaf = self.slots.shard
        if type(leaf) is UninitializedShard:  # isinstance goes through Python for parameters
            leaf.settle()

    @property
    def shard(self) -> Tensor:
        """This rank's shard: the leaf, or a view of its slice of it."""
        part = self.slots.part
        return self.leaf if part is None else self.leaf[part.number]

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of the shard."""
        with torch._C.DisableTorchFunctionSubclass():  # without values it acts as the full one
            shape = self.slots.shard.shape
        return shape if self.slots.part is None else shape[1:]

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the shard; zeros in a stack of which only other slices have one."""
        part, grad = self.slots.part, self.leaf.grad
        return grad if part is None or grad is None else grad[part.number]

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        part = self.slots.part
        if part is None:
            self.leaf.grad = grad
        elif grad is not None or self.leaf.grad is not None:
            of_all = self.leaf.grad
            new = torch.zeros_like(self.leaf) if of_all is None else of_all.detach().clone()
            new[part.number] = 0 if grad is None else grad
            self.leaf.grad = new

    @property
    def is_flat(self) -> bool:
        """Whether the shard is registered on its own, apart from its originals."""
        return self._home is not None

    @property
    def by_rows(self) -> bool:
        """Whether the shard has the shape of whole rows."""
        return len(self.shard_shape) > 1

    def as_shard(self, rows: Tensor, *length: int) -> Tensor:
        """Return the elements of a shard in its shape; with ``length``, of so many shards."""
        if self.packing.dim:
            return self.packing.from_rows(rows, *length)
        return ops.shaped(rows, (*length, *self.shard_shape))

    def slice_of(self, full: Sequence[Tensor], rank: int) -> Tensor:
        """Return ``rank``'s shard of unsharded tensors, one for each original, on their device."""
        rows = [self.packing.in_rows(tensor) for tensor in full]
        return self.as_shard(cut_shard(rows, self.packing.layout, rank))

    def to_unsharded(self, full: Sequence[Tensor], *, idle: bool = False) -> None:
        """Point the modules at unsharded tensors; call ``check_owners`` before.

        Args:
            full: one for each original.
            idle: no forward is about to use them, so one that another unit runs keeps its own.
        """
        self._move(ParamState.SHARDED, ParamState.UNSHARDED)
        self._full = list(full)
        for original, tensor in zip(self.originals, full, strict=True):
            for owner in original.owners:
                self.slots.show(owner, tensor, idle=idle)

    @property
    def waits_for_memory(self) -> bool:
        """Whether an owner holds something on the meta device."""
        return any(held.is_meta for held in self._held())

    def _held(self) -> list[Tensor]:
        """What the owners hold."""
        held = (owner.module._parameters.get(owner.attribute) for owner in self._owners)
        return [tensor for tensor in held if tensor is not None]

    def take_memory(self, *, has_values: bool) -> None:
        """Take what the user has put in place of a shard on the meta device as the shard.

        Args:
            has_values: whether it is complete; if not, it acts as the unsharded parameter for
                whoever initializes it.

        Raises:
            ValueError: if it has another shape.
        """
        if self.slots.shard.is_meta:
            new = next((tensor for tensor in self._held() if not tensor.is_meta), None)
            if new is None:
                return
            self._replace(new, has_values=has_values)
        for owner in self._owners:
            self.slots.refresh(owner)

    def _replace(self, new: Tensor, *, has_values: bool) -> None:
        old = self.slots.shard
        if new.shape != old.shape:
            raise ValueError(
                f"{self.key} is on the meta device as a shard of shape {tuple(old.shape)}, and was "
                f"given a tensor of shape {tuple(new.shape)}; give it this rank's shard "
                f"(distribute_tensor), or memory first (to_empty) and then full tensors"
            )
        kind = ShardParameter if has_values else UninitializedShard
        # A copy: what is computed from an alias is traced from the values that it once had.
        self.slots.shard = kind(new.detach().clone(), requires_grad=old.requires_grad)
        vars(self.slots.shard).update(vars(old))
        moved = known_group(old)
        remember(self, [self.slots.shard])
        if moved is not None:
            remember_group(self.slots.shard, moved)

    @contextlib.contextmanager
    def without_shard(self) -> Iterator[None]:
        """Take a flat shard off its module inside the block, while the originals are attributes."""
        if self._home is None:
            yield
            return
        del self._home._parameters[self.key]
        try:
            yield
        finally:
            self._home._parameters[self.key] = self.leaf

    def to_sharded(self) -> None:
        """Point the modules back at the leaf (of a flat shard: take the originals away)."""
        self._move(ParamState.UNSHARDED, ParamState.SHARDED)
        full, self._full = self._full, []
        for original, tensor in zip(self.originals, full, strict=True):
            for owner in original.owners:
                self.slots.hide(owner, tensor)

    def check_owners(self) -> None:
        """Raise ValueError if a module does not hold what it should: a parameter that the user put
        in its place would silently be dropped."""
        if self.state is not ParamState.SHARDED:
            return
        expected = [(owner, self.slots.held_by(owner)) for owner in self._owners]
        if self._home is not None:
            expected = [(ModuleAttr(self._home, self.key), self.leaf)]
        for owner, tensor in expected:
            if not owner.holds(tensor):
                raise ValueError(
                    f"{self.key} was replaced after wrapping (by load_state_dict(assign=True), by "
                    f"moving the module to another device, or by tying weights). FSDP trains the "
                    f"shard that it made. Load without assign, leave the module on its device, and "
                    f"tie weights before wrapping."
                )

    def _move(self, expected: ParamState, new: ParamState) -> None:
        if self.state is not expected:
            raise RuntimeError(
                f"{self.key} is {self.state.name}, but to become {new.name} it must be "
                f"{expected.name}"
            )
        self.state = new


# ---------------------------------------------------------------- what has replaced a tensor


class _Gather(Protocol):
    def as_stored(self, params: Any, shards: Sequence[Tensor]) -> list[Tensor]: ...


class KnownGroup(Protocol):
    """An ``FSDPParamGroup``, as modules below ``param_group`` see it."""

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
    """Note that ``param`` has replaced ``tensors``: originals, meta tensors, or its own shard."""
    for tensor in tensors:
        _param_of[tensor] = weakref.ref(param)


def known_shard(tensor: Tensor) -> FSDPParam | None:
    """Return the parameter that has replaced ``tensor``, if a unit has taken it."""
    reference = _param_of.get(tensor)
    return reference() if reference is not None else None


def remember_group(shard: Tensor, group: KnownGroup) -> None:
    """Note that ``shard`` is gathered with ``group``, the first one if units share it."""
    if known_group(shard) is None:
        _group_of[shard] = weakref.ref(group)


def known_group(shard: Tensor) -> KnownGroup | None:
    """Return the group with which a shard is gathered."""
    reference = _group_of.get(shard)
    return reference() if reference is not None else None


def remember_shown(full: Iterable[Tensor]) -> None:
    """Note that a unit shows these unsharded parameters to its user in place of shards."""
    for tensor in full:
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
    """Note that the ignored ``param`` was made of the meta tensor ``origin``."""
    _materialized[origin] = param


def known_materialized(origin: Tensor) -> Tensor | None:
    """Return the ignored parameter that was made of the meta tensor ``origin``."""
    return _materialized.get(origin)


# ---------------------------------------------------------------- tensor parallelism


def own_part(whole: Tensor, placement: TensorPlacement | None) -> Tensor:
    """Return this rank's local part of a global tensor, on its device."""
    return whole if placement is None else placement.slice_of(whole, _own_rank(placement))


def own_parts(whole: Sequence[Tensor], originals: Sequence[OriginalParam]) -> list[Tensor]:
    """Return the local parts of several originals."""
    return [own_part(t, original.placement) for t, original in zip(whole, originals, strict=True)]


def joined(local: Tensor, placement: TensorPlacement | None) -> Tensor:
    """Gather the global tensor of the local parts, on the device."""
    if placement is None or placement.dim is None:
        return local
    return AxisComm(placement.mesh).all_gather(local, placement.dim)


def all_joined(local: Sequence[Tensor], originals: Iterable[OriginalParam]) -> list[Tensor]:
    """Gather the global tensors of several originals."""
    return [joined(t, original.placement) for t, original in zip(local, originals, strict=True)]


def is_first(originals: Iterable[OriginalParam]) -> bool:
    """Whether this rank is the first along the axes that cut the originals."""
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
    flat = cut_shard([t.movedim(dim, 0) if dim else t for t in tensors], layout, rank)
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
    [full] = all_joined(group.gather.as_stored([param], [value]), param.originals)
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


def _known(shard: Any) -> tuple[FSDPParam, KnownGroup]:
    leaf = getattr(shard, "stands_for", shard)
    param, group = known_shard(leaf), known_group(leaf)
    if param is None or group is None:
        raise RuntimeError("this shard's model is gone, so who shares it is not known any more")
    return param, group


def _tensor_parallel_cut(param: FSDPParam) -> tuple[Mesh, int] | None:
    """Return the axis and dim along which tensor parallelism has cut the parameter."""
    placement = param.originals[0].placement
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
        shape = _known(shard)[0].originals[0].whole_shape
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
            local = own_parts([unsharded.detach()], param.originals)
            shard.copy_(param.slice_of(local, group.collectives.rank))
            # At once: the unsharded parameter is freed, and no program of a training step, which
            # must be the same on every rank, begins with slices that are not.
            ops.compute([shard])
    shard.has_values = True
