"""Text that several threads print, in whole lines: ``print`` writes a line's end separately."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any


class _WholeLines:
    """A text stream that hands on what each thread writes once its line ends, or is flushed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._begun: dict[int, str] = {}  # by thread: the line that has not ended

    def write(self, text: str) -> int:
        me = threading.get_ident()
        with self._lock:
            lines, end, rest = (self._begun.pop(me, "") + text).rpartition("\n")
            if rest:
                self._begun[me] = rest
            if end:
                self._stream.write(lines + end)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        """Hand on what the calling thread has begun, too."""
        with self._lock:
            if rest := self._begun.pop(threading.get_ident(), ""):
                self._stream.write(rest)
            self._stream.flush()

    def end(self) -> None:
        """Hand on what any thread has begun: all have ended."""
        with self._lock:
            for rest in self._begun.values():
                self._stream.write(rest)
            self._begun.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def whole_lines() -> Iterator[None]:
    """Let what threads print inside the block not cut each other's lines.

    A stream that code inside has put in the place of ``sys.stdout`` or ``sys.stderr`` stays there.
    """
    names = ("stdout", "stderr")
    before = {name: getattr(sys, name) for name in names}
    own = {name: _WholeLines(stream) for name, stream in before.items() if stream is not None}
    for name, stream in own.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in own.items():
            stream.end()
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])
