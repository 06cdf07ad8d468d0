"""Find the shard, and its group, of a tensor that a unit has replaced.

A unit replaces a parameter by its shard. Where another unit's module still holds the original (a
head tied to an embedding), this registry is the only way to know that the two are one.

Invariants: no shard is kept alive. Keys are tensors of one rank's own model, so ranks that are
threads of one process never share an entry.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.placement import TensorPlacement
from xla_fsdp.fsdp.engine.packing import ShardPacking


class KnownMember(Protocol):
    """An ``OriginalParam``, as modules below ``param`` see it."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def whole_shape(self) -> torch.Size: ...
    @property
    def placement(self) -> TensorPlacement | None: ...


class KnownParam(Protocol):
    """An ``FSDPParam``, as modules below ``param`` see it."""

    @property
    def key(self) -> str: ...
    @property
    def members(self) -> tuple[KnownMember, ...]: ...
    @property
    def packing(self) -> ShardPacking: ...
    @property
    def slots(self) -> Any: ...  # ``ParamSlots``
    @property
    def is_flat(self) -> bool: ...
    @property
    def leaf(self) -> nn.Parameter: ...
    def slice_of(self, full: Sequence[Tensor], rank: int) -> Tensor: ...


class _Gather(Protocol):
    def as_stored(self, params: Any, shards: Sequence[Tensor]) -> list[Tensor]: ...


class KnownGroup(Protocol):
    """An ``FSDPParamGroup``, as modules below ``param_group`` see it."""

    @property
    def collectives(self) -> Collectives: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def gather(self) -> _Gather: ...
    @property
    def has_unreduced(self) -> bool: ...
    @property
    def steps_in_backward(self) -> bool: ...


_param_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_group_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_materialized: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_unsharded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(param: KnownParam, tensors: Iterable[Tensor]) -> None:
    """Note that ``param`` has replaced ``tensors``: originals, meta tensors, or its own shard."""
    for tensor in tensors:
        _param_of[tensor] = weakref.ref(param)


def known_shard(tensor: Tensor) -> KnownParam | None:
    """Return the parameter that has replaced ``tensor``, if a unit has taken it."""
    reference = _param_of.get(tensor)
    return reference() if reference is not None else None


def remember_group(shard: Tensor, group: KnownGroup) -> None:
    """Note that ``shard`` is gathered with ``group``, the first one if units share it."""
    if known_group(shard) is None:
        _group_of[shard] = weakref.ref(group)


def known_group(shard: Tensor) -> KnownGroup | None:
    """Return the group with which a shard is gathered."""
    reference = _group_of.get(shard)
    return reference() if reference is not None else None


def remember_shown(full: Iterable[Tensor]) -> None:
    """Note that a unit shows these unsharded parameters to its user in place of shards."""
    for tensor in full:
        _unsharded[tensor] = True


def refuse_shown(params: Iterable[Tensor], function: str) -> None:
    """Raise RuntimeError if ``function`` was given unsharded parameters in place of shards."""
    if any(param in _unsharded for param in params):
        raise RuntimeError(
            f"{function} was given full parameters, which units show after unshard() or with "
            f"set_reshard_after_backward(False); the gradients are those of the shards. Call "
            f"model.clip_grad_norm_(max_norm) on the outermost sharded module, or reshard() of "
            f"these units before model.parameters()"
        )


def remember_materialized(origin: Tensor, param: Tensor) -> None:
    """Note that the ignored ``param`` was made of the meta tensor ``origin``."""
    _materialized[origin] = param


def known_materialized(origin: Tensor) -> Tensor | None:
    """Return the ignored parameter that was made of the meta tensor ``origin``."""
    return _materialized.get(origin)
