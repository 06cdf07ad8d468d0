"""The original parameters of a unit: their names and shapes, and the attributes that hold them.

Words: a *member* is one original parameter; an *owner* is a module attribute that holds it, and a
tied member has several.
Always true: no module is kept alive by what is said of it here.
What an owner is to hold at which time is decided by ``places``.

What the module attributes of one shard's members hold, and what they held before.

Always true: an owner holds what was shown there last and is not hidden yet, and the shard when
nothing is shown. Several units may own a parameter of a module that they share, one inside the
other, and be unsharded at once.
Who shows what, and when, is left to ``sharded_param``; what a stack is, to ``shard_stacks``.

One shard parameter: what the optimizer sees, and the full parameters that it stands for.

Words: see ``members``; a shard has one member, or several joined end to end (*flat*).
Always true: outside a forward or backward pass of the units, owners of a one-member shard hold the
shard parameter (so names, optimizers and state dicts see it), and members of a flat shard are not
attributes at all; while unsharded, owners hold the full tensors. The *leaf* is what the optimizer
sees: the shard, or a stack that it is a slice of (``shard_stacks``). Once it has memory, it only
changes when shards are stacked. How members become shards is left to ``shard_cut``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.placement import TensorPlacement
from xla_fsdp.distributed.shard_layout import ShardLayout
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.packing import ShardPacking, slice_of
from xla_fsdp.fsdp.engine.registry import known_group, remember, remember_group
from xla_fsdp.fsdp.engine.shard_parameter import ShardParameter, UninitializedShard


class ModuleAttr:
    """One place in a module tree that holds a parameter.

    The module is not kept alive: it may itself be what holds the unit that owns this.

    Args:
        module: holds it.
        attribute: its name there.
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
        """Make the module's attribute this tensor.

        nn.Module.__setattr__ refuses tensors that are not leaf parameters, hence the registry.
        """
        module = self.module
        module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        _refresh_rnn_weights(module)

    def remove(self) -> None:
        """Take the attribute off the module."""
        module = self.module
        module._parameters.pop(self.attribute, None)
        _refresh_rnn_weights(module)

    def holds(self, tensor: Tensor | None) -> bool:
        """Whether the attribute is this tensor; so it is where the module is gone."""
        module = self._module()
        return module is None or module._parameters.get(self.attribute) is tensor


@dataclass(frozen=True)
class OriginalParam:
    """An original parameter: its names (first the canonical one, then ties) in the unit.

    ``parts`` are the numbers of the unit's modules in which the names are; none means the first.
    Where tensor parallelism has cut the plain model's parameter, ``placement`` says how; the shape
    is that of the local one.
    """

    names: tuple[str, ...]
    shape: torch.Size
    owners: tuple[ModuleAttr, ...]
    parts: tuple[int, ...] = ()
    placement: TensorPlacement | None = None

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the plain model's parameter."""
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
    """Which slice of a stack, [length, *shape of the shard], a shard is.

    Args:
        number: of the slice.
        length: of the stack.
    """

    number: int
    length: int


class ParamSlots:
    """Of one shard.

    Args:
        shard: what stands for the parameter: the leaf.
        registered: whether it is so under its members' names; members of a flat one are no
            attributes when nothing is shown.

    Attributes:
        part: where the shard is in the leaf, if that is a stack; the first one's owners hold it.
        users: how many units have the parameter.
    """

    def __init__(self, shard: nn.Parameter, *, registered: bool) -> None:
        self.shard = shard
        self.part: StackPart | None = None
        self.users = 0
        self._registered = registered
        self._shown: list[tuple[ModuleAttr, Tensor]] = []

    def stack(self, leaf: nn.Parameter, part: StackPart) -> None:
        """From now on the shard is this part of ``leaf``."""
        self.shard, self.part = leaf, part
        self._registered = part.number == 0

    def show(self, owner: ModuleAttr, tensor: Tensor, *, idle: bool) -> None:
        """Let ``owner`` hold ``tensor``, unless it is ``idle`` and something else is shown."""
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
        """What the owner should hold; None for no attribute."""
        for place, tensor in reversed(self._shown):
            if place == owner:
                return tensor
        return self.shard if self._registered else None

    def refresh(self, owner: ModuleAttr) -> None:
        """Let ``owner`` hold what it should."""
        tensor = self.held_by(owner)
        if tensor is None:
            owner.remove()
        else:
            owner.point_at(tensor)


