"""Make the state of optimizers before their first step is traced.

An optimizer of torch makes the state of a parameter (moments of zeros) in its first step. Traced
so, the zeros are constants of that step's program, and the second step, which takes the moments as
inputs, is another program: a model would be compiled twice. With state that is on the device
before, both are one program.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from xla_fsdp.fsdp.engine.param_guards import held_shape
from xla_fsdp.optim.traits import STEPS_SLICES_OF, StepWatch, params_of
from xla_fsdp.xla import ops

MAKERS = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adafactor,
    optim.Adam,  # and AdamW
    optim.Adamax,
    optim.Muon,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
"""Classes whose ``_init_group`` makes the state of parameters that have none."""


def make_state(optimizer: Optimizer) -> None:
    """Give every parameter of ``optimizer`` on an XLA device that is trained and has no state the
    state with which its first step begins: the values that the optimizer's own code makes, as
    buffers on the device.

    Steps do this by themselves, for parameters that have a gradient. Two programs remain for:
    optimizers that are not torch's own, or have a ``step`` of their own, as their first step may do
    what later ones do not (``torch_xla.amp.syncfree``, LBFGS, SparseAdam); SGD with dampening,
    which begins with the gradient; Adagrad, which makes its state when it is created; master
    weights of ``HighPrecisionOptimizer``, which are those of the first step; and what writes its
    state in an order of its own, unless this is called before the forward: ASGD, Rprop, Adafactor,
    and Adam with both ``amsgrad`` and ``capturable``. RAdam changes its formula at its sixth step.
    """
    own = getattr(optimizer, "make_state", None)
    if own is not None:  # whose parameters have values in a step only, or that steps another one
        own()
        return
    _fill(optimizer, [p for p in _missing(optimizer) if p.requires_grad])


def make_state_of(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """``make_state`` for those of ``params`` that have none."""
    wanted = {id(param) for param in params}
    _fill(optimizer, [param for param in _missing(optimizer) if id(param) in wanted])


def _missing(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters on an XLA device without state."""
    with torch._C.DisableTorchFunctionSubclass():  # no need to ask whether shards may be read
        return [
            param
            for param in params_of(optimizer)
            if param.device.type == "xla" and not optimizer.state.get(param)
        ]


def _fill(optimizer: Optimizer, params: list[Tensor]) -> None:
    """Make the state of ``params``, which have none."""
    if not params or not is_known(optimizer) or not ops.runtime().executes():
        return
    wanted = {id(param) for param in params}
    made: list[tuple[dict[str, Any], str, Tensor, float]] = []
    for group in optimizer.param_groups:
        own = [param for param in group["params"] if id(param) in wanted]
        for param, state in zip(own, _states(optimizer, group, own), strict=True):
            values = _numbers_of(optimizer, group, param) if state else {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_meta:
                    made.append((optimizer.state[param], name, value, values[name]))
                else:
                    optimizer.state[param][name] = value
    filled = functools.cache(_filled)
    tensors = ops.upload_all([filled(v.shape, v.dtype, number) for *_, v, number in made])
    for (state, name, *_), tensor in zip(made, tensors, strict=True):
        state[name] = tensor


def is_known(optimizer: Optimizer) -> bool:
    kind: Any = type(optimizer)
    if not isinstance(optimizer, (*MAKERS, optim.SGD)) or STEPS_SLICES_OF in vars(optimizer):
        return False
    methods = (inspect.unwrap(kind.step), kind._init_group)
    return all(method.__module__.startswith("torch.optim.") for method in methods)


def _states(
    optimizer: Optimizer, group: dict[str, Any], params: list[Tensor]
) -> list[dict[str, Any]]:
    """Return new states: of tensors on the device without values (on the meta device)."""
    if isinstance(optimizer, optim.SGD):
        if not group["momentum"] or group["dampening"]:
            return [{} for _ in params]  # its first momentum is the gradient, not a part of it
        return [{"momentum_buffer": _on_meta(each)} for each in params]
    stand_ins = [nn.Parameter(_on_meta(param)) for param in params]
    return _made(optimizer, group, stand_ins)


def _on_meta(param: Tensor) -> Tensor:
    return torch.empty(held_shape(param), dtype=param.dtype, device="meta")


def _made(
    optimizer: Optimizer, group: dict[str, Any], params: list[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return the states that the optimizer's own code makes for ``params``."""
    for param in params:
        param.grad = torch.zeros_like(param)
    copy: Any = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    copy.state = defaultdict(dict)
    lists = len(inspect.signature(copy._init_group).parameters) - 1
    with torch.no_grad():
        copy._init_group({**group, "params": params}, *([] for _ in range(lists)))
    return [copy.state.get(param, {}) for param in params]


def _numbers_of(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> dict[str, float]:
    """Return the number that all elements of each tensor of a state begin with."""
    if isinstance(optimizer, optim.SGD):
        return {"momentum_buffer": 0.0}
    shape = [min(size, 1) for size in held_shape(param)]
    small = nn.Parameter(torch.ones(shape, dtype=param.dtype))
    [state] = _made(optimizer, group, [small])
    return {
        name: value.flatten()[0].item() if value.numel() else 0.0
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _filled(shape: torch.Size, dtype: torch.dtype, number: float) -> Tensor:
    """Return a host tensor of one number; of zeros it takes no memory."""
    # Not torch.zeros, which would write to the pages.
    made = torch.from_numpy(np.zeros(shape.numel() * dtype.itemsize, np.uint8))
    made = made.view(dtype).view(shape) if shape.numel() else torch.empty(shape, dtype=dtype)
    return made.fill_(number) if number else made


@functools.cache
def make_missing_states() -> RemovableHandle:
    """Make, before the steps of all optimizers of the process from now on, the state of parameters
    that are stepped the first time: those without a gradient have none, as without it."""

    def before_step(optimizer: Optimizer) -> None:
        _fill(optimizer, [param for param in _missing(optimizer) if param.grad is not None])

    return register_optimizer_step_pre_hook(StepWatch(before_step))
