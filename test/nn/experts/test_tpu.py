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
    scores = 3 * 2 * LAYERS * 2 * TOKENS**2 * WIDTH
    expected = of_experts + projections + routers + scores
    assert found["step_time"]["model_flops"] == pytest.approx(expected)
