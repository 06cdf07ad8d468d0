"""A request to end that one process got, and the step after which all ranks know of it.

Words: a *vote* is a number that every rank puts into a step's program, which adds them up.
Always true: all ranks learn of a request after the same step, at most two steps late; reading it
waits for no more than the step before the last one, so a step stays queued while another runs.
What a job does then (save, and end with an exit code of its own) is its own business; how a
process gets a request is ``stop_signals``'s.

Signals that ask a job to end, taken for requests instead of ending the process.

Words: to *listen* is to do that; a process was *asked* once such a signal came.
Always true: only a process's main thread can listen, so ``launch`` does it for the ranks; a signal
that comes again changes nothing, as a shutdown tells processes directly and by their parent, too.
How ranks learn of a request that another process got is ``preemption``'s business. Needs no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed import preemption as stop_signals
from xla_fsdp.distributed.xla import ops

LAG = 2

"""Votes that may be on their way: in the program that runs, and in the one that waits behind it."""


class Preemption:
    """A rank's view of requests to end (``launch(..., stop_signals=[signal.SIGTERM])``)::

        preemption = Preemption()
        for batch in batches:
            train_step(batch)
            preemption.vote()
            torch_xla.sync()
            if preemption.agreed():
                save_checkpoint(...)
                raise SystemExit(75)

    Every rank makes the same calls. A step's program sums one more number over the ranks.
    """

    def __init__(self) -> None:
        self._votes: deque[Tensor] = deque()

    def vote(self) -> None:
        """Put this rank's word into the step that is being traced: before ``torch_xla.sync()``."""
        word = ops.upload(torch.tensor([float(stop_signals.was_asked())]))
        everybody = [list(range(ops.world_size()))]
        self._votes.append(ops.all_reduce("sum", word, everybody))

    def agreed(self) -> bool:
        """Whether a rank had been asked to end when it voted for the last time but one: after the
        sync. The same on every rank."""
        return len(self._votes) >= LAG and self._votes.popleft().item() > 0


Signals = tuple[signal.Signals, ...]


class _Process:
    """What signals did to this process; like them, one for all of its threads."""

    asked = False


def was_asked() -> bool:
    """Whether this process was asked to end."""
    return _Process.asked


@contextmanager
def listen(signals: Signals, *, to_children: bool) -> Iterator[None]:
    """Inside, ``signals`` to this process are requests.

    Args:
        signals: such as ``signal.SIGTERM``; none of them leaves everything as it is.
        to_children: whether to send them on to the processes that this one has started.

    Raises:
        ValueError: outside of the main thread, or for a signal that cannot be caught.
    """
    if signals and threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "stop_signals: only the main thread of a process can listen for signals; call launch "
            "there, or leave stop_signals out"
        )
    _Process.asked = False
    before: dict[signal.Signals, Any] = {}
    try:
        for each in signals:
            before[each] = _install(each, to_children)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Listening:
    """A function that makes a process listen by being sent there.

    torch_xla starts processes and runs ranks in their threads, which cannot listen; but what it
    sends to a process is unpickled by the main thread.
    """

    def __init__(self, fn: Callable[..., Any], signals: Signals) -> None:
        self._fn, self._signals = fn, signals

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._fn, self._signals)


def _arrive(fn: Callable[..., Any], signals: Signals) -> Listening:
    if threading.current_thread() is threading.main_thread():
        for each in signals:
            _install(each, to_children=False)
    return Listening(fn, signals)


def _install(number: signal.Signals, to_children: bool) -> Any:
    """Listen for one signal; returns what handled it before."""

    def note(received: int, frame: FrameType | None) -> None:
        _Process.asked = True
        for child in multiprocessing.active_children() if to_children else ():
            if child.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, received)

    try:
        return signal.signal(number, note)
    except (OSError, ValueError) as error:
        raise ValueError(f"stop_signals: {number!r} cannot be caught: {error}") from error
