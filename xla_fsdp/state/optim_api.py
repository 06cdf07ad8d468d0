"""Optimizer state dicts of sharded models: full ones of the original model, or those of shards.

Both have the form of torch's FSDP, ``{"state": {name: {state name: tensor or value}},
"param_groups": [{..., "params": [names]}]}``, and are in host memory. State of a flattened shard is
split into that of the parameters in it; state that is not sharded (step counts) is copied to each
of them. Gathering takes one collective per unit and state name.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from xla_fsdp.fsdp.engine.module_state import named_shards, reshard_units
from xla_fsdp.fsdp.engine.param import all_joined
from xla_fsdp.fsdp.engine.param_group import NamedShard
from xla_fsdp.fsdp.engine.stacked_params import slice_of
from xla_fsdp.optim.optimizers import takes_found_inf
from xla_fsdp.state.model import cut_outside_units, refuse_cut_outside
from xla_fsdp.state.optim import (
    OptimizerParams,
    create_state,
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
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    outside = [each for each in cut_outside_units(model) if id(each.param) in held]
    refuse_cut_outside(outside, "optim_state_dict")
    state = read_optimizer(optimizer, _params(model))
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
    load_full(optimizer, _params(model), _names(model), state)


def cut_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, full: bool
) -> dict[str, Any]:
    """Return ``state`` in the form that ``optimizer.load_state_dict`` takes; load nothing.

    Args:
        model: the sharded model.
        optimizer: the optimizer of its parameters.
        state: a result of ``optim_state_dict`` (``full``) or of ``sharded_optim_state_dict``.
        full: whether ``state`` is unsharded.
    """
    params = _params(model)
    with state_made(optimizer, params, state, restore=True) as template:
        cut = from_full(state, template, _names(model)) if full else from_shards(state, template)
        return torch_state_dict(optimizer, params, cut)


def sharded_optim_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state of this rank's shards, by their keys in ``state_dict()``."""
    state = read_optimizer(optimizer, _params(model))
    return {
        "state": {
            key: {name: _on_host(entry.value) for name, entry in entries.items()}
            for key, entries in state.states.items()
        },
        "param_groups": [{**group.options, "params": list(group.params)} for group in state.groups],
    }


