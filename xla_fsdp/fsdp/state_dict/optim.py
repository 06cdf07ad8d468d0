"""What an optimizer holds, by the names of the parameters it belongs to.

Words: a *key* names a parameter in the state dict (of a flattened unit, ``flat_param_0``); an
*entry* is one value that the optimizer keeps for one parameter; its *place* says what it is: cut
like the parameter (``SHARD``), or whole, on the device or on the host.
Always true: these are data. Reading them out of an optimizer, and back into it, is
``optim_state``'s business.

An optimizer's state in the words of the checkpoint format, and back.

Words: see ``optim_entries`` for places and entries, ``checkpoint.optimizer_format`` for records.
Always true: converting there and back changes nothing. Reading and writing an optimizer is
``optim_state``'s business, cutting state anew for other ranks ``checkpoint.reshard``'s.

An optimizer's entries for stacks, as those of the single parameters in them, and back.

Words: see ``optim_entries`` and ``shard_stacks``. Always true: what is cut like a stack has a slice
for each parameter; what is one number for a stack is so for all of them, and can only be written if
it is the same for all. ``optim_state`` decides when.

An optimizer's state by the names of the parameters it belongs to, out of torch and back into it.

Words: see ``optim_entries``.
Always true: everything is checked before anything is changed, and all problems are raised as one
``ValueError``; entries come back with the dtype, shape and place that they had (torch's own
``load_state_dict`` casts them to the parameter's dtype). Hyperparameters come from what is
written, as in torch. What an optimizer keeps for a stack is taken apart when it is read, and
stacked when it is written (``stacked_entries``): entries are those of single parameters.
Cutting entries anew for other ranks is ``checkpoint.reshard``'s business, files are
``checkpoint``'s.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from xla_fsdp.checkpoint.optimizer_format import GroupRecord, OptimizerRecord, StateRecord
from xla_fsdp.checkpoint.reshard import CutState
from xla_fsdp.fsdp.engine.optimizer_traits import takes_found_inf
from xla_fsdp.fsdp.engine.param import StackPart
from xla_fsdp.fsdp.engine.registry import known_shard
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.fsdp.engine.stacked_params import is_stack, part_of


class Place(Enum):
    """Where an entry lives, and whether other ranks hold other parts of it."""

    SHARD = "shard"
    """A tensor of the shard's shape, cut like the parameter."""
    DEVICE = "device"
    """A whole tensor on the parameter's device."""
    HOST = "host"
    """A tensor in host memory, or a plain value."""


@dataclass(frozen=True)
class Entry:
    """One value of an optimizer for one parameter: a tensor or a plain value."""

    place: Place
    value: Any


@dataclass(frozen=True)
class GroupState:
    """One parameter group: hyperparameters as plain values, and the keys of its parameters."""

    options: dict[str, Any]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerState:
    """All that an optimizer holds.

    Args:
        groups: in the optimizer's order.
        entries: key, then name of the state (``exp_avg``, ``step``), to its entry. Parameters
            without state, as all are before the first step, are left out.
    """

    groups: tuple[GroupState, ...]
    entries: dict[str, dict[str, Entry]]


def is_number(value: Tensor) -> bool:
    """One number, or the empty tensor that torch_xla's optimizers keep for what they do not use."""
    return value.dim() == 0 or value.shape in ((0,), (1,))


def record_of(state: OptimizerState) -> OptimizerRecord:
    """What is written about ``state``, beside its tensors."""
    return OptimizerRecord(
        groups=tuple(GroupRecord(group.keys, group.options) for group in state.groups),
        states={key: _state_record(entries) for key, entries in state.entries.items()},
    )


def tensors_of(state: OptimizerState) -> dict[str, dict[str, Tensor]]:
    """The tensors of ``state``, by key and name."""
    return {
        key: {name: e.value for name, e in entries.items() if isinstance(e.value, Tensor)}
        for key, entries in state.entries.items()
    }


def state_from(
    groups: Iterable[GroupRecord],
    states: Mapping[str, Mapping[str, CutState]],
    params: Mapping[str, Tensor],
) -> OptimizerState:
    """The state that was cut for a rank, in the shapes of its parameters."""
    entries = {
        key: {name: _entry_of_cut(state, params[key]) for name, state in each.items()}
        for key, each in states.items()
    }
    return OptimizerState(
        tuple(GroupState(dict(group.options), group.params) for group in groups), entries
    )


