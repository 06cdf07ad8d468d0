"""Collectives of tensor parallelism as autograd functions, and changes of placement by them.

A tensor is replicated if all ranks of the axis hold the same values, sharded along a dim if each
holds a slice of the global tensor, partial if the global tensor is the sum over the ranks. Tensors
are ordinary ones that do not know their placement, so the placements in a plan are not checked.

Invariants: the gradient of a replicated or partial tensor is replicated, that of a sharded tensor
is sharded the same way. Gradients are partial only between a mapping whose name ends in
``to_parallel`` and the matmul of a parallel layer. On several ranks no mapping saves a tensor or
returns its input itself, so results may be shared, recomputed, and traced as the body of a loop.

Source: the mappings of Megatron-LM (arXiv 1909.08053, and for sequences 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.higher_order import mapped
from xla_fsdp.distributed.mesh_axis import AxisComm


def copy_to_parallel(x: Tensor, axis: AxisComm) -> Tensor:
    """Replicated to the input of a parallel layer. Forward: copy. Backward: all-reduce."""
    return mapped(x, Tensor.clone, axis.all_reduce)


def gather_to_parallel(
    x: Tensor, axis: AxisComm, dim: int, gathered: Tensor | None = None
) -> Tensor:
    """Sharded to the input of a parallel layer. Forward: all-gather, or copy of ``gathered`` if it
    has been gathered already. Backward: reduce-scatter."""
    gather, scatter = partial(axis.all_gather, dim=dim), partial(axis.reduce_scatter, dim=dim)
    return mapped(x, gather, scatter, None if gathered is None else gathered.detach())


def all_reduce(x: Tensor, axis: AxisComm) -> Tensor:
    """Partial to replicated. Forward: all-reduce. Backward: copy."""
    return mapped(x, axis.all_reduce, Tensor.clone)


def reduce_scatter(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Partial to sharded. Forward: reduce-scatter. Backward: all-gather."""
    scatter, gather = partial(axis.reduce_scatter, dim=dim), partial(axis.all_gather, dim=dim)
    return mapped(x, scatter, gather)


def all_gather(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Sharded to replicated. Forward: all-gather. Backward: this rank's slice."""
    gather, own = partial(axis.all_gather, dim=dim), partial(axis.own_slice, dim=dim)
    return mapped(x, gather, own)


def own_slice(x: Tensor, axis: AxisComm, dim: int) -> Tensor:
    """Replicated to sharded. Forward: this rank's slice. Backward: all-gather."""
    own, gather = partial(axis.own_slice, dim=dim), partial(axis.all_gather, dim=dim)
    return mapped(x, own, gather)


def all_to_all(x: Tensor, axis: AxisComm, old: int, new: int) -> Tensor:
    """Sharded along one dim to sharded along another. Forward and backward: all-to-all."""
    there = partial(axis.all_to_all, split_dim=new, concat_dim=old)
    back = partial(axis.all_to_all, split_dim=old, concat_dim=new)
    return mapped(x, there, back)


def send(x: Tensor, axis: AxisComm, ahead: int) -> Tensor:
    """From this rank to the one so far ahead. Forward and backward: collective-permute."""
    return mapped(x, partial(axis.send, ahead=ahead), partial(axis.send, ahead=-ahead))


# ---------------------------------------------------------------- placements

# Query, key and value projections take the same tensor. It is gathered once for all of them, and
# the sum of their gradients is reduced once. If a module passes on another tensor than its input (a
# view, a cast), the collective only runs twice.
# Entries live as long as the tensor that is the key. Keys are tensors of one rank, so ranks that
# are threads of one process do not share entries.

# Inputs of parallel layers made from a tensor, by (kind, version, grad mode).
_parallel_inputs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

# For each gathered tensor: (local tensor, dim, key of the axis, version of the gathered tensor).
_gathered_from: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def redistribute_problems(old: Any, new: Any, what: str) -> Iterator[str]:
    """Yield why the placement of ``what`` cannot be changed from ``old`` to ``new``."""
    for layout in (old, new):
        if type(layout) not in (Replicate, Shard, Partial):
            yield f"{what} has the layout {layout!r}; expected Replicate(), Shard(dim) or Partial()"
        elif isinstance(layout, Partial) and layout.reduce_op != "sum":
            yield f"{what} has the layout {layout!r}; only sums are supported: Partial()"
    if isinstance(new, Partial) and not isinstance(old, Partial):
        yield f"{what} is {old!r} and is to be {new!r}; no layer takes that. Choose Replicate()"


def redistribute(x: Tensor, old: Placement, new: Placement, axis: AxisComm, what: str) -> Tensor:
    """Change the placement of a local tensor; ``redistribute_problems`` must find no problem.

    Raises:
        ValueError: if the size of the new sharded dim is not divisible by the number of ranks.
    """
    if axis.size == 1 or old == new:
        return x
    if isinstance(new, Shard):
        _check_even(x, new.dim, axis, what)
        dim = new.dim % x.dim()
        if isinstance(old, Partial):
            return reduce_scatter(x, axis, dim)
        if isinstance(old, Shard):
            old_dim = old.dim % x.dim()
            return x if dim == old_dim else all_to_all(x, axis, old_dim, dim)
        return own_slice(x, axis, dim)
    if isinstance(old, Partial):
        return all_reduce(x, axis)
    assert isinstance(old, Shard)  # the only other placement that can become Replicate()
    dim = old.dim % x.dim()
    gathered = all_gather(x, axis, dim)
    if torch.is_grad_enabled() and x.requires_grad:
        _gathered_from[gathered] = (x, dim, axis.key, gathered._version)
    return gathered


def parallel_input(x: Tensor, old: Placement, axis: AxisComm, what: str) -> Tensor:
    """Replicate a tensor for a parallel layer, which computes a partial gradient of it."""
    if axis.size == 1:
        return x
    if isinstance(old, Shard):
        dim = old.dim % x.dim()
        return _made_once(x, (axis.key, dim), lambda: gather_to_parallel(x, axis, dim))
    x = redistribute(x, old, Replicate(), axis, what)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    shard, dim, key, version = _gathered_from.get(x, (None, 0, None, 0))
    if (key, version) == (axis.key, x._version):
        again = partial(gather_to_parallel, shard, axis, dim, gathered=x)
        return _made_once(x, (axis.key, "regathered"), again)
    return _made_once(x, (axis.key, "copied"), lambda: copy_to_parallel(x, axis))


def _made_once(x: Tensor, kind: Hashable, make: Callable[[], Tensor]) -> Tensor:
    # Inference tensors have no version. The graph of a result refers to a leaf (AccumulateGrad), so
    # an entry would keep its own key alive.
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
