"""Blocks that run as one loop against the plain model on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test.common.parity import Case, assert_same, join, reference, run_cases
from test.common.ranks import cached_outcome, run_on_ranks

BF16 = {"compute_dtype": torch.bfloat16}
NO_BARRIERS = {"optimization_barrier_in_forward": False, "optimization_barrier_in_backward": False}
ALL_LARGE: dict[str, Any] = {"gather_once_below": 1}

CASES = {
    "plain": Case("ScanNet", scan={}),
    "two_blocks": Case("Net", scan=ALL_LARGE),
    "one_block": Case("ScanNetOfOne", scan={}),
    "all_large": Case("ScanNet", scan=ALL_LARGE),
    "all_small": Case("ScanNet", scan={"gather_once_below": 10**9}),
    "no_remat": Case("ScanNet", scan={"remat": "none"}),
    "named": Case("ScanNet", scan={"remat": ["qkv", "up"]}),
    "remat_inside": Case("ScanNet", remat="inside", scan={}),
    "offload": Case("ScanNet", scan={"offload_activations": True}),
    "offload_named": Case("ScanNet", scan={"remat": ["qkv"], "offload_activations": True}),
    "offload_one_block": Case("ScanNetOfOne", scan={"offload_activations": True}),
    "offload_adapters": Case("AdapterNet", scan={"remat": "none", "offload_activations": True}),
    "bf16": Case("ScanNet", scan={}, options=BF16, tolerance=0.05),
    "bf16_fp32_reduce": Case(
        "ScanNet", scan={}, options={**BF16, "fp32_reduce_scatter": True}, tolerance=0.05
    ),
    "fp16": Case("ScanNet", scan={}, options={"compute_dtype": torch.float16}, tolerance=0.02),
    "flat": Case("ScanNet", scan={}, options={"flatten_parameters": True}),
    "rows": Case("ScanNet", scan={}, options={"shard_param_on_dim_0": True}),
    "in_place": Case("ScanNet", scan={}, in_place=True),
    "in_place_dim_1": Case("ScanNet", scan=ALL_LARGE, in_place=True, dim=1),
    "in_place_dim_1_small": Case("ScanNet", scan={}, in_place=True, dim=1),
    "no_barriers": Case("ScanNet", scan={}, options=NO_BARRIERS),
    "one_gather_each": Case("ScanNet", scan={}, options={"coalesce_all_gather_ops": False}),
    "one_reduce_each": Case("ScanNet", scan={}, options={"reduce_scatter_bucket_size_mb": 0}),
    "adapters": Case("AdapterNet", scan={}),
    "adapters_no_remat": Case("AdapterNet", scan={"remat": "none"}),
    "clip": Case("ScanNet", scan={}, clip=(0.3, 2.0)),
    "adamw": Case("Net", scan=ALL_LARGE, optimizer="adamw", tolerance=1e-3),
    "accumulate": Case("ScanNet", scan={}, micro_batches=2),
    "no_sync": Case("ScanNet", scan={}, micro_batches=3, no_sync=True),
    "joint_backward": Case("ScanNet", scan={}, micro_batches=2, joint_backward=True),
    "evaluate": Case("ScanNet", scan={}, evaluate=True),
    "auto": Case(policy="transformer", options={"scan_layers": True}),
    "auto_by_name": Case(policy="transformer", options={"scan_layers": "blocks"}, remat="inside"),
    "groups_of_two": Case("ScanNet", scan={}, groups_of=2, clip=(0.3, 2.0)),
    "torus_2x2": Case("ScanNet", scan=ALL_LARGE, torus=(2, 2)),
    "hybrid_2x2": Case("ScanNet", scan={}, mesh=(2, 2), clip=(0.3, 2.0)),
    "hybrid_2x2_no_sync": Case("ScanNet", scan={}, mesh=(2, 2), micro_batches=2, no_sync=True),
    "hybrid_2x4_bf16": Case("ScanNet", scan={}, mesh=(2, 4), options=BF16, tolerance=0.05),
}  # fmt: skip
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
