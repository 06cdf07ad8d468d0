"""Let an optimizer that was made of a plain model's parameters hold the shards of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from xla_fsdp.fsdp.engine.param import known_shard


def hold_shards(optimizer: Optimizer) -> None:
    """Replace parameters that were sharded since by their shards, and those of a stack by the
    stack. Groups and their options are kept.

    Raises:
        ValueError: if the optimizer has state, or one that wraps another, or a flattened unit or a
            stack is in several groups.
    """
    groups = [[_current(param) for param in group["params"]] for group in optimizer.param_groups]
    before = [param for group in optimizer.param_groups for param in group["params"]]
    after = [param for group in groups for param in group]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return
    unique = [list(dict.fromkeys(group)) for group in groups]
    _check_can_change(optimizer, unique)
    for group, all_params, params in zip(optimizer.param_groups, groups, unique, strict=True):
        if "param_names" in group:  # of an optimizer of named parameters
            group["param_names"] = _first_names(group["param_names"], all_params)
        group["params"] = params


def _current(param: Tensor) -> Tensor:
    known = known_shard(param)
    return param if known is None else known.leaf


def _first_names(names: Sequence[str], params: Sequence[Tensor]) -> list[str]:
    found: dict[int, str] = {}
    for name, param in zip(names, params, strict=True):
        found.setdefault(id(param), name)
    return list(found.values())


def _check_can_change(optimizer: Optimizer, groups: list[list[Any]]) -> None:
    name = type(optimizer).__name__
    if optimizer.state:
        raise ValueError(
            f"{name} has made steps before its model was wrapped, so its state is that of whole "
            f"parameters. Wrap first, then load_optim_state_dict"
        )
    if hasattr(optimizer, "inner"):
        raise ValueError(
            f"{name} was made before its model was wrapped, and the optimizer inside it holds what "
            f"the parameters were then. Prepare the model first, and make the optimizer of "
            f"model.parameters()"
        )
    every = [param for group in groups for param in group]
    if len(set(map(id, every))) < len(every):
        raise ValueError(
            f"parameter groups of {name} share a flattened unit or a stack of scanned blocks, "
            f"which has one optimizer state. Shard with flatten_parameters=False, scan without "
            f"stacked, or make one group"
        )
