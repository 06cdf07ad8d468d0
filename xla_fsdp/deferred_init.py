"""Let code that initializes whole parameters initialize shards.

Words: a shard is *opened* when a function of torch is called with it: the function gets the full
parameter instead; *closing* cuts what that then holds into the shard.
Always true: only shards that got their memory by ``to_empty`` and have not been used since are
opened; those of one call are open at a time, so a device holds one more full parameter, and every
rank must make the same calls. Results are those of the plain model, as shapes (fan-in) and random
numbers are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from xla_fsdp import xla_ops
from xla_fsdp.ties import known_group, known_shard
from xla_fsdp.whole_params import all_joined, own_parts

if TYPE_CHECKING:
    from xla_fsdp.shard_parameter import UninitializedShard

_OF_THE_SHARD = {"requires_grad_", "register_hook", "__repr__"}
_ATTRIBUTES_OF_THE_SHARD = {
    "requires_grad",
    "grad",
    "is_meta",
    "device",
    "dtype",
    "is_leaf",
    "retains_grad",
}


class _Open(threading.local):
    """What is open on this rank: shards and full parameters, by the shard's id."""

    def __init__(self) -> None:
        self.shards: dict[int, tuple[UninitializedShard, nn.Parameter]] = {}


_open = _Open()


def call_in_full(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` with full parameters in place of shards."""
    with torch._C.DisableTorchFunctionSubclass():
        if _concerns_the_shard(func):
            return func(*args, **kwargs)
        found = _shards_in((args, kwargs))
        for shard, _ in [each for key, each in _open.shards.items() if key not in found]:
            _close(shard)
        full = {key: _opened(shard) for key, shard in found.items()}
        args, kwargs = pytree.tree_map(lambda each: full.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
    back = {id(full[key]): shard for key, shard in found.items()}
    return pytree.tree_map(lambda each: back.get(id(each), each), result)


def close_all() -> None:
    """Cut what is open into shards."""
    for shard, _ in list(_open.shards.values()):
        _close(shard)


def _concerns_the_shard(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") in _ATTRIBUTES_OF_THE_SHARD
    return name in _OF_THE_SHARD


def _shards_in(tree: Any) -> dict[int, UninitializedShard]:
    leaves = pytree.tree_leaves(tree)
    return {id(each): each for each in leaves if hasattr(type(each), "settle")}


def _opened(shard: UninitializedShard) -> nn.Parameter:
    if id(shard) not in _open.shards:
        _open.shards[id(shard)] = shard, _full(shard)
    return _open.shards[id(shard)][1]


@torch.no_grad()
def _full(shard: UninitializedShard) -> nn.Parameter:
    param, group = known_shard(shard), known_group(shard)
    if param is None or group is None:
        raise RuntimeError("a shard without values was initialized after its model was gone")
    if shard.was_open:
        [value] = all_joined(group.gather.as_stored([param], [shard]), param.members)
        xla_ops.compute([value])
    else:
        value = torch.zeros(param.members[0].whole_shape, dtype=shard.dtype, device=shard.device)
    return nn.Parameter(value, requires_grad=shard.requires_grad)


@torch.no_grad()
def _close(shard: UninitializedShard) -> None:
    _, full = _open.shards.pop(id(shard))
    param, group = known_shard(shard), known_group(shard)
    with torch._C.DisableTorchFunctionSubclass():
        if param is not None and group is not None:
            local = own_parts([full.detach()], param.members)
            shard.copy_(param.slice_of(local, group.collectives.rank))
            # At once: the full parameter is freed, and no program of a training step, which must be
            # the same on every rank, begins with slices that are not.
            xla_ops.compute([shard])
    shard.was_open = True