class ParamState(Enum):
    """Where the owners of a shard's members point."""

    SHARDED = auto()
    UNSHARDED = auto()


class FSDPParam:
    """This rank's shard of one parameter, or of several that were flattened together.

    Args:
        key: name of the shard in the unit's state dict.
        members: the original parameters in joining order.
        shard: leaf parameter of ``layout.shard_numel`` elements on the rank's device; 1-D, or
            [rows, ...] where whole rows of a dim are sharded, which is in its place.
        layout: how the joined members are cut; along another dim, how the member is with that dim
            moved to the front.
        compute_dtype: what full parameters are gathered and used in; None for the shard's own.
        home: for a flat shard, the module that registers it under ``key``; otherwise None.
        places: what another unit's parameter with the same shard keeps of its owners.
        dim: which dim of a single member is cut.
    """

    def __init__(
        self,
        key: str,
        members: Sequence[OriginalParam],
        shard: nn.Parameter,
        layout: ShardLayout,
        compute_dtype: torch.dtype | None,
        home: nn.Module | None = None,
        places: ParamSlots | None = None,
        dim: int = 0,
    ) -> None:
        self.key = key
        self.members = tuple(members)
        self.packing = ShardPacking([member.shape for member in members], layout, dim)
        self.compute_dtype = compute_dtype
        self.state = ParamState.SHARDED
        self.slots = places or ParamSlots(shard, registered=home is None)
        self.slots.users += 1
        self._home = home
        self._full: list[Tensor] = []
        self._owners = [owner for member in members for owner in member.owners]
        if home is not None:
            home.register_parameter(key, shard)
        for owner in self._owners:
            self.slots.refresh(owner)

    @property
    def leaf(self) -> nn.Parameter:
        """The leaf parameter, which the optimizer sees: the shard, or the stack that it is in."""
        self.settle()
        return self.slots.shard

    def settle(self) -> None:
        """A leaf that had no values is complete, and acts as any other from now on."""
        leaf = self.slots.shard
        if type(leaf) is UninitializedShard:  # isinstance goes through Python for parameters
            leaf.settle()

    @property
    def shard(self) -> Tensor:
        """This rank's shard: the leaf, or a slice of it, to which a change is one of the leaf."""
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
        """Gradient of the shard. In a stack that has a gradient none is missing, but zero."""
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
        """Whether the shard is registered on its own, apart from its members."""
        return self._home is not None

    @property
    def by_rows(self) -> bool:
        """Whether the shard has the shape of whole rows of its member's dim."""
        return len(self.shard_shape) > 1

    def as_shard(self, rows: Tensor, *length: int) -> Tensor:
        """Return elements of a shard in its shape; with ``length``, of so many shards."""
        if self.packing.dim:
            return self.packing.from_rows(rows, *length)
        return ops.shaped(rows, (*length, *self.shard_shape))

    def slice_of(self, full: Sequence[Tensor], rank: int) -> Tensor:
        """``rank``'s shard of full members, in the shape of the shard, on their device."""
        rows = [self.packing.in_rows(tensor) for tensor in full]
        return self.as_shard(slice_of(rows, self.packing.layout, rank))

    def unshard(self, full: Sequence[Tensor], *, idle: bool = False) -> None:
        """Point the owners at the full tensors, one per member in order.

        Args:
            full: the tensors. Whether something else was put in their place is for the caller to
                check before.
            idle: no forward is about to use them, so one that another unit runs keeps its own.
        """
        self._move(ParamState.SHARDED, ParamState.UNSHARDED)
        self._full = list(full)
        for member, tensor in zip(self.members, full, strict=True):
            for owner in member.owners:
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
        """The owners hold what the user has put in place of a shard on the meta device: that is the
        shard from now on. Without values, it acts as the full parameter for whoever gives it some.

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
        """While the members are attributes, a flat shard need not be one."""
        if self._home is None:
            yield
            return
        del self._home._parameters[self.key]
        try:
            yield
        finally:
            self._home._parameters[self.key] = self.leaf

    def reshard(self) -> None:
        """Point the owners back at the shard (of a flat shard: take the members away)."""
        self._move(ParamState.UNSHARDED, ParamState.SHARDED)
        full, self._full = self._full, []
        for member, tensor in zip(self.members, full, strict=True):
            for owner in member.owners:
                self.slots.hide(owner, tensor)

    def check_owners(self) -> None:
        """Raise ValueError if an owner does not hold what it should: a parameter that the user put
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
