"""State dicts of sharded models and of their optimizers, as the plain model would have them.

Words: a *full* state dict holds whole tensors under the names that the model had before wrapping;
one of *shards* holds this rank's. ``model.state_dict()`` gives shards, ``model.load_state_dict()``
takes either.
Always true: gathering is done by every rank, one unit at a time, so that the device never holds
more than one unit's; results are in host memory. Files are left to ``checkpoint``, which saves and
merges shards without gathering anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp import xla_ops
from xla_fsdp.full_optim_state import from_full, to_full
from xla_fsdp.names import join_name
from xla_fsdp.optim_state import create_state, params_by_key, read_optimizer, write_optimizer
from xla_fsdp.state_loading import NamedShard, marked_full
from xla_fsdp.summon import SummonOptions, is_shown, summoned
from xla_fsdp.unit_module import UnitModule, named_units


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state dict that the plain model would have: every parameter and persistent buffer whole,
    in host memory, under its original name and in its original dtype. Tied names share memory.

    Args:
        model: a wrapped module, or one that holds wrapped modules. Every rank must call this.
        rank0_only: only rank 0 of the ranks that share the parameters gets the state dict; the
            others, which take part all the same, get an empty one and need no memory for it.

    Raises:
        RuntimeError: inside a forward, a backward or ``summon_full_params``.
    """
    wrappers = list(named_units(model))
    units = [wrapper._unit for _, wrapper in wrappers]
    options = SummonOptions(writeback=False, rank0_only=rank0_only, offload_to_cpu=True)
    xla_ops.sync()  # buffers are read on ranks that are shown something only
    with summoned(units, options):
        if not all(is_shown(unit, options) for unit in units):
            return {}
        state = model.state_dict()
    dtypes = dict(_original_dtypes(wrappers))
    return {name: _on_host(value, dtypes.get(name)) for name, value in state.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """``model.load_state_dict(state, strict)`` for a ``state`` that is known to hold full tensors.

    Only needed where all parameters are so small that full tensors and shards have the same shapes.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected names.
    """
    return model.load_state_dict(marked_full(state, model), strict=strict)


def optim_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """The optimizer's state as that of the plain model, by original names, in host memory.

    Args:
        model: the sharded model. Every rank must call this.
        optimizer: over its parameters; for flattened units, their members' state is taken apart.
        rank0_only: as in ``full_state_dict``.

    Returns:
        ``{"state": {name: {state name: tensor or value}}, "param_groups": [{..., "params":
        [names]}]}``, as torch's FSDP returns it.

    Raises:
        ValueError: if the optimizer holds parameters that are not the model's, or state that is
            neither cut like a shard nor one number (as Adafactor's factors of a shard).
    """
    shards = list(_shards(model))
    state = read_optimizer(optimizer, _params(model))
    return to_full(state, shards, rank0_only=rank0_only)


def load_optim_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give the optimizer of a sharded model a full state, as ``optim_state_dict`` returns it.

    Args:
        model: the sharded model, on any number of ranks.
        optimizer: over the model's parameters, in the same groups as the state; it need not have
            made a step. The state of a parameter that is not in the optimizer is an error.
        state: the same on every rank.

    Raises:
        ValueError: with every name, group or shape that does not fit; nothing has been changed.
    """
    params = _params(model)
    create_state(optimizer)
    template = read_optimizer(optimizer, params)
    write_optimizer(optimizer, params, from_full(state, template, list(_shards(model))))


def _params(model: nn.Module) -> dict[str, Tensor]:
    sharded = [(shard.key, shard.param.shard) for shard in _shards(model)]
    return params_by_key(sharded, model.named_parameters())


def _shards(model: nn.Module) -> Iterator[NamedShard]:
    """Every shard once, under its first key."""
    seen: set[int] = set()
    for name, wrapper in named_units(model):
        for param in wrapper._unit.group.params:
            if id(param.shard) not in seen:
                seen.add(id(param.shard))
                yield NamedShard(name, param, wrapper._unit.group)


def _original_dtypes(wrappers: list[tuple[str, UnitModule]]) -> Iterator[tuple[str, torch.dtype]]:
    for unit, wrapper in wrappers:
        for name, dtype in wrapper._cast_buffers.items():
            yield join_name(unit, name), dtype


def _on_host(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device="cpu", dtype=dtype or value.dtype)
