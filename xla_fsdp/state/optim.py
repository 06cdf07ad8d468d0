"""Read an optimizer's state by the keys of its parameters, and write it back.

A *key* names a parameter in the sharded model's state dict (of a flattened unit, ``flat_param_0``).
The state of a stack of several units' parameters is split when it is read, and stacked when it is
written, so there is one entry for each parameter.

Invariants: everything is checked before anything is changed, and all problems are raised as one
``ValueError``; states come back with the dtype, shape and device that they had (torch's own
``load_state_dict`` casts them to the parameter's dtype), unless the parameter has another dtype
than it had when it was saved. Hyperparameters are replaced, as in torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.checkpoint.format.records import (
    UNSHARDED,
    GroupRecord,
    OptimizerState,
    StateEntry,
    StateKind,
)
from xla_fsdp.fsdp.engine.module_state import named_shards, reshard_units
from xla_fsdp.fsdp.engine.param import StackPart, held_shape, known_shard
from xla_fsdp.fsdp.engine.param_group import NamedShard
from xla_fsdp.fsdp.engine.shard_tensor import is_sharded
from xla_fsdp.fsdp.engine.stacked_params import is_stack, part_of, slice_of
from xla_fsdp.optim.guards import marked
from xla_fsdp.optim.optimizers import params_of

PLAIN = (bool, int, float, str, type(None))
NOT_OPTIONS = ("params", "param_names")
SET_BY_SCHEDULERS = "initial_lr"


def distinct_shards(model: nn.Module) -> list[NamedShard]:
    """Return every shard once, under its first key."""
    shards: dict[object, NamedShard] = {}
    for shard in named_shards(model):
        shards.setdefault(shard.param.slots, shard)
    return list(shards.values())


def params_by_key(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter once, by key; a stacked one as its slice. The first of several names
    for one shard is its key, as in ``get_shard_metadata()``."""
    reshard_units(model)
    sharded = [(each.key, slice_of(each.param)) for each in distinct_shards(model)]
    keys: dict[int, tuple[str, Tensor]] = {}
    for name, param in (*sharded, *model.named_parameters()):
        if not is_stack(param):  # its slices are in ``sharded``
            keys.setdefault(id(param), (name, param))
    return dict(keys.values())


class OptimizerParams:
    """Maps keys of parameters to *leaves*: the tensors that an optimizer steps, parameters or
    stacks of them."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        # The leaf of each parameter, and which slice it is, if that is a stack.
        self.places = {key: _leaf_of(param) for key, param in params.items()}
        self.leaves = list({id(leaf): leaf for leaf, _ in self.places.values()}.values())
        self._keys: dict[int, list[str]] = defaultdict(list)
        numbers = {key: part.number if part else 0 for key, (_, part) in self.places.items()}
        for key in sorted(numbers, key=numbers.__getitem__):
            self._keys[id(self.places[key][0])].append(key)

    def keys(self, *leaves: Tensor) -> list[str]:
        """Return the keys of the parameters in ``leaves``, in order; none for other tensors."""
        return [key for leaf in leaves for key in self._keys.get(id(leaf), [])]


def _leaf_of(param: Tensor) -> tuple[Tensor, StackPart | None]:
    known = known_shard(param)
    if known is None or known.slots.part is None or is_stack(param):
        return param, None
    return known.leaf, known.slots.part


def read_optimizer(optimizer: Optimizer, params: Mapping[str, Tensor]) -> OptimizerState:
    """Return the groups and state of ``optimizer``; tensors are detached, but not copied. Not all
    of ``params``, the model's from ``params_by_key``, need be in the optimizer."""
    raise_if(find_problems(optimizer, params))
    known = OptimizerParams(params)
    groups = tuple(
        GroupRecord(
            tuple(known.keys(*group["params"])),
            {name: _plain(value) for name, value in group.items() if name not in NOT_OPTIONS},
        )
        for group in optimizer.param_groups
    )
    by_leaf = {
        id(leaf): _entries(leaf, state)
        for leaf in known.leaves
        if (state := optimizer.state.get(leaf))
    }
    states = {
        key: _entries_of_slice(by_leaf[id(leaf)], part)
        for key, (leaf, part) in known.places.items()
        if id(leaf) in by_leaf
    }
    return OptimizerState(groups, states)


