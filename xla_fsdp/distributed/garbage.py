"""The garbage collector, where several threads may call it."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any


def collect_garbage() -> None:
    """Free what only reference cycles hold.

    ``gc.collect()`` does nothing, and says nothing, while another thread collects: other ranks of
    the process may, and lose the interpreter's lock meanwhile to the caller. Not to be called in a
    finalizer, which may run inside of a collection of the same thread.
    """
    caller, collected = threading.get_ident(), threading.Event()

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2 and threading.get_ident() == caller:
            collected.set()

    gc.callbacks.append(note)
    try:
        gc.collect()
        while not collected.is_set():
            time.sleep(0.001)
            gc.collect()
    finally:
        gc.callbacks.remove(note)
