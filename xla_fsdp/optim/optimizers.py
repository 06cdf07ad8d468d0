"""What is known of torch's optimizers: how they step, their first state, and their state dicts.

An optimizer is *elementwise* if a step on slices of a parameter gives the same as on the parameter.
Unknown optimizers count as not elementwise: results are right, only memory is not saved.

The state of a parameter (moments of zeros) is made in its first step. Traced so, the zeros are
constants of that step's program, and the second step, which takes the moments as inputs, is another
program: a model would be compiled twice. With state that is on the device before, both are one.

State dicts know parameters by position. torch_xla's FSDP lists the parameters of an outer unit
before those of inner ones; here they come in the order of the model. So the state of a job of
torch_xla belongs to other parameters, unless the order is that of the model's file, which is noted
when that is loaded, until the first step. Nothing has changed when an error is raised.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from xla_fsdp.fsdp.engine.load_hooks import (
    PLACES,
    Places,
    places_of,
    refuse_other_places,
    upstream_lock,
    upstream_order,
)
from xla_fsdp.fsdp.engine.param import FSDPParam, held_shape, known_group, known_shard
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
    """A hook of optimizers' steps that changes nothing, so that loops may step slices as without
    it; it calls ``note`` with the optimizer."""

    def __init__(self, note: Callable[[optim.Optimizer], None]) -> None:
        self._note = note

    def __call__(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._note(optimizer)


def params_of(optimizer: optim.Optimizer) -> list[Any]:
    """Return the parameters in the groups of an optimizer, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


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
    optimizers of the same class and options.

    For classes that are not known; False if one cannot be made so, or cannot step such tensors.
    """
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
        with torch._C.DisableTorchFunctionSubclass():
            missing = [param for param in _missing(optimizer) if param.grad is not None]
        _fill(optimizer, missing)

    return register_optimizer_step_pre_hook(StepWatch(before_step))


# ---------------------------------------------------------------- state dicts

_translated: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""The last place of the order in which an optimizer has loaded state."""


class _Own(threading.local):
    order = False


_own = _Own()


def forget_order(params: Iterable[Tensor]) -> None:
    """State is in this package's order from now on, as these are stepped."""
    if not upstream_order:
        return
    with upstream_lock:
        for param in params:
            if (known := known_shard(param)) is not None:
                upstream_order.pop(known, None)


@contextmanager
def in_own_order() -> Iterator[None]:
    """State dicts that this rank loads in the block are in this package's order, and checked."""
    before, _own.order = _own.order, True
    try:
        yield
    finally:
        _own.order = before


def guard_state_dicts() -> None:
    """Let every optimizer's state dict tell which shards it is of from now on, and its
    ``load_state_dict`` check and translate."""
    read: Callable[..., dict[str, Any]] = Optimizer.state_dict
    load: Callable[..., None] = Optimizer.load_state_dict

    @wraps(read)
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        state, places = read(optimizer), _places_in(optimizer)
        return {**state, PLACES: places} if places else state

    @wraps(load)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        return load(optimizer, fitting(optimizer, state_dict))

    # Not hooks, which each optimizer would need: torch has none for all of them.
    Optimizer.state_dict = state_dict  # type: ignore[method-assign, assignment]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]


def _places_in(optimizer: Optimizer) -> Places:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = [(known_shard(param), known_group(param)) for param in params]
    return places_of(
        (param, group.collectives_of(param))
        for param, group in known
        if param is not None and group is not None
    )


def fitting(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict by position in the order of the optimizer's parameters.

    Raises:
        ValueError: if it is of another rank's shards, the order cannot be told, or a tensor has
            another shape than its parameter.
    """
    live = [group["params"] for group in optimizer.param_groups]
    groups = state_dict.get("param_groups", ())
    if _own.order or [len(own) for own in live] != [len(g["params"]) for g in groups]:
        return state_dict  # of another number, torch tells
    refuse_other_places(state_dict.get(PLACES), _places_in(optimizer), "the optimizer's state dict")
    numbers = [list(group["params"]) for group in groups]
    known = [[known_shard(param) for param in own] for own in live]
    if not any(each is not None for own in known for each in own):
        return state_dict
    orders = [_order(own) for own in known]
    moved = any(order is None or order != sorted(order) for order in orders)
    if moved and not _is_own(optimizer, state_dict["state"]):
        last = max(upstream_order.get(each, 0) for own in known for each in own if each is not None)
        if _translated.get(optimizer) == last or None in orders:
            raise ValueError(_UNKNOWN_ORDER)
        numbers = [[own[i] for i in o or ()] for own, o in zip(numbers, orders, strict=True)]
        pairs = zip(groups, numbers, strict=True)
        state_dict = {**state_dict, "param_groups": [{**g, "params": n} for g, n in pairs]}
        _translated[optimizer] = last
    if problems := list(_misfits(optimizer, live, numbers, state_dict["state"])):
        raise ValueError("\n".join([*problems, _OTHER_ORDER]))
    return state_dict


def _order(params: Sequence[FSDPParam | None]) -> list[int] | None:
    """Return the place in the file's order of each parameter of a group.

    None if it differs from the group's, but is not known of all.
    """
    known = [each for each in params if each is not None]
    places = [upstream_order[each] for each in known if each in upstream_order]
    if places == sorted(places):
        return list(range(len(params)))
    if len(places) < len(params):
        return None
    ranked = {place: i for i, place in enumerate(sorted(places))}
    return [ranked[place] for place in places]


def _is_own(optimizer: Optimizer, state: Mapping[Any, Any]) -> bool:
    """Return whether a state dict holds the very tensors of the optimizer."""
    own = {id(v) for each in optimizer.state.values() for v in each.values()}
    return bool(own) and all(
        id(value) in own
        for each in state.values()
        for value in each.values()
        if isinstance(value, Tensor)
    )


def _misfits(
    optimizer: Optimizer,
    live: Sequence[Sequence[Tensor]],
    numbers: Sequence[Sequence[Any]],
    state: Mapping[Any, Mapping[str, Any]],
) -> Iterator[str]:
    if not steps_elementwise(optimizer):  # whose state may have any shape
        return
    for index, (own, group) in enumerate(zip(live, numbers, strict=True)):
        for place, (param, number) in enumerate(zip(own, group, strict=True)):
            for name, value in state.get(number, {}).items():
                is_wide = isinstance(value, Tensor) and value.shape not in ((), (0,), (1,))
                if is_wide and known_shard(param) is not None and value.shape != held_shape(param):
                    yield (
                        f"{name} of parameter {place} in group {index} has shape "
                        f"{tuple(value.shape)}, but the parameter {tuple(held_shape(param))}"
                    )


_OTHER_ORDER = (
    "The state dict is of other shards, or of parameters in another order (torch's optimizers know "
    "them by position). State of a job of torch_xla's FSDP is translated if the model's state dict "
    "of the same file is loaded just before; other state is loaded by names: by load_checkpoint, "
    "or load_optim_state_dict of what optim_state_dict has returned"
)
_UNKNOWN_ORDER = (
    "The order of the parameters in this state dict cannot be told: torch_xla's FSDP, from whose "
    "file the model was loaded, lists those of an outer unit first. Create the optimizer from "
    "model.parameters(), load the model's state dict and then, once, the optimizer's"
)
