"""One collective for all cut layers that take the same tensor.

Query, key and value projections take one tensor. Each of them needs it ready for *use* by a cut
layer: gathered, and with a backward that sums over the ranks. Made once, the sum of the three
gradients is reduced once.
Always true: what is kept here lives no longer than the tensor that it was made of; a tensor that
was changed in place, or is seen in another grad mode, is made ready anew. Where a module hands on
another tensor than it was given (a view, a cast), only the collective is made twice.
Keys are tensors of one rank, so ranks that are threads of one process never meet here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.tensor_parallel.mappings import copied, gathered_for_use, regathered

_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def use_replicated(x: Tensor, axis: AxisComm) -> Tensor:
    """A replicated tensor for cut layers."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if x in _origins:
        cut, dim, of, version = _origins[x]
        if (of, version) == (axis.key, x._version):
            return _once(x, (axis.key, "regathered"), lambda: regathered(cut, x, axis, dim))
    return _once(x, (axis.key, "copied"), lambda: copied(x, axis))


def use_cut(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """A tensor that is cut along ``dim``, gathered for cut layers."""
    return _once(x, (axis.key, "gathered", dim), lambda: gathered_for_use(x, axis, dim))


def remember_origin(gathered: Tensor, cut: Tensor, axis: AxisComm, dim: int) -> None:
    """``gathered`` is ``cut``, gathered along ``dim``."""
    if torch.is_grad_enabled() and cut.requires_grad:
        _origins[gathered] = (cut, dim, axis.key, gathered._version)


def _once(x: Tensor, how: Hashable, make: Callable[[], Tensor]) -> Tensor:
    # Inference tensors have no version; what is made of a leaf would keep it alive.
    if x.is_inference() or (x.is_leaf and x.requires_grad):
        return make()
    key = (how, x._version, torch.is_grad_enabled())
    known = _made.get(x)
    if known is None:
        known = _made[x] = {}
    if key not in known:
        known[key] = make()
    return known[key]
