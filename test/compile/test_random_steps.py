"""Random steps: compiled ones are the traced ones to the bit, or are refused; none is silent."""

from __future__ import annotations

from collections import Counter

import pytest

from test.common.random_steps import is_simplified, verdicts
from test.common.ranks import FAST_COMPILE, run_on_ranks

# A plain step also returns what autograd still holds, which a compiled one does not. The compiler
# simplifies the two differently, which on some processors changes the last bit.
NOT_SIMPLIFIED = {"XLA_FLAGS": f"{FAST_COMPILE} --xla_disable_hlo_passes=algsimp"}


def check(num_ranks: int, first: int, count: int) -> None:
    """Assert that no case of ``count`` seeds is at fault, and that enough were replayed."""
    seeds = range(first, first + count)
    total: Counter[str] = Counter()
    for simplified, env in ((False, NOT_SIMPLIFIED), (True, {})):
        some = [seed for seed in seeds if is_simplified(seed) == simplified]
        if not some:
            continue
        for each in run_on_ranks(verdicts, num_ranks, some, timeout=3600, env=env):
            assert not each["faults"], "\n\n".join(each["faults"])
            total.update(each["counts"], replays=each["replays"])
    assert total["equal"] + total["refused"] + total["needless"] == num_ranks * count
    assert total["needless"] <= 0.01 * num_ranks * count, total
    assert total["equal"] > 0.4 * num_ranks * count, total
    assert total["refused"] > 0.05 * num_ranks * count, total
    assert total["replays"] > num_ranks * count, total


def test_compiled_steps_are_the_traced_ones_or_are_refused() -> None:
    check(1, 0, 200)


def test_compiled_steps_are_the_traced_ones_or_are_refused_on_two_ranks() -> None:
    check(2, 1000, 12)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_many_compiled_steps_are_the_traced_ones_or_are_refused(first: int) -> None:
    check(1, first, 500)


@pytest.mark.slow
def test_many_compiled_steps_are_the_traced_ones_or_are_refused_on_two_ranks() -> None:
    check(2, 2000, 200)
