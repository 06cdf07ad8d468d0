"""``fully_shard`` on N ranks against the plain model on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test.common.parity import Case, Runs
from xla_fsdp import MixedPrecisionPolicy

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
BF16_ALL = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
IN_PARTS = (("mid", "mid2"), ("inp", "head"))  # of Net; the first two share a weight


def case(**settings: Any) -> Case:
    return Case(in_place=True, **settings)


CASES = {
    "nested": case(),
    "root": case(nest="root"),
    "deep": case(nest="deep"),
    "always": case(options={"reshard_after_forward": True}),
    "never": case(options={"reshard_after_forward": False}),
    "bf16": case(options={"mp_policy": BF16}, tolerance=0.05),
    "bf16_root": case(nest="root", options={"mp_policy": BF16_ALL}, tolerance=0.05),
    "batch_norm": case(model="BatchNormNet"),
    "batch_norm_bf16": case(model="BatchNormNet", options={"mp_policy": BF16}, tolerance=0.1),
    "conv": case(model="ConvNet", statistics_count=5 * 2 * 5),
    "frozen": case(model="FrozenNet"),
    "ignored": case(model="FrozenNet", ignored="blocks.0"),
    "views": case(model="FunctionalNet", options={"reshard_after_forward": True}),
    "holding": case(model="HoldingNet", options={"reshard_after_forward": True}),
    "holding_never": case(model="HoldingNet", options={"reshard_after_forward": False}),
    "holding_remat": case(model="HoldingNet", remat="outside"),
    "remembering": case(model="RememberingNet"),
    "twice": case(model="TwiceNet"),
    "containers": case(model="ContainerNet"),
    "parts": case(together=IN_PARTS),
    "parts_bf16": case(together=IN_PARTS, options={"mp_policy": BF16}, tolerance=0.05),
    "parts_never": case(together=IN_PARTS, options={"reshard_after_forward": False}),
    "parts_no_sync": case(together=IN_PARTS, micro_batches=2, no_sync=True),
    "dim_1": case(dim=1),
    "dim_1_wide": case(model="WideNet", dim=1),
    "wide": case(model="WideNet"),
    "remat": case(remat="inside"),
    "remat_outside": case(remat="outside"),
    "no_sync": case(micro_batches=3, no_sync=True),
    "joint_backward": case(micro_batches=2, joint_backward=True),
    "clip": case(clip=(0.3, 2.0)),
    "adamw": case(optimizer="adamw", tolerance=1e-3),
    "evaluate": case(evaluate=True),
}
REGATHER = {
    f"regather_{size}_{name}": case(
        options={"reshard_after_forward": size, **options}, **{"model": "Net", **settings}
    )
    for size in (2, 4)
    for name, options, settings in (
        ("nested", {}, {}),
        ("wide", {}, {"model": "WideNet"}),
        ("bf16", {"mp_policy": BF16}, {"tolerance": 0.05}),
        ("parts", {}, {"together": IN_PARTS}),
        ("remat", {}, {"remat": "inside"}),
        ("no_sync", {}, {"micro_batches": 2, "no_sync": True}),
        ("dim_1", {}, {"dim": 1}),
    )
}
MESHES = {
    4: {"mesh_2x2": case(options={"mesh": (2, 2)}, clip=(0.3, 2.0))},
    8: {
        "mesh_2x4": case(options={"mesh": (2, 4)}),
        "mesh_4x2": case(options={"mesh": (4, 2)}),
        "mesh_2x4_regather_2": case(options={"mesh": (2, 4), "reshard_after_forward": 2}),
    },
}
QUICK = {
    3: ("nested", "parts_bf16", "dim_1", "ignored", "holding"),
    4: ("regather_2_wide",),
}


def cases(num_ranks: int) -> dict[str, Case]:
    """Everything that runs on so many ranks."""
    regather = {
        name: each
        for name, each in REGATHER.items()
        if num_ranks > each.options["reshard_after_forward"]
        and num_ranks % each.options["reshard_after_forward"] == 0
    }
    return {**CASES, **regather, **MESHES.get(num_ranks, {})}


ALL = {(n, name): each for n in (1, 2, 3, 4, 8) for name, each in cases(n).items()}
QUICK_RUNS = Runs({(n, name): ALL[n, name] for n, names in QUICK.items() for name in names})
OTHERS = Runs({run: each for run, each in ALL.items() if run not in QUICK_RUNS.cases})


@pytest.mark.parametrize(("num_ranks", "name"), QUICK_RUNS.cases)
def test_parity(num_ranks: int, name: str) -> None:
    QUICK_RUNS.check(num_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), OTHERS.cases)
def test_parity_in_full(num_ranks: int, name: str) -> None:
    OTHERS.check(num_ranks, name)
