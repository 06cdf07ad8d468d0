"""Conversions of sharded modules (``model.to(torch.float64)``) keep their shards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch


class _Inside(threading.local):  # CPU ranks are threads, and the setting is the process's
    count = 0


_inside = _Inside()


@contextlib.contextmanager
def without_swaps() -> Iterator[None]:
    """Let conversions inside the block change the data of parameters, as torch does by default.

    ``torch.__future__.set_swap_module_params_on_conversion(True)`` asks for swaps of tensors
    instead, so that parameters stay the same objects. Shards do so anyway, and torch refuses to
    swap tensors to which there are weak references, as there are to every shard.
    """
    _inside.count += 1
    try:
        yield
    finally:
        _inside.count -= 1


def install() -> None:
    """Make torch's setting answer False inside of ``without_swaps``."""
    future = torch.__future__
    future.get_swap_module_params_on_conversion = _unless_inside(
        future.get_swap_module_params_on_conversion
    )


def _unless_inside(original: Callable[[], bool]) -> Callable[[], bool]:
    def get() -> bool:
        return original() and not _inside.count

    return get
