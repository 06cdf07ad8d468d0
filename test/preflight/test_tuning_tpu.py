"""``--tune`` with the TPU compiler: predictions are what it says of the whole step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test.common.ranks import run_python
from xla_fsdp import Recipe

pytest.importorskip("libtpu", reason="the TPU compiler: pip install '.[preflight]'")
pytestmark = pytest.mark.slow

TARGET = ("-m", "xla_fsdp.preflight", "test.common.tpu_tuning:build_step")
SEARCH = ("--tune", "--jobs", "1", "--set", "recipe=plain", "--sweep", "batch=8,16",
          "--set", "depth=12", "--mesh", "shard=4", "--mesh", "shard=2,tensor=2")  # fmt: skip


def test_predictions_hold_and_what_is_compiled_is_kept(tmp_path: Path) -> None:
    cache, found, best = (tmp_path / each for each in ("cache", "found.json", "best.json"))
    common = ("--topology", "v5e:2x2", "--cache_dir", str(cache), "--json", str(found))
    done = run_python(*TARGET, *SEARCH, *common, "--recipe_file", str(best), timeout=1800)
    assert done.returncode == 0, done.stderr
    told = json.loads(found.read_text())
    candidates = {(each["way"], each["batch"]): each for each in told["candidates"]}
    rates = [each["rate"] for each in candidates.values() if each["fits"]]
    [winner] = [each for each in candidates.values() if each["compiled"] and not each["reason"]]
    assert winner["rate"] == max(rates)
    assert dict(Recipe.load(best).mesh or ()) == {"shard": 4}
    tensor = [each for (way, _), each in candidates.items() if "tensor" in way]
    assert len(tensor) == 1
    assert all("no layer of the model is cut over it" in each["reason"] for each in tensor)

    compiled = sorted(cache.iterdir())
    again = run_python(*TARGET, *SEARCH, *common, timeout=900)
    assert again.returncode == 0, again.stderr
    assert sorted(cache.iterdir()) == compiled
    assert json.loads(found.read_text())["candidates"] == told["candidates"]

    one = ("--set", "recipe=plain", "--set", "batch=8", "--set", "depth=12", *common)
    assert run_python(*TARGET, *one, timeout=900).returncode == 0
    [exact] = json.loads(found.read_text())
    predicted = candidates["plain shard=4", 8]
    assert not predicted["compiled"]
    assert predicted["needed"] == pytest.approx(exact["peak_bytes"], rel=0.05)
    assert predicted["compute"] == pytest.approx(exact["step_time"]["compute"], rel=0.05)
