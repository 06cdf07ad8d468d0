"""Programs for a TPU, run with numbers on virtual chips, against plain torch on the joined batch.

Beside the usual cases there are two mistakes made on purpose, which show that a case can fail.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from test.common.chips import Done, Job, run_jobs
from test.common.parity import Case, assert_parity, run_cases

BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
ROWS: dict[str, Any] = {"shard_param_on_dim_0": True}
ALL_LARGE: dict[str, Any] = {"gather_once_below": 1}  # so that the loop gathers and reduces all

QUICK: dict[str, tuple[str, Case]] = {
    "nested": ("v5e:2x2", Case("Net", clip=(0.3, 2.0), optimizer="adamw", tolerance=1e-3)),
    "loop": ("v5e:2x4", Case("ScanNet", scan=ALL_LARGE)),
    "hybrid stacked bf16": (
        "v5e:2x2*2",
        Case(
            "ScanNet",
            scan={**ALL_LARGE, "stacked": True},
            mesh=(2, 4),
            options=BF16,
            tolerance=0.05,
        ),
    ),
    "streamed ends": ("v5e:2x2", Case("SignsToLossNet", options=ROWS, computes_loss=True)),
}
BROKEN = {"broken ring": "ring", "stale input": "stale"}


def job_of(topology: str, case: Case, **how: Any) -> Job:
    return Job(topology, run_cases, ({"it": case},), **how)


@functools.cache
def quick() -> dict[str, Done]:
    jobs = {name: job_of(*each) for name, each in QUICK.items()}
    jobs.update({name: job_of(*QUICK["loop"], fault=fault) for name, fault in BROKEN.items()})
    return run_jobs(jobs)


def assert_right(case: Case, done: Done) -> None:
    assert not done.error, done.error
    assert_parity(case, [rank["it"] for rank in done.ranks])


@pytest.mark.parametrize("name", QUICK)
def test_training_equals_that_of_plain_torch(name: str) -> None:
    assert_right(QUICK[name][1], quick()[name])


def test_reductions_go_around_rings_and_steps_settle_on_one_program() -> None:
    done = quick()["loop"]
    assert "collective-permute" in done.programs[-1]
    assert done.runs[-2:] == (done.runs[-1],) * 2


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_seen(name: str) -> None:
    done = quick()[name]
    assert not done.error, done.error
    with pytest.raises(AssertionError):
        assert_right(QUICK["loop"][1], done)
