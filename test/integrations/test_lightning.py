"""Lightning Fabric's own XLAFSDPStrategy with this package below it, on two CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test.common.models import Net
from test.common.ranks import run_warm
from xla_fsdp.integrations.versions import UntestedVersionError, require

try:
    require("lightning-fabric")
except UntestedVersionError as error:
    pytest.skip(str(error), allow_module_level=True)

from test.common.fabric_job import ACCUMULATE, MAX_NORM, MICRO, RATE, STEPS, rows
from xla_fsdp import consolidate_sharded_model_checkpoints


def train_plain(steps: int) -> tuple[dict[str, Any], list[float]]:
    """The same training in plain torch; also the norms."""
    torch.manual_seed(3)  # as make does
    model, norms = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    data = rows().tensors
    for step in range(steps):
        part = slice(step * MICRO * ACCUMULATE, (step + 1) * MICRO * ACCUMULATE)
        F.cross_entropy(model(data[0][part]), data[1][part]).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), norms


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=1e-5, msg=name)


def run(directory: Path, state_dict_type: str) -> dict[str, Any]:
    done = run_warm("-m", "test.common.fabric_job", str(directory), state_dict_type)
    assert done.returncode == 0, done.stderr
    return torch.load(directory / "found.pt")


@pytest.mark.slow
def test_training_saving_and_loading(tmp_path: Path) -> None:
    found = run(tmp_path, "sharded")
    state, norms = train_plain(STEPS)
    assert min(norms) > MAX_NORM
    torch.testing.assert_close(found["norms"], norms, atol=1e-6, rtol=1e-5)
    assert_close(found["whole"], state)
    for name, value in found["whole"].items():
        assert torch.equal(found["resumed"][name], value), name
    merged, _ = consolidate_sharded_model_checkpoints(
        f"{tmp_path}/saved/checkpoint", "_rank-*-of-*.pth", save_model=False
    )
    assert_close(dict(merged), train_plain(1)[0])


@pytest.mark.slow
def test_full_checkpoints_are_merged_by_fabric(tmp_path: Path) -> None:
    run(tmp_path, "full")
    assert_close(torch.load(tmp_path / "saved")["model"], train_plain(1)[0])
