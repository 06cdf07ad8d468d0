"""Shards that have memory, or not even that, and no values yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from xla_fsdp.fsdp.engine.param import (
    FSDPParam,
    held_shape,
    known_shard,
    remember,
)
from xla_fsdp.fsdp.engine.param_guards import Reads, name_of, read_by
from xla_fsdp.fsdp.engine.shard_tensor import ShardParameter, gather_like, param_of
from xla_fsdp.xla import ops


class UninitializedShard(ShardParameter):
    """A shard that has memory but no values yet.

    Torch functions called with it compute with an unsharded parameter, so that initialization sees
    the shape (fan-in) and draws the random numbers of the original model. The result is cut into
    the shard before the next call with other shards, so the device holds the unsharded parameters
    of one call only. Every rank must make the same calls.
    """

    waits_for_values = True
    has_values = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call_unsharded(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.finalize()
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        restore, (_, *values) = super().__reduce_ex__(protocol)
        return restore, (ShardParameter, *values)

    def complete(self) -> None:
        """Write what was done to the unsharded parameter into the shard."""
        if id(self) in _opened.shards:
            _close(self)

    def finalize(self) -> None:
        """Become a ``ShardParameter``, as the values are complete."""
        for shard, _ in list(_opened.shards.values()):
            _close(shard)
        self.__class__ = ShardParameter  # type: ignore[assignment]


class _Opened(threading.local):
    def __init__(self) -> None:
        # By id of the shard: the shard and its unsharded parameter.
        self.shards: dict[int, tuple[UninitializedShard, nn.Parameter]] = {}


_opened = _Opened()


def _call_unsharded(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        name, writes = name_of(func), getattr(func, "__name__", "") == "__set__"
        of_object = read_by(func, args, UninitializedShard) is Reads.OBJECT
        if name == "__repr__" or (of_object and not (name == "data" and writes)):
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        shards = {id(each): each for each in leaves if isinstance(each, UninitializedShard)}
        for shard, _ in [each for key, each in _opened.shards.items() if key not in shards]:
            _close(shard)
        unsharded = {key: _open(shard) for key, shard in shards.items()}
        args, kwargs = pytree.tree_map(lambda each: unsharded.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
    back = {id(unsharded[key]): shard for key, shard in shards.items()}
    return pytree.tree_map(lambda each: back.get(id(each), each), result)


@torch.no_grad()
def _open(shard: UninitializedShard) -> nn.Parameter:
    if id(shard) in _opened.shards:
        return _opened.shards[id(shard)][1]
    if shard.has_values:
        value = gather_like(shard, shard)
        ops.compute([value])
    else:
        shape = param_of(shard).originals[0].whole_shape
        value = torch.zeros(shape, dtype=shard.dtype, device=shard.device)
    unsharded = nn.Parameter(value, requires_grad=shard.requires_grad)
    _opened.shards[id(shard)] = shard, unsharded
    return unsharded


@torch.no_grad()
def _close(shard: UninitializedShard) -> None:
    _, unsharded = _opened.shards.pop(id(shard))
    param = known_shard(shard)
    with torch._C.DisableTorchFunctionSubclass():
        if param is not None and param.group() is not None:
            shard.copy_(param.cut([unsharded.detach()]))
            # At once, to free the unsharded parameter, and because the slice depends on the rank,
            # while the programs of training steps must be the same on all ranks.
            ops.compute([shard])
    shard.has_values = True


def take_memory(param: FSDPParam, *, has_values: bool) -> None:
    """Replace a shard on the meta device by the tensor that the user has put into the module. If it
    has no values, the shard acts as the unsharded parameter until they are complete. Raises
    ValueError if the shapes differ."""
    old = param.slots.shard
    if old.is_meta:
        new = next((tensor for tensor in param.owned() if not tensor.is_meta), None)
        if new is None:
            return
        if held_shape(new) != held_shape(old):
            raise ValueError(
                f"{param.key} is on the meta device as a shard of shape {tuple(held_shape(old))}, "
                f"and was given a tensor of shape {tuple(held_shape(new))}; give it this rank's "
                f"shard (distribute_tensor), or memory first (to_empty) and then full tensors"
            )
        kind = ShardParameter if has_values else UninitializedShard
        # A copy: torch_xla would trace what is computed from an alias from its earlier values.
        values = new.detach().to(ops.device(), copy=True)
        param.slots.shard = kind(values, requires_grad=old.requires_grad)
        vars(param.slots.shard).update(vars(old))
        remember(param, [param.slots.shard])
    for owner in param.owners:
        param.slots.refresh(owner)
