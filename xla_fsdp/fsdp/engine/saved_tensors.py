"""Keep unsharded parameters out of what autograd saves for backward.

Autograd stores a reference in place of a parameter, or of a view of one such as the transpose that
``F.linear`` saves; it is resolved against the parameters gathered again in backward. Every other
tensor goes through whatever saved-tensor hooks were active outside (a checkpoint's, say).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.xla import ops


@dataclass(frozen=True)
class _ParamReference:
    index: int
    view: Tensor | None  # a released view; only its recipe of view ops is used


@dataclass(frozen=True)
class _PackedOutside:
    value: Any
    unpack: Callable[[Any], Tensor]


class SavedParams:
    """Saved-tensor hooks for one forward of one unit.

    Args:
        full: the gathered parameters that this forward computes with.
        regathered: returns the parameters in backward, in the same order.
    """

    def __init__(self, full: Sequence[Tensor], regathered: Callable[[], Sequence[Tensor]]) -> None:
        self._full = list(full)
        self._versions = [_version(tensor) for tensor in full]
        self._index = {id(tensor): index for index, tensor in enumerate(full)}
        self._views: list[Tensor] = []
        self._regathered = regathered
        self._outside = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context manager to run the forward in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def changed_in_place(self) -> list[int]:
        """Return the indices of parameters that the forward modified."""
        pairs = zip(self._full, self._versions, strict=True)
        return [index for index, (tensor, before) in enumerate(pairs) if _version(tensor) > before]

    def release(self, dummy: Tensor) -> None:
        """Point the parameters of this forward, and their saved views, at ``dummy``."""
        for tensor in (*self._full, *self._views):
            ops.release(tensor, dummy)
        self.forget()

    def forget(self) -> None:
        """Drop this object's own references to the parameters; the hooks outlive the forward."""
        self._full.clear()
        self._views.clear()
        self._index.clear()

    def _pack(self, tensor: Tensor) -> Any:
        index = self._index.get(id(tensor))
        if index is not None:
            return _ParamReference(index, None)
        index = self._index.get(id(tensor._base)) if tensor._base is not None else None
        if index is not None and tensor._version == self._versions[index]:
            self._views.append(tensor)
            return _ParamReference(index, tensor)
        if self._outside is not None:
            pack, unpack = self._outside
            return _PackedOutside(pack(tensor), unpack)
        return tensor

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _PackedOutside):
            return packed.unpack(packed.value)
        if not isinstance(packed, _ParamReference):
            return packed
        full = self._regathered()[packed.index]
        if packed.view is None:
            return full
        # The strides of an XLA tensor do not describe its views; the recorded view ops do.
        with torch.no_grad():
            return packed.view._view_func_unsafe(full)


def _version(tensor: Tensor) -> int:
    # In inference mode nothing counts changes in place.
    return 0 if tensor.is_inference() else tensor._version
