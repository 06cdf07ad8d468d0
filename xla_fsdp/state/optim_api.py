"""Optimizer state dicts of sharded models: full ones of the original model, or those of shards.

Both have the form of torch's FSDP, ``{"state": {name: {state name: tensor or value}},
"param_groups": [{..., "params": [names]}]}``, and are in host memory. State of a flattened shard is
split into that of the parameters in it; state that is not sharded (step counts) is copied to each
of them. Gathering takes one collective per unit and state name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
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
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.fsdp.engine.module_state import named_shards
from xla_fsdp.fsdp.engine.param import all_joined
from xla_fsdp.fsdp.engine.param_group import NamedShard
from xla_fsdp.optim.optimizers import needs_closure, params_of, takes_found_inf
from xla_fsdp.state.model import cut_outside_units, refuse_cut_outside
from xla_fsdp.state.optim import (
    distinct_shards,
    params_by_key,
    raise_if,
    read_optimizer,
    same_value,
    torch_state_dict,
    write_optimizer,
)
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import execute_pending


def optim_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Return the unsharded state of the optimizer, by original names. Every rank must call this.

    Args:
        model: the sharded model.
        optimizer: the optimizer of its parameters; state of flattened units is split.
        rank0_only: return it on rank 0 only, and an empty one on others.

    Raises:
        ValueError: if the optimizer holds parameters that are not the model's, parameters that
            tensor parallelism has cut and no unit shards, or state that has neither the shape of a
            shard nor one element (as Adafactor's row and column statistics of a shard).
    """
    held = set(map(id, params_of(optimizer)))
    outside = [each for each in cut_outside_units(model) if id(each.param) in held]
    refuse_cut_outside(outside, "optim_state_dict")
    state = read_optimizer(optimizer, params_by_key(model))
    execute_pending()  # with rank0_only some ranks alone read entries; see full_state_dict
    return to_full(state, _names(model), only=0 if rank0_only else None)


def load_optim_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a result of ``optim_state_dict``, which any number of ranks saved.

    Args:
        model: the sharded model.
        optimizer: the optimizer of its parameters, in the same groups as the state; it need not
            have made a step. State of a parameter that is not in the optimizer is an error.
        state: the state dict, the same on every rank.

    Raises:
        ValueError: with every name, group or shape that does not fit; nothing has been changed.
    """
    write_optimizer(optimizer, *_to_load(model, optimizer, state, full=True))


def cut_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, full: bool
) -> dict[str, Any]:
    """Return ``state``, a result of ``optim_state_dict`` (``full``) or of
    ``sharded_optim_state_dict``, in the form that ``optimizer.load_state_dict`` takes."""
    return torch_state_dict(optimizer, *_to_load(model, optimizer, state, full=full))


def sharded_optim_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state of this rank's shards, by their keys in ``state_dict()``."""
    state = read_optimizer(optimizer, params_by_key(model))
    return map_tensors(_on_host, state.to_dict())


def load_sharded_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Load a result of ``sharded_optim_state_dict`` on this rank, of as many ranks."""
    write_optimizer(optimizer, *_to_load(model, optimizer, state, full=False))


def _to_load(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, full: bool
) -> tuple[dict[str, Tensor], OptimizerState]:
    """Return the model's parameters by key, and ``state`` of this rank's shards."""
    params = params_by_key(model)
    template = _template(optimizer, params, state)
    own = from_full(state, template, _names(model)) if full else from_shards(state, template)
    return params, own


def _names(model: nn.Module) -> ShardNames:
    """Return the original names; of a tied parameter, the first of ``model.named_parameters()``."""
    first = {id(param): name for name, param in model.named_parameters()}
    aliases: dict[object, list[str]] = defaultdict(list)
    for shard in named_shards(model):
        if not shard.param.is_flat:
            aliases[shard.param.slots] += shard.names_of(shard.param.originals[0])

    def canonical_name(shard: NamedShard) -> str:
        is_slice = shard.param.slots.part is not None
        return shard.names[0] if is_slice else first[id(shard.param.leaf)]

    shards = distinct_shards(model)
    originals = {
        shard.key: shard.names if shard.param.is_flat else [canonical_name(shard)]
        for shard in shards
    }
    canonical = {
        alias: canonical_name(shard) for shard in shards for alias in aliases[shard.param.slots]
    }
    return ShardNames({shard.key: shard for shard in shards}, originals, canonical)


# ---------------------------------------------------------------- conversion


def to_full(state: OptimizerState, names: ShardNames, *, only: int | None = None) -> dict[str, Any]:
    """Return the state dict of the original model's optimizer, by original names, on the CPU; on
    ranks other than ``only``, among those that share the parameters, an empty one."""
    raise_if(list(_ungatherable(state, names)))
    shards = list(names.shards.values())
    shown = only is None or all(shard.is_of(only) for shard in shards)
    full: dict[tuple[str, str], Tensor] = {}
    for _, of_unit in groupby(shards, key=lambda shard: id(shard.group)):
        for name, entry_name, tensor in _gathered(state, names, list(of_unit)):
            if shown:
                full[name, entry_name] = tensor.cpu()
    if not shown:
        return {}
    return state.unsharded(names.of, full, _on_host).to_dict()


def from_full(
    full: Mapping[str, Any], template: OptimizerState, names: ShardNames
) -> OptimizerState:
    """Shard a result of ``to_full``, on any number of ranks, for this rank's optimizer."""
    given = {names.canonical.get(name, name): own for name, own in full["state"].items()}
    key_of = {n: key for group in template.groups for key in group.params for n in names.of(key)}
    problems = [
        f"the state has entries for {name}, which is not in the optimizer"
        for name in given
        if name not in key_of
    ]
    groups = []
    for part in full["param_groups"]:
        members = [names.canonical.get(name, name) for name in part["params"]]
        keys = dict.fromkeys(key_of.get(name, name) for name in members)
        problems += [
            f"{key} joins {', '.join(names.of(key))}, which are not all in one group of the state"
            for key in keys
            if not set(names.of(key)) <= set(members)
        ]
        groups.append(GroupRecord.of(part, keys))
    states = {}
    for key in dict.fromkeys(key for name, key in key_of.items() if name in given):
        found = {name: given.get(name, {}) for name in names.of(key)}
        wanted, shard = template.states.get(key, {}), names.shards.get(key)
        states[key] = _own_entries(key, wanted, found, shard, problems)
    raise_if(problems)
    return OptimizerState(tuple(groups), states)


