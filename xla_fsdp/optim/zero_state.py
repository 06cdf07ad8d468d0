"""State dicts of an optimizer that holds slices: this rank's, and the plain optimizer's.

Words: *own* is the state dict of one rank, which carries a mark that says whose it is; *plain* the
one that the optimizer would have over whole parameters. In both, parameters are numbers, counted
through the groups, as in torch. Always true: everything is checked before anything is changed.
Gathering and cutting are ``full_optim_state``'s, as for a sharded model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.xla.host import settle
from xla_fsdp.fsdp.engine.named_params import NamedShard
from xla_fsdp.fsdp.state_dict.full_optim import ShardNames, load_full, to_full
from xla_fsdp.fsdp.state_dict.optim import read_optimizer
from xla_fsdp.optim.slices import Slices

MARK = "zero"


def own_state(inner: Optimizer, slices: Slices | None) -> dict[str, Any]:
    """This rank's state dict; without slices it is the plain one."""
    state = inner.state_dict()
    return state if slices is None else {**state, MARK: _mark(slices)}


def is_own(state: Mapping[str, Any]) -> bool:
    """Whether ``state`` is what ``own_state`` made of slices."""
    return MARK in state


def as_torch_has_it(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` without the mark, and in tensors of its own: torch's optimizers take on those that
    they are given, and would share them with whoever saved the state."""
    copied = map_tensors(lambda tensor: tensor.detach().clone(), dict(state))
    return {name: value for name, value in copied.items() if name != MARK}


def plain_state(inner: Optimizer, slices: Slices | None, over: Slices, to: int) -> dict[str, Any]:
    """The plain optimizer's state dict on rank ``to`` of ``over``'s ranks, else an empty one.

    Raises:
        ValueError: if there is no such rank.
    """
    ranks = over.collectives
    if not 0 <= to < ranks.num_shards:
        raise ValueError(f"to={to} is not one of the {ranks.num_shards} ranks of a group")
    if slices is None:
        state = _on_host(inner.state_dict())
        return state if ranks.rank == to else {}
    with slices.filled(slices.params):  # what is cut like a slice is told by its shape
        state = read_optimizer(inner, slices.keys())
    settle()  # whole entries are read on one rank only
    groups = _on_host(inner.state_dict()["param_groups"])
    full = to_full(state, _names(slices), only=to)
    if not full:
        return {}
    entries = {int(name): values for name, values in full["state"].items()}
    return {"state": entries, "param_groups": groups}


def load_plain(inner: Optimizer, slices: Slices, state: Mapping[str, Any]) -> None:
    """Cut a plain optimizer's state dict for ``inner``.

    Raises:
        ValueError: with every entry that does not fit; nothing has been changed then.
    """
    with slices.filled(slices.params):
        load_full(inner, slices.keys(), _names(slices), _named(state))


def problems(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], slices: Slices | None
) -> list[str]:
    """Why ``state`` cannot be loaded, as far as it can be told without the optimizer's own."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return [
            "expected an optimizer state dict with 'state' and 'param_groups' (an empty one is "
            "what consolidate_state_dict returns on ranks other than `to`)"
        ]
    return [*_mark_problems(state, slices), *_group_problems(state, groups)]


def _mark_problems(state: Mapping[str, Any], slices: Slices | None) -> Iterator[str]:
    if not is_own(state):
        return
    here = None if slices is None else _mark(slices)
    if state[MARK] != here:
        wanted = f"expected {here}" if here else "this optimizer steps whole parameters"
        yield (
            f"the state is of {state[MARK]}, {wanted}. Load it on the rank that saved it, on as "
            f"many ranks, or load what consolidate_state_dict returned"
        )


def _group_problems(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    there = [len(group["params"]) for group in state["param_groups"]]
    here = [len(group["params"]) for group in groups]
    if there != here:
        yield f"groups of the state have {there} parameters, those of the optimizer {here}"


def _mark(slices: Slices) -> dict[str, Any]:
    return {
        "version": 1,
        "rank": slices.collectives.rank,
        "num_ranks": slices.collectives.num_shards,
        "shapes": slices.shapes(),
    }


def _names(slices: Slices) -> ShardNames:
    group = slices.group
    shards = {param.key: NamedShard((("",),), param, group) for param in group.params}
    return ShardNames(shards, {key: [key] for key in shards}, {})


def _on_host(value: Any) -> Any:
    return map_tensors(lambda t: t.detach().to("cpu", copy=True), value)


def _named(state: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a state dict need not be consecutive; what counts is their order in the groups."""
    order = [number for group in state["param_groups"] for number in group["params"]]
    names = {number: str(place) for place, number in enumerate(order)}
    groups = [
        {
            **{name: value for name, value in group.items() if name != "param_names"},
            "params": [names[number] for number in group["params"]],
        }
        for group in state["param_groups"]
    ]
    entries = {names[n]: values for n, values in state["state"].items() if n in names}
    return {"state": entries, "param_groups": groups}
