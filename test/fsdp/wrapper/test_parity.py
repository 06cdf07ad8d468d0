"""N ranks against the plain model on the joined batch: losses, gradients, parameters, buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from test.common.models import FEATURES
from test.common.parity import ROWS, Case, Outcome, Runs, assert_same, build, reference

NO_BARRIERS = {"optimization_barrier_in_forward": False, "optimization_barrier_in_backward": False}
BF16 = {"compute_dtype": torch.bfloat16}

HYBRID = {
    "": Case(clip=(0.3, 2.0)),
    "_flat": Case(nest="deep", options={"flatten_parameters": True}, clip=(0.3, 1.0)),
    "_no_sync": Case(micro_batches=3, no_sync=True, optimizer="adamw", tolerance=1e-3),
    "_bf16": Case(options={**BF16, "fp32_reduce_scatter": True}, tolerance=0.05),
    "_batch_norm": Case(model="BatchNormNet", remat="inside"),
    "_rows": Case(model="WideNet", options={"shard_param_on_dim_0": True}),
    "_auto": Case(policy="transformer", remat="inside"),
}
CASES = {
    "root": Case(nest="root"),
    "root_flat": Case(nest="root", options={"flatten_parameters": True}),
    "root_reshards": Case(nest="root", options={"disable_reshard_on_root": False}),
    "nested": Case(),
    "deep": Case(nest="deep"),
    "deep_flat": Case(nest="deep", options={"flatten_parameters": True}),
    "flat": Case(options={"flatten_parameters": True}),
    "keeps_params": Case(options={"reshard_after_forward": False}),
    "no_barriers": Case(options=NO_BARRIERS),
    "sync_on_end": Case(options={"sync_on_finalization": True, "execute_sharding_on_init": False}),
    "one_gather_each": Case(options={"coalesce_all_gather_ops": False}),
    "one_reduce_each": Case(options={"reduce_scatter_bucket_size_mb": 0}),
    "rows": Case(options={"shard_param_on_dim_0": True}),
    "groups_of_two": Case(groups_of=2, clip=(0.3, 2.0)),
    "adamw": Case(optimizer="adamw", tolerance=1e-3),
    "bf16": Case(options=BF16, tolerance=0.05),
    "bf16_flat": Case(options={**BF16, "flatten_parameters": True}, tolerance=0.05),
    "bf16_fp32_reduce": Case(options={**BF16, "fp32_reduce_scatter": True}, tolerance=0.05),
    "fp16": Case(options={"compute_dtype": torch.float16}, tolerance=0.02),
    "bf16_buffers": Case(
        model="BatchNormNet", options={**BF16, "buffer_dtype": torch.bfloat16}, tolerance=0.1
    ),
    "bf16_batch_norm": Case(model="BatchNormNet", options=BF16, tolerance=0.1),
    "batch_norm": Case(model="BatchNormNet"),
    "batch_norm_remat": Case(model="BatchNormNet", remat="inside"),
    "batch_norm_remat_outside": Case(model="BatchNormNet", remat="outside"),
    "conv": Case(model="ConvNet", statistics_count=ROWS * 2 * FEATURES),
    "frozen": Case(model="FrozenNet"),
    "frozen_flat": Case(model="FrozenNet", options={"flatten_parameters": True}),
    "frozen_root": Case(model="FrozenNet", nest="root"),
    "views": Case(model="FunctionalNet", options={"disable_reshard_on_root": False}),
    "views_flat": Case(
        model="FunctionalNet",
        options={"disable_reshard_on_root": False, "flatten_parameters": True},
    ),
    "holding": Case(model="HoldingNet", options={"disable_reshard_on_root": False}),
    "holding_flat": Case(model="HoldingNet", options={"flatten_parameters": True}),
    "holding_deep": Case(model="HoldingNet", nest="deep"),
    "holding_keeps_params": Case(model="HoldingNet", options={"reshard_after_forward": False}),
    "holding_bf16": Case(model="HoldingNet", options=BF16, tolerance=0.05),
    "holding_remat": Case(model="HoldingNet", remat="inside"),
    "holding_remat_outside": Case(model="HoldingNet", remat="outside"),
    "holding_no_sync": Case(model="HoldingNet", micro_batches=2, no_sync=True),
    "holding_joint_backward": Case(model="HoldingNet", micro_batches=2, joint_backward=True),
    "remembering": Case(model="RememberingNet"),
    "remembering_root": Case(model="RememberingNet", nest="root"),
    "twice": Case(model="TwiceNet"),
    "containers": Case(model="ContainerNet"),
    "containers_remat": Case(model="ContainerNet", remat="inside"),
    "remat": Case(remat="inside"),
    "remat_flat": Case(remat="inside", options={"flatten_parameters": True}),
    "remat_outside": Case(remat="outside"),
    "remat_deep": Case(nest="deep", remat="inside"),
    "remat_deep_outside": Case(nest="deep", remat="outside"),
    "remat_no_barriers": Case(remat="inside", options=NO_BARRIERS),
    "accumulate": Case(micro_batches=2),
    "no_sync": Case(micro_batches=3, no_sync=True),
    "no_sync_flat": Case(micro_batches=2, no_sync=True, options={"flatten_parameters": True}),
    "joint_backward": Case(micro_batches=2, joint_backward=True),
    "clip": Case(clip=(0.3, 2.0)),
    "clip_inf": Case(clip=(0.05, float("inf"))),
    "clip_flat": Case(clip=(0.3, 1.0), options={"flatten_parameters": True}),
    "evaluate": Case(evaluate=True),
    "evaluate_keeps_params": Case(evaluate=True, options={"reshard_after_forward": False}),
    "wide": Case(model="WideNet"),
    "wide_rows": Case(model="WideNet", options={"shard_param_on_dim_0": True}),
    "torus_2x2": Case(torus=(2, 2)),
    "torus_2x2_wide": Case(model="WideNet", torus=(2, 2)),
    "torus_2x2x2": Case(model="WideNet", torus=(2, 2, 2)),
    **{
        f"hybrid_{replicas}x{shards}{name}": replace(case, mesh=(replicas, shards))
        for name, case in HYBRID.items()
        for replicas, shards in ((2, 2), (2, 4), (4, 2), (4, 1))
    },
    "auto_always": Case(policy="always"),
    "auto_size": Case(policy="size"),
    "auto_transformer": Case(policy="transformer"),
    "auto_lambda": Case(policy="lambda"),
    "auto_remat": Case(policy="transformer", remat="inside"),
}
# Every case runs on every number of ranks. In the quick tests these do, on 4 those with meshes and
# toruses, and the others on 3, which divide nothing, but for those that combine what is already
# there.
COMBINED = (
    "root_flat", "bf16_buffers", "frozen_flat", "frozen_root", "views_flat",
    "holding_flat", "holding_deep", "holding_keeps_params", "holding_remat",
    "holding_joint_backward", "remembering_root", "containers_remat", "remat_flat", "remat_deep",
    "no_sync_flat", "clip_flat", "evaluate_keeps_params", "wide_rows", "auto_lambda",
    "bf16_flat", "bf16_fp32_reduce", "bf16_batch_norm", "batch_norm_remat_outside",
    "holding_bf16", "holding_remat_outside", "holding_no_sync", "remat_no_barriers", "clip_inf",
    "auto_size",
)  # fmt: skip
QUICK = (
    "root", "nested", "deep_flat", "bf16", "batch_norm", "frozen", "remat", "no_sync",
    "clip", "groups_of_two", "torus_2x2_wide", "torus_2x2x2",
    "hybrid_2x2", "hybrid_2x2_no_sync",
)  # fmt: skip
ALL = [(n, name) for n in (1, 2, 3, 4, 8) for name, case in CASES.items() if case.fits(n)]
OF_FOUR = ("nested", "groups_of_two", "torus_2x2_wide", "hybrid_2x2", "hybrid_2x2_no_sync")
IN_QUICK = [
    (n, name)
    for n, name in ALL
    if name in (OF_FOUR if n == 4 else QUICK) or (n == 3 and name not in COMBINED)
]
QUICK_RUNS = Runs({(n, name): CASES[name] for n, name in IN_QUICK})
OTHERS = Runs({(n, name): CASES[name] for n, name in ALL if (n, name) not in QUICK_RUNS.cases})


@pytest.mark.parametrize(("num_ranks", "name"), QUICK_RUNS.cases)
def test_parity(num_ranks: int, name: str) -> None:
    QUICK_RUNS.check(num_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), OTHERS.cases)
def test_parity_in_full(num_ranks: int, name: str) -> None:
    OTHERS.check(num_ranks, name)


@pytest.mark.parametrize("name", ["nested", "deep", "remat_deep_outside", "auto_always", "frozen"])
def test_names_are_those_of_the_plain_model(name: str) -> None:
    found = QUICK_RUNS.outcomes(3)[0][name]["names"]
    plain = [name for name, _ in build(CASES[name]).named_parameters()]
    assert sorted(found) == sorted(plain)


def test_the_comparison_notices_an_error() -> None:
    case = CASES["nested"]
    expected = reference(case, 2)
    broken = Outcome(**vars(reference(case, 2)))
    broken.state["head.weight"] = broken.state["head.weight"] * (1 + 10 * case.tolerance)
    with pytest.raises(AssertionError, match=r"state of head\.weight"):
        assert_same(broken, expected, case.tolerance)
