"""Signals that ask a job to end: taken for requests, and agreed on by all ranks.

Only the main thread of a process can listen for signals, so ``launch`` does it for the ranks. A
shutdown signals processes directly and by their parent, too; a second signal changes nothing.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Signals = tuple[signal.Signals, ...]

LAG = 2
"""Votes that may be on their way: in the program that runs, and in the one that waits behind it."""


class _Process:
    """What signals did to this process; like them, one for all of its threads."""

    # No threading.Event: a second signal while the handler sets it would wait for itself.
    asked = False


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

    Every rank makes the same calls. A step's program sums one more number over the ranks. All ranks
    learn of a request after the same step, at most two steps late; reading it waits for no more
    than the step before the last one, so a step stays queued while another runs.
    """

    def __init__(self) -> None:
        self._votes: deque[Tensor] = deque()

    def vote(self) -> None:
        """Put this rank's word into the step that is being traced: before ``torch_xla.sync()``."""
        import torch

        from xla_fsdp.distributed.xla import ops  # not above: the launcher must not load torch_xla

        word = ops.upload(torch.tensor([float(was_asked())]))
        everybody = [list(range(ops.world_size()))]
        self._votes.append(ops.all_reduce("sum", word, everybody))

    def agreed(self) -> bool:
        """Return whether a rank had been asked to end when it voted for the last time but one: the
        same on every rank. After the sync."""
        return len(self._votes) >= LAG and self._votes.popleft().item() > 0


def was_asked() -> bool:
    """Return whether this process was asked to end."""
    return _Process.asked


@contextmanager
def listen(signals: Signals, *, to_children: bool) -> Iterator[None]:
    """Take ``signals`` to this process for requests inside the block.

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
        return _unpickled, (self._fn, self._signals)


def _unpickled(fn: Callable[..., Any], signals: Signals) -> Listening:
    if threading.current_thread() is threading.main_thread():
        for each in signals:
            _install(each, to_children=False)
    return Listening(fn, signals)


def _install(number: signal.Signals, to_children: bool) -> Any:
    """Listen for one signal; return what handled it before."""

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
