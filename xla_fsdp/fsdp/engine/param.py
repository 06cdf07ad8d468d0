"""One sharded parameter: its shard, its original parameters, and the attributes that hold it.

A shard replaces one original parameter, or several joined end to end (*flat*). Its *leaf* is the
parameter of the optimizer: the shard itself, or a stack of the shards of several blocks.

Invariants: outside of forward and backward the modules hold the leaf, so names, optimizers and
state dicts see it; the originals of a flat shard are then no attributes. While unsharded, the
modules hold unsharded tensors. Modules and shards are referenced weakly.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.shard_layout import ShardLayout, join_name
from xla_fsdp.fsdp.engine.packing import cut_shard, is_expert, packing_of
from xla_fsdp.fsdp.engine.param_guards import held_shape
from xla_fsdp.fsdp.engine.slots import (
    ModuleAttr,
    OriginalParam,
    ParamSlots,
    name_in_state_dicts,
    print_without,
)
from xla_fsdp.xla import ops


class _Made(threading.local):  # thread-local, as ranks on CPU are threads of one process
    count = 0


_made = _Made()


class FSDPParam:
    """This rank's shard of one parameter, or of several that were flattened together.

    Args:
        key: name of the shard in the unit's state dict.
        originals: the original parameters, in the order in which they are joined.
        shard: leaf parameter of ``layout.shard_numel`` elements on the rank's device: [n], or
            [rows, ...] where whole rows along a dim are sharded.
        layout: how the joined originals are sharded, with ``dim`` moved to the front.
        compute_dtype: dtype in which parameters are gathered and used; None for the shard's own.
        home: for a flat shard, the module that registers it under ``key``; otherwise None.
        slots: of another unit's parameter that has the same shard.
        dim: along which a single original is sharded.
        everywhere: whether every rank of the job has this parameter.

    Attributes:
        is_expert: whether ranks along an axis of the mesh hold different experts of it.
        unit: name of the unit, as far out as there are units.
    """

    def __init__(
        self,
        key: str,
        originals: Sequence[OriginalParam],
        shard: nn.Parameter,
        layout: ShardLayout,
        compute_dtype: torch.dtype | None,
        home: nn.Module | None = None,
        slots: ParamSlots | None = None,
        dim: int = 0,
        *,
        everywhere: bool = False,
    ) -> None:
        self.key = key
        _made.count += 1
        self._number = _made.count if everywhere else 0
        self.unit = ""
        self.originals = tuple(originals)
        self.is_expert = is_expert(originals)
        self.packing = packing_of(tuple(original.shape for original in originals), layout, dim)
        self.compute_dtype = compute_dtype
        self.slots = slots or ParamSlots(shard, registered=home is None)
        self.slots.users += 1
        self._home = home
        self._unsharded: Sequence[Tensor] = ()
        if home is not None:
            home.register_parameter(key, shard)
            for original in originals:
                print_without(original)
                for owner in original.owners:
                    name_in_state_dicts(owner, original.whole_shape, shard.dtype)
        for owner in self.owners:
            self.slots.refresh(owner)

    def __repr__(self) -> str:
        shapes = " + ".join(f"{each.names[0]} {list(each.shape)}" for each in self.originals)
        dtype, layout = self.slots.shard.dtype, self.packing.layout
        return (
            f"{type(self).__name__}({shapes}: {layout.shard_numel} elements {dtype} on each of "
            f"{layout.num_shards} ranks, computes in {self.compute_dtype or dtype}, "
            f"{'UNSHARDED' if self._unsharded else 'SHARDED'})"
        )

    @property
    def owners(self) -> list[ModuleAttr]:
        """The attributes of modules that hold the originals."""
        return [owner for original in self.originals for owner in original.owners]

    def expect_on_all_ranks(self, what: str) -> None:
        """Tell CPU ranks that every one of them traces ``what`` of this parameter now.

        Buckets of other parameters may have the same size, so that the sizes of collectives do not
        show that one rank runs another layer, or has a gradient of another parameter.
        """
        if self._number:
            ops.runtime().expect_on_all_ranks(lambda: f"{what} of {self._told()}")

    def _told(self) -> str:
        return f"{join_name(self.unit, self.key)} (sharded parameter {self._number})"

    @property
    def leaf(self) -> nn.Parameter:
        """The leaf parameter, for the optimizer."""
        self.finalize()
        return self.slots.shard

    def finalize(self) -> None:
        """Turn a leaf that was waiting for values into a common shard."""
        leaf = self.slots.shard
        if getattr(type(leaf), "waits_for_values", False):
            leaf.finalize()  # type: ignore[attr-defined]

    @property
    def shard(self) -> Tensor:
        """This rank's shard: the leaf, or a view of a slice of it."""
        part = self.slots.part
        if part is None:
            return self.leaf
        return ops.viewable(self.leaf).select(0, part.number).view(part.shape)

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of the shard."""
        part = self.slots.part
        return held_shape(self.slots.shard) if part is None else part.shape

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the shard; zeros if it is in a stack and only other slices have one."""
        part, grad = self.slots.part, self.leaf.grad
        return grad if part is None or grad is None else grad[part.number].view(part.shape)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        part = self.slots.part
        if part is None:
            self.leaf.grad = grad
        elif grad is not None or self.leaf.grad is not None:
            stack = self.leaf.grad
            new = torch.zeros_like(self.leaf) if stack is None else stack.detach().clone()
            new[part.number] = 0 if grad is None else grad.view(new.shape[1:])
            self.leaf.grad = new

    @property
    def is_flat(self) -> bool:
        """Whether the shard is registered under ``key``, not in place of its originals."""
        return self._home is not None

    def is_whole(self, shard: Tensor) -> bool:
        """Return whether ``shard``, or what is computed from it, is of the whole parameter."""
        return self.packing.layout.num_shards == 1 and shard.shape == self.originals[0].whole_shape

    @property
    def by_rows(self) -> bool:
        """Whether the shard has the shape of whole rows."""
        return len(self.shard_shape) > 1

    def as_shard(self, rows: Tensor, *length: int) -> Tensor:
        """Return the elements of a shard, with the sharded dim first, in the shard's shape; with
        ``length``, of so many shards of a stack, in its shape."""
        if self.packing.dim:
            return self.packing.from_rows(rows, *length)
        shape = held_shape(self.slots.shard)[1:] if length else self.shard_shape
        return ops.shaped(rows, (*length, *shape))

    def is_cut_like(self, other: FSDPParam | None) -> bool:
        """Return whether shards of both have the same elements of parameters of the same shapes."""
        mine = self.packing
        return other is not None and (mine.shapes, mine.layout, mine.dim) == (
            other.packing.shapes,
            other.packing.layout,
            other.packing.dim,
        )

    def slice_of(self, unsharded: Sequence[Tensor], rank: int) -> Tensor:
        """Return ``rank``'s shard of unsharded tensors, one for each original, on their device."""
        rows = [self.packing.in_rows(tensor) for tensor in unsharded]
        return self.as_shard(cut_shard(rows, self.packing.layout, rank))

    def to_unsharded(self, unsharded: Sequence[Tensor], *, idle: bool = False) -> None:
        """Point the modules at unsharded tensors; call ``check_owners`` before.

        Args:
            unsharded: one for each original.
            idle: no forward is about to use them, so the tensors of another unit whose forward
                runs take precedence.
        """
        self._unsharded = list(unsharded)
        for original, tensor in zip(self.originals, unsharded, strict=True):
            for owner in original.owners:
                self.slots.show(owner, tensor, idle=idle)

    @property
    def waits_for_memory(self) -> bool:
        """Whether a module holds the shard on the meta device."""
        return any(tensor.is_meta for tensor in self.owned())

    def owned(self) -> list[Tensor]:
        """Return the parameters that the modules hold now."""
        owned = (owner.module._parameters.get(owner.attribute) for owner in self.owners)
        return [tensor for tensor in owned if tensor is not None]

    @contextlib.contextmanager
    def without_shard(self) -> Iterator[None]:
        """Remove a flat shard from its module inside the block, while the module holds the
        originals."""
        if self._home is None:
            yield
            return
        del self._home._parameters[self.key]
        try:
            yield
        finally:
            self._home._parameters[self.key] = self.leaf

    def to_sharded(self) -> None:
        """Point the modules back at the leaf; for a flat shard, remove the originals from them."""
        unsharded, self._unsharded = self._unsharded, ()
        for original, tensor in zip(self.originals, unsharded, strict=True):
            for owner in original.owners:
                self.slots.hide(owner, tensor)

    def check_owners(self) -> None:
        """Raise ValueError if the user has replaced the parameter of a module, as FSDP would not
        train the new one."""
        if self._unsharded:
            return
        if self._home is None:
            as_expected = all(map(self.slots.is_held_by, self.owners))
        else:
            as_expected = ModuleAttr(self._home, self.key).holds(self.leaf)
        if not as_expected:
            raise ValueError(
                f"{self.key} was replaced after wrapping (by load_state_dict(assign=True), by "
                f"moving the module to another device, by tying weights, or by "
                f"torch.func.functional_call). FSDP trains the shard that it made. Load "
                f"without assign, leave the module on its device, tie weights before wrapping, "
                f"and differentiate with respect to parameters by torch.autograd.grad."
            )


_param_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(param: FSDPParam, tensors: Iterable[Tensor]) -> None:
    """Register ``param`` as the replacement of ``tensors``: originals, meta tensors, its shard."""
    for tensor in tensors:
        _param_of[tensor] = weakref.ref(param)


def known_shard(tensor: Tensor) -> FSDPParam | None:
    """Return the parameter that has replaced ``tensor``, or None."""
    reference = _param_of.get(tensor)
    return reference() if reference is not None else None