def _state_record(entries: Mapping[str, Entry]) -> StateRecord:
    tensors = {name: e for name, e in entries.items() if isinstance(e.value, Tensor)}
    whole = [name for name, entry in tensors.items() if entry.place is not Place.SHARD]
    return StateRecord(
        sharded=tuple(name for name in tensors if name not in whole),
        whole=tuple(whole),
        values={name: e.value for name, e in entries.items() if name not in tensors},
        host=tuple(name for name in whole if tensors[name].place is Place.HOST),
    )


def _entry_of_cut(state: CutState, param: Tensor) -> Entry:
    place = Place(state.kind.value)
    value = state.value.reshape(param.shape) if place is Place.SHARD else state.value
    return Entry(place, value)


class Holding:
    """What an optimizer holds of a model's parameters.

    Args:
        params: by key; of one that is in a stack, its slice, as ``slice_of`` gives it.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._places = {key: _place_of(param) for key, param in params.items()}
        self._keys: dict[int, list[str]] = defaultdict(list)
        by_number = sorted(self._places, key=lambda key: self.number(key) or 0)
        for key in by_number:
            self._keys[id(self.leaf(key))].append(key)

    @property
    def leaves(self) -> list[Tensor]:
        """Each once."""
        return list({id(leaf): leaf for leaf, _ in self._places.values()}.values())

    def leaf(self, key: str) -> Tensor:
        """What the optimizer may hold of the parameter ``key``."""
        return self._places[key][0]

    def number(self, key: str) -> int | None:
        """Which slice of a stack the parameter is."""
        part = self._places[key][1]
        return None if part is None else part.number

    def keys(self, leaf: Tensor) -> list[str]:
        """Of the parameters that are in ``leaf``, in order; none if it is not of the model."""
        return self._keys.get(id(leaf), [])

    def all_keys(self, leaves: Iterable[Tensor]) -> list[str]:
        """Of the parameters that are in these."""
        return [key for leaf in leaves for key in self.keys(leaf)]


def _place_of(param: Tensor) -> tuple[Tensor, StackPart | None]:
    known = known_shard(param)
    if known is None or known.slots.part is None or is_stack(param):
        return param, None
    return known.leaf, known.slots.part


def part_of_entries(entries: dict[str, Entry], number: int | None) -> dict[str, Entry]:
    """Those of one slice, of what is kept for a stack."""
    if number is None:
        return entries
    return {
        name: Entry(each.place, part_of(each.value, number)) if each.place is Place.SHARD else each
        for name, each in entries.items()
    }


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """The inverse, of one entry's values for all slices, in order; a copy."""
    return torch.stack([value.detach() for value in values]).to(device)


def find_stack_problems(
    optimizer: str, key: str, stack: Tensor, entries: Mapping[str, Entry]
) -> Iterator[str]:
    """Why what an optimizer keeps for a stack cannot be taken apart, one line each.

    Args:
        optimizer: what it is called.
        key: of the first parameter in the stack.
        stack: the parameters.
        entries: of the whole stack.
    """
    for name, entry in entries.items():
        value = entry.value
        if entry.place is not Place.SHARD and isinstance(value, Tensor) and not is_number(value):
            yield (
                f"{optimizer} keeps {name!r} of shape {tuple(value.shape)} for the stack that "
                f"{key} is in, of shape {tuple(stack.shape)}, which cannot be taken apart by "
                f"block. Scan the blocks without stacked"
            )


def find_stack_mismatches(keys: Sequence[str], state: OptimizerState) -> Iterator[str]:
    """What is written to a stack must be there, and alike, for all that are in it."""
    first = state.entries.get(keys[0], {})
    for key in keys[1:]:
        own = state.entries.get(key, {})
        for name in sorted({*first, *own}):
            if name not in own or name not in first:
                without, other = (key, keys[0]) if name not in own else (keys[0], key)
                yield f"the state has {name!r} for {other}, but not for {without} of the same stack"
            elif own[name].place is not Place.SHARD and not _same(first[name], own[name]):
                yield (
                    f"{name!r} differs between {keys[0]} and {key}, which are in one stack and "
                    f"have one value; load this state without stacked"
                )


def _same(a: Entry, b: Entry) -> bool:
    if isinstance(a.value, Tensor) and isinstance(b.value, Tensor):
        return torch.equal(a.value.cpu(), b.value.cpu())
    return bool(a.value == b.value)


