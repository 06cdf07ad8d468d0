"""The group that gathers a shard, and other facts of tensors, looked up by the tensor.

Tables are keyed by tensors of one rank's model, so that ranks that are threads of one process share
no entry.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.placement import placed_params


class _Gather(Protocol):
    def as_stored(self, params: Any, shards: Sequence[Tensor]) -> list[Tensor]: ...


class KnownGroup(Protocol):
    """The part of ``FSDPParamGroup`` used here; importing the class would be circular."""

    @property
    def collectives(self) -> Collectives: ...
    def collectives_of(self, param: Any) -> Collectives: ...
    def mesh_of(self, param: Any) -> Mesh: ...
    @property
    def gather(self) -> _Gather: ...
    @property
    def has_unreduced(self) -> bool: ...
    @property
    def steps_in_backward(self) -> bool: ...


_group_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_materialized: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_unsharded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_with_grads: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember_group(shard: Tensor, group: KnownGroup) -> None:
    """Register ``group`` as the one that gathers ``shard``, unless another unit's group does."""
    if known_group(shard) is None:
        _group_of[shard] = weakref.ref(group)


def known_group(shard: Tensor) -> KnownGroup | None:
    """Return the group that gathers ``shard``, or None."""
    reference = _group_of.get(shard)
    return reference() if reference is not None else None


def owners_of_grads(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameter of each gradient, if ranks may hold different parts of it; else the
    tensor itself."""
    # Looked up only here, so that accumulating gradients costs nothing. list() of a dict is atomic:
    # other threads may add to it.
    live = [reference() for reference in list(_group_of.data)]
    owners = {
        id(param.grad): param
        for param in [*(each for each in live if each is not None), *placed_params()]
        if param.grad is not None
    }
    return [owners.get(id(grad), grad) for grad in grads]


def note_grads(stack: Tensor, numbers: Iterable[int]) -> None:
    """Note that these slices of a stack of shards have got a gradient."""
    _with_grads.setdefault(stack, set()).update(numbers)


def slices_without_grads(stack: Tensor, length: int) -> list[int]:
    """Return the slices that got no gradient since the last step, although others did; and begin
    anew.

    A stack has one gradient and is stepped as one. A slice of zeros in it would be decayed, and
    moved by its momentum, where torch leaves a parameter without a gradient as it is.
    """
    noted = _with_grads.pop(stack, None)
    return [number for number in range(length) if number not in noted] if noted else []


def register_unsharded_views(unsharded: Iterable[Tensor]) -> None:
    """Register unsharded parameters that ``parameters()`` returns in place of shards."""
    for tensor in unsharded:
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
    """Register the ignored ``param`` as the one made of the meta tensor ``origin``."""
    _materialized[origin] = param


def known_materialized(origin: Tensor) -> Tensor | None:
    """Return the ignored parameter that was made of the meta tensor ``origin``, or None."""
    return _materialized.get(origin)
