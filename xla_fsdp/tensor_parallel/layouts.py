"""From one layout of a tensor over the ranks of an axis to another.

Words: see ``pairs``; a *layout* is torch's ``Replicate()`` (replicated), ``Shard(dim)`` (cut) or
``Partial()``. A layout that a plan gives is taken to be true: tensors are ordinary local ones.
Always true: every change is one pair; a change that no layer can need, and a size that the ranks do
not divide, is an error that names the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.tensor_parallel.gather_cache import remember_origin, use_cut, use_replicated
from xla_fsdp.tensor_parallel.mappings import cut, gathered, recut, summed, summed_and_cut


def change_problems(old: Any, new: Any, what: str) -> Iterator[str]:
    """Why a tensor cannot be brought from one layout to another, one line each.

    Args:
        old: the layout it has.
        new: the layout it is to have.
        what: which tensor, for the messages.
    """
    for layout in (old, new):
        if type(layout) not in (Replicate, Shard, Partial):
            yield f"{what} has the layout {layout!r}; expected Replicate(), Shard(dim) or Partial()"
        elif isinstance(layout, Partial) and layout.reduce_op != "sum":
            yield f"{what} has the layout {layout!r}; only sums are supported: Partial()"
    if isinstance(new, Partial) and not isinstance(old, Partial):
        yield f"{what} is {old!r} and is to be {new!r}; no layer takes that. Choose Replicate()"


def changed(x: Tensor, old: Placement, new: Placement, axis: AxisComm, what: str) -> Tensor:
    """``x``, which has the layout ``old``, in the layout ``new``.

    Raises:
        ValueError: if the ranks do not divide a dim that is to be cut.
    """
    if axis.size == 1 or old == new:
        return x
    if isinstance(new, Shard):
        check_even(x, new.dim, axis, what)
    if isinstance(old, Partial):
        return _from_partial(x, new, axis)
    if isinstance(old, Replicate):
        assert isinstance(new, Shard)
        return cut(x, axis, new.dim % x.dim())
    assert isinstance(old, Shard)
    dim = old.dim % x.dim()
    if isinstance(new, Shard):
        return x if new.dim % x.dim() == dim else recut(x, axis, dim, new.dim % x.dim())
    whole = gathered(x, axis, dim)
    remember_origin(whole, x, axis, dim)
    return whole


def for_use(x: Tensor, old: Placement, axis: AxisComm, what: str) -> Tensor:
    """``x`` replicated, as input of a cut layer, which gives it a partial gradient."""
    if axis.size == 1:
        return x
    if isinstance(old, Shard):
        return use_cut(x, axis, old.dim % x.dim())
    return use_replicated(changed(x, old, Replicate(), axis, what), axis)


def check_even(x: Tensor, dim: int, axis: AxisComm, what: str) -> None:
    """Raise ValueError unless the ranks divide a dim; all run one program on equal slices."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what} has shape {tuple(x.shape)}, which has no dim {dim} to cut")
    size = x.shape[dim]
    if size % axis.size:
        raise ValueError(
            f"{what} has shape {tuple(x.shape)}, and the {axis.size} ranks of axis {axis.name!r} "
            f"cannot share the {size} of dim {dim} equally; pad it to "
            f"{-(-size // axis.size) * axis.size}"
        )


def _from_partial(x: Tensor, new: Placement, axis: AxisComm) -> Tensor:
    if isinstance(new, Shard):
        return summed_and_cut(x, axis, new.dim % x.dim())
    return summed(x, axis)
