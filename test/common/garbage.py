"""A thread that collects garbage for a while."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

SECONDS = 0.2


@contextlib.contextmanager
def collecting_elsewhere() -> Iterator[None]:
    """Begin the block while another thread collects, and for ``SECONDS`` goes on to."""
    begun = threading.Event()

    class Slow:
        def __del__(self) -> None:
            begun.set()
            time.sleep(SECONDS)

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
        thread.join()
