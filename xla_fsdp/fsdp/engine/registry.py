"""Which shard stands for a tensor that a unit has replaced.

A unit replaces a parameter by its shard. Where another unit's module still holds the original (a
head tied to an embedding), this registry is the only way to know that the two are one.
Words: a *stand-in* is a tensor that the shard stands for: the original parameter, the meta tensor
that it was before it had memory, or the shard itself.
Always true: no shard is kept alive. Keys are tensors of one rank's own model, so ranks that are
threads of one process never meet here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from xla_fsdp.fsdp.engine.param import FSDPParam
    from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup


_shard_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_whole_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_group_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_shown: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(param: FSDPParam, stand_ins: Iterable[Tensor]) -> None:
    """``param`` is what became of ``stand_ins``."""
    for tensor in stand_ins:
        _shard_of[tensor] = weakref.ref(param)


def known_shard(tensor: Tensor) -> FSDPParam | None:
    """What became of ``tensor``, if a unit has taken it."""
    reference = _shard_of.get(tensor)
    return reference() if reference is not None else None


def remember_group(shard: Tensor, group: FSDPParamGroup) -> None:
    """``shard`` is gathered with ``group`` (and with others, if units share it)."""
    if known_group(shard) is None:
        _group_of[shard] = weakref.ref(group)


def known_group(shard: Tensor) -> FSDPParamGroup | None:
    """The group with which a shard is gathered."""
    reference = _group_of.get(shard)
    return reference() if reference is not None else None


def remember_shown(full: Iterable[Tensor]) -> None:
    """``full`` is what a unit shows to its user in place of shards."""
    for tensor in full:
        _shown[tensor] = True


def refuse_shown(params: Iterable[Tensor], function: str) -> None:
    """Raise RuntimeError if ``function`` was given full parameters in place of shards."""
    if any(param in _shown for param in params):
        raise RuntimeError(
            f"{function} was given full parameters, which units show after unshard() or with "
            f"set_reshard_after_backward(False); the gradients are those of the shards. Call "
            f"model.clip_grad_norm_(max_norm) on the outermost sharded module, or reshard() of "
            f"these units before model.parameters()"
        )


def remember_whole(origin: Tensor, param: Tensor) -> None:
    """``param``, which no unit shards, is what became of the meta tensor ``origin``."""
    _whole_of[origin] = param


def known_whole(origin: Tensor) -> Tensor | None:
    """What became of the meta tensor ``origin``, if it is a parameter that no unit shards."""
    return _whole_of.get(origin)
