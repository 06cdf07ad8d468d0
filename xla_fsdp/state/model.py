"""Full state dicts of sharded models: those of the original model, in host memory.

``model.state_dict()`` returns this rank's shards; ``model.load_state_dict()`` takes either form.
Invariants: every rank gathers, one unit at a time, so that the device never holds more than one
unit's unsharded parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.placement import TensorPlacement, placement_in
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine.load_hooks import Form, marked
from xla_fsdp.fsdp.engine.module_state import named_fsdp_modules, reshard_units, units_in
from xla_fsdp.fsdp.engine.param import joined
from xla_fsdp.fsdp.engine.shard_tensor import is_sharded
from xla_fsdp.optim.guards import owned_by, shards_of_others
from xla_fsdp.state.summon import SummonOptions, is_shown, summoned
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import execute_pending


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> OrderedDict[str, Any]:
    """Return the state dict that the original model would have.

    Args:
        model: a sharded module, or one that holds sharded modules. Every rank must call this.
        rank0_only: return the state dict only on rank 0 of the ranks that share the parameters, and
            an empty one, which takes no memory, on others.

    Returns:
        Every parameter and persistent buffer, unsharded and global, in host memory, under its
        original name and in its original dtype. Tied names share memory.

    Raises:
        RuntimeError: inside a forward, a backward or ``summon_full_params``.
        ValueError: if ``model`` has parameters of a unit around it, as what a wrapper holds does.
    """
    reshard_units(model)  # unsharded parameters in modules may be from before the optimizer's step
    units = units_in(model)
    if found := shards_of_others(model):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"full_state_dict was given a {type(model).__name__} inside of the unit that shards "
            f"{', '.join(found[:3])}{more}, of which it has only shards; give it the sharded "
            f"model, as the wrapper, fully_shard or parallelize returned it"
        )
    options = SummonOptions(False, rank0_only, offload_to_cpu=True, global_params=True)
    # Compute buffers on all ranks, so that their programs are alike: with rank0_only the copies to
    # the host below are made on some ranks only.
    execute_pending()
    outside = cut_outside_units(model)
    gathered = {name: joined(param.detach(), placement) for name, param, placement in outside}
    ops.compute(list(gathered.values()))
    with summoned(units, options):
        if not is_shown(units, options):
            return OrderedDict()
        state = model.state_dict()
    state.update(gathered)
    dtypes = cast_buffers(model)
    for name, value in state.items():
        dtype = dtypes.get(name)
        # Also tensors of an extra state, which may be of any structure.
        state[name] = map_tensors(partial(_to_host, dtype=dtype), value)
    return marked(state, model, Form.FULL)


def cast_buffers(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the original dtypes of the buffers that units have cast, by all of their names."""
    return {
        join_name(prefix, name): dtype
        for prefix, module in named_fsdp_modules(model, remove_duplicate=False)
        for name, dtype in module._fsdp_module_state.cast_buffers.items()
    }


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a ``state`` of full tensors, as ``model.load_state_dict(state, strict)`` does.

    Only needed if all parameters are so small that full tensors and shards have the same shapes.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected names.
    """
    return model.load_state_dict(marked(state, model, Form.FULL), strict=strict)


def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a ``state`` of this rank's shards, as ``model.load_state_dict(state, strict)`` does.

    Needed in the same case, if ``state`` is no longer the object that ``model.state_dict()``
    returned but a plain dict of its tensors (as ``xm.save`` writes it).

    Returns:
        What ``load_state_dict`` returns: missing and unexpected names.
    """
    return model.load_state_dict(marked(state, model, Form.SHARDS), strict=strict)


class OutsideParam(NamedTuple):
    """A parameter that tensor parallelism has cut and that no unit shards."""

    name: str
    param: Tensor
    placement: TensorPlacement


def cut_outside_units(model: nn.Module) -> Iterator[OutsideParam]:
    """Yield the parameters outside of units that tensor parallelism has cut; tied ones under each
    of their names."""
    in_units = owned_by(units_in(model))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            placement = placement_in(module, attribute)
            if param is None or placement is None or placement.dim is None:
                continue
            if not is_sharded(param) and (id(module), attribute) not in in_units:
                yield OutsideParam(join_name(prefix, attribute), param, placement)


def refuse_cut_outside(params: Iterable[OutsideParam], what: str) -> None:
    """Raise ValueError if ranks hold different parts of one of ``params``."""
    names = [each.name for each in params if each.placement.parts > 1]
    if names:
        raise ValueError(
            f"{what} cannot have parameters that tensor parallelism has cut and no FSDP unit "
            f"shards (ignored ones, say), of which ranks hold different parts: {', '.join(names)}. "
            f"Shard them, too (an axis of one rank will do), or leave them out of the plan of "
            f"parallelize_module; xla_fsdp.full_state_dict(model) has their whole values"
        )


def _to_host(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype)
