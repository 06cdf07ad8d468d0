"""Lists of equal modules whose weights the model reads and which it never calls. Two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.readers import Reader, rows
from test.common.scenarios import Scenarios, one_step

scenarios = Scenarios(__name__)

WIDTH, STEPS = 8, 4


def plain() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.cat([rows(rank, step) for rank in range(2)])
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


CASES = {"plain": ("plain", False), "lean": ("lean", False), "compiled": ("lean", True)}


@scenarios.add
def trained(rank: int) -> dict[str, Any]:
    return {name: train(rank, *case) for name, case in CASES.items()}


def train(rank: int, recipe: Any, is_compiled: bool) -> Any:
    import torch_xla

    from xla_fsdp import full_state_dict, parallelize

    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, chosen = parallelize(model, optimizer, recipe)

    step = one_step(model, optimizer)
    if is_compiled:
        step = chosen.compile(step)
    for at in range(STEPS):
        step(rows(rank, at).to(torch_xla.device()))
        torch_xla.sync()
    state = {name: value.cpu() for name, value in full_state_dict(model).items()}
    return state, "\n".join(chosen._report)


@pytest.mark.parametrize("case", CASES)
def test_what_a_model_reads_and_does_not_call_is_trained(case: str) -> None:
    state, told = scenarios.result("trained")[case]
    torch.testing.assert_close(state, dict(plain()), rtol=1e-4, atol=1e-5)
    assert "is read by the model, which does not call its module" in told
