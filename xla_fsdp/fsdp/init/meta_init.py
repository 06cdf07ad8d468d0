"""Give memory and values to modules that were built on the meta device.

Words: the *origin* of a parameter made here is the meta tensor that it replaces.
Always true: what is not on the meta device is left alone, and so is what lies in units that exist
already, except that a parameter tied to one of theirs becomes their shard. Values come from the
caller's function or the module's ``reset_parameters``, which see whole parameters also where tensor
parallelism has cut them: random numbers and fan-in are those of the plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.placement import TensorPlacement, placement_in
from xla_fsdp.fsdp.engine.registry import known_shard, known_whole, remember_whole
from xla_fsdp.fsdp.engine.tp_params import own_part
from xla_fsdp.fsdp.init.managed import ManagedModules


def materialize(
    scope: ManagedModules, param_init_fn: Callable[[nn.Module], None] | None
) -> dict[int, Tensor]:
    """Allocate in host memory what modules in ``scope`` hold on the meta device, and initialize it.

    Args:
        scope: what belongs to a new unit.
        param_init_fn: called with each module that directly holds meta tensors; default is the
            module's own ``reset_parameters``.

    Returns:
        The origins, by the id of the parameter made of each.

    Raises:
        ValueError: if neither exists for a module.
    """
    made = _Made(scope)
    for name, owner in scope.modules():
        if _meta_tensors(owner):
            initialize = param_init_fn or _reset_parameters(name, owner)
            made.allocate(owner)
            initialize(owner)
    made.cut()
    made.tie()
    return made.origins


class _Made:
    """What replaces meta tensors."""

    def __init__(self, scope: ManagedModules) -> None:
        self._ignored = scope.ignored
        self._new: dict[int, Tensor] = {}  # by the meta tensor's id: tied parameters stay one
        self._tied: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._whole: list[tuple[nn.Module, str, TensorPlacement]] = []
        self.origins: dict[int, Tensor] = {}

    def allocate(self, owner: nn.Module) -> None:
        """Host memory for what is on the meta device, and only that."""
        registries: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None and tensor.is_meta:
                    placement = placement_in(owner, name)
                    registry[name] = self._replace(tensor, placement)
                    if placement is not None and placement.parts > 1:
                        self._whole.append((owner, name, placement))
                    if known := known_shard(tensor):
                        self._tied.append((owner, name, known.leaf))

    def cut(self) -> None:
        """Once modules are initialized: of whole parameters, this rank's part is left."""
        local: dict[int, nn.Parameter] = {}
        for owner, name, placement in self._whole:
            whole = owner._parameters[name]
            if whole is None or whole.shape != placement.shape:  # ignored, and made by another unit
                continue
            if id(whole) not in local:
                local[id(whole)] = self._part(whole, placement)
            owner._parameters[name] = local[id(whole)]

    def _part(self, whole: nn.Parameter, placement: TensorPlacement) -> nn.Parameter:
        local = _param_like(own_part(whole.detach(), placement).clone(), whole)
        origin = self.origins[id(local)] = self.origins.pop(id(whole))
        if self._ignored.has_param(whole):
            self._ignore(local, origin)
        return local

    def tie(self) -> None:
        """Once modules are initialized: what another unit has sharded already is its shard."""
        for owner, name, shard in self._tied:
            owner._parameters[name] = shard

    def _replace(self, tensor: Tensor, placement: TensorPlacement | None) -> Tensor:
        if id(tensor) not in self._new:
            known = self._made_elsewhere(tensor)
            shape = tensor.shape if placement is None else torch.Size(placement.shape)
            new = self._new[id(tensor)] = _like(tensor, shape) if known is None else known
            self.origins[id(new)] = tensor
            if isinstance(tensor, nn.Parameter) and self._ignored.has_param(tensor):
                self._ignore(new, tensor)
        return self._new[id(tensor)]

    def _ignore(self, new: Tensor, origin: Tensor) -> None:
        self._ignored.add(new)
        remember_whole(origin, new)

    def _made_elsewhere(self, tensor: Tensor) -> Tensor | None:
        """An ignored parameter that a module of another unit shares stays one."""
        ignored = isinstance(tensor, nn.Parameter) and self._ignored.has_param(tensor)
        return known_whole(tensor) if ignored else None


def _meta_tensors(owner: nn.Module) -> list[Tensor]:
    tensors = (*owner._parameters.values(), *owner._buffers.values())
    return [tensor for tensor in tensors if tensor is not None and tensor.is_meta]


def _like(tensor: Tensor, shape: torch.Size) -> Tensor:
    if shape == tensor.shape:
        empty = torch.empty_like(tensor, device="cpu")
    else:
        empty = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    return _param_like(empty, tensor) if isinstance(tensor, nn.Parameter) else empty


def _param_like(value: Tensor, other: Tensor) -> nn.Parameter:
    new = nn.Parameter(value, requires_grad=other.requires_grad)
    vars(new).update(vars(other))
    return new


def _reset_parameters(name: str, owner: nn.Module) -> Callable[[nn.Module], None]:
    if not callable(getattr(owner, "reset_parameters", None)):
        raise ValueError(
            f"{name or 'the module'} ({type(owner).__name__}) is on the meta device and has no "
            f"reset_parameters(). Pass param_init_fn to initialize it"
        )
    return lambda target: target.reset_parameters()  # type: ignore[operator]
