"""An optimizer's state by the keys of the parameters it belongs to, out of torch and back into it.

A *key* names a parameter in the sharded model's state dict (of a flattened unit, ``flat_param_0``).
What an optimizer keeps for a stack of several units' parameters is taken apart when it is read, and
stacked when it is written: states are those of single parameters.

Invariants: everything is checked before anything is changed, and all problems are raised as one
``ValueError``; states come back with the dtype, shape and device that they had (torch's own
``load_state_dict`` casts them to the parameter's dtype). Hyperparameters come from what is written,
as in torch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from xla_fsdp.checkpoint.format import GroupRecord, OptimizerState, StateEntry, StateKind
from xla_fsdp.fsdp.engine.optimizer_traits import takes_found_inf
from xla_fsdp.fsdp.engine.param import StackPart
from xla_fsdp.fsdp.engine.registry import known_shard
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.fsdp.engine.stacked_params import is_stack, part_of

PLAIN = (bool, int, float, str, type(None))
NOT_OPTIONS = ("params", "param_names")
SET_BY_SCHEDULERS = "initial_lr"


def params_by_key(
    sharded: Iterable[tuple[str, Tensor]], named: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Return every parameter that an optimizer may hold, once, under its key.

    Args:
        sharded: what ``model.get_original_names_and_sharded_parameters()`` returns. Of several
            names for one shard the first is its key, as in ``get_shard_metadata()``.
        named: ``model.named_parameters()``, for those that are not sharded.
    """
    keys: dict[int, tuple[str, Tensor]] = {}
    for name, param in (*sharded, *named):
        if not is_stack(param):  # its slices are there
            keys.setdefault(id(param), (name, param))
    return dict(keys.values())


class OptimizerParams:
    """What an optimizer may hold of a model's parameters: its *leaves*, which are parameters or
    stacks of them.

    Args:
        params: by key; of one that is in a stack, its slice.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._leaves = {key: _leaf_of(param) for key, param in params.items()}
        self._keys: dict[int, list[str]] = defaultdict(list)
        for key in sorted(self._leaves, key=lambda key: self.number(key) or 0):
            self._keys[id(self.leaf(key))].append(key)

    @property
    def leaves(self) -> list[Tensor]:
        """Each once."""
        return list({id(leaf): leaf for leaf, _ in self._leaves.values()}.values())

    def leaf(self, key: str) -> Tensor:
        """Return what the optimizer may hold of the parameter ``key``."""
        return self._leaves[key][0]

    def number(self, key: str) -> int | None:
        """Return which slice of a stack the parameter is."""
        part = self._leaves[key][1]
        return None if part is None else part.number

    def keys(self, *leaves: Tensor) -> list[str]:
        """Return keys of the parameters in these leaves, in order; none of those of no model."""
        return [key for leaf in leaves for key in self._keys.get(id(leaf), [])]


def _leaf_of(param: Tensor) -> tuple[Tensor, StackPart | None]:
    known = known_shard(param)
    if known is None or known.slots.part is None or is_stack(param):
        return param, None
    return known.leaf, known.slots.part


# ---------------------------------------------------------------- reading


def read_optimizer(optimizer: Optimizer, params: Mapping[str, Tensor]) -> OptimizerState:
    """Return all that ``optimizer`` holds; the tensors are its own, detached, not copies.

    Args:
        optimizer: any that keeps tensors and plain values.
        params: the model's, by key, from ``params_by_key``. They need not all be in the optimizer.

    Raises:
        ValueError: with every line of ``find_problems``.
    """
    raise_if(find_problems(optimizer, params))
    known = OptimizerParams(params)
    groups = tuple(
        GroupRecord(tuple(known.keys(*group["params"])), _options(group))
        for group in optimizer.param_groups
    )
    by_leaf = {
        id(leaf): _entries(leaf, state)
        for leaf in known.leaves
        if (state := optimizer.state.get(leaf))
    }
    states = {
        key: _entries_of_slice(by_leaf[at], known.number(key))
        for key in params
        if (at := id(known.leaf(key))) in by_leaf
    }
    return OptimizerState(groups, states)


def find_problems(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[str]:
    """Return why this optimizer's state cannot be read or written, one line each."""
    known = OptimizerParams(params)
    problems = [
        f"group {index} of {type(optimizer).__name__} has a parameter of shape "
        f"{tuple(param.shape)} that is not in the model. Create the optimizer after wrapping, from "
        f"model.parameters()"
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if not known.keys(param)
    ]
    for leaf in known.leaves:
        problems += _state_problems(optimizer, leaf, known.keys(leaf)[0])
    for index, group in enumerate(optimizer.param_groups):
        problems += _option_problems(index, group)
    return problems


