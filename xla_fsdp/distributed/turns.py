"""Ranks that run one after the other, as threads of one process, and meet where they need each
other.

Invariants: one rank runs at a time, and goes on until it meets the others or returns, so that all
ranks find the host's random number generators as a process of their own would. Imports no
torch_xla, and torch only when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_fsdp.distributed.cpu_ranks import Run
from xla_fsdp.distributed.process_state import RandomState

Together = Callable[[list[Any]], Sequence[Any]]
"""Takes what every rank brings to a meeting, in rank order; returns what each takes away."""


@dataclass(frozen=True)
class Visit:
    """A rank that waits for the others to meet.

    Args:
        purpose: of the meeting, as text for messages; equal on all ranks.
        brought: what it brings.
    """

    purpose: str
    brought: Any


@dataclass(frozen=True)
class _Raised:
    """What the ranks take away from a meeting that failed."""

    error: Exception


class TurnRun(Run):
    """A run whose ranks take turns; each calls ``begin`` first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._turn = 0
        self._visits: dict[int, Visit] = {}
        self._taken: dict[int, Any] = {}
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
            self._visits[rank] = Visit(purpose, brought)
            if len(self._visits) < self.num_ranks:
                self._pass_turn(rank)
                return self._take(rank)
            visits = [self._visits[each] for each in range(self.num_ranks)]
        try:
            self._check_purposes(visits)
            taken: Sequence[Any] = together([visit.brought for visit in visits])
        except Exception as error:  # which every rank raises
            taken = [_Raised(error)] * self.num_ranks
        with self._changed:
            self._taken = dict(enumerate(taken))
            self._visits.clear()
            self._pass_turn(rank)
            return self._take(rank)

    def _take(self, rank: int) -> Any:
        self._await_turn(rank)
        taken = self._taken.pop(rank)
        if isinstance(taken, _Raised):
            raise RuntimeError(str(taken.error)) from taken.error
        return taken

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
            purpose = self._visits[waiting[0]].purpose
            self._fail_uneven(
                left[0],
                f"ranks {waiting} wait for {purpose}, but ranks {left} have already returned",
            )

    def _await_turn(self, rank: int) -> None:
        self._await(lambda: self._turn == rank)
        self._random_states.get(rank, self._first_state).restore()

    def _check_purposes(self, visits: Sequence[Visit]) -> None:
        ranks: dict[str, list[int]] = {}
        for rank, visit in enumerate(visits):
            ranks.setdefault(visit.purpose, []).append(rank)
        if len(ranks) > 1:
            what = "; ".join(f"{purpose} on ranks {which}" for purpose, which in ranks.items())
            raise RuntimeError(
                f"the ranks meet for different reasons: {what}. Every rank must sync, read values "
                f"and exchange data in the same order; look for code that depends on the rank."
            )
