"""What is known of torch's optimizers: how they step, their first state, what they may be given.

An optimizer is *elementwise* if a step on slices of a parameter gives the same as on the parameter.
Unknown optimizers count as not elementwise: results are right, only memory is not saved.

The state of a parameter (moments of zeros) is made in its first step. Traced so, the zeros are
constants of that step's program, and the second step, which takes the moments as inputs, is another
program: a model would be compiled twice. With state that is on the device before, both are one.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xla_fsdp.fsdp.engine.param import FSDPParam, held_shape, known_shard, slices_without_grads
from xla_fsdp.fsdp.engine.shard_tensor import is_part
from xla_fsdp.fsdp.engine.thread import begin_step, end_step, package_code
from xla_fsdp.xla import ops

# Not Adafactor and Muon (rows, columns and norms of a matrix), nor LBFGS (inner products).
ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)

SYNCFREE = "torch_xla.amp.syncfree"

STEPS_SLICES_OF = "steps_slices_of"
"""Attribute of a copy of an optimizer, which steps slices of parameters: the optimizer."""


class StepWatch:
    """A hook of optimizers' steps that changes nothing: loops may step slices as without it."""

    def __init__(self, note: Callable[[optim.Optimizer], None]) -> None:
        self._note = note

    def __call__(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._note(optimizer)


def params_of(optimizer: optim.Optimizer) -> list[Any]:
    """Return the parameters in the groups of an optimizer, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def shallow_copy(
    optimizer: optim.Optimizer, state: Mapping[Any, Any], groups: list[dict[str, Any]]
) -> Any:
    """Return a copy of ``optimizer`` with this state and these groups."""
    # Not copy.copy, for which optimizers keep nothing but state, groups and defaults.
    copy: Any = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    copy.state, copy.param_groups = state, groups
    return copy


def device_options(optimizer_class: Callable[..., optim.Optimizer]) -> dict[str, Any]:
    """Return options with which an optimizer's step is traced as one program."""
    # Rprop otherwise selects elements by a mask, and ASGD reads its rate and its counts; both need
    # values, so XLA would run the program.
    return {"capturable": True} if optimizer_class in (optim.ASGD, optim.Rprop) else {}


def is_elementwise(optimizer_class: Callable[..., optim.Optimizer], options: Mapping) -> bool:
    """Return whether ``optimizer_class(params, **options)`` is elementwise.

    A class of another package can define a static method ``is_elementwise(options)``.
    """
    if isinstance(optimizer_class, partial):
        return is_elementwise(optimizer_class.func, {**optimizer_class.keywords, **options})
    own: Any = getattr(optimizer_class, "is_elementwise", None)
    if own is not None:
        return bool(own(options))
    module = getattr(optimizer_class, "__module__", "")
    return optimizer_class in ELEMENTWISE or module.startswith(SYNCFREE)


def steps_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return whether ``optimizer``, or the innermost that it wraps (``inner``), is elementwise."""
    inner = _innermost(optimizer)
    return is_elementwise(type(inner), inner.defaults)


def _innermost(optimizer: optim.Optimizer) -> optim.Optimizer:
    inner = getattr(optimizer, "inner", None)
    return optimizer if inner is None else _innermost(inner)


def acts_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return whether steps on a tensor are those on its halves, tried out in host memory by new
    optimizers of the same class and options; False if one cannot be made so."""
    optimizer = _innermost(optimizer)
    try:
        return all(
            _steps_halves_alike(type(optimizer), group, scale)
            for group in optimizer.param_groups
            for scale in (1.0, 1e-5)  # norms on both sides of what an optimizer clips them at
        )
    except Exception:  # whatever a foreign class raises for a tensor like this one
        return False


def _steps_halves_alike(
    optimizer_class: type[optim.Optimizer], group: Mapping[str, Any], scale: float
) -> bool:
    # Elements grow, so that the halves differ in every norm.
    values = scale * 1.5 ** torch.arange(24.0)
    values[::3] *= -1
    whole = _after_steps(optimizer_class, group, values.reshape(4, 6)).flatten()
    halves = [_after_steps(optimizer_class, group, half) for half in values.chunk(2)]
    return torch.allclose(whole, torch.cat(halves), rtol=1e-4)


def _after_steps(
    optimizer_class: type[optim.Optimizer], group: Mapping[str, Any], value: Tensor
) -> Tensor:
    """Return ``value`` after some steps with the options of ``group``, and gradients of its own."""
    param = torch.nn.Parameter(value.clone())
    options = {name: option for name, option in group.items() if name != "params"}
    if "lr" in options:
        options["lr"] = 0.1  # a scheduler may begin at 0
    taken = inspect.signature(optimizer_class).parameters.keys() & options.keys()
    # Not a copy of the user's optimizer: that may hold its parameters, or another optimizer.
    optimizer = optimizer_class([param], **{name: options[name] for name in taken})
    optimizer.param_groups[0].update(options)
    step = inspect.unwrap(optimizer_class.step)  # without the hooks that torch calls
    with torch.no_grad():
        for factor in (1.0, 1e-3, 10.0):
            param.grad = factor * (value + value.abs().sqrt())
            step(optimizer)
    return param.detach()


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` needs a closure, as that of LBFGS, which calls it as often
    as the values that it has seen ask for."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` takes ``found_inf``, a tensor on the device that says
    whether to skip the step. An optimizer around another one has a property of this name."""
    own = getattr(optimizer, "takes_found_inf", None)
    return "found_inf" in inspect.signature(optimizer.step).parameters if own is None else own


# ---------------------------------------------------------------- state before the first step


def make_state(optimizer: Optimizer, params: Iterable[Tensor] | None = None) -> None:
    """Give every trained parameter, or those of ``params``, on an XLA device that has no state the
    state with which its first step begins: the values that the optimizer's own code makes, as
    buffers on the device.

    Steps do this by themselves, for parameters that have a gradient. Two programs remain for
    optimizers that are not torch's own or have a ``step`` of their own; SGD with dampening, which
    begins with the gradient; Adagrad, which makes its state when it is created; master weights of
    ``HighPrecisionOptimizer``; and, unless this is called before the forward, what writes its state
    in an order of its own: ASGD, Rprop, Adafactor, and Adam with ``amsgrad`` and ``capturable``.
    """
    own = getattr(optimizer, "make_state", None)
    if own is not None:  # whose parameters have values in a step only, or that steps another one
        own()
        return
    wanted = None if params is None else {id(param) for param in params}
    missing = [p for p in _missing(optimizer) if p.requires_grad]
    _fill(optimizer, [p for p in missing if wanted is None or id(p) in wanted])


def _missing(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters on an XLA device without state."""
    with torch._C.DisableTorchFunctionSubclass():  # no need to ask whether shards may be read
        return [
            param
            for param in params_of(optimizer)
            if param.device.type == "xla" and not optimizer.state.get(param)
        ]


def _fill(optimizer: Optimizer, params: list[Tensor]) -> None:
    if not params or not is_known(optimizer) or not ops.runtime().executes():
        return
    wanted = {id(param) for param in params}
    made: list[tuple[dict[str, Any], str, Tensor, float]] = []
    with package_code():  # of a shard its own, not that of the whole parameter
        given = [
            (group, param, param.shape, param.dtype)
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in wanted
        ]
    for group, param, shape, dtype in given:
        state = _made(optimizer, group, torch.empty(shape, dtype=dtype, device="meta"))
        # All elements of a tensor begin with one number.
        small = torch.ones([min(size, 1) for size in shape], dtype=dtype)
        numbers = _made(optimizer, group, small)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_meta:
                number = numbers[name].flatten()[0].item() if value.numel() else 0.0
                made.append((optimizer.state[param], name, value, number))
            else:
                optimizer.state[param][name] = value
    if not made:
        return
    filled = functools.cache(_filled)
    tensors = ops.upload_all([filled(v.shape, v.dtype, number) for *_, v, number in made])
    for (state, name, *_), tensor in zip(made, tensors, strict=True):
        state[name] = tensor


def is_known(optimizer: Optimizer) -> bool:
    """Return whether torch's own ``step`` makes the state, by torch's own ``_init_group``."""
    kind: Any = type(optimizer)
    if not hasattr(kind, "_init_group") or STEPS_SLICES_OF in vars(optimizer):
        return False
    methods = (inspect.unwrap(kind.step), kind._init_group)
    return all(method.__module__.startswith("torch.optim.") for method in methods)


def _made(optimizer: Optimizer, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
    """Return the state that the optimizer's own code makes for a parameter like ``value``."""
    param = nn.Parameter(value)
    if isinstance(optimizer, optim.SGD):
        # Its first momentum is the gradient, which with dampening is not what zeros lead to.
        begins = group["momentum"] and not group["dampening"]
        return {"momentum_buffer": torch.zeros_like(value)} if begins else {}
    param.grad = torch.zeros_like(param)
    copy = shallow_copy(optimizer, defaultdict(dict), optimizer.param_groups)
    lists = len(inspect.signature(copy._init_group).parameters) - 1
    with torch.no_grad():
        copy._init_group({**group, "params": [param]}, *([] for _ in range(lists)))
    return dict(copy.state.get(param, {}))


def _filled(shape: torch.Size, dtype: torch.dtype, number: float) -> Tensor:
    """Return a host tensor of one number; of zeros it takes no memory."""
    # Not torch.zeros, which would write to the pages.
    made = torch.from_numpy(np.zeros(shape.numel() * dtype.itemsize, np.uint8))
    made = made.view(dtype).view(shape) if shape.numel() else torch.empty(shape, dtype=dtype)
    return made.fill_(number) if number else made


# ---------------------------------------------------------------- before each step

_num_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""How many parameters of an optimizer were checked before its first step, or after a change.
Process-wide, not by rank, as hooks of all optimizers are."""


def check_steps() -> None:
    """Check what optimizers are given, before the steps of all of the process from now on; those
    that have passed once more."""
    _num_checked.clear()
    watch_steps()


@functools.cache
def watch_steps() -> None:
    """Let all optimizers of the process, before their steps from now on, make the state of
    parameters that are stepped the first time, and be checked."""
    register_optimizer_step_pre_hook(StepWatch(_before_step))
    register_optimizer_step_post_hook(StepWatch(lambda optimizer: end_step()))


def _before_step(optimizer: Optimizer) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        missing = [param for param in _missing(optimizer) if param.grad is not None]
    _fill(optimizer, missing)
    params = params_of(optimizer)
    if _num_checked.get(optimizer) != len(params):
        _refuse_replaced(optimizer, params)
        _refuse_empty_groups(optimizer, params)
        _warn_unless_elementwise(optimizer, params)
        _num_checked[optimizer] = len(params)
    _refuse_partial_stacks(optimizer, params)
    begin_step()


def _refuse_replaced(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    pairs = [(param, known_shard(param)) for param in params]
    for known in [known for param, known in pairs if known and known.leaf is not param]:
        now = "shard" if known.slots.part is None else "stack of shards of scanned blocks"
        raise ValueError(
            f"{type(optimizer).__name__} holds {_names(known)} as it was before wrapping; FSDP "
            f"trains the {now} that replaced it, which this optimizer would never change. Create "
            f"the optimizer after wrapping, from model.parameters()"
        )


def _refuse_partial_stacks(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    for stack in params:
        if not getattr(stack, "is_stack", False) or stack.grad is None:
            continue
        if missing := slices_without_grads(stack, held_shape(stack)[0]):
            known = known_shard(stack)
            name = "a stack" if known is None else f"the stack of {_names(known)}"
            raise RuntimeError(
                f"blocks {', '.join(map(str, missing))} have no gradient in {name}, and others "
                f"have: backward has not used them (layers that are dropped, detached, run "
                f"without gradients, or never called). A stack is stepped as one, so "
                f"{type(optimizer).__name__} would decay and move these, too. Give each block "
                f'parameters of its own: parallelize(..., "plain"), Recipe(stacked=False), or '
                f"scan_layers without stacked"
            )


def _refuse_empty_groups(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    # A group chosen by name, as for weight decay, finds no parameter among flat shards.
    empty = [i for i, group in enumerate(optimizer.param_groups) if not group["params"]]
    known = map(known_shard, params if empty else ())
    flat = next((param for param in known if param is not None and param.is_flat), None)
    if flat is not None:
        names = ", ".join(original.names[0] for original in flat.originals)
        raise ValueError(
            f"group {empty[0]} of {type(optimizer).__name__} is empty, and {flat.key} joins "
            f"{names}: with flatten_parameters=True an optimizer only sees whole units, so its "
            f"groups cannot tell their parameters apart. Set flatten_parameters=False to have "
            f"groups by parameter, or make one group"
        )


def _warn_unless_elementwise(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    # An elementwise optimizer steps a shard, or a stack, as it would step the whole parameter.
    if getattr(optimizer, "steps_whole_parameters", False) or steps_elementwise(optimizer):
        return
    parts = [param for param in params if not _is_whole(param)]
    if parts and not acts_elementwise(optimizer):
        name = type(optimizer).__name__
        stacks = [param for param in parts if getattr(param, "is_stack", False)]
        blocks = held_shape(stacks[0])[0] if stacks else 0
        given = f"stacks, each of one parameter of {blocks} blocks" if stacks else "shards"
        by = (
            f"Leave the model unsharded, and step it by xla_fsdp.optim.ZeroRedundancyOptimizer("
            f"params, {name}, ...), which takes a closure,"
            if needs_closure(optimizer)
            else f"Step these by xla_fsdp.optim.WholeParameterOptimizer(params, {name}, ...),"
        )
        warnings.warn(
            f"{name} is not known to treat every element of a parameter by itself, and was given "
            f"{given}: its steps may differ from those of whole parameters. {by} or say by a "
            f"static method is_elementwise(options) of its class that they do not",
            stacklevel=5,
        )


def _is_whole(param: Tensor) -> bool:
    """Return whether ``param`` is a parameter of the original model, as it was there."""
    if getattr(param, "is_stack", False) or is_part(param):
        return False
    known = known_shard(param)
    return known is None or [held_shape(param)] == [each.whole_shape for each in known.originals]


def _names(param: FSDPParam) -> str:
    # For a flat shard it is not known which of its originals the optimizer holds.
    names = [original.names[0] for original in param.originals]
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