def _state_problems(optimizer: Optimizer, leaf: Tensor, key: str) -> Iterator[str]:
    name_of_class, state = type(optimizer).__name__, optimizer.state.get(leaf, {})
    for name, value in state.items():
        if not isinstance(value, (Tensor, *PLAIN)):
            yield (
                f"{name_of_class} keeps a {type(value).__name__} as {name!r} of {key}; expected "
                f"tensors and plain values only"
            )
    for name, entry in _entries(leaf, state).items() if is_stack(leaf) else ():
        if entry.kind in (StateKind.DEVICE, StateKind.HOST) and not _is_number(entry.value):
            yield (
                f"{name_of_class} keeps {name!r} of shape {tuple(entry.value.shape)} for the stack "
                f"that {key} is in, of shape {tuple(leaf.shape)}, which cannot be taken apart by "
                f"block. Scan the blocks without stacked"
            )


def _option_problems(index: int, group: Mapping[str, Any]) -> Iterator[str]:
    for name, value in group.items():
        if name in NOT_OPTIONS:
            continue
        for part in value if isinstance(value, list | tuple) else [value]:
            scalar = isinstance(part, Tensor) and part.numel() == 1
            if not (scalar or isinstance(part, PLAIN)):
                yield (
                    f"group {index} has a {type(part).__name__} in {name!r}; expected numbers, "
                    f"strings, one-element tensors, and lists or tuples of them"
                )


def _entries(param: Tensor, state: Mapping[str, Any]) -> dict[str, StateEntry]:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    # Where one tensor has a shape of its own, as in Adafactor, another may have the shard's by
    # chance (statistics of columns beside a shard of one row), so none is taken to be cut like it.
    alike = all(value.shape == param.shape or _is_number(value) for value in tensors)
    cut = is_sharded(param) and alike
    return {name: _entry(param, value, cut) for name, value in state.items()}


def _entry(param: Tensor, value: Any, cut: bool) -> StateEntry:
    if not isinstance(value, Tensor):
        return StateEntry(StateKind.VALUE, value)
    if cut and value.shape == param.shape and value.dim() > 0:
        return StateEntry(StateKind.SHARD, value.detach())
    on_host = value.device.type == "cpu" and param.device.type != "cpu"
    return StateEntry(StateKind.HOST if on_host else StateKind.DEVICE, value.detach())


def _is_number(value: Tensor) -> bool:
    # Also the empty tensor that torch_xla's optimizers keep for what they do not use.
    return value.dim() == 0 or value.shape in ((0,), (1,))


def _entries_of_slice(entries: dict[str, StateEntry], number: int | None) -> dict[str, StateEntry]:
    """Return the states of one slice, of what is kept for a stack."""
    if number is None:
        return entries
    return {
        name: replace(e, value=part_of(e.value, number)) if e.kind is StateKind.SHARD else e
        for name, e in entries.items()
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in group.items() if name not in NOT_OPTIONS}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # a learning rate may be one
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


# ---------------------------------------------------------------- writing


