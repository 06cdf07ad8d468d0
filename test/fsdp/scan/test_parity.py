"""Blocks that run as one loop against the plain model on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest

from test.common.parity import assert_same, join, reference, run_cases
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scan import CASES

QUICK = (
    (3, "plain"), (3, "no_sync"), (3, "no_remat"), (3, "adapters"), (3, "auto_by_name"),
    (3, "offload_named"),
)  # fmt: skip
ALL = [(n, name) for n in (1, 2, 3, 4, 8) for name, case in CASES.items() if case.fits(n)]
OTHERS = [run for run in ALL if run not in QUICK]


@cached_outcome
def sharded(num_ranks: int, *, quick: bool) -> list[dict[str, Any]]:
    """What every rank holds after all quick cases, or all others, out of one launch."""
    cases = {name: CASES[name] for n, name in (QUICK if quick else OTHERS) if n == num_ranks}
    return run_on_ranks(run_cases, num_ranks, cases, timeout=1200)


@pytest.mark.parametrize(("num_ranks", "name"), QUICK)
def test_parity(num_ranks: int, name: str) -> None:
    _compare(num_ranks, name, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), OTHERS)
def test_parity_in_full(num_ranks: int, name: str) -> None:
    _compare(num_ranks, name, quick=False)


def _compare(num_ranks: int, name: str, *, quick: bool) -> None:
    case = CASES[name]
    expected = reference(case, num_ranks)
    found = join([rank[name] for rank in sharded(num_ranks, quick=quick)])
    if case.options.get("flatten_parameters"):
        found.grads, expected.grads = {}, {}  # of flat parameters there is no one for each name
    assert_same(found, expected, case.tolerance)
