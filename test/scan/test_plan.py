"""Which of a sequence of blocks run in a loop."""

from __future__ import annotations

import pytest

from xla_fsdp.scan.plan import Plan, find_plan


@pytest.mark.parametrize(
    ("kinds", "plan"),
    [
        ("a", Plan(1, 0, 1, 1)),
        ("aaaa", Plan(4, 0, 1, 4)),
        ("ab", None),
        ("aba", None),
        ("abcd", None),
        ("baaaa", Plan(5, 1, 1, 4)),
        ("aaab", Plan(4, 0, 1, 3)),
        ("abab", Plan(4, 0, 2, 2)),
        ("ababa", Plan(5, 0, 2, 2)),
        ("cababab", Plan(7, 1, 2, 3)),
        ("llllglllllgd", Plan(12, 5, 1, 5)),
        ("lllllglllllg", Plan(12, 0, 6, 2)),
        ("xllgllgllgy", Plan(11, 1, 3, 3)),
        ("aaabbbbbbbb", Plan(11, 3, 1, 8)),
    ],
)
def test_the_smallest_program_is_found(kinds: str, plan: Plan | None) -> None:
    assert find_plan(kinds) == plan


def test_a_plan_tells_which_block_runs_where() -> None:
    plan = Plan(length=8, first=1, period=3, times=2)
    assert [list(plan.numbers_at(position)) for position in range(3)] == [[1, 4], [2, 5], [3, 6]]
    assert (list(plan.numbers), plan.stop, plan.size) == ([1, 2, 3, 4, 5, 6], 7, 5)
