"""Let an optimizer that was made of a plain model's parameters hold the shards of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from xla_fsdp.distributed.placement import current
from xla_fsdp.fsdp.engine.param import known_shard
from xla_fsdp.optim.held_params import HeldParams
from xla_fsdp.optim.optimizers import params_of


def hold_shards(optimizer: Optimizer) -> None:
    """Replace parameters that were sharded since by their shards, and those of a stack by the
    stack, in the groups and wherever else ``optimizer`` holds them.

    Raises:
        ValueError: if the optimizer has state, copies of parameters, or what no shard can replace;
            nothing is changed then.
    """
    new = {id(param): _current(param) for param in params_of(optimizer)}
    if all(id(each) == old for old, each in new.items()):
        return
    held = HeldParams(new, frozenset(param.shape for param in params_of(optimizer)))
    held.search(optimizer)
    for each in held.optimizers:
        _check_can_change(each, [_unique(new, group["params"]) for group in each.param_groups])
    _check_elsewhere(optimizer, held, new)
    held.replace()
    groups = {id(group["params"]): group for each in held.optimizers for group in each.param_groups}
    for group in groups.values():
        _replace_in_group(group, new)


def _current(param: Tensor) -> Tensor:
    param = current(param)
    known = known_shard(param)
    return param if known is None else known.leaf


def _unique(new: dict[int, Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    return list(dict.fromkeys(new.get(id(param), param) for param in params))


def _replace_in_group(group: dict[str, Any], new: dict[int, Tensor]) -> None:
    if "param_names" in group:  # of an optimizer of named parameters
        found: dict[int, str] = {}
        for name, param in zip(group["param_names"], group["params"], strict=True):
            found.setdefault(id(new.get(id(param), param)), name)
        group["param_names"] = list(found.values())
    # The same list: LBFGS has it under another name, too.
    group["params"][:] = _unique(new, group["params"])


def _check_elsewhere(optimizer: Optimizer, held: HeldParams, new: dict[int, Tensor]) -> None:
    uses = Counter(map(id, new.values()))
    joined = held.places if any(count > 1 for count in uses.values()) else []
    if wrong := [*held.problems, *joined]:
        name = type(optimizer).__name__
        why = "of which several became one shard" if joined else "which no shard can replace"
        raise ValueError(
            f"{name} was made before its model was sharded, and holds what it had of the "
            f"parameters then in {', '.join(wrong[:4])}, {why}. Make it of the sharded model's "
            f"parameters; parallelize takes a function that does so, as partial({name}, ...)"
        )


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