@torch.no_grad()
def write_optimizer(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> None:
    """Replace all that ``optimizer`` holds. Works before its first step, too.

    Args:
        optimizer: over the same parameters in the same groups as ``state``.
        params: the model's, by key.
        state: tensors of kind ``SHARD`` must have the shape of the parameter.

    Raises:
        ValueError: with every problem found; nothing has been changed then.
    """
    placed = torch_state_dict(optimizer, params, state)
    # Through torch's own method, for the sake of hooks and of what subclasses do in it.
    optimizer.load_state_dict(
        {**placed, "state": {index: dict(values) for index, values in placed["state"].items()}}
    )
    order = [param for group in optimizer.param_groups for param in group["params"]]
    for index, values in placed["state"].items():
        optimizer.state[order[index]].update(values)  # without the casts


def torch_state_dict(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> dict[str, Any]:
    """Return ``state`` as ``optimizer.load_state_dict`` takes it: copies, by number.

    Arguments and errors are those of ``write_optimizer``.
    """
    raise_if(find_write_problems(optimizer, params, state))
    known = OptimizerParams(params)
    order = [param for group in optimizer.param_groups for param in group["params"]]
    found = [[state.states.get(key) for key in known.keys(param)] for param in order]
    return {
        "param_groups": _torch_groups(optimizer, state),
        "state": {
            index: {
                name: _placed([each[name] for each in entries if each], param)
                for name in entries[0] or ()
            }
            for index, (param, entries) in enumerate(zip(order, found, strict=True))
            if entries[0] is not None
        },
    }


def find_write_problems(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> list[str]:
    """Return why ``state`` cannot be written to this optimizer, one line each."""
    return find_problems(optimizer, params) or list(_mismatches(optimizer, params, state))


def _mismatches(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> Iterator[str]:
    known = OptimizerParams(params)
    live = [set(known.keys(*group["params"])) for group in optimizer.param_groups]
    if len(live) != len(state.groups):
        yield (
            f"the state has {len(state.groups)} parameter groups, the optimizer {len(live)}; "
            f"create it with the same groups"
        )
        return
    for index, (here, group) in enumerate(zip(live, state.groups, strict=True)):
        there = set(group.params)
        yield from (
            f"{key} is in group {index} of the state, but not of the optimizer"
            for key in sorted(there - here)
        )
        yield from (
            f"{key} is in group {index} of the optimizer, but not of the state"
            for key in sorted(here - there)
        )
        yield from _foreign_options(index, optimizer, group)
    yield from _entry_mismatches(set().union(*live), params, state)
    for leaf in known.leaves:
        if is_stack(leaf):
            yield from _stack_mismatches(known.keys(leaf), state)


def _foreign_options(index: int, optimizer: Optimizer, group: GroupRecord) -> Iterator[str]:
    # Another class of optimizer has other hyperparameters; a later torch may only add some.
    here = set(optimizer.param_groups[index]) - {*NOT_OPTIONS, SET_BY_SCHEDULERS}
    there = set(group.options) - {SET_BY_SCHEDULERS}
    if here - there and there - here:
        yield (
            f"group {index} of the state is of another kind of optimizer: it has "
            f"{', '.join(sorted(there - here))}, {type(optimizer).__name__} has "
            f"{', '.join(sorted(here - there))}"
        )


def _entry_mismatches(
    held: set[str], params: Mapping[str, Tensor], state: OptimizerState
) -> Iterator[str]:
    for key, entries in state.states.items():
        if key not in held:
            yield f"the state has entries for {key}, which is in no group of the optimizer"
            continue
        for name, entry in entries.items():
            if entry.kind is StateKind.SHARD and entry.value.shape != params[key].shape:
                yield (
                    f"{name} of {key} has shape {tuple(entry.value.shape)}, expected that of the "
                    f"parameter, {tuple(params[key].shape)}"
                )


def _stack_mismatches(keys: Sequence[str], state: OptimizerState) -> Iterator[str]:
    """Find what is not there, or not alike, for all parameters in a stack."""
    first = state.states.get(keys[0], {})
    for key in keys[1:]:
        own = state.states.get(key, {})
        for name in sorted({*first, *own}):
            if name not in own or name not in first:
                without, other = (key, keys[0]) if name not in own else (keys[0], key)
                yield f"the state has {name!r} for {other}, but not for {without} of the same stack"
            elif own[name].kind is not StateKind.SHARD and not same_value(
                first[name].value, own[name].value
            ):
                yield (
                    f"{name!r} differs between {keys[0]} and {key}, which are in one stack and "
                    f"have one value; load this state without stacked"
                )


def _placed(entries: Sequence[StateEntry], param: Tensor) -> Any:
    """Return a copy where a state belongs, of all slices if ``param`` is a stack."""
    entry = entries[0]
    if not isinstance(entry.value, Tensor):
        return entry.value
    if entry.kind is StateKind.SHARD and is_stack(param):
        return torch.stack([each.value.detach() for each in entries]).to(param.device)
    device = "cpu" if entry.kind is StateKind.HOST else param.device
    return entry.value.detach().to(device=device, copy=True)


def _torch_groups(optimizer: Optimizer, state: OptimizerState) -> list[dict[str, Any]]:
    """Return groups as ``Optimizer.load_state_dict`` wants them: parameters are numbers."""
    groups, at = [], 0
    for live, saved in zip(optimizer.param_groups, state.groups, strict=True):
        options = {name: value for name, value in live.items() if name != "params"}
        for name, value in saved.options.items():
            options[name] = _as_in(live.get(name), value)
        groups.append({**options, "params": list(range(at, at + len(live["params"])))})
        at += len(live["params"])
    return groups


def _as_in(live: Any, value: Any) -> Any:
    """Return a plain value as the tensor or tuple that the optimizer has for it."""
    if isinstance(live, Tensor):
        return torch.full_like(live, value)
    if isinstance(live, tuple) and isinstance(value, list) and len(live) == len(value):
        return tuple(_as_in(*pair) for pair in zip(live, value, strict=True))
    return value


# ---------------------------------------------------------------- making


@torch.no_grad()
def create_state(optimizer: Optimizer, *, by_scaler: bool = True) -> None:
    """Make the state that an optimizer otherwise creates in its first step, for every trainable
    parameter that has none. Parameters and gradients stay as they are.

    A step is taken for it, with zero gradients and a learning rate of 0; what counts steps is set
    back to 0. An SGD with dampening then starts from a momentum of zero, which it does not do by
    itself.

    Args:
        optimizer: any.
        by_scaler: for an optimizer that a gradient scaler tells on the device whether to step:
            make what it keeps then, not what it keeps without.

    Raises:
        ValueError: if a step needs a closure.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    waiting = [param for param in params if param.requires_grad and not optimizer.state.get(param)]
    if not waiting:
        return
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} cannot make its state ahead of a step, which needs a "
            f"closure; make a step before its state is loaded"
        )
    values = [param.clone() for param in waiting]
    with _learning_rate_zero(optimizer, params):
        for param in waiting:
            param.grad = torch.zeros_like(param)
        if by_scaler and takes_found_inf(optimizer):
            found_inf = torch.zeros((), device=waiting[0].device)
            optimizer.step(found_inf=found_inf)  # type: ignore[call-overload]
        else:
            optimizer.step()
    for param, value in zip(waiting, values, strict=True):
        param.copy_(value)
        state = optimizer.state[param]
        if "step" in state:
            state["step"] = state["step"] * 0


@contextlib.contextmanager
def _learning_rate_zero(optimizer: Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Inside, no parameter has a gradient and all learning rates are 0."""
    grads = [param.grad for param in params]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for param in params:
        param.grad = None
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, rate in rates:
            group["lr"] = rate


# ---------------------------------------------------------------- shared with full_optim


def same_value(a: Any, b: Any) -> bool:
    """Return whether two states are equal, wherever they are."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())
    return bool(a == b)


def raise_if(problems: list[str]) -> None:
    """Raise one ``ValueError`` for all problems, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))
