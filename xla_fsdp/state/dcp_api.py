"""The functions of ``torch.distributed.checkpoint.state_dict``, for sharded models.

Every rank calls every function. ``options`` are torch's ``StateDictOptions``; one that is not
``SUPPORTED`` and differs from its default raises.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from xla_fsdp.distributed.collectives import all_ranks, broadcast_
from xla_fsdp.distributed.pytree import map_tensors, tensors_in
from xla_fsdp.state.model import full_state_dict, load_full_state_dict
from xla_fsdp.state.optim_api import (
    load_optim_state_dict,
    load_sharded_optim_state_dict,
    optim_state_dict,
    sharded_optim_state_dict,
)
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import exchange

SUPPORTED = ("broadcast_from_rank0", "cpu_offload", "full_state_dict", "strict")


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: Collection[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state dict of a sharded model, or of one that holds sharded modules; its form
    depends on ``options``.

    Args:
        model: the model.
        submodules: modules of ``model`` to which the result is limited, by names in ``model``.
        options: with ``full_state_dict`` the result is the original model's state dict rather than
            this rank's shards. ``cpu_offload`` returns tensors in host memory, where full ones
            always are; together with ``full_state_dict`` on rank 0 only, as in torch.

    Raises:
        ValueError: if ``submodules`` holds a module that ``model`` does not have.
    """
    chosen, names = _options(options), _names(model, submodules)
    full = chosen.full_state_dict
    state = full_state_dict(model, rank0_only=chosen.cpu_offload) if full else model.state_dict()
    if submodules is not None:
        state = {name: value for name, value in state.items() if _is_in(names, name)}
    to_host = chosen.cpu_offload and not full
    return map_tensors(lambda t: t.detach().cpu(), dict(state)) if to_host else state


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Load a state dict. Shards on the meta device get memory on this rank's device first.

    Args:
        model: a sharded model, or one that holds sharded modules.
        model_state_dict: shards or, with ``full_state_dict``, full tensors.
        options: with ``broadcast_from_rank0`` rank 0 alone needs the state dict, a full one; with
            ``strict`` missing and unexpected names are errors.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected names.
    """
    chosen = _options(options)
    model._apply(lambda t: torch.empty_like(t, device=ops.device()) if t.is_meta else t)
    if chosen.broadcast_from_rank0:
        model_state_dict = _from_rank0(model_state_dict)
    if chosen.full_state_dict or chosen.broadcast_from_rank0:
        return load_full_state_dict(model, model_state_dict, chosen.strict)
    return model.load_state_dict(model_state_dict, strict=chosen.strict)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: Collection[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of the one optimizer of a sharded model's parameters, by their names:
    ``{"state": ..., "param_groups": ...}``; of those in ``submodules`` alone, if given."""
    chosen, optimizer = _options(options), _one(optimizers)
    names = _names(model, submodules)
    if chosen.full_state_dict:
        state = optim_state_dict(model, optimizer, rank0_only=chosen.cpu_offload)
    else:
        state = sharded_optim_state_dict(model, optimizer)
    if not state:
        return state
    return {
        "state": {key: values for key, values in state["state"].items() if _is_in(names, key)},
        "param_groups": [
            {**group, "params": [key for key in group["params"] if _is_in(names, key)]}
            for group in state["param_groups"]
        ],
    }


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a result of ``get_optimizer_state_dict``.

    Args:
        model: the sharded model.
        optimizers: the optimizer of its parameters; it need not have made a step.
        optim_state_dict: full or of shards, as ``options`` say; with ``broadcast_from_rank0``
            ignored on all ranks but rank 0.
        options: as of ``set_model_state_dict``.
    """
    chosen, optimizer = _options(options), _one(optimizers)
    if chosen.broadcast_from_rank0:
        optim_state_dict = _from_rank0(optim_state_dict)
    if chosen.full_state_dict or chosen.broadcast_from_rank0:
        load_optim_state_dict(model, optimizer, optim_state_dict)
    else:
        load_sharded_optim_state_dict(model, optimizer, optim_state_dict)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: Collection[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of the model and of the optimizer, or their part of ``submodules``."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Load both, and return the result of ``set_model_state_dict``."""
    report = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return report


def _names(model: nn.Module, submodules: Collection[nn.Module] | None) -> list[str]:
    """Return all names of ``submodules`` in ``model``; for None that of the model, which is empty.

    Raises:
        ValueError: if one of them is not in ``model``.
    """
    if submodules is None:
        return [""]
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    if missing := [each for each in submodules if each not in names]:
        raise ValueError(
            f"submodules holds a {type(missing[0]).__name__} that is no module of the model"
        )
    return [name for each in submodules for name in names[each]]


def _is_in(names: Collection[str], key: str) -> bool:
    return any(not name or f"{key}.".startswith(f"{name}.") for name in names)


def _options(given: StateDictOptions | None) -> StateDictOptions:
    given, default = given or StateDictOptions(), StateDictOptions()
    others = [
        f"{name}={value!r}"
        for name, value in vars(given).items()
        if name not in SUPPORTED and value != getattr(default, name)
    ]
    if others:
        raise ValueError(
            f"{', '.join(others)}: options that are not supported; {', '.join(SUPPORTED)} are"
        )
    return given


def _one(optimizers: Optimizer | Iterable[Optimizer]) -> Optimizer:
    found = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    if len(found) != 1:
        raise ValueError(f"{len(found)} optimizers were given; call this for each of them")
    return found[0]


def _from_rank0(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's state, its tensors broadcast one after the other.

    Everything else is sent first, so that every rank allocates the same tensors.
    """
    buffer, everyone = io.BytesIO(), all_ranks()
    if everyone.rank == 0:
        torch.save(map_tensors(lambda t: torch.empty_like(t, device="meta"), dict(state)), buffer)
    own = iter(tensors_in(dict(state)))

    def received(tensor: Tensor) -> Tensor:
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if everyone.rank == 0:
            value.copy_(next(own))
        broadcast_([value], everyone, ops.device())
        return value

    sent = torch.load(io.BytesIO(exchange(buffer.getvalue())[0]), weights_only=True)
    return cast(dict[str, Any], map_tensors(received, sent))
