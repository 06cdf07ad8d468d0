"""Ranks that run one after the other, as threads of one process, and meet where they need each
other.

Invariants: one rank runs at a time, and goes on until it comes to the gate or returns, so that all
ranks find the host's random number generators as a process of their own would. Imports no
torch_xla, and torch only when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xla_fsdp.distributed.cpu_ranks import Run
from xla_fsdp.distributed.process_state import RandomState

Together = Callable[[list[Any]], Sequence[Any]]
"""Takes what every rank brings to a meeting, in rank order; returns what each takes away."""


class TurnRun(Run):
    """A run whose ranks take turns; each calls ``begin`` first. It is the turn of the first rank
    that neither waits at the gate nor has returned."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._taken: dict[int, Any] = {}  # from the last meeting
        self._first_state = RandomState.now()
        self._random_states: dict[int, RandomState] = {}

    def begin(self, rank: int) -> None:
        """Wait for the first turn of ``rank``."""
        with self._changed:
            self._await(lambda: self._whose_turn() == rank)
        self._random_states.get(rank, self._first_state).restore()

    def pass_gate(self, rank: int, data: Any = None) -> list[Any]:
        self._random_states[rank] = RandomState.now()
        delivered = super().pass_gate(rank, data)
        self.begin(rank)
        return delivered

    def meet(self, rank: int, purpose: str, brought: Any, together: Together) -> Any:
        """Wait for all ranks; return this rank's part of ``together(what all have brought)``.

        Raises Unwind if the run fails, as it does if ``together`` raises.
        """
        self.expect(rank, purpose)
        delivered = self.pass_gate(rank, brought)
        if rank == 0:  # whose turn is the first behind the gate
            self._taken = dict(enumerate(together(delivered)))
            delivered.clear()  # values of all ranks, which take memory
        return self._taken.pop(rank)

    def longest_wait(self) -> float:
        return 0.0  # for the turns of others, however long these take

    def _whose_turn(self) -> int | None:
        busy = self.finished | self._at_gate.keys()
        return next((rank for rank in range(self.num_ranks) if rank not in busy), None)
