"""What a tree of units shares during backward passes: order and clean-up.

Words: a unit is *open* from when its parameters are gathered for backward until they are freed;
*pending* tensors must be computed before the next gather may start (the reduced gradients and
input gradients of units already done), so that two units' parameters are not alive at once.
Always true: when a backward pass ends, no unit that it opened is open. A pass that raised leaves
units open; the next forward closes them.
The root unit makes one ``BackwardPass`` and hands it to the units below it.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from xla_fsdp import xla_ops


class Closable(Protocol):
    """What a backward pass needs to know of a unit."""

    def close(self) -> None:
        """Free the parameters gathered for backward."""
        ...


def current_pass() -> int:
    """Number of the backward pass that the calling thread runs, or -1 outside of one."""
    return torch._C._current_graph_task_id()


class BackwardPass:
    """Pending tensors and open units of one tree.

    Args:
        sync_on_end: run what has been traced when a backward pass is over.
    """

    def __init__(self, *, sync_on_end: bool = False) -> None:
        self.pending: list[Tensor] = []
        self._sync_on_end = sync_on_end
        # By number of the pass: reentrant checkpoints run passes inside passes.
        self._open: dict[int, list[Closable]] = {}

    def open(self, unit: Closable) -> None:
        """Close ``unit`` at the latest when the current backward pass ends."""
        self.watch()
        self._open[current_pass()].append(unit)

    def watch(self) -> None:
        """See to it that ``_end`` runs when the current backward pass is over."""
        number = current_pass()
        if number not in self._open:
            self._open[number] = []
            Variable._execution_engine.queue_callback(partial(self._end, number))

    def take_pending(self) -> list[Tensor]:
        """The pending tensors, which the caller puts behind a barrier."""
        pending, self.pending = self.pending, []
        return pending

    def abandon(self) -> None:
        """Forget passes that ended by an exception, and close what they left open."""
        leftover, self._open = self._open, {}
        self.pending.clear()
        for units in leftover.values():
            for unit in units:
                unit.close()

    def _end(self, number: int) -> None:
        for unit in self._open.pop(number, []):
            unit.close()
        if self._open:
            return
        self.pending.clear()
        if self._sync_on_end:
            xla_ops.sync()
