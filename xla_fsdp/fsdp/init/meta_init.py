"""Allocate and initialize modules that were built on the meta device.

Invariants: modules of existing units are not changed; a parameter tied to one of theirs is replaced
by their shard. Under tensor parallelism, too, global parameters are initialized, so that random
numbers and fan-in are those of the original model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.placement import TensorPlacement, placement_in
from xla_fsdp.fsdp.engine.param import known_shard, own_part
from xla_fsdp.fsdp.init.build import ManagedModules
from xla_fsdp.wrap import Ignored
from xla_fsdp.xla import ops

_materialized: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The ignored parameters that were made of meta tensors."""


def materialize(
    managed: ManagedModules, param_init_fn: Callable[[nn.Module], None] | None
) -> dict[int, Tensor]:
    """Replace meta tensors by initialized tensors in host memory; return them by the id of the
    tensor that has replaced each.

    Args:
        managed: the modules of a new unit.
        param_init_fn: called with each module that directly holds meta tensors (default: the
            module's own ``reset_parameters``).

    Raises:
        ValueError: if a module has no ``reset_parameters``, and there is no ``param_init_fn``;
            not on ranks whose programs are only compiled.
    """
    allocator = _Allocator(managed.ignored)
    for name, owner in managed.modules():
        tensors = (*owner._parameters.values(), *owner._buffers.values())
        if any(tensor is not None and tensor.is_meta for tensor in tensors):
            initialize = param_init_fn or _reset_parameters(name, owner)
            allocator.allocate(owner)
            initialize(owner)
    # After all modules are initialized, as they are with unsharded, global tensors.
    allocator.finish()
    return allocator.origins


class _Allocator:
    """Replaces meta tensors by tensors in host memory."""

    def __init__(self, ignored: Ignored) -> None:
        self._ignored = ignored
        self._new: dict[int, Tensor] = {}  # by id of the meta tensor, so that ties are preserved
        self._tied: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._global: list[tuple[nn.Module, str, TensorPlacement]] = []
        # The meta tensors, by the id of the tensor that has replaced each.
        self.origins: dict[int, Tensor] = {}

    def allocate(self, owner: nn.Module) -> None:
        """Replace the meta tensors of a module, without its children, by uninitialized ones."""
        registries: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None and tensor.is_meta:
                    placement = placement_in(owner, name)
                    registry[name] = self._replace(tensor, placement)
                    if placement is not None and placement.parts > 1:
                        self._global.append((owner, name, placement))
                    if known := known_shard(tensor):
                        self._tied.append((owner, name, known.leaf))

    def finish(self) -> None:
        """Replace global parameters by this rank's local parts, and those that are tied to
        parameters of another unit by its shards."""
        local: dict[int, nn.Parameter] = {}
        for owner, name, placement in self._global:
            param = owner._parameters[name]
            # An ignored parameter that another unit has initialized and cut already.
            if param is None or param.shape != placement.shape:
                continue
            if id(param) not in local:
                local[id(param)] = self._local_part(param, placement)
            owner._parameters[name] = local[id(param)]
        for owner, name, shard in self._tied:
            owner._parameters[name] = shard

    def _local_part(self, param: nn.Parameter, placement: TensorPlacement) -> nn.Parameter:
        local = _param_like(own_part(param.detach(), placement).clone(), param)
        origin = self.origins[id(local)] = self.origins.pop(id(param))
        if param in self._ignored.params:
            self._ignore(local, origin)
        return local

    def _replace(self, tensor: Tensor, placement: TensorPlacement | None) -> Tensor:
        if id(tensor) not in self._new:
            ignored = isinstance(tensor, nn.Parameter) and tensor in self._ignored.params
            # An ignored parameter may be shared with a unit that has replaced it already.
            new = _materialized.get(tensor) if ignored else None
            if new is None:
                shape = tensor.shape if placement is None else torch.Size(placement.shape)
                new = _empty_like(tensor, shape)
            self._new[id(tensor)] = new
            self.origins[id(new)] = tensor
            if ignored:
                self._ignore(new, tensor)
        return self._new[id(tensor)]

    def _ignore(self, new: Tensor, origin: Tensor) -> None:
        self._ignored.add(new)
        _materialized[origin] = new


def _empty_like(tensor: Tensor, shape: torch.Size) -> Tensor:
    new = torch.empty_like(tensor, device="cpu")
    if shape != tensor.shape:
        new = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    return _param_like(new, tensor) if isinstance(tensor, nn.Parameter) else new


def _param_like(value: Tensor, other: Tensor) -> nn.Parameter:
    new = nn.Parameter(value, requires_grad=other.requires_grad)
    vars(new).update(vars(other))
    return new


def _reset_parameters(name: str, owner: nn.Module) -> Callable[[nn.Module], None]:
    if not callable(getattr(owner, "reset_parameters", None)):
        if not ops.runtime().executes():  # nothing reads the values
            return lambda target: None
        raise ValueError(
            f"{name or 'the module'} ({type(owner).__name__}) is on the meta device and has no "
            f"reset_parameters(). Pass param_init_fn to initialize it"
        )
    return lambda target: target.reset_parameters()  # type: ignore[operator]
