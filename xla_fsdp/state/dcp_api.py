"""The functions of ``torch.distributed.checkpoint.state_dict``, for sharded models.

Every rank calls every function. Options are read by name, so torch's own ``StateDictOptions``
works, too; an unknown option that differs from its default raises.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.collectives import all_ranks, broadcast_
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.state.model import full_state_dict, load_full_state_dict
from xla_fsdp.state.optim_api import (
    load_optim_state_dict,
    load_sharded_optim_state_dict,
    optim_state_dict,
    sharded_optim_state_dict,
)
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import exchange


@dataclass(frozen=True)
class StateDictOptions:
    """The form of a state dict.

    Args:
        full_state_dict: use the original model's state dict rather than this rank's shards.
        cpu_offload: return tensors in host memory, where full ones always are; together with
            ``full_state_dict`` return them on rank 0 only, as torch does.
        broadcast_from_rank0: load a full state dict that only rank 0 has.
        strict: whether names that are missing or unexpected are errors.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    broadcast_from_rank0: bool = False
    strict: bool = True


def get_model_state_dict(
    model: nn.Module, *, submodules: Collection[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """Return the state dict of a sharded model, or of one that holds sharded modules; its form
    depends on ``options`` (``StateDictOptions``).

    Args:
        model: the model.
        submodules: modules of ``model`` to which the result is limited, by names in ``model``.
        options: ``StateDictOptions``.

    Raises:
        ValueError: if ``submodules`` holds a module that ``model`` does not have.
    """
    chosen, wanted = _options(options), _Wanted(model, submodules)
    if chosen.full_state_dict:
        return wanted.of(full_state_dict(model, rank0_only=chosen.cpu_offload))
    state = wanted.of(model.state_dict())
    return map_tensors(lambda t: t.detach().cpu(), dict(state)) if chosen.cpu_offload else state


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None
) -> Any:
    """Load a state dict. Shards on the meta device get memory on this rank's device first.

    Args:
        model: a sharded model, or one that holds sharded modules.
        model_state_dict: shards or, with ``full_state_dict``, full tensors.
        options: ``StateDictOptions``.

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
    options: Any = None,
) -> dict[str, Any]:
    """Return the state of the one optimizer of a sharded model's parameters, by their names:
    ``{"state": ..., "param_groups": ...}``; of those in ``submodules`` alone, if given."""
    chosen, optimizer = _options(options), _one(optimizers)
    wanted = _Wanted(model, submodules)
    if chosen.full_state_dict:
        state = optim_state_dict(model, optimizer, rank0_only=chosen.cpu_offload)
    else:
        state = sharded_optim_state_dict(model, optimizer)
    return wanted.of_optimizer(state)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: Any = None,
) -> None:
    """Load a result of ``get_optimizer_state_dict``.

    Args:
        model: the sharded model.
        optimizers: the optimizer of its parameters; it need not have made a step.
        optim_state_dict: full or of shards, as ``options`` say; with ``broadcast_from_rank0``
            ignored on all ranks but rank 0.
        options: ``StateDictOptions``.
    """
    chosen, optimizer = _options(options), _one(optimizers)
    if chosen.broadcast_from_rank0:
        optim_state_dict = _sent_from_rank0(optim_state_dict)
    if chosen.full_state_dict or chosen.broadcast_from_rank0:
        load_optim_state_dict(model, optimizer, optim_state_dict)
    else:
        load_sharded_optim_state_dict(model, optimizer, optim_state_dict)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: Collection[nn.Module] | None = None,
    options: Any = None,
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
    options: Any = None,
) -> Any:
    """Load both, and return the result of ``set_model_state_dict``."""
    report = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return report


class _Wanted:
    """The part of a state dict that belongs to modules of ``model``; all of it for None."""

    def __init__(self, model: nn.Module, submodules: Collection[nn.Module] | None) -> None:
        self._all = submodules is None
        names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
        if missing := [each for each in submodules or () if each not in names]:
            raise ValueError(
                f"submodules holds a {type(missing[0]).__name__} that is no module of the model"
            )
        self._names = [name for each in submodules or () for name in names[each]]

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._all:
            return state
        return {name: value for name, value in state.items() if self._has(name)}

    def of_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._all or not state:
            return state
        groups = [
            {**group, "params": [name for name in group["params"] if self._has(name)]}
            for group in state["param_groups"]
        ]
        return {**state, "state": self.of(state["state"]), "param_groups": groups}

    def _has(self, name: str) -> bool:
        return any(not each or f"{name}.".startswith(f"{each}.") for each in self._names)


def _options(given: Any) -> StateDictOptions:
    if given is None:
        return StateDictOptions()
    known = {field.name for field in fields(StateDictOptions)}
    defaults = type(given)()
    others = [
        f"{name}={value!r}"
        for name, value in vars(given).items()
        if name not in known and value != getattr(defaults, name)
    ]
    if others:
        raise ValueError(
            f"{', '.join(others)}: options that are not supported; {', '.join(sorted(known))} are"
        )
    return StateDictOptions(**{name: getattr(given, name) for name in known})


def _one(optimizers: Optimizer | Iterable[Optimizer]) -> Optimizer:
    found = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    if len(found) != 1:
        raise ValueError(f"{len(found)} optimizers were given; call this for each of them")
    return found[0]


def _from_rank0(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's full state dict, its tensors broadcast one after the other.

    Names and shapes are sent first, so that every rank allocates the same tensors.
    """
    shapes = {
        name: torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, Tensor) else v
        for name, v in state.items()
    }
    everyone = all_ranks()
    result = {}
    for name, value in _sent_from_rank0(shapes).items():
        result[name] = value
        if isinstance(value, Tensor):
            result[name] = torch.zeros(value.shape, dtype=value.dtype)
            if everyone.rank == 0:
                result[name].copy_(state[name])
            broadcast_([result[name]], everyone, ops.device())
    return result


def _sent_from_rank0(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return rank 0's state, sent as bytes because optimizer state may have any structure."""
    buffer = io.BytesIO()
    if ops.rank() == 0:
        torch.save(dict(state), buffer)
    return torch.load(io.BytesIO(exchange(buffer.getvalue())[0]), weights_only=True)
