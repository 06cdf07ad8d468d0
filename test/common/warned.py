"""Warnings of one rank, which is a thread.

``warnings.catch_warnings`` replaces filters, and what shows warnings, for the
whole process: ranks would take each other's warnings, and leave each other's
filters behind.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Yield the list to which every warning of this thread, inside the block, adds its text."""
    with _recorder().recording() as texts:
        yield texts


class _Recorder:
    """Records by thread, from where the first thread begins to where the last one ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[int, list[str]] = {}
        self._replaced = contextlib.ExitStack()

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[str]]:
        own, texts = threading.get_ident(), list[str]()
        with self._lock:
            if not self._texts:
                self._replaced.enter_context(warnings.catch_warnings())
                warnings.simplefilter("always")
                warnings.showwarning = functools.partial(self._show, warnings.showwarning)
            self._texts[own] = texts
        try:
            yield texts
        finally:
            with self._lock:
                del self._texts[own]
                if not self._texts:
                    self._replaced.close()

    def _show(self, otherwise: Any, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        texts = self._texts.get(threading.get_ident())
        if texts is None:
            otherwise(message, *args, **kwargs)
        else:
            texts.append(str(message))


@functools.cache
def _recorder() -> _Recorder:
    """Return that of this process."""
    return _Recorder()
