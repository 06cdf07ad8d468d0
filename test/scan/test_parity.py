"""Blocks that run as one loop against the plain model on the joined batch."""

from __future__ import annotations

import pytest

from test.common.parity import Runs
from test.common.scan import CASES

QUICK = (
    (3, "plain"), (3, "no_sync"), (3, "adapters"), (3, "auto_by_name"),
    (3, "offload_named"), (3, "numbers"), (3, "vmap"), (3, "pattern"), (3, "holding"),
)  # fmt: skip
ALL = [(n, name) for n in (1, 2, 3, 4, 8) for name, case in CASES.items() if case.fits(n)]
QUICK_RUNS = Runs({(n, name): CASES[name] for n, name in QUICK})
OTHERS = Runs({(n, name): CASES[name] for n, name in ALL if (n, name) not in QUICK})


@pytest.mark.parametrize(("num_ranks", "name"), QUICK_RUNS.cases)
def test_parity(num_ranks: int, name: str) -> None:
    QUICK_RUNS.check(num_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), OTHERS.cases)
def test_parity_in_full(num_ranks: int, name: str) -> None:
    OTHERS.check(num_ranks, name)
