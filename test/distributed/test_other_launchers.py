"""Jobs that were not started by our ``launch``: by torchrun, and by ``torch_xla.launch``.

On CPU several processes cannot form one XLA job, so these have one rank.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import torch
from torch import nn

from test.common.ranks import run_python

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("method", ["xla://", pytest.param("env://", marks=pytest.mark.slow)])
def test_a_script_under_torchrun(method: str) -> None:
    found = outcome(
        run_python(*TORCHRUN, "--nproc_per_node=1", "-m", "test.common.start_user", method)
    )
    assert found["ranks"] == 1
    assert found["losses"] == pytest.approx(plain_losses(), rel=1e-5)


@pytest.mark.slow
def test_a_script_that_starts_its_ranks_by_torch_xla() -> None:
    found = outcome(run_python("-m", "test.common.start_user", "launch"))
    assert found["ranks"] == 1
    assert found["losses"] == pytest.approx(plain_losses(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["xla://", "env://"])
def test_processes_that_are_not_joined_are_told(method: str) -> None:
    done = run_python(*TORCHRUN, "--nproc_per_node=2", "-m", "test.common.start_user", method)
    assert done.returncode
    assert "torchrun started 2 processes, but this one is rank 0 of 1 XLA ranks" in done.stderr
    assert "python -m xla_fsdp.launch --num_ranks 2" in done.stderr
