"""Random steps: compiled ones are the traced ones to the bit, or are refused; none is silent."""

from __future__ import annotations

from typing import Any

import pytest

from test.common.random_steps import verdicts
from test.common.ranks import FAST_COMPILE, run_on_ranks

# A plain step also returns what autograd still holds, which a compiled one does not. The compiler
# simplifies the two differently, which on some processors changes the last bit.
ENVIRONMENT = {"XLA_FLAGS": f"{FAST_COMPILE} --xla_disable_hlo_passes=algsimp"}


def check(num_ranks: int, first: int, count: int) -> None:
    """Assert that no case of ``count`` seeds is at fault, and that enough were replayed."""
    found: list[dict[str, Any]] = run_on_ranks(
        verdicts, num_ranks, first, count, timeout=3600, env=ENVIRONMENT
    )
    for each in found:
        assert not each["faults"], "\n\n".join(each["faults"])
        counts = each["counts"]
        assert counts["equal"] + counts["refused"] == count
        assert counts["equal"] > 0.4 * count, counts
        assert counts["refused"] > 0.1 * count, counts
        assert each["replays"] > count, each


def test_compiled_steps_are_the_traced_ones_or_are_refused() -> None:
    check(1, 0, 200)


def test_compiled_steps_are_the_traced_ones_or_are_refused_on_two_ranks() -> None:
    check(2, 1000, 24)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_many_compiled_steps_are_the_traced_ones_or_are_refused(first: int) -> None:
    check(1, first, 500)


@pytest.mark.slow
def test_many_compiled_steps_are_the_traced_ones_or_are_refused_on_two_ranks() -> None:
    check(2, 2000, 200)
