"""Which attributes of modules hold a parameter: its shard, or unsharded tensors."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.placement import TensorPlacement


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
        # A parametrization that a forward puts on and takes off, as PEFT's, leaves it as a buffer.
        module._buffers.pop(self.attribute, None)
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
    """Slice ``number`` of a stack of shards.

    Args:
        number: of the slice.
        length: of the stack.
        shape: of the shard. A stack has other dims where shards are vectors of whole rows: on a
            TPU, vectors that are stacked lie across each other, and a slice would be laid out anew.
    """

    number: int
    length: int
    shape: torch.Size


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

    def is_held_by(self, owner: ModuleAttr) -> bool:
        """Return whether ``owner`` holds what it should."""
        return owner.holds(self._held_by(owner))

    def refresh(self, owner: ModuleAttr) -> None:
        """Set the attribute of ``owner`` to what it should hold, or remove it."""
        tensor = self._held_by(owner)
        if tensor is None:
            owner.remove()
        else:
            owner.point_at(tensor)

    def _held_by(self, owner: ModuleAttr) -> Tensor | None:
        """Return the tensor that ``owner`` should hold; None if it should have no attribute."""
        for shown, tensor in reversed(self._shown):
            if shown == owner:
                return tensor
        return self.shard if self._registered else None


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
                owner.remove()


def print_without(original: OriginalParam) -> None:
    """Let the modules of a parameter be printed while a flat shard or a stack has it for them:
    layers ask for their biases then, and PEFT prints the layers that it has adapted."""
    for owner in original.owners:
        module = owner.module
        if not isinstance(module.__dict__.get("extra_repr"), _ExtraRepr):
            module.__dict__["extra_repr"] = _ExtraRepr()
        module.__dict__["extra_repr"].lacking.append((owner, original.shape))
