"""A request to end that one process got, and the step after which all ranks know of it.

Words: a *vote* is a number that every rank puts into a step's program, which adds them up.
Always true: all ranks learn of a request after the same step, at most two steps late; reading it
waits for no more than the step before the last one, so a step stays queued while another runs.
What a job does then (save, and end with an exit code of its own) is its own business; how a
process gets a request is ``stop_signals``'s.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from xla_fsdp import stop_signals, xla_ops

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
        word = xla_ops.upload(torch.tensor([float(stop_signals.was_asked())]))
        everybody = [list(range(xla_ops.world_size()))]
        self._votes.append(xla_ops.all_reduce("sum", word, everybody))

    def agreed(self) -> bool:
        """Whether a rank had been asked to end when it voted for the last time but one: after the
        sync. The same on every rank."""
        return len(self._votes) >= LAG and self._votes.popleft().item() > 0
