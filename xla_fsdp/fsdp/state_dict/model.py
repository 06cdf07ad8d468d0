"""Parameters that tensor parallelism has cut and no unit has taken, as those that units ignore.

Words: see ``tensor_placement``. Always true: ranks hold different parts of them, so they are joined
to be whole (``full_state_dict`` does), and nothing that takes what is outside of units for whole
may have them. Full parameters that units show meanwhile are not outside.

State dicts of sharded models and of their optimizers, as the plain model would have them.

Words: a *full* state dict holds whole tensors under the names that the model had before wrapping;
one of *shards* holds this rank's. ``model.state_dict()`` gives shards, ``model.load_state_dict()``
takes either.
Always true: gathering is done by every rank, one unit at a time, so that the device never holds
more than one unit's; results are in host memory. Files are left to ``checkpoint``, which saves and
merges shards without gathering anything.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.placement import TensorPlacement, placement_in
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.host import settle
from xla_fsdp.fsdp.engine.load_hooks import Form, marked
from xla_fsdp.fsdp.engine.module_state import named_hosts, named_shards, reshard_units, units_in
from xla_fsdp.fsdp.engine.named_params import NamedShard
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.fsdp.engine.stacked_params import slice_of
from xla_fsdp.fsdp.engine.tp_params import joined
from xla_fsdp.fsdp.state_dict.full_optim import (
    ShardNames,
    from_full,
    from_shards,
    load_full,
    state_made,
    to_full,
    to_shards,
)
from xla_fsdp.fsdp.state_dict.optim import (
    params_by_key,
    read_optimizer,
    torch_state_dict,
    write_optimizer,
)
from xla_fsdp.fsdp.state_dict.summon import SummonOptions, is_shown, summoned


class OutsideParam(NamedTuple):
    """A parameter, its name, and where the local one is in the whole."""

    name: str
    param: Tensor
    placement: TensorPlacement


def cut_outside_units(model: nn.Module) -> Iterator[OutsideParam]:
    """Those of a model, tied ones under each of their names."""
    taken = {
        (id(owner.module), owner.attribute)
        for unit in units_in(model)
        for param in unit.group.params
        for member in param.members
        for owner in member.owners
    }
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            placement = placement_in(module, attribute)
            if param is None or placement is None or placement.dim is None:
                continue
            if not is_sharded(param) and (id(module), attribute) not in taken:
                yield OutsideParam(join_name(prefix, attribute), param, placement)


def refuse_cut_outside(params: Iterable[OutsideParam], what: str) -> None:
    """Raise ValueError if there are any of which ranks hold different parts.

    Args:
        params: of a model.
        what: what cannot have them.
    """
    names = [each.name for each in params if each.placement.parts > 1]
    if names:
        raise ValueError(
            f"{what} cannot have parameters that tensor parallelism has cut and no FSDP unit "
            f"shards (ignored ones, say), of which ranks hold different parts: {', '.join(names)}. "
            f"Shard them, too (an axis of one rank will do), or leave them out of the plan of "
            f"parallelize_module; xla_fsdp.full_state_dict(model) has their whole values"
        )


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> OrderedDict[str, Any]:
    """The state dict that the plain model would have: every parameter and persistent buffer whole,
    in host memory, under its original name and in its original dtype. Tied names share memory.

    Args:
        model: a wrapped module, or one that holds wrapped modules; what tensor parallelism has cut
            is joined, in units and outside. Every rank must call this.
        rank0_only: only rank 0 of the ranks that share the parameters gets the state dict; the
            others, which take part all the same, get an empty one and need no memory for it.

    Raises:
        RuntimeError: inside a forward, a backward or ``summon_full_params``.
    """
    reshard_units(model)  # full parameters left in modules are of before the optimizer's step
    units = units_in(model)
    options = SummonOptions(False, rank0_only, offload_to_cpu=True, whole=True)
    settle()  # buffers are read on ranks that are shown something only
    outside = cut_outside_units(model)
    whole = {name: joined(param.detach(), placement) for name, param, placement in outside}
    ops.compute(list(whole.values()))
    with summoned(units, options):
        if not is_shown(units, options):
            return OrderedDict()
        state = model.state_dict()
    state.update(whole)
    dtypes = dict(_original_dtypes(model))
    for name, value in state.items():
        state[name] = _on_host(value, dtypes.get(name))
    return marked(state, model, Form.FULL)


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """``model.load_state_dict(state, strict)`` for a ``state`` that is known to hold full tensors.

    Only needed where all parameters are so small that full tensors and shards have the same shapes.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected names.
    """
    return model.load_state_dict(marked(state, model, Form.FULL), strict=strict)


def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """``model.load_state_dict(state, strict)`` for a ``state`` that is known to hold this rank's
    shards; needed in the same cases, where ``state`` has become a plain dict (as ``xm.save`` makes
    of it) since ``model.state_dict()``.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected names.
    """
    return model.load_state_dict(marked(state, model, Form.SHARDS), strict=strict)


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
            neither cut like a shard nor one number (as Adafactor's factors of a shard); if it holds
            parameters that tensor parallelism has cut and no unit shards.
    """
    _refuse_cut_outside(model, optimizer)
    state = read_optimizer(optimizer, _params(model))
    settle()  # whole entries are read on ranks that are shown something only
    return to_full(state, _names(model), only=0 if rank0_only else None)


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
    load_full(optimizer, _params(model), _names(model), state)


