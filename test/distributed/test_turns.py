"""Ranks that take turns: order, meetings, and what goes wrong in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_fsdp.distributed.turns import TurnRun

RANKS = 3


def run(fn: Callable[[int, TurnRun], Any]) -> tuple[list[Any], list[str]]:
    """What each rank has returned, and what failed."""
    turns = TurnRun(RANKS)
    turns.start(fn, (turns,), turns.begin, lambda rank: None)
    assert turns.wait(60, for_all=True)
    turns.join_finished()
    return [turns.results.get(rank) for rank in range(RANKS)], [
        failure.message for failure in turns.failures
    ]


def test_one_rank_runs_until_it_needs_the_others() -> None:
    order: list[tuple[int, str]] = []

    def fn(rank: int, turns: TurnRun) -> Any:
        order.append((rank, "before"))
        found = turns.meet(rank, "it", rank, lambda brought: [sum(brought)] * RANKS)
        order.append((rank, "after"))
        return found

    assert run(fn) == ([3, 3, 3], [])
    assert order[:RANKS] == [(rank, "before") for rank in range(RANKS)]
    assert sorted(order[RANKS:]) == [(rank, "after") for rank in range(RANKS)]


def test_an_error_in_a_meeting_ends_all_ranks() -> None:
    def refuse(brought: list[Any]) -> list[Any]:
        raise ValueError("no")

    def fn(rank: int, turns: TurnRun) -> Any:
        return turns.meet(rank, "it", rank, refuse)

    assert run(fn) == ([None] * RANKS, ["rank 0 raised ValueError: no"])


def test_several_meetings_deliver_what_was_brought_to_each() -> None:
    def fn(rank: int, turns: TurnRun) -> Any:
        first = turns.meet(rank, "it", rank, lambda brought: brought)
        return first, turns.exchange(rank, bytes([rank])), turns.meet(rank, "it", 2 * rank, list)

    each = [b"\0", b"\1", b"\2"]
    assert run(fn) == ([(0, each, 0), (1, each, 2), (2, each, 4)], [])


def test_meetings_for_different_reasons_are_refused() -> None:
    def fn(rank: int, turns: TurnRun) -> None:
        turns.meet(rank, "a sync" if rank else "a read", rank, lambda brought: brought)

    _, [failure] = run(fn)
    assert "number 1 is a read on ranks [0]; a sync on ranks [1, 2]. Every rank must" in failure


def test_a_rank_that_returns_early_is_named() -> None:
    def fn(rank: int, turns: TurnRun) -> None:
        if rank != 1:
            turns.meet(rank, "a sync", rank, lambda brought: brought)

    _, [failure] = run(fn)
    assert "to run a sync, but ranks [1] have already returned" in failure
