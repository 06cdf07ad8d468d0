"""Gradients of gradients through units and checkpoints, and the transforms of ``torch.func``."""

from __future__ import annotations

import pytest

from test.common.parity import Case, Runs

CASES = {
    (2, "penalty"): Case(penalty="added"),
    (2, "forces"): Case(penalty="alone"),
    (2, "one unit"): Case(nest="root", penalty="added"),
    (2, "held"): Case(penalty="added", options={"reshard_after_forward": False}),
    (2, "remat inside"): Case(penalty="added", remat="inside"),
    (2, "remat outside"): Case(penalty="added", remat="outside"),
    (2, "remat forces"): Case(penalty="alone", remat="outside"),
    (2, "in place"): Case(penalty="added", in_place=True),
    (2, "flat"): Case(penalty="added", options={"flatten_parameters": True}),
    (2, "bf16"): Case(penalty="added", options={"compute_dtype": __import__("torch").bfloat16},tolerance=0.1),
    (2, "no_sync"): Case(penalty="added", micro_batches=2, no_sync=True),
    (2, "joint"): Case(penalty="added", micro_batches=2, joint_backward=True),
    (2, "frozen"): Case(model="FrozenNet", penalty="added"),
    (2, "functional"): Case(model="FunctionalNet", penalty="added", nest="root"),
    (2, "bn"): Case(model="BatchNormNet", penalty="added", optimizer="sgd"),
    (2, "deep forces"): Case(penalty="alone", nest="deep"),
    (3, "wide"): Case(model="WideNet", penalty="added"),
    (3, "deep"): Case(penalty="added", nest="deep", optimizer="adamw"),
    (3, "bn forces"): Case(model="BatchNormNet", penalty="alone"),
    (1, "one rank"): Case(penalty="added"),
    (1, "one rank f"): Case(penalty="alone",nest="root"),
    (4, "mesh"): Case(penalty="added", mesh=(2, 2)),
    (4, "larger"): Case(penalty="alone", in_place=True, options={"reshard_after_forward": 2}),
}
runs = Runs(CASES)


@pytest.mark.parametrize(("num_ranks", "name"), CASES, ids=lambda value: str(value))
def test_a_gradient_penalty_is_that_of_the_plain_model(num_ranks, name):
    runs.check(num_ranks, name)