def find_problems(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[str]:
    """Return the reasons why this optimizer's state cannot be read or written, one line each."""
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
        is_wide = entry.kind in (StateKind.DEVICE, StateKind.HOST) and not _is_number(entry.value)
        if is_wide and not name.startswith(UNSHARDED):
            yield (
                f"{name_of_class} keeps {name!r} of shape {tuple(entry.value.shape)} for the stack "
                f"that {key} is in, of shape {tuple(held_shape(leaf))}, which cannot be taken "
                f"apart by block. Scan the blocks without stacked"
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
    tensors = [
        value
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith(UNSHARDED)
    ]
    # If any other tensor has another shape than the shard, as in Adafactor, none counts as sharded:
    # another one may have the shard's shape by chance (column statistics and a shard of one row).
    same_shapes = all(value.shape == held_shape(param) or _is_number(value) for value in tensors)
    sharded = is_sharded(param) and same_shapes
    return {
        name: _entry(param, value, sharded and not name.startswith(UNSHARDED))
        for name, value in state.items()
    }


def _entry(param: Tensor, value: Any, sharded: bool) -> StateEntry:
    if not isinstance(value, Tensor):
        return StateEntry(StateKind.VALUE, value)
    if sharded and value.shape == held_shape(param) and value.dim() > 0:
        return StateEntry(StateKind.SHARD, value.detach())
    on_host = value.device.type == "cpu" and param.device.type != "cpu"
    return StateEntry(StateKind.HOST if on_host else StateKind.DEVICE, value.detach())


def _is_number(value: Tensor) -> bool:
    # Shape [0] is the empty tensor that torch_xla's optimizers have for state that is not in use.
    return value.dim() == 0 or value.shape in ((0,), (1,))


def _entries_of_slice(
    entries: dict[str, StateEntry], part: StackPart | None
) -> dict[str, StateEntry]:
    """Return the state of a slice of a stack, or ``entries`` if there is no stack."""
    if part is None:
        return entries

    def cut(entry: StateEntry) -> StateEntry:
        shape = part.shape if entry.kind is StateKind.SHARD else entry.value.shape[1:]
        return replace(entry, value=part_of(entry.value, replace(part, shape=shape)))

    return {name: cut(e) if _is_stacked(name, e) else e for name, e in entries.items()}


def _is_stacked(name: str, entry: StateEntry) -> bool:
    """Return whether the state of a stack has a slice for each block."""
    return entry.kind is StateKind.SHARD or name.startswith(UNSHARDED)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # such as a learning rate
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


@torch.no_grad()
def write_optimizer(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    state: OptimizerState,
    *,
    cast: Collection[str] = (),
) -> None:
    """Replace the groups' options and the state of ``optimizer``, also before its first step.

    ``cast`` are keys of parameters whose state gets the dtype that the optimizer's own
    ``load_state_dict`` gives it.
    """
    given = torch_state_dict(optimizer, params, state)
    # torch's own method runs hooks, and subclasses override it; but it casts state to the dtypes of
    # parameters, so the values are written again afterwards, apart from those to cast.
    optimizer.load_state_dict(
        {**given, "state": {index: dict(values) for index, values in given["state"].items()}}
    )
    order = params_of(optimizer)
    known = OptimizerParams(params)
    for index, values in given["state"].items():
        is_cast = not set(cast).isdisjoint(known.keys(order[index]))
        optimizer.state[order[index]].update(
            {
                name: value
                for name, value in values.items()
                if not (is_cast and isinstance(value, Tensor) and value.is_floating_point())
            }
        )


def torch_state_dict(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> dict[str, Any]:
    """Return a copy of ``state`` in the form that ``optimizer.load_state_dict`` takes."""
    raise_if(find_write_problems(optimizer, params, state))
    known = OptimizerParams(params)
    order = params_of(optimizer)
    found = [[state.states.get(key) for key in known.keys(param)] for param in order]
    states = {
        index: {
            name: _copied(name, [each[name] for each in entries if each], param)
            for name in entries[0] or ()
        }
        for index, (param, entries) in enumerate(zip(order, found, strict=True))
        if entries[0] is not None
    }
    return marked(optimizer, {"param_groups": _torch_groups(optimizer, state), "state": states})


def find_write_problems(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> list[str]:
    """Return the reasons why ``state`` cannot be written to this optimizer, one line each."""
    return find_problems(optimizer, params) or list(_mismatches(optimizer, params, state))


def _mismatches(
    optimizer: Optimizer, params: Mapping[str, Tensor], state: OptimizerState
) -> Iterator[str]:
    known = OptimizerParams(params)
    own_groups = [set(known.keys(*group["params"])) for group in optimizer.param_groups]
    if len(own_groups) != len(state.groups):
        yield (
            f"the state has {len(state.groups)} parameter groups, the optimizer {len(own_groups)}; "
            f"create it with the same groups"
        )
        return
    for index, (own, group) in enumerate(zip(own_groups, state.groups, strict=True)):
        given = set(group.params)
        for key in sorted(given - own):
            yield f"{key} is in group {index} of the state, but not of the optimizer"
        for key in sorted(own - given):
            yield f"{key} is in group {index} of the optimizer, but not of the state"
        yield from _foreign_options(index, optimizer, group)
    yield from _entry_mismatches(set().union(*own_groups), params, state)
    for leaf in known.leaves:
        if is_stack(leaf):
            yield from _stack_mismatches(known.keys(leaf), state)


def _foreign_options(index: int, optimizer: Optimizer, group: GroupRecord) -> Iterator[str]:
    # Only if both have options that the other lacks: another version of torch may add some.
    own = set(optimizer.param_groups[index]) - {*NOT_OPTIONS, SET_BY_SCHEDULERS}
    given = set(group.options) - {SET_BY_SCHEDULERS}
    if own - given and given - own:
        yield (
            f"group {index} of the state is of another kind of optimizer: it has "
            f"{', '.join(sorted(given - own))}, {type(optimizer).__name__} has "
            f"{', '.join(sorted(own - given))}"
        )


def _entry_mismatches(
    held: set[str], params: Mapping[str, Tensor], state: OptimizerState
) -> Iterator[str]:
    for key, entries in state.states.items():
        if key not in held:
            yield f"the state has entries for {key}, which is in no group of the optimizer"
            continue
        for name, entry in entries.items():
            if entry.kind is StateKind.SHARD and entry.value.shape != held_shape(params[key]):
                yield (
                    f"{name} of {key} has shape {tuple(entry.value.shape)}, expected that of the "
                    f"parameter, {tuple(held_shape(params[key]))}"
                )


def _stack_mismatches(keys: Sequence[str], state: OptimizerState) -> Iterator[str]:
    """Find state that only some parameters of a stack have, and numbers that differ in a stack."""
    first = state.states.get(keys[0], {})
    for key in keys[1:]:
        own = state.states.get(key, {})
        for name in sorted({*first, *own}):
            both = name in first and name in own
            if not both or not (
                _is_stacked(name, own[name]) or same_value(first[name].value, own[name].value)
            ):
                yield (
                    f"{name!r} differs between {keys[0]} and {key}, or one has none; they are in "
                    f"one stack and have one value, so load this state without stacked"
                )


def _copied(name: str, entries: Sequence[StateEntry], param: Tensor) -> Any:
    """Return a copy on the device of the state, of all slices if ``param`` is a stack."""
    entry = entries[0]
    if not isinstance(entry.value, Tensor):
        return entry.value
    if is_stack(param) and _is_stacked(name, entry):
        stack = torch.stack([each.value.detach() for each in entries]).to(param.device)
        return stack.reshape(held_shape(param)) if entry.kind is StateKind.SHARD else stack
    device = "cpu" if entry.kind is StateKind.HOST else param.device
    return entry.value.detach().to(device=device, copy=True)


def _torch_groups(optimizer: Optimizer, state: OptimizerState) -> list[dict[str, Any]]:
    """Return the groups in torch's form, with numbers for parameters."""
    groups, start = [], 0
    for live, saved in zip(optimizer.param_groups, state.groups, strict=True):
        options = {name: value for name, value in live.items() if name != "params"}
        for name, value in saved.options.items():
            options[name] = _as_in(live.get(name), value)
        groups.append({**options, "params": list(range(start, start + len(live["params"])))})
        start += len(live["params"])
    return groups


def _as_in(live: Any, value: Any) -> Any:
    """Convert a plain value to the type that the optimizer has: a tensor, or a tuple of values."""
    if isinstance(live, Tensor):
        return torch.full_like(live, value)
    if isinstance(live, tuple) and isinstance(value, list) and len(live) == len(value):
        return tuple(_as_in(*pair) for pair in zip(live, value, strict=True))
    return value


def same_value(a: Any, b: Any) -> bool:
    """Return whether two states are equal; tensors may be on different devices."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())
    return bool(a == b)


def raise_if(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))
