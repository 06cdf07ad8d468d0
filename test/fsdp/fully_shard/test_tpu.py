"""What ``fully_shard``'s communication choices change in the TPU compiler's schedule."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import pytest

from test.common.ranks import cached_outcome, run_python

pytest.importorskip("libtpu", reason="the TPU compiler: pip install '.[preflight]'")
pytestmark = pytest.mark.slow

STEPS: dict[str, Any] = {
    "usual": {},
    "prefetch": {"prefetch": 2},
    "fp32": {"reduce": "f32"},
    "hook": {"reduce": "hook"},
}


@cached_outcome
def schedules() -> dict[str, dict[str, Any]]:
    """Of all steps; and what the compiler says of host memory, as "offload"."""
    with tempfile.TemporaryDirectory() as folder:
        steps = [json.dumps(options) for options in STEPS.values()]
        done = run_python("-m", "test.common.tpu_schedules", folder, *steps, "offload", timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip([*STEPS, "offload"], lines, strict=True))


def test_prefetched_gathers_begin_earlier_and_more_of_them_are_there() -> None:
    usual, prefetch = schedules()["usual"], schedules()["prefetch"]
    assert len(prefetch["starts"]) == len(usual["starts"])
    assert sum(prefetch["starts"]) < sum(usual["starts"])
    assert prefetch["full"] > usual["full"]


def test_gradients_travel_in_the_reduce_dtype_or_as_a_hook_sends_them() -> None:
    found = schedules()
    assert found["usual"]["reduced"] == found["hook"]["reduced"] == ["bf16"]
    assert found["fp32"]["reduced"] == ["f32"]
    assert found["fp32"]["reduced_bytes"] > 1.8 * found["usual"]["reduced_bytes"]
    assert found["hook"]["reduced_bytes"] < 1.2 * found["usual"]["reduced_bytes"]


def test_shards_cannot_live_in_host_memory() -> None:
    """Should this fail one day, ``CPUOffloadPolicy`` may become possible."""
    assert "not set to host memory" in schedules()["offload"]["refusal"]
