"""Give memory and values to modules that were built on the meta device.

Always true: a module that is not on the meta device is left alone, and so are modules inside units
that exist already. Values come from the caller's function or the module's ``reset_parameters``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

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
    for name, owner in own_modules(module, is_unit):
        tensors = (*owner._parameters.values(), *owner._buffers.values())
        if not any(tensor is not None and tensor.is_meta for tensor in tensors):
            continue
        initialize = param_init_fn or _reset_parameters(name, owner)
        owner.to_empty(device=torch.device("cpu"), recurse=False)
        initialize(owner)


def _reset_parameters(name: str, owner: nn.Module) -> Callable[[nn.Module], None]:
    if not callable(getattr(owner, "reset_parameters", None)):
        raise ValueError(
            f"{name or 'the module'} ({type(owner).__name__}) is on the meta device and has no "
            f"reset_parameters(). Pass param_init_fn to initialize it"
        )
    return lambda target: target.reset_parameters()  # type: ignore[operator]
