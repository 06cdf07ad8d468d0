"""What a tree of units shares during backward passes: order and clean-up.

Words: a unit is *open* from when its parameters are gathered for backward until they are freed;
*pending* tensors must be computed before the next gather may start (the reduced gradients and
input gradients of units already done, and shards that were stepped), so that two units' parameters
are not alive at once; a unit *lingers* while it holds parameters gathered for a forward, or ahead
of one, that may not come.
Always true: when a backward pass ends, no unit that it opened is open. A pass that raised leaves
units open until ``abandon``, which every forward and every look at the parameters call first.
The root unit makes one ``BackwardPass`` and hands it to the units below it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from xla_fsdp.distributed.xla import ops


class PassMember(Protocol):
    """What a backward pass needs to know of a unit."""

    def ensure_open(self) -> None:
        """Gather the parameters for backward, unless they are."""
        ...

    def close(self) -> None:
        """Free the parameters gathered for backward."""
        ...

    def reduce_kept(self) -> None:
        """Reduce what ``no_sync`` kept, unless gradients are still not synchronized."""
        ...

    def end_forward(self) -> None:
        """Free what was gathered for a forward and is not needed any more."""
        ...


def current_pass() -> int:
    """Number of the backward pass that the calling thread runs, or -1 outside of one."""
    return torch._C._current_graph_task_id()


class _Running(threading.local):
    """The units whose forward the current thread is in, outermost first."""

    def __init__(self) -> None:
        self.units: list[PassMember] = []


_running = _Running()


@contextlib.contextmanager
def running(unit: PassMember) -> Iterator[None]:
    """The forward of ``unit`` runs inside."""
    _running.units.append(unit)
    try:
        yield
    finally:
        _running.units.remove(unit)


def running_units() -> list[PassMember]:
    """Units whose parameters a computation that is going on here may use."""
    return list(_running.units)


class PrefetchGate:
    """What must be computed before the next gather may start: all that went into the unit before.

    Lagging one unit behind, a gather can travel while the unit before it computes, and no more than
    two units' parameters are there at once.
    """

    def __init__(self) -> None:
        self._last: list[Tensor] = []

    def swap(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the last call was given, or ``tensors`` if there is none."""
        last, self._last = self._last, list(tensors)
        return last or self._last

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """The next gather waits for these, whatever went into the unit before: they come out of a
        loop, under which nothing from outside can travel."""
        self._last = list(tensors)

    def clear(self) -> None:
        """Begin anew; tensors held on would become outputs of the program."""
        self._last = []


class BackwardPass:
    """Pending tensors and open units of one tree.

    Args:
        sync_on_end: run what has been traced when a backward pass is over.

    Where ``is_last`` is False, more passes follow before the gradients are used: what is pending at
    the end of a pass then stands before the first gather of the next.
    """

    def __init__(self, *, sync_on_end: bool = False) -> None:
        self.pending: list[Tensor] = []
        self.forward_gate, self.backward_gate = PrefetchGate(), PrefetchGate()
        self._sync_on_end = sync_on_end
        # Units with gradients kept by no_sync; a list, as all ranks must go by the same order.
        self.keeping: list[PassMember] = []
        self.lingering: list[PassMember] = []
        self.is_last = True
        # By number of the pass: reentrant checkpoints run passes inside passes.
        self._open: dict[int, list[PassMember]] = {}

    def open(self, unit: PassMember) -> None:
        """Close ``unit`` at the latest when the current backward pass ends."""
        self.watch()
        self._open[current_pass()].append(unit)

    def watch(self) -> None:
        """See to it that ``_end`` runs when the current backward pass is over."""
        number = current_pass()
        if number not in self._open:
            self._open[number] = []
            Variable._execution_engine.queue_callback(partial(self._end, number))

    def gate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a unit's gather in backward has to wait for, when ``tensors`` are what its own
        computation begins with. The caller puts both behind a barrier."""
        pending, self.pending = self.pending, []
        return self.backward_gate.swap([*tensors, *pending])

    def fence(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As ``gate`` for a loop, which begins with ``tensors``: it waits for all that is pending.
        What a loop does not consume would be alive as long as it runs."""
        pending, self.pending = self.pending, []
        self.backward_gate.clear()
        return [*tensors, *pending]

    def wait_for(self, tensor: Tensor) -> None:
        """Make ``tensor`` pending, if a unit of this tree takes part in the current pass: else
        nothing would forget it."""
        if current_pass() in self._open:
            self.pending.append(tensor)

    def linger(self, unit: PassMember) -> None:
        """``unit`` holds parameters that a forward or backward to come may need or not."""
        if unit not in self.lingering:
            self.lingering.append(unit)

    def stay(self, unit: PassMember) -> None:
        """``unit`` runs now; what it holds is needed."""
        if unit in self.lingering:
            self.lingering.remove(unit)

    def end_forwards(self) -> None:
        """Nothing that lingers is needed any more."""
        units, self.lingering = self.lingering, []
        for unit in units:
            unit.end_forward()

    def abandon(self) -> None:
        """Forget passes that ended by an exception, and close what they left open. Does nothing
        inside a pass."""
        if current_pass() != -1:
            return
        if not running_units():
            self.end_forwards()
        if not self._open:
            return
        leftover, self._open = self._open, {}
        self._forget()
        for units in leftover.values():
            for unit in units:
                unit.close()

    def _end(self, number: int) -> None:
        for unit in self._open.pop(number, []):
            unit.close()
        if self._open:
            return
        # Of units that a synchronized pass did not touch, but an earlier one under no_sync did.
        for unit in list(self.keeping):
            unit.reduce_kept()
        self.end_forwards()
        if not self.is_last:
            return
        self._forget()
        if self._sync_on_end:
            ops.sync()

    def _forget(self) -> None:
        self.pending.clear()
        self.backward_gate.clear()