def _own_entries(
    key: str,
    wanted: Mapping[str, StateEntry],
    found: Mapping[str, Mapping[str, Any]],
    shard: NamedShard | None,
    problems: list[str],
) -> dict[str, StateEntry]:
    """Return this rank's states under a key, of those of the parameters in it, by name."""
    known = {name.removeprefix(UNSHARDED): name for name in wanted}
    for name, values in found.items():
        problems += [f"{name} has no {what!r}" for what in known if what not in values]
        problems += [
            f"{name} has {what!r}, which this optimizer does not keep for it"
            for what in values
            if what not in known
        ]
    entries = {}
    for what, own in known.items():
        if all(what in values for values in found.values()):
            values = {name: each[what] for name, each in found.items()}
            entry = wanted[own]
            if entry.kind is StateKind.SHARD and shard is not None:
                value = _own_shard(what, entry.value, values, shard, problems)
            else:
                value = _common_value(key, what, entry.value, values, problems)
            entries[own] = replace(entry, value=_in_dtype_of(entry.value, value))
    return entries


def _own_shard(
    what: str, own: Tensor, values: Mapping[str, Any], shard: NamedShard, problems: list[str]
) -> Tensor:
    originals = zip(shard.param.originals, values.items(), strict=True)
    shapes = [(tuple(original.whole_shape), *named) for original, named in originals]
    bad = [line for each in shapes for line in _misfit(what, *each)]
    problems += bad
    return own if bad else shard.param.cut(list(values.values()))


def _common_value(
    key: str, what: str, own: Any, values: Mapping[str, Any], problems: list[str]
) -> Any:
    first, *others = values.values()
    if any(not same_value(first, value) for value in others):
        problems.append(
            f"{what!r} differs between the parameters that are flattened together in {key}"
        )
    problems += _misfit(what, _shape(own), key, first)
    return first


def from_shards(given: Mapping[str, Any], template: OptimizerState) -> OptimizerState:
    """Read a result of ``sharded_optim_state_dict``; ``write_optimizer`` checks whether it fits."""
    groups = tuple(GroupRecord.of(part, part["params"]) for part in given["param_groups"])

    def entry(key: str, name: str, value: Any) -> StateEntry:
        own = template.states.get(key, {}).get(name)
        if own is not None and own.kind is not StateKind.VALUE:
            return StateEntry(own.kind, _in_dtype_of(own.value, value))
        is_tensor = isinstance(value, Tensor)
        return StateEntry(StateKind.HOST if is_tensor else StateKind.VALUE, value)

    states = {
        key: {name: entry(key, name, value) for name, value in values.items()}
        for key, values in given["state"].items()
    }
    return OptimizerState(groups, states)


def load_full(
    optimizer: Optimizer, params: Mapping[str, Tensor], names: ShardNames, full: Mapping[str, Any]
) -> None:
    """Load a full state, of any number of ranks, into this rank's optimizer."""
    write_optimizer(optimizer, params, from_full(full, _template(optimizer, params, full), names))


