"""One shard parameter: what the optimizer sees, and the original parameters that it stands for.

A shard stands for one original parameter, or for several joined end to end (*flat*). Its *leaf* is
what the optimizer sees: the shard itself, or the stack of several blocks' shards that it is in.

Invariants: outside a forward or backward pass of its units, the modules hold the leaf (so names,
optimizers and state dicts see it), and the originals of a flat shard are no attributes at all;
while unsharded, the modules hold unsharded tensors. No module is kept alive from here.
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


class ParamState(Enum):
    """What the attributes of a shard's originals hold."""

    SHARDED = auto()
    UNSHARDED = auto()


class FSDPParam:
    """This rank's shard of one parameter, or of several that were flattened together.

    Args:
        key: name of the shard in the unit's state dict.
        members: the original parameters, in the order in which they are joined.
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
        """Whether the shard is registered on its own, apart from its members."""
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
        return self.as_shard(slice_of(rows, self.packing.layout, rank))

    def to_unsharded(self, full: Sequence[Tensor], *, idle: bool = False) -> None:
        """Point the modules at unsharded tensors; call ``check_owners`` before.

        Args:
            full: one for each original.
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
        for member, tensor in zip(self.members, full, strict=True):
            for owner in member.owners:
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