def load_sharded_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Load a result of ``sharded_optim_state_dict`` on this rank, of as many ranks.

    Raises:
        ValueError: with every name, group or shape that does not fit.
    """
    params = _params(model)
    with state_made(optimizer, params, state) as template:
        write_optimizer(optimizer, params, from_shards(state, template))


def _params(model: nn.Module) -> dict[str, Tensor]:
    reshard_units(model)
    sharded = [(shard.key, slice_of(shard.param)) for shard in _shards(model)]
    return params_by_key(sharded, model.named_parameters())


def _shards(model: nn.Module) -> list[NamedShard]:
    """Return every shard once, under its first key."""
    shards: dict[object, NamedShard] = {}
    for shard in named_shards(model):
        shards.setdefault(shard.param.slots, shard)
    return list(shards.values())


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

    shards = _shards(model)
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
    """Return the state dict of the original model's optimizer, by original names, on the CPU.

    Args:
        state: of this rank's optimizer.
        names: of the model's parameters.
        only: the rank, among those that share the parameters, that gets the result; others get an
            empty one (default: all get it).

    Raises:
        ValueError: for state that cannot be gathered.
    """
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
    return {
        "state": {
            name: {
                entry_name.removeprefix(UNSHARDED): full[name, entry_name]
                if entry.kind is StateKind.SHARD
                else _on_host(entry.value)
                for entry_name, entry in entries.items()
            }
            for key, entries in state.states.items()
            for name in names.of(key)
        },
        "param_groups": [
            {**group.options, "params": [name for key in group.params for name in names.of(key)]}
            for group in state.groups
        ],
    }


def from_full(
    full: Mapping[str, Any], template: OptimizerState, names: ShardNames
) -> OptimizerState:
    """Shard a full state for this rank's optimizer.

    Args:
        full: a result of ``to_full``, on any number of ranks.
        template: state of the optimizer to load, which has the kind of each entry.
        names: of the model's parameters.

    Raises:
        ValueError: with every problem found.
    """
    raise_if(list(_malformed(full)))
    reader = _Reader(full, template, names)
    state = OptimizerState(
        tuple(reader.group(part) for part in full["param_groups"]),
        {key: reader.entries(key) for key in reader.keys if reader.has_state(key)},
    )
    raise_if([*reader.unknown(), *reader.problems])
    return state


def from_shards(given: Mapping[str, Any], template: OptimizerState) -> OptimizerState:
    """Read a result of ``sharded_optim_state_dict``; ``write_optimizer`` checks whether it fits.

    Args:
        given: the state dict.
        template: state of the optimizer to load, which has the kind of each entry.

    Raises:
        ValueError: if ``given`` does not have the form of an optimizer's state dict.
    """
    raise_if(list(_malformed(given)))
    groups = tuple(
        GroupRecord(tuple(part["params"]), {n: v for n, v in part.items() if n != "params"})
        for part in given["param_groups"]
    )

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
    """Load a full state, of any number of ranks, into this rank's optimizer, which need not have
    made a step; raise ValueError with every problem found, before anything is changed."""
    with state_made(optimizer, params, full) as template:
        write_optimizer(optimizer, params, from_full(full, template, names))


@contextlib.contextmanager
def state_made(
    optimizer: Optimizer, params: Mapping[str, Tensor], given: Any, *, restore: bool = False
) -> Iterator[OptimizerState]:
    """Yield the optimizer's state, after creating what a first step would, to load ``given`` into.

    Created state is removed again if the block raises, and always with ``restore``.
    """
    without = [leaf for leaf in OptimizerParams(params).leaves if not optimizer.state.get(leaf)]
    _create_for(given, optimizer, without)
    failed = True
    try:
        yield read_optimizer(optimizer, params)
        failed = False
    finally:
        for param in without if failed or restore else ():
            optimizer.state.pop(param, None)


def _create_for(given: Any, optimizer: Optimizer, without: Sequence[Tensor]) -> None:
    """Create state with the entries that ``given`` has, which tell whether a scaler made the steps
    (optimizers of ``torch_xla.amp.syncfree`` have other entries then)."""
    create_state(optimizer)
    if not takes_found_inf(optimizer) or list(_malformed(given)):
        return
    made = {name for param in without for name in optimizer.state.get(param, ())}
    if made and made != {name for values in given["state"].values() for name in values}:
        for param in without:
            optimizer.state.pop(param, None)
        create_state(optimizer, by_scaler=False)


@dataclass(frozen=True)
class ShardNames:
    """The original names of the parameters in each shard.

    Args:
        shards: every shard of the model once, by key; those of a unit follow each other.
        originals: names of the parameters in each shard, in order, by its key.
        canonical: the name used in state dicts, by each other name of a tied parameter.
    """

    shards: dict[str, NamedShard]
    originals: dict[str, list[str]]
    canonical: dict[str, str]

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


class _Reader:
    """Shards a full state for the optimizer to load, and collects ``problems``."""

    def __init__(
        self, full: Mapping[str, Any], template: OptimizerState, names: ShardNames
    ) -> None:
        known = names.canonical
        self._full = {known.get(name, name): values for name, values in full["state"].items()}
        self._template = template
        self._names = names
        self.keys = [key for group in template.groups for key in group.params]
        self._key_of = {name: key for key in self.keys for name in names.of(key)}
        self.problems: list[str] = []

    def has_state(self, key: str) -> bool:
        return any(name in self._full for name in self._names.of(key))

    def unknown(self) -> list[str]:
        """Return one line for each name that the optimizer does not have."""
        return [
            f"the state has entries for {name}, which is not in the optimizer"
            for name in self._full
            if name not in self._key_of
        ]

    def group(self, part: Mapping[str, Any]) -> GroupRecord:
        names = [self._names.canonical.get(name, name) for name in part["params"]]
        keys = list(dict.fromkeys(self._key_of.get(name, name) for name in names))
        for key in keys:
            own = self._names.of(key)
            if not set(own) <= set(names):
                self.problems.append(
                    f"{key} joins {', '.join(own)}, which are not all in one group of the state"
                )
        return GroupRecord(tuple(keys), {n: v for n, v in part.items() if n != "params"})

    def entries(self, key: str) -> dict[str, StateEntry]:
        wanted = self._template.states.get(key, {})
        found = [self._full.get(name, {}) for name in self._names.of(key)]
        self._compare(key, wanted, found)
        named = [(name, name.removeprefix(UNSHARDED), own) for name, own in wanted.items()]
        return {
            name: StateEntry(own.kind, self._value(key, full, own, [v[full] for v in found]))
            for name, full, own in named
            if all(full in values for values in found)
        }

    def _compare(
        self, key: str, entries: Mapping[str, StateEntry], found: Sequence[Mapping[str, Any]]
    ) -> None:
        wanted = [entry.removeprefix(UNSHARDED) for entry in entries]
        for name, values in zip(self._names.of(key), found, strict=True):
            self.problems += [f"{name} has no {entry!r}" for entry in wanted if entry not in values]
            self.problems += [
                f"{name} has {entry!r}, which this optimizer does not keep for it"
                for entry in values
                if entry not in wanted
            ]

    def _value(self, key: str, name: str, own: StateEntry, values: Sequence[Any]) -> Any:
        if own.kind is not StateKind.SHARD:
            if any(not same_value(values[0], value) for value in values[1:]):
                self.problems.append(
                    f"{name!r} differs between the parameters that are flattened together in {key}"
                )
            self.problems += _misfit(name, _shape(own.value), key, values[0])
            return _in_dtype_of(own.value, values[0])
        shard = self._names.shards[key]
        originals = shard.param.originals
        shapes = [tuple(original.whole_shape) for original in originals]
        triples = zip(shapes, self._names.of(key), values, strict=True)
        bad = [line for triple in triples for line in _misfit(name, *triple)]
        self.problems += bad
        if bad:
            return own.value
        own_slice = shard.param.cut(values)
        return _in_dtype_of(own.value, own_slice)


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


def _on_host(value: Any) -> Any:
    # A copy also of tensors on the CPU, as the optimizer will change its own in place.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
