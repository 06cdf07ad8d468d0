"""Bring activations from one placement over the ranks of an axis to another.

Placements are torch's ``Replicate()``, ``Shard(dim)`` and ``Partial()``. Those that a plan gives
are taken to be true: tensors are ordinary ones, which do not know how they are placed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.tensor_parallel import mappings

# Query, key and value projections take one tensor. It is gathered once for all of them, and the sum
# of their gradients reduced once. A module that hands on another tensor than it was given (a view,
# a cast) only makes the collective happen twice.
# Entries live no longer than the tensor that is the key. Keys are tensors of one rank, so ranks
# that are threads of one process never meet here.

# By tensor: what was made of it for parallel layers, by kind, version and grad mode.
_parallel_inputs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

# By gathered tensor: the shard, dim, axis and version that it was gathered from.
_gathered_from: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def redistribute_problems(old: Any, new: Any, what: str) -> Iterator[str]:
    """Yield why a tensor cannot be brought from one placement to another.

    Args:
        old: the placement it has.
        new: the placement it is to have.
        what: names the tensor in the messages.
    """
    for layout in (old, new):
        if type(layout) not in (Replicate, Shard, Partial):
            yield f"{what} has the layout {layout!r}; expected Replicate(), Shard(dim) or Partial()"
        elif isinstance(layout, Partial) and layout.reduce_op != "sum":
            yield f"{what} has the layout {layout!r}; only sums are supported: Partial()"
    if isinstance(new, Partial) and not isinstance(old, Partial):
        yield f"{what} is {old!r} and is to be {new!r}; no layer takes that. Choose Replicate()"


def redistribute(x: Tensor, old: Placement, new: Placement, axis: AxisComm, what: str) -> Tensor:
    """Bring a tensor from one placement to another, between which there are no problems.

    Args:
        x: the local tensor.
        old: the placement it has.
        new: the placement it is to have.
        axis: the ranks that share it.
        what: names the tensor in messages.

    Raises:
        ValueError: if the ranks cannot share a dim equally.
    """
    if axis.size == 1 or old == new:
        return x
    if isinstance(new, Shard):
        _check_even(x, new.dim, axis, what)
        dim = new.dim % x.dim()
        if isinstance(old, Partial):
            return mappings.reduce_scatter(x, axis, dim)
        if isinstance(old, Shard):
            old_dim = old.dim % x.dim()
            return x if dim == old_dim else mappings.all_to_all(x, axis, old_dim, dim)
        return mappings.own_slice(x, axis, dim)
    if isinstance(old, Partial):
        return mappings.all_reduce(x, axis)
    assert isinstance(old, Shard)  # nothing else becomes Replicate()
    dim = old.dim % x.dim()
    gathered = mappings.all_gather(x, axis, dim)
    if torch.is_grad_enabled() and x.requires_grad:
        _gathered_from[gathered] = (x, dim, axis.key, gathered._version)
    return gathered


def parallel_input(x: Tensor, old: Placement, axis: AxisComm, what: str) -> Tensor:
    """Replicate a tensor as input of a parallel layer, which gives it a partial gradient."""
    if axis.size == 1:
        return x
    if isinstance(old, Shard):
        dim = old.dim % x.dim()
        kind = (axis.key, "gathered", dim)
        return _made_once(x, kind, lambda: mappings.gather_to_parallel(x, axis, dim))
    x = redistribute(x, old, Replicate(), axis, what)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    shard, dim, key, version = _gathered_from.get(x, (None, 0, None, 0))
    if (key, version) == (axis.key, x._version):
        kind = (axis.key, "regathered")
        return _made_once(x, kind, lambda: mappings.regather_to_parallel(shard, x, axis, dim))
    return _made_once(x, (axis.key, "copied"), lambda: mappings.copy_to_parallel(x, axis))


def _made_once(x: Tensor, kind: Hashable, make: Callable[[], Tensor]) -> Tensor:
    # Inference tensors have no version; what is made of a leaf would keep it alive.
    if x.is_inference() or (x.is_leaf and x.requires_grad):
        return make()
    key = (kind, x._version, torch.is_grad_enabled())
    known = _parallel_inputs.get(x)
    if known is None:
        known = _parallel_inputs[x] = {}
    if key not in known:
        known[key] = make()
    return known[key]


def _check_even(x: Tensor, dim: int, axis: AxisComm, what: str) -> None:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what} has shape {tuple(x.shape)}, which has no dim {dim} to cut")
    size = x.shape[dim]
    if size % axis.size:
        raise ValueError(
            f"{what} has shape {tuple(x.shape)}, and the {axis.size} ranks of axis {axis.name!r} "
            f"cannot share the {size} of dim {dim} equally; pad it to "
            f"{-(-size // axis.size) * axis.size}"
        )
