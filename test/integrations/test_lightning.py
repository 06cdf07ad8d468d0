"""Lightning Fabric's own XLAFSDPStrategy with this package below it, on two CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.accumulation import MAX_NORM, STEPS, train_plain
from test.common.compare import assert_close
from test.common.ranks import run_warm
from xla_fsdp.integrations import UntestedVersionError, require

try:
    require("lightning-fabric")
except UntestedVersionError as error:
    pytest.skip(str(error), allow_module_level=True)

from test.common.fabric_job import MICRO
from xla_fsdp import consolidate_sharded_model_checkpoints


def run_job(directory: Path, *how: str) -> dict[str, Any]:
    done = run_warm("-m", "test.common.fabric_job", str(directory), *how)
    assert done.returncode == 0, done.stderr
    return torch.load(directory / "found.pt")


@pytest.mark.slow
def test_training_saving_and_loading(tmp_path: Path) -> None:
    found = run_job(tmp_path, "sharded")
    state, norms = train_plain(STEPS, MICRO)
    assert min(norms) > MAX_NORM
    torch.testing.assert_close(found["norms"], norms, atol=1e-6, rtol=1e-5)
    assert_close(found["whole"], state, atol=2e-6, rtol=1e-5)
    for name, value in found["whole"].items():
        assert torch.equal(found["resumed"][name], value), name
    merged, _ = consolidate_sharded_model_checkpoints(
        f"{tmp_path}/saved/checkpoint", "_rank-*-of-*.pth", save_model=False
    )
    assert_close(dict(merged), train_plain(1, MICRO)[0], atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_full_checkpoints_are_merged_by_fabric(tmp_path: Path) -> None:
    run_job(tmp_path, "full")
    model = torch.load(tmp_path / "saved")["model"]
    assert_close(model, train_plain(1, MICRO)[0], atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_recipe_trains_saves_and_loads(tmp_path: Path) -> None:
    found = run_job(tmp_path, "sharded", "lean")
    assert_close(found["whole"], train_plain(STEPS, MICRO)[0], atol=2e-6, rtol=1e-5)
    for name, value in found["whole"].items():
        torch.testing.assert_close(found["resumed"][name], value)
