"""Ranks that run one after the other, as threads of one process, and meet where they need each
other.

Invariants: one rank runs at a time, and goes on until it meets the others or returns, so that all
ranks find the host's random number generators as a process of their own would. Imports no
torch_xla, and torch only when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xla_fsdp.distributed.cpu_ranks import Run, listed, ranks_by_name
from xla_fsdp.distributed.process_state import RandomState

Together = Callable[[list[Any]], Sequence[Any]]
"""Takes what every rank brings to a meeting, in rank order; returns what each takes away."""


class TurnRun(Run):
    """A run whose ranks take turns; each calls ``begin`` first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._turn = 0
        self._visits: dict[int, tuple[str, Any]] = {}  # purpose of the meeting, and what is brought
        self._taken: dict[int, Any] = {}  # from the last meeting
        self._error: Exception | None = None  # of that
        self._first_state = RandomState.now()
        self._random_states: dict[int, RandomState] = {}

    def begin(self, rank: int) -> None:
        """Wait for the first turn of ``rank``."""
        with self._changed:
            self._await_turn(rank)

    def meet(self, rank: int, purpose: str, brought: Any, together: Together) -> Any:
        """Wait for all ranks; return this rank's part of ``together(what all have brought)``.

        The rank that comes last calls ``together``; its error is raised on every rank.
        Raises Unwind if the run fails.
        """
        with self._changed:
            self._check_may_wait(rank)
            self._visits[rank] = purpose, brought
            if len(self._visits) < self.num_ranks:
                self._pass_turn(rank)
                return self._take(rank)
        try:
            self._taken = dict(enumerate(together(self._all_brought())))
            self._error = None
        except Exception as error:  # which every rank raises
            self._error = error
        with self._changed:
            self._visits.clear()
            self._pass_turn(rank)
            return self._take(rank)

    def _take(self, rank: int) -> Any:
        self._await_turn(rank)
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._taken.pop(rank)

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        return self.meet(rank, "an exchange of host data", data, lambda found: [found] * len(found))

    def finish(self, rank: int) -> None:
        with self._changed:
            self.finished.add(rank)
            if not self.failures and self._turn == rank:
                self._pass_turn(rank)
            self._changed.notify_all()

    def _pass_turn(self, rank: int) -> None:
        """Give the turn to the first rank that can run; fail the run if all others wait for one
        that has returned."""
        self._random_states[rank] = RandomState.now()
        busy = self.finished | self._visits.keys()
        able = [each for each in range(self.num_ranks) if each not in busy]
        if able:
            self._turn = able[0]
            self._changed.notify_all()
        elif self._visits:
            left, waiting = sorted(self.finished), sorted(self._visits)
            purpose, _ = self._visits[waiting[0]]
            self._fail_uneven(
                left[0],
                f"ranks {waiting} wait for {purpose}, but ranks {left} have already returned",
            )

    def _await_turn(self, rank: int) -> None:
        self._await(lambda: self._turn == rank)
        self._random_states.get(rank, self._first_state).restore()

    def _all_brought(self) -> list[Any]:
        """Return what the ranks have brought; raise RuntimeError if for different purposes."""
        visits = [self._visits[rank] for rank in range(self.num_ranks)]
        ranks = ranks_by_name([purpose for purpose, _ in visits])
        if len(ranks) > 1:
            raise RuntimeError(
                f"the ranks meet for different reasons: {listed(ranks)}. Every rank must sync, "
                f"read values and exchange data in the same order; look for code that depends on "
                f"the rank."
            )
        return [brought for _, brought in visits]
