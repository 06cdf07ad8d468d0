"""Models with ``attention`` against the plain model on the joined batch."""

from __future__ import annotations

import pytest

from test.common.parity import Case, Runs
from test.common.scan import BF16

NAMED = {"remat": ["attention"]}
MODEL = "AttentionNet"
CASES = {
    "units": Case(MODEL),
    "flat": Case(MODEL, options={"flatten_parameters": True}),
    "in_place": Case(MODEL, in_place=True),
    "checkpoint": Case(MODEL, remat="inside"),
    "bf16": Case(MODEL, options=BF16, tolerance=0.05),
    "loop": Case(MODEL, scan={}),
    "loop_named": Case(MODEL, scan=NAMED),
    "loop_no_remat": Case(MODEL, scan={"remat": "none"}),
    "loop_offload": Case(MODEL, scan={**NAMED, "offload_activations": True}),
    "loop_stacked": Case(MODEL, scan={**NAMED, "stacked": True}),
    "loop_bf16": Case(MODEL, scan=NAMED, options=BF16, tolerance=0.05),
    "loop_in_place": Case(MODEL, in_place=True, scan=NAMED, clip=(0.3, 2.0)),
}
QUICK = [(3, "checkpoint"), (3, "loop_offload")]
ALL = [(n, name) for n in (1, 3, 8) for name in CASES if (n, name) not in QUICK]
QUICK_RUNS = Runs({(n, name): CASES[name] for n, name in QUICK})
OTHERS = Runs({(n, name): CASES[name] for n, name in ALL})


@pytest.mark.parametrize(("num_ranks", "name"), QUICK_RUNS.cases)
def test_parity(num_ranks: int, name: str) -> None:
    QUICK_RUNS.check(num_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), OTHERS.cases)
def test_parity_in_full(num_ranks: int, name: str) -> None:
    OTHERS.check(num_ranks, name)