def cut_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, full: bool
) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, from a full state or from one of these shards; the
    optimizer stays as it is.

    Args:
        model: the sharded model.
        optimizer: over its parameters.
        state: as ``optim_state_dict`` or ``sharded_optim_state_dict`` returns it.
        full: which of the two.

    Raises:
        ValueError: with every name, group or shape that does not fit.
    """
    params = _params(model)
    with state_made(optimizer, params, state, restore=True) as template:
        cut = from_full(state, template, _names(model)) if full else from_shards(state, template)
        return torch_state_dict(optimizer, params, cut)


def sharded_optim_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state of this rank's shards, by their names, in host memory; in the form of
    ``optim_state_dict``."""
    return to_shards(read_optimizer(optimizer, _params(model)))


def load_sharded_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Give the optimizer what ``sharded_optim_state_dict`` returned on as many ranks.

    Raises:
        ValueError: with every name, group or shape that does not fit.
    """
    params = _params(model)
    with state_made(optimizer, params, state) as template:
        write_optimizer(optimizer, params, from_shards(state, template))


def _refuse_cut_outside(model: nn.Module, optimizer: Optimizer) -> None:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    outside = [each for each in cut_outside_units(model) if id(each.param) in held]
    refuse_cut_outside(outside, "optim_state_dict")


def _params(model: nn.Module) -> dict[str, Tensor]:
    reshard_units(model)
    sharded = [(shard.key, slice_of(shard.param, shard.group)) for shard in _shards(model)]
    return params_by_key(sharded, model.named_parameters())


def _shards(model: nn.Module) -> list[NamedShard]:
    """Every shard once, under its first key."""
    shards: dict[int, NamedShard] = {}
    for shard in named_shards(model):
        shards.setdefault(id(shard.param.slots), shard)
    return list(shards.values())


def _names(model: nn.Module) -> ShardNames:
    """A parameter that units share goes by the name that the plain model has first."""
    first = {id(param): name for name, param in model.named_parameters()}
    aliases: dict[int, list[str]] = defaultdict(list)
    for shard in named_shards(model):
        if not shard.param.is_flat:
            aliases[id(shard.param.slots)] += shard.names_of(shard.param.members[0])

    def canonical_name(shard: NamedShard) -> str:
        is_slice = shard.param.slots.part is not None
        return shard.names[0] if is_slice else first[id(shard.param.leaf)]

    shards = _shards(model)
    members = {
        shard.key: shard.names if shard.param.is_flat else [canonical_name(shard)]
        for shard in shards
    }
    canonical = {
        alias: canonical_name(shard) for shard in shards for alias in aliases[id(shard.param.slots)]
    }
    return ShardNames({shard.key: shard for shard in shards}, members, canonical)


def _original_dtypes(model: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    for unit, host in named_hosts(model):
        for name, dtype in host._fsdp_attachment.cast_buffers.items():
            yield join_name(unit, name), dtype


def _on_host(value: Any, dtype: torch.dtype | None) -> Any:
    """Tensors, also those of an extra state, copied unless they have just been."""
    return map_tensors(lambda t: t.detach().to(device="cpu", dtype=dtype or t.dtype), value)
