"""Buffers in another dtype while a unit's forward runs.

Invariants: what modules hold outside of forwards has its own dtype and, unless a forward changes
it, its own value. Modules are referenced weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _Shown(NamedTuple):
    """A buffer that a module holds in another dtype."""

    module: nn.Module
    name: str
    own: Tensor
    cast: Tensor
    version: int


class CastBuffers:
    """Casts floating-point buffers for a forward.

    Args:
        modules: that hold the buffers.
        dtype: in which a forward sees them.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._dtype = dtype

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``forward(*args, **kwargs)``, which sees the buffers in ``dtype``. One that it
        changes or assigns is stored afterwards, in its own dtype."""
        shown = self._show()
        try:
            return forward(*args, **kwargs)
        finally:
            _put_back(shown)

    def _show(self) -> list[_Shown]:
        shown = []
        casts: dict[int, Tensor] = {}  # a buffer of two modules is one in the forward, too
        for module in [module for each in self._modules if (module := each()) is not None]:
            for name, own in list(module._buffers.items()):
                # Empty ones of a unit that calls itself: it has cast them already.
                if own is None or not own.is_floating_point() or own.dtype == self._dtype:
                    continue
                if id(own) not in casts:
                    with torch.inference_mode(False):  # such a tensor counts no changes
                        casts[id(own)] = own.to(self._dtype)
                cast = casts[id(own)]
                module._buffers[name] = cast
                shown.append(_Shown(module, name, own, cast, cast._version))
        return shown


@torch.no_grad()
def _put_back(shown: list[_Shown]) -> None:
    for module, name, own, cast, version in shown:
        now = module._buffers.get(name)
        if now is cast:
            if cast._version != version:
                own.copy_(cast)
            module._buffers[name] = own
        elif now is not None:  # assigned in the forward
            module._buffers[name] = now.to(own.dtype)
