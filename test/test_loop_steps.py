"""Optimizers that step scanned blocks inside their loop, against steps after backward. Two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from test.ranks import run_on_ranks
from test.scenarios import Scenarios, message
from test.test_stacked import batch, of_kind, whole

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result

STEPS = 4
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "centered": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "capturable": lambda params: torch.optim.AdamW(params, lr=0.01, capturable=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
IN_LOOP = tuple(name for name in OPTIMIZERS if name != "adafactor")


def model_of(kind: str = "stacked", **options: Any) -> Any:
    """All of a block's parameters travel in the loop."""
    from xla_fsdp import scan_blocks

    model = of_kind("single", **options)
    if kind != "single":
        model.scan = scan_blocks(model.blocks, stacked=kind == "stacked", gather_once_below=0)
    return model


def loops_of(model: Any) -> dict[str, int]:
    """How many different loops backward has run, that step and that do not."""
    [loop] = [
        program.loop
        for (direction, *_), program in model.scan._programs._loops.items()
        if direction == "backward"
    ]
    stepping = sum(bool(update) for update in loop._computations)
    return {"stepping": stepping, "plain": len(loop._computations) - stepping}


def train(
    make_optimizer: Make,
    *,
    within: bool,
    loss_of: Callable[[Any, Tensor], Tensor] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What is left of a model, and of the optimizer, after some steps at falling rates."""
    import torch_xla

    from xla_fsdp.optim import step_in_backward

    model = model_of(**options)
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if within:
        step_in_backward(model, optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        x = batch(number)
        loss = loss_of(model, x) if loss_of else model(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        torch_xla.sync()
    state = optimizer.state_dict()["state"]
    values = [value for number in sorted(state) for value in state[number].values()]
    kept = [value.cpu() for value in values if value is not None]
    return {"values": whole(model), "kept": kept, "loops": loops_of(model)}


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["values"].keys() == expected["values"].keys()
    for name, value in expected["values"].items():
        torch.testing.assert_close(found["values"][name], value, rtol=1e-5, atol=1e-6, msg=name)
    for mine, other in zip(found["kept"], expected["kept"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@scenario
def optimizers(rank: int) -> dict[Any, Any]:
    return {
        (name, within): train(make, within=within)
        for name, make in OPTIMIZERS.items()
        for within in (False, True)
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_values_and_state_as_with_steps_after_backward(name: str) -> None:
    for rank in range(2):
        found = result("optimizers", rank)
        assert_alike(found[name, True], found[name, False])


@pytest.mark.parametrize("name", IN_LOOP)
def test_steps_are_made_in_one_loop_once_there_is_something_kept(name: str) -> None:
    """Also where numbers change from step to step: rates, counts, corrections."""
    found = result("optimizers")[name, True]["loops"]
    assert found == {"stepping": 1, "plain": 0 if name == "sgd" else 1}
    assert result("optimizers")[name, False]["loops"] == {"stepping": 0, "plain": 1}


def test_an_optimizer_that_looks_at_whole_matrices_steps_after_the_loop() -> None:
    assert result("optimizers")["adafactor", True]["loops"] == {"stepping": 0, "plain": 1}
