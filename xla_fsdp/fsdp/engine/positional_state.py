"""Check and translate the state dicts of torch's optimizers, which know parameters by position.

torch_xla's FSDP lists the parameters of an outer unit before those of inner ones; here they come in
the order of the model. So the state of a job of torch_xla belongs to other parameters, unless the
order is that of the model's file, which is noted when that is loaded.

Invariants: the noted order ends with the first step; nothing has changed when an error is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.optimizer import Optimizer

from xla_fsdp.fsdp.engine.param import FSDPParam, known_shard
from xla_fsdp.fsdp.engine.param_guards import held_shape
from xla_fsdp.fsdp.engine.registry import known_group
from xla_fsdp.fsdp.engine.shard_place import PLACES, Places, places_of, refuse_other_places
from xla_fsdp.optim.traits import steps_elementwise

_places: WeakKeyDictionary[FSDPParam, int] = WeakKeyDictionary()
"""Where a parameter was in the state dict of torch_xla's FSDP from which it was loaded last."""
_translated: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""The last place of the order in which an optimizer has loaded state."""
_lock = threading.Lock()  # ranks on CPU are threads
_next_place = count(1)


class _Own(threading.local):
    order = False


_own = _Own()


def note_order(params: Sequence[FSDPParam], *, upstream: bool) -> None:
    """Note the order in which a state dict of the model that is being loaded has parameters; forget
    it, if that is not of torch_xla's FSDP."""
    with _lock:
        for param in params:
            _places.pop(param, None)
            if upstream:
                _places[param] = next(_next_place)  # never used again: tells one file's order


def forget_order(optimizer: Optimizer) -> None:
    """State is in this package's order from now on, as a step is made."""
    if not _places:
        return
    with _lock:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if (known := known_shard(param)) is not None:
                    _places.pop(known, None)


@contextmanager
def in_own_order() -> Iterator[None]:
    """State dicts that this rank loads in the block are in this package's order, and checked."""
    before, _own.order = _own.order, True
    try:
        yield
    finally:
        _own.order = before


def guard_state_dicts() -> None:
    """Let every optimizer's state dict tell which shards it is of from now on, and its
    ``load_state_dict`` check and translate."""
    read: Callable[..., dict[str, Any]] = Optimizer.state_dict
    load: Callable[..., None] = Optimizer.load_state_dict

    @wraps(read)
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        state, places = read(optimizer), _places_in(optimizer)
        return {**state, PLACES: places} if places else state

    @wraps(load)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        return load(optimizer, fitting(optimizer, state_dict))

    # Not hooks, which each optimizer would need: torch has none for all of them.
    Optimizer.state_dict = state_dict  # type: ignore[method-assign, assignment]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]


def _places_in(optimizer: Optimizer) -> Places:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = [(known_shard(param), known_group(param)) for param in params]
    return places_of(
        (param, group.collectives_of(param))
        for param, group in known
        if param is not None and group is not None
    )


def fitting(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict by position in the order of the optimizer's parameters.

    Raises:
        ValueError: if it is of another rank's shards, the order cannot be told, or a tensor has
            another shape than its parameter.
    """
    live = [group["params"] for group in optimizer.param_groups]
    groups = state_dict.get("param_groups", ())
    if _own.order or [len(own) for own in live] != [len(g["params"]) for g in groups]:
        return state_dict  # of another number, torch tells
    refuse_other_places(state_dict.get(PLACES), _places_in(optimizer), "the optimizer's state dict")
    numbers = [list(group["params"]) for group in groups]
    known = [[known_shard(param) for param in own] for own in live]
    if not any(each is not None for own in known for each in own):
        return state_dict
    orders = [_order(own) for own in known]
    moved = any(order is None or order != sorted(order) for order in orders)
    if moved and not _is_own(optimizer, state_dict["state"]):
        last = max(_places.get(each, 0) for own in known for each in own if each is not None)
        if _translated.get(optimizer) == last or None in orders:
            raise ValueError(_UNKNOWN_ORDER)
        numbers = [[own[i] for i in o or ()] for own, o in zip(numbers, orders, strict=True)]
        pairs = zip(groups, numbers, strict=True)
        state_dict = {**state_dict, "param_groups": [{**g, "params": n} for g, n in pairs]}
        _translated[optimizer] = last
    if problems := list(_misfits(optimizer, live, numbers, state_dict["state"])):
        raise ValueError("\n".join([*problems, _OTHER_ORDER]))
    return state_dict


def _order(params: Sequence[FSDPParam | None]) -> list[int] | None:
    """Return the place in the file's order of each parameter of a group.

    None if it differs from the group's, but is not known of all.
    """
    places = [_places[each] for each in params if each is not None and each in _places]
    if places == sorted(places):
        return list(range(len(params)))
    if len(places) < len(params):
        return None
    ranked = {place: i for i, place in enumerate(sorted(places))}
    return [ranked[place] for place in places]


def _is_own(optimizer: Optimizer, state: Mapping[Any, Any]) -> bool:
    """Return whether a state dict holds the very tensors of the optimizer."""
    own = {id(v) for each in optimizer.state.values() for v in each.values()}
    return bool(own) and all(
        id(value) in own
        for each in state.values()
        for value in each.values()
        if isinstance(value, Tensor)
    )


def _misfits(
    optimizer: Optimizer,
    live: Sequence[Sequence[Tensor]],
    numbers: Sequence[Sequence[Any]],
    state: Mapping[Any, Mapping[str, Any]],
) -> Iterator[str]:
    if not steps_elementwise(optimizer):  # whose state may have any shape
        return
    for index, (own, group) in enumerate(zip(live, numbers, strict=True)):
        for place, (param, number) in enumerate(zip(own, group, strict=True)):
            for name, value in state.get(number, {}).items():
                is_wide = isinstance(value, Tensor) and value.shape not in ((), (0,), (1,))
                if is_wide and known_shard(param) is not None and value.shape != held_shape(param):
                    yield (
                        f"{name} of parameter {place} in group {index} has shape "
                        f"{tuple(value.shape)}, but the parameter {tuple(held_shape(param))}"
                    )


_OTHER_ORDER = (
    "The state dict is of other shards, or of parameters in another order (torch's optimizers know "
    "them by position). State of a job of torch_xla's FSDP is translated if the model's state dict "
    "of the same file is loaded just before; other state is loaded by names: by load_checkpoint, "
    "or load_optim_state_dict of what optim_state_dict has returned"
)
_UNKNOWN_ORDER = (
    "The order of the parameters in this state dict cannot be told: torch_xla's FSDP, from whose "
    "file the model was loaded, lists those of an outer unit first. Create the optimizer from "
    "model.parameters(), load the model's state dict and then, once, the optimizer's"
)
