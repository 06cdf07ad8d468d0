"""What the FSDP states of one model share during backward passes: order and clean-up.

Invariants: when a backward pass ends, no state holds parameters that the pass gathered. A pass that
raised leaves some behind until ``abandon``, which every forward and every look at the parameters
calls first.
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


class ContextMember(Protocol):
    """The part of ``FSDPState`` that the context calls."""

    def ensure_unsharded(self) -> None:
        """Gather the parameters for backward, unless they are."""
        ...

    def reshard_after_pass(self) -> None:
        """Free the parameters gathered for backward."""
        ...

    def reduce_unreduced(self) -> None:
        """Reduce gradients left by ``no_sync``, unless they are still not to be synchronized."""
        ...

    def free_unused(self) -> None:
        """Free what was gathered for a forward and is not needed any more."""
        ...


def current_pass() -> int:
    """Return the number of the backward pass that the calling thread runs, or -1 outside of one."""
    return torch._C._current_graph_task_id()


class _Running(threading.local):
    """The units whose forward the current thread is in, outermost first."""

    def __init__(self) -> None:
        self.units: list[ContextMember] = []


_running = _Running()


@contextlib.contextmanager
def running(unit: ContextMember) -> Iterator[None]:
    """Count ``unit`` among those whose forward runs, inside the block."""
    _running.units.append(unit)
    try:
        yield
    finally:
        _running.units.remove(unit)


def running_units() -> list[ContextMember]:
    """Return the units whose forward the calling thread is in, outermost first."""
    return list(_running.units)


class PrefetchGate:
    """The tensors that the next gather waits for: all that went into the unit before.

    One unit behind, a gather can travel while the unit before it computes, and no more than two
    units' parameters are in memory at once.
    """

    def __init__(self) -> None:
        self._last: list[Tensor] = []

    def swap(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Remember ``tensors``; return those of the call before, or these if there are none."""
        last, self._last = self._last, list(tensors)
        return last or self._last

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Let the next gather wait for the results of a loop: nothing travels under a loop."""
        self._last = list(tensors)

    def clear(self) -> None:
        """Forget all; tensors that stay alive would become outputs of the program."""
        self._last = []


class FSDPContext:
    """Pending tensors and gathered units of one tree; its root makes it.

    *Pending* tensors (reduced gradients, gradients of inputs, stepped shards) must be computed
    before the next gather may start, so that two units' parameters are not in memory at once.

    Args:
        sync_on_end: run what has been traced when a backward pass is over.

    Attributes:
        is_last: False if more passes follow before the gradients are used; what is pending at the
            end of a pass then stands before the first gather of the next.
    """

    def __init__(self, *, sync_on_end: bool = False) -> None:
        self.pending: list[Tensor] = []
        self.forward_gate, self.backward_gate = PrefetchGate(), PrefetchGate()
        self.is_last = True
        # Units with gradients left by no_sync. A list, as all ranks must go in the same order.
        self.unreduced: list[ContextMember] = []
        self._sync_on_end = sync_on_end
        self._unused: list[ContextMember] = []  # hold parameters for a forward that may not come
        # By number of the pass: reentrant checkpoints run passes inside passes.
        self._unsharded_in: dict[int, list[ContextMember]] = {}

    # ------------------------------------------------------------ order of gathers

    def gate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what a gather in backward waits for, for a computation that begins with
        ``tensors``. The caller puts both behind a barrier."""
        pending, self.pending = self.pending, []
        return self.backward_gate.swap([*tensors, *pending])

    def fence(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what a loop that begins with ``tensors`` waits for: all that is pending. What the
        loop does not consume would be alive as long as it runs."""
        pending, self.pending = self.pending, []
        self.backward_gate.clear()
        return [*tensors, *pending]

    def wait_for(self, tensor: Tensor) -> None:
        """Make ``tensor`` pending, if a unit of this tree takes part in the current pass: else
        nothing would forget it."""
        if current_pass() in self._unsharded_in:
            self.pending.append(tensor)

    # ------------------------------------------------------------ clean-up

    def reshard_at_end(self, unit: ContextMember) -> None:
        """Free what ``unit`` has gathered at the latest when the current backward pass ends."""
        self.watch()
        self._unsharded_in[current_pass()].append(unit)

    def watch(self) -> None:
        """See to it that the clean-up runs when the current backward pass is over."""
        number = current_pass()
        if number not in self._unsharded_in:
            self._unsharded_in[number] = []
            Variable._execution_engine.queue_callback(partial(self._end, number))

    def mark_unused(self, unit: ContextMember) -> None:
        """Free what ``unit`` holds when the forwards are over, unless it is used by then."""
        if unit not in self._unused:
            self._unused.append(unit)

    def mark_used(self, unit: ContextMember) -> None:
        """Take ``mark_unused`` back: the unit runs now."""
        if unit in self._unused:
            self._unused.remove(unit)

    def free_unused(self) -> None:
        """Free what units hold that were marked as unused."""
        units, self._unused = self._unused, []
        for unit in units:
            unit.free_unused()

    def abandon(self) -> None:
        """Forget passes that ended by an exception, and free what they have gathered. Does nothing
        inside a pass."""
        if current_pass() != -1:
            return
        if not running_units():
            self.free_unused()
        if not self._unsharded_in:
            return
        leftover, self._unsharded_in = self._unsharded_in, {}
        self._forget()
        for units in leftover.values():
            for unit in units:
                unit.reshard_after_pass()

    def _end(self, number: int) -> None:
        for unit in self._unsharded_in.pop(number, []):
            unit.reshard_after_pass()
        if self._unsharded_in:
            return
        # Of units that a synchronized pass did not touch, but an earlier one under no_sync did.
        for unit in list(self.unreduced):
            unit.reduce_unreduced()
        self.free_unused()
        if not self.is_last:
            return
        self._forget()
        if self._sync_on_end:
            ops.sync()

    def _forget(self) -> None:
        self.pending.clear()
        self.backward_gate.clear()
