"""Treat signals such as SIGTERM as requests to end, on which all ranks agree.

Only the main thread of a process can listen for signals, so ``launch`` does it for the ranks. A
process may get a signal twice, from the system and from its parent; the second changes nothing.
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
"""Votes that are not read yet: one in the program that runs, one in the next, which is queued."""


class _Process:
    """Whether this process was asked to end; signals are per process, not per thread."""

    # Not a threading.Event: a second signal while the handler sets it would deadlock.
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

    Every rank makes the same calls. A vote adds an all-reduce of one number to a step's program.
    All ranks learn of a request after the same step, at most two steps late. Reading a vote waits
    only for the step before the last one, so one step is queued while another runs.
    """

    def __init__(self) -> None:
        self._votes: deque[Tensor] = deque()

    def vote(self) -> None:
        """Add this rank's vote to the step that is being traced; call before the sync, or after a
        compiled step.

        Raises:
            RuntimeError: inside a compiled step.
        """
        import torch

        # Here, as the launcher must not load torch_xla.
        from xla_fsdp.xla import hooks, ops

        if hooks.current_reader() is not None:
            raise RuntimeError(
                "Preemption.vote() was called inside a compiled step, whose replays would not "
                "vote; call it after the step"
            )
        own = ops.upload(torch.tensor([float(was_asked())]))
        all_ranks = [list(range(ops.world_size()))]
        self._votes.append(ops.all_reduce("sum", own, all_ranks))

    def agreed(self) -> bool:
        """Return whether any rank had been asked to end at the vote before the last; call after
        the sync. All ranks get the same answer."""
        return len(self._votes) >= LAG and self._votes.popleft().item() > 0


def was_asked() -> bool:
    """Return whether this process was asked to end."""
    return _Process.asked


@contextmanager
def listen(signals: Signals, *, to_children: bool) -> Iterator[None]:
    """Treat ``signals`` to this process as requests to end inside the block.

    Args:
        signals: such as ``signal.SIGTERM``; may be empty.
        to_children: whether to forward them to the processes that this one has started.

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
    """A function that makes the process in which it is unpickled listen for signals.

    torch_xla runs ranks in threads of the processes it starts, and only a main thread can listen.
    But it is the main thread that unpickles the function to run.
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
