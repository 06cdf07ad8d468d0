"""A thread that collects garbage for a while, and what is alive after a backward pass.

Threads of autograd drop what a backward pass has needed a moment after its end.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

SECONDS = 0.2
PATIENCE = 60.0
MOMENT = 0.2


@contextlib.contextmanager
def collecting_elsewhere(seconds: float = SECONDS) -> Iterator[None]:
    """Begin the block while another thread collects; it goes on to, at most for ``seconds``, until
    the block ends."""
    begun, over = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            begun.set()
            over.wait(seconds)

    def collect() -> None:
        cycle = [Slow()]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        while not begun.is_set():
            gc.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def is_freed(reference: weakref.ref[Any]) -> bool:
    """Return whether an object goes without being collected."""
    end = time.monotonic() + PATIENCE
    while reference() is not None and time.monotonic() < end:
        time.sleep(0.001)
    return reference() is None


def live_tensors() -> int:
    """Return the number of XLA tensors of the process that are alive, counted while every rank
    waits; called by all ranks together."""
    from torch_xla.debug import metrics

    from xla_fsdp.xla.host import exchange

    exchange(b"")
    end, found = time.monotonic() + MOMENT, list[int]()
    while not found or time.monotonic() < end:
        made, gone = (metrics.counter_value(f"{what}XlaTensor") for what in ("Create", "Destroy"))
        found.append(made - gone)
        time.sleep(0.01)
    exchange(b"")  # until all have counted
    return min(found)
