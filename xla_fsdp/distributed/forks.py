"""Let a process fork while its other threads rest.

A child process has a copy of every lock, but only the thread that forked. A lock that another
thread holds meanwhile, in C++ and without the interpreter's lock, is never released in the child:
those of libc, of torch's random number generators, of variables that C++ initializes at first use.
A worker of a DataLoader then waits for ever, and the rank that it works for, too. Ranks that are
threads of one process make that likely: one starts its workers while others compute. While the
memory is copied, a thread that writes to it has to wait, with the locks that it holds.

Invariants: no thread is kept from running for longer than ``LONGEST_HOLD`` at a time. Imports no
torch_xla.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

HOLD = 0.1
"""Seconds for which a thread that wants to fork keeps the interpreter's lock at first, so that the
others come to rest: who computes without the lock needs it next. Twice as long at each further
try, as on a busy machine the others compute for longer."""

LONGEST_HOLD = 1.6
"""Seconds for which it keeps the lock at most."""

PAUSE = 0.1
"""Seconds for which the others go on before the next try."""

PATIENCE = 10.0
"""Seconds after which the process forks, whether the others rest or not."""

LOOK_AGAIN = 0.001
AT_WORK = (b"R", b"D")  # running or ready to run, or in the kernel; see proc_pid_stat(5)


class QuietForks:
    """Makes forks of this process wait; ``begin`` is called before each, ``end`` after it."""

    def __init__(self) -> None:
        self._forking = threading.Lock()
        self._forker: int | None = None
        self._interval = sys.getswitchinterval()
        # Its functions keep the interpreter's lock, unlike those of Python.
        self._libc = ctypes.PyDLL(None)
        self._status = ctypes.create_string_buffer(512)

    def begin(self, is_compiling: Callable[[], bool]) -> None:
        """Wait until all other threads rest, but at most ``PATIENCE``, and let them.

        Args:
            is_compiling: returns whether a thread is at work for long, but not for ever.
        """
        self._forking.acquire()
        self._forker = threading.get_ident()
        self._interval = sys.getswitchinterval()
        end, hold = time.monotonic() + PATIENCE, HOLD
        while is_compiling() or not self._others_rest(hold):
            sys.setswitchinterval(self._interval)
            if time.monotonic() > end and not is_compiling():
                return
            time.sleep(PAUSE)
            hold = min(2 * hold, LONGEST_HOLD)

    def end(self) -> None:
        """Let the other threads, of which the child has none, go on."""
        if self._forker == threading.get_ident():
            sys.setswitchinterval(self._interval)
            self._forker = None
            self._forking.release()

    def _others_rest(self, hold: float) -> bool:
        """Keep the interpreter's lock until all other threads rest; return False if they do not
        within ``hold`` seconds."""
        own = threading.get_native_id()
        others = [name for name in os.listdir("/proc/self/task") if name != str(own)]
        # Threads that wait for the lock ask for it after that time. Those that wait already have
        # a shorter one in mind: until it is over, this thread may lose the lock, once to each.
        sys.setswitchinterval(2 * hold)
        self._sleep(self._interval + LOOK_AGAIN)
        end = time.monotonic() + hold
        while any(map(self._is_at_work, others)):
            if time.monotonic() > end:
                return False
            self._sleep(LOOK_AGAIN)
        return True

    def _sleep(self, seconds: float) -> None:
        self._libc.usleep(int(seconds * 1e6))

    def _is_at_work(self, thread: str) -> bool:
        file = self._libc.open(f"/proc/self/task/{thread}/stat".encode(), os.O_RDONLY)
        if file < 0:
            return False  # it has ended
        size = self._libc.read(file, self._status, len(self._status))
        self._libc.close(file)
        return self._status.raw[: max(size, 0)].rpartition(b") ")[2][:1] in AT_WORK
