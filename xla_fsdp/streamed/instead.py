"""Lets a module's own forward, with its hooks and checks, compute one thing otherwise.

Always true: it is so for one module, on the calling thread, inside a block.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torch import Tensor, nn


class _Now(threading.local):
    """Which module of the calling thread computes otherwise, and how."""

    def __init__(self) -> None:
        self.module: nn.Module | None = None
        self.compute: Callable[..., Tensor] | None = None


_now = _Now()


@contextlib.contextmanager
def computing_by(module: nn.Module, compute: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, forwards of ``module`` on this thread find ``compute``."""
    before = (_now.module, _now.compute)
    _now.module, _now.compute = module, compute
    try:
        yield
    finally:
        _now.module, _now.compute = before


def compute_of(module: nn.Module, otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What ``module`` computes by at the moment; ``otherwise`` where nobody says."""
    return _now.compute if _now.module is module and _now.compute is not None else otherwise