PLAIN = (bool, int, float, str, type(None))

NOT_OPTIONS = ("params", "param_names")

SET_BY_SCHEDULERS = "initial_lr"


def params_by_key(
    sharded: Iterable[tuple[str, Tensor]], named: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Every parameter that an optimizer may hold, once, under its key.

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


def find_problems(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[str]:
    """Why this optimizer's state cannot be read or written, one line each."""
    holding = Holding(params)
    problems = [
        f"group {index} of {type(optimizer).__name__} has a parameter of shape "
        f"{tuple(param.shape)} that is not in the model. Create the optimizer after wrapping, from "
        f"model.parameters()"
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if not holding.keys(param)
    ]
    for leaf in holding.leaves:
        problems += _state_problems(optimizer, leaf, holding.keys(leaf)[0])
    for index, group in enumerate(optimizer.param_groups):
        problems += _option_problems(index, group)
    return problems


def _state_problems(optimizer: Optimizer, leaf: Tensor, key: str) -> Iterator[str]:
    state = optimizer.state.get(leaf, {})
    for name, value in state.items():
        if not isinstance(value, (Tensor, *PLAIN)):
            yield (
                f"{type(optimizer).__name__} keeps a {type(value).__name__} as {name!r} of "
                f"{key}; expected tensors and plain values only"
            )
    if is_stack(leaf):
        yield from find_stack_problems(type(optimizer).__name__, key, leaf, _entries(leaf, state))


def find_write_problems(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> list[str]:
    """Why ``state`` cannot be written to this optimizer, one line each."""
    problems = find_problems(optimizer, params)
    return problems or list(_mismatches(optimizer, params, state))


def read_optimizer(optimizer: Optimizer, params: Mapping[str, Tensor]) -> OptimizerState:
    """All that ``optimizer`` holds; the tensors are its own, detached, not copies.

    Args:
        optimizer: any that keeps tensors and plain values.
        params: the model's, by key; see ``params_by_key``. They need not all be in the optimizer.

    Raises:
        ValueError: with every line of ``find_problems``.
    """
    _raise_if(find_problems(optimizer, params))
    holding = Holding(params)
    groups = tuple(
        GroupState(_options(group), tuple(holding.all_keys(group["params"])))
        for group in optimizer.param_groups
    )
    by_leaf = {
        id(leaf): _entries(leaf, state)
        for leaf in holding.leaves
        if (state := optimizer.state.get(leaf))
    }
    entries = {
        key: part_of_entries(by_leaf[at], holding.number(key))
        for key in params
        if (at := id(holding.leaf(key))) in by_leaf
    }
    return OptimizerState(groups, entries)


@torch.no_grad()
def write_optimizer(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> None:
    """Replace all that ``optimizer`` holds. Works before its first step, too.

    Args:
        optimizer: over the same parameters in the same groups as ``state``.
        params: the model's, by key.
        state: entries of place ``SHARD`` must have the shape of the parameter.

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
    """``state`` as ``optimizer.load_state_dict`` takes it: copies, by number.

    Args:
        optimizer: and what follows, as in ``write_optimizer``.

    Raises:
        ValueError: with every problem found.
    """
    _raise_if(find_write_problems(optimizer, params, state))
    holding = Holding(params)
    order = [param for group in optimizer.param_groups for param in group["params"]]
    found = [[state.entries.get(key) for key in holding.keys(param)] for param in order]
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
    with _standing_still(optimizer, params):
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
def _standing_still(optimizer: Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
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


# ---------------------------------------------------------------- reading


def _entries(param: Tensor, state: Mapping[str, Any]) -> dict[str, Entry]:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    # Where one tensor has a shape of its own, as in Adafactor, another may have the shard's by
    # chance (statistics of columns beside a shard of one row), so none is taken to be cut like it.
    alike = all(value.shape == param.shape or is_number(value) for value in tensors)
    cut = is_sharded(param) and alike
    return {name: _entry(param, value, cut) for name, value in state.items()}


def _entry(param: Tensor, value: Any, cut: bool) -> Entry:
    if not isinstance(value, Tensor):
        return Entry(Place.HOST, value)
    if cut and value.shape == param.shape and value.dim() > 0:
        return Entry(Place.SHARD, value.detach())
    on_host = value.device.type == "cpu" and param.device.type != "cpu"
    return Entry(Place.HOST if on_host else Place.DEVICE, value.detach())


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values: a learning rate may be a tensor."""
    return {name: _plain(value) for name, value in group.items() if name not in NOT_OPTIONS}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _option_problems(index: int, group: Mapping[str, Any]) -> Iterator[str]:
    for name, value in group.items():
        if name in NOT_OPTIONS:
            continue
        parts = value if isinstance(value, list | tuple) else [value]
        for part in parts:
            scalar = isinstance(part, Tensor) and part.numel() == 1
            if not (scalar or isinstance(part, PLAIN)):
                yield (
                    f"group {index} has a {type(part).__name__} in {name!r}; expected numbers, "
                    f"strings, one-element tensors, and lists or tuples of them"
                )


# ---------------------------------------------------------------- writing


def _mismatches(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> Iterator[str]:
    holding = Holding(params)
    live = [set(holding.all_keys(group["params"])) for group in optimizer.param_groups]
    if len(live) != len(state.groups):
        yield (
            f"the state has {len(state.groups)} parameter groups, the optimizer {len(live)}; "
            f"create it with the same groups"
        )
        return
    for index, (keys_here, group) in enumerate(zip(live, state.groups, strict=True)):
        yield from (
            f"{key} is in group {index} of the state, but not of the optimizer"
            for key in sorted(set(group.keys) - keys_here)
        )
        yield from (
            f"{key} is in group {index} of the optimizer, but not of the state"
            for key in sorted(keys_here - set(group.keys))
        )
        yield from _foreign_options(index, optimizer, group)
    yield from _entry_mismatches(set().union(*live), params, state)
    for leaf in holding.leaves:
        if is_stack(leaf):
            yield from find_stack_mismatches(holding.keys(leaf), state)


def _entry_mismatches(
    held: set[str], params: Mapping[str, Tensor], state: OptimizerState
) -> Iterator[str]:
    for key, entries in state.entries.items():
        if key not in held:
            yield f"the state has entries for {key}, which is in no group of the optimizer"
            continue
        for name, entry in entries.items():
            if entry.place is Place.SHARD and entry.value.shape != params[key].shape:
                yield (
                    f"{name} of {key} has shape {tuple(entry.value.shape)}, expected that of the "
                    f"parameter, {tuple(params[key].shape)}"
                )


def _foreign_options(index: int, optimizer: Optimizer, group: GroupState) -> Iterator[str]:
    """Another class of optimizer has other hyperparameters; a later torch may only add some."""
    here = set(optimizer.param_groups[index]) - {*NOT_OPTIONS, SET_BY_SCHEDULERS}
    there = set(group.options) - {SET_BY_SCHEDULERS}
    if here - there and there - here:
        yield (
            f"group {index} of the state is of another kind of optimizer: it has "
            f"{', '.join(sorted(there - here))}, {type(optimizer).__name__} has "
            f"{', '.join(sorted(here - there))}"
        )


def _placed(entries: Sequence[Entry], param: Tensor) -> Any:
    """A copy where an entry belongs, of all slices if ``param`` is a stack."""
    entry = entries[0]
    if not isinstance(entry.value, Tensor):
        return entry.value
    if entry.place is Place.SHARD and is_stack(param):
        return stacked([each.value for each in entries], param.device)
    device = "cpu" if entry.place is Place.HOST else param.device
    return entry.value.detach().to(device=device, copy=True)


def _torch_groups(optimizer: Optimizer, state: OptimizerState) -> list[dict[str, Any]]:
    """Groups as ``Optimizer.load_state_dict`` wants them: parameters are numbers."""
    groups, at = [], 0
    for live, saved in zip(optimizer.param_groups, state.groups, strict=True):
        options = {name: value for name, value in live.items() if name != "params"}
        for name, value in saved.options.items():
            options[name] = _as_in(live.get(name), value)
        groups.append({**options, "params": list(range(at, at + len(live["params"])))})
        at += len(live["params"])
    return groups


def _as_in(live: Any, value: Any) -> Any:
    """A plain value as the tensor or tuple that the optimizer has in its place."""
    if isinstance(live, Tensor):
        return torch.full_like(live, value)
    if isinstance(live, tuple) and isinstance(value, list) and len(live) == len(value):
        return tuple(_as_in(*pair) for pair in zip(live, value, strict=True))
    return value


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))
