"""What the TPU compiler makes of mixtures."""

from __future__ import annotations

import pytest

from test.common.tpu_reports import reports

pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'xla_fsdp[preflight]'")
pytestmark = pytest.mark.slow

BUILD = "test.common.tpu_mixtures:build"
EXPERTS, INNER, WIDTH, CHOICES, LAYERS, TOKENS = 8, 3584, 1024, 2, 2, 2048
VOCABULARY = 8192


def test_no_weight_is_copied_for_a_token() -> None:
    """That of every pair of a token and an expert took 56 GiB."""
    [found] = reports(BUILD, "--topology", "v5e:2x2")
    assert found["peak_bytes"] < 2**30
    pairs = TOKENS * CHOICES
    of_experts = 3 * 2 * LAYERS * pairs * 3 * WIDTH * INNER  # three products, and two gradients
    projections = 3 * 2 * TOKENS * (LAYERS * 4 * WIDTH**2 + WIDTH * VOCABULARY)
    routers = 3 * 2 * LAYERS * TOKENS * WIDTH * EXPERTS
    # Of 4 x 4 tiles of 512 tokens the attention of the recipe computes the 10 that are not masked.
    scores = 3 * 2 * LAYERS * 2 * TOKENS**2 * WIDTH * 10 // 16
    expected = of_experts + projections + routers + scores
    assert found["step_time"]["model_flops"] == pytest.approx(expected)


def test_gradients_of_whole_experts_take_a_piece_of_memory() -> None:
    """They and the sums of a ring were most of a peak; what they are hidden under stays."""
    sizes = ("--set", "inner=7168", "--topology", "v5e:2x2")
    whole = "test.common.tpu_mixtures:build_with_whole_gradients"
    [[found], [before]] = (reports(target, *sizes) for target in (BUILD, whole))
    gradients = 3 * EXPERTS * 2 * INNER * WIDTH * 2  # of both weights of a layer, in bf16
    assert found["peak_bytes"] < before["peak_bytes"] - gradients // 2
    assert found["step_time"]["total"] < 1.03 * before["step_time"]["total"]