@torch.no_grad()
def _template(optimizer: Optimizer, params: Mapping[str, Tensor], given: Any) -> OptimizerState:
    """Return the state of ``optimizer``, and of parameters without any that of a first step, which
    tells what of ``given`` is sharded. Nothing changes."""
    raise_if(list(_malformed(given)))
    own = params_of(optimizer)
    without = [param for param in own if param.requires_grad and not optimizer.state.get(param)]
    if without and needs_closure(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} cannot make its state ahead of a step, which needs a "
            f"closure; make a step before its state is loaded"
        )
    grads, values = [param.grad for param in own], [param.clone() for param in without]
    options = [dict(group) for group in optimizer.param_groups]  # some count steps there
    wanted = {name for entries in given["state"].values() for name in entries}
    # Those of torch_xla.amp.syncfree have other entries where a scaler made the steps.
    ways = (True, False) if takes_found_inf(optimizer) else (False,)
    try:
        for by_scaler in ways if without else ():
            _step_by_zero(optimizer, without, by_scaler=by_scaler)
            if wanted == {name for param in without for name in optimizer.state.get(param, ())}:
                break
        return read_optimizer(optimizer, params)
    finally:
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(before)
        for param, grad in zip(own, grads, strict=True):
            param.grad = grad
        for param, value in zip(without, values, strict=True):
            param.copy_(value)
            optimizer.state.pop(param, None)


def _step_by_zero(optimizer: Optimizer, params: Sequence[Tensor], *, by_scaler: bool) -> None:
    """Step ``params``, which have no state, by gradients of zeros."""
    for param in params_of(optimizer):
        param.grad = None
    for param in params:
        optimizer.state.pop(param, None)
        param.grad = torch.zeros_like(param)
    if by_scaler:
        optimizer.step(found_inf=torch.zeros((), device=params[0].device))  # type: ignore[call-overload]
    else:
        optimizer.step()


@dataclass(frozen=True)
class ShardNames:
    """The original names of the parameters in each shard."""

    shards: dict[str, NamedShard]  # by key; those of a unit follow each other
    originals: dict[str, list[str]]  # by key, in order
    canonical: dict[str, str]  # the name in state dicts, by each other one of a tied parameter

    def of(self, key: str) -> list[str]:
        """Return the names of the parameters in shard ``key``; an unsharded one is its own key."""
        return self.originals.get(key, [key])


@torch.no_grad()
def _gathered(
    state: OptimizerState, names: ShardNames, shards: Sequence[NamedShard]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield parameter name, state name and full tensor, for every sharded state of one unit."""
    group = shards[0].group
    for entry_name in sorted({n for shard in shards for n in state.states.get(shard.key, ())}):
        entries = [(shard, state.states.get(shard.key, {}).get(entry_name)) for shard in shards]
        found = [(s, e.value) for s, e in entries if e and e.kind is StateKind.SHARD]
        full = group.gather.as_stored([s.param for s, _ in found], [value for _, value in found])
        full = all_joined(full, [original for s, _ in found for original in s.param.originals])
        # At once, so that ranks that do not read the result run the same program as those that do.
        ops.compute(full)
        originals = [name for shard, _ in found for name in names.of(shard.key)]
        for name, tensor in zip(originals, full, strict=True):
            yield name, entry_name, tensor


def _ungatherable(state: OptimizerState, names: ShardNames) -> Iterator[str]:
    for key, entries in state.states.items():
        if key not in names.shards or names.shards[key].group.collectives.num_shards == 1:
            continue
        for name, entry in entries.items():
            wide = isinstance(entry.value, Tensor) and entry.value.numel() > 1
            if entry.kind is not StateKind.SHARD and wide and not name.startswith(UNSHARDED):
                yield (
                    f"{name} of {key} has shape {tuple(entry.value.shape)}: it is computed from "
                    f"one rank's shard and is no slice of a whole. Save this optimizer's state as "
                    f"shards, and load it on as many ranks"
                )


def _in_dtype_of(own: Any, value: Any) -> Any:
    """Return state in the dtype of the optimizer's own: the parameter may have had another one."""
    both = isinstance(own, Tensor) and isinstance(value, Tensor)
    if both and own.is_floating_point() and value.is_floating_point():
        return value.to(own.dtype)
    return value


def _misfit(entry: str, expected: Any, name: str, value: Any) -> Iterator[str]:
    if _shape(value) != expected:
        yield f"{entry!r} of {name} is {_shape(value)}, expected {expected}"


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else "a value"


def _malformed(full: Any) -> Iterator[str]:
    if not isinstance(full, Mapping) or not {"state", "param_groups"} <= set(full):
        yield "expected an optimizer state dict with 'state' and 'param_groups'"
        return
    for index, group in enumerate(full["param_groups"]):
        if not all(isinstance(name, str) for name in group.get("params", [0])):
            yield (
                f"param_groups[{index}]['params'] holds no names; pass what optim_state_dict("
                f"model, optimizer) returned, not optimizer.state_dict()"
            )
    for name, state in full["state"].items():
        if not isinstance(state, Mapping):
            yield f"state[{name!r}] is a {type(state).__name__}; give a dict of values by name"


def _on_host(value: Any) -> Any:
    # A copy also of tensors on the CPU, as the optimizer will change its own in place.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
