"""Optimizer state dicts of sharded models: full ones of the original model, or those of shards.

Both have the form of torch's FSDP, ``{"state": {name: {state name: tensor or value}},
"param_groups": [{..., "params": [names]}]}``, and are in host memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.fsdp.engine.module_state import named_shards, reshard_units
from xla_fsdp.fsdp.engine.named_params import NamedShard
from xla_fsdp.fsdp.engine.stacked_params import slice_of
from xla_fsdp.state.full_optim import (
    ShardNames,
    from_full,
    from_shards,
    load_full,
    state_made,
    to_full,
    to_shards,
)
from xla_fsdp.state.model import cut_outside_units, refuse_cut_outside
from xla_fsdp.state.optim import params_by_key, read_optimizer, torch_state_dict, write_optimizer
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
    return to_shards(read_optimizer(optimizer, _params(model)))


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
    sharded = [(shard.key, slice_of(shard.param, shard.group)) for shard in _shards(model)]
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
