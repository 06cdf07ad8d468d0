"""Find what repeats in a sequence of blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Which of ``length`` blocks run in a loop; those before and after it run one by one.

    Args:
        length: number of blocks.
        first: number of the first block in the loop.
        period: number of blocks that one iteration runs.
        times: number of iterations.
    """

    length: int
    first: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        """Number of the first block after the loop."""
        return self.first + self.period * self.times

    @property
    def size(self) -> int:
        """Number of blocks that the program has code for."""
        return self.first + self.period + self.length - self.stop

    @property
    def numbers(self) -> range:
        """The numbers of the blocks in the loop."""
        return range(self.first, self.stop)

    def numbers_at(self, position: int) -> range:
        """Return the numbers of the blocks that run at ``position`` of an iteration."""
        return range(self.first + position, self.stop, self.period)


def find_plan(kinds: Sequence[Hashable]) -> Plan | None:
    """Return the plan with the smallest program for blocks of these kinds, of which equal ones
    compute the same; None if nothing repeats.

    Of several, take the shortest period, then the fewest blocks before the loop.
    """
    length = len(kinds)
    if length == 1:
        return Plan(1, 0, 1, 1)
    plans = (
        Plan(length, first, period, times)
        for period in range(1, length // 2 + 1)
        for first, times in _repetitions(kinds, period)
    )
    return min(plans, key=lambda plan: plan.size, default=None)


def _repetitions(kinds: Sequence[Hashable], period: int) -> list[tuple[int, int]]:
    """Return (first, times) of the longest repetitions with this period."""
    found: list[tuple[int, int]] = []
    same = 0  # number of blocks up to here that equal the one ``period`` before
    for at in range(period, len(kinds)):
        same = same + 1 if kinds[at] == kinds[at - period] else 0
        if times := same // period:
            found.append((at - same - period + 1, times + 1))
    return found
