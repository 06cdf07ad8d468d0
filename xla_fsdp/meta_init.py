"""Give memory and values to modules that were built on the meta device.

Always true: a module that is not on the meta device is left alone, and so are modules inside units
that exist already. Values come from the caller's function or the module's ``reset_parameters``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.ownership import own_modules


def materialize(
    module: nn.Module,
    is_unit: Callable[[nn.Module], bool],
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Allocate in host memory what ``module`` holds on the meta device, and initialize it.

    Args:
        module: the module of a new unit.
        is_unit: tells the units inside it.
        param_init_fn: called with each module that directly holds meta tensors; default is the
            module's own ``reset_parameters``.

    Raises:
        ValueError: if neither exists for a module.
    """
    allocated: dict[int, Tensor] = {}  # by the meta tensor's id: tied parameters stay one
    for name, owner in own_modules(module, is_unit):
        if _meta_tensors(owner):
            initialize = param_init_fn or _reset_parameters(name, owner)
            _allocate(owner, allocated)
            initialize(owner)


def _meta_tensors(owner: nn.Module) -> list[Tensor]:
    tensors = (*owner._parameters.values(), *owner._buffers.values())
    return [tensor for tensor in tensors if tensor is not None and tensor.is_meta]


def _allocate(owner: nn.Module, allocated: dict[int, Tensor]) -> None:
    """Host memory for what is on the meta device, and only that."""
    registries: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
    for registry in registries:
        for name, tensor in registry.items():
            if tensor is not None and tensor.is_meta:
                registry[name] = allocated.setdefault(id(tensor), _like(tensor))


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _reset_parameters(name: str, owner: nn.Module) -> Callable[[nn.Module], None]:
    if not callable(getattr(owner, "reset_parameters", None)):
        raise ValueError(
            f"{name or 'the module'} ({type(owner).__name__}) is on the meta device and has no "
            f"reset_parameters(). Pass param_init_fn to initialize it"
        )
    return lambda target: target.reset_parameters()  # type: ignore[operator]
