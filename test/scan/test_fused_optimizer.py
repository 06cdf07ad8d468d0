"""Optimizers that step scanned blocks inside their loop, against steps after backward.

Two ranks in the quick tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.models import FEATURES, NumbersNet, ScanNet, TwoKindsNet
from test.common.ranks import run_on_ranks
from test.common.scan import batch, of_kind, whole
from test.common.scenarios import Scenarios, make, message, nested

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result

STEPS = 3
Make = Callable[[Any], torch.optim.Optimizer]


def syncfree(name: str) -> Make:
    """An optimizer of torch_xla, which only ranks import."""
    import torch_xla.amp.syncfree as optimizers

    return getattr(optimizers, name)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "centered": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "capturable": lambda params: torch.optim.AdamW(params, lr=0.01, capturable=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01, capturable=True),
    "reading asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "syncfree": lambda params: syncfree("AdamW")(params, lr=0.01),
    "syncfree momentum": lambda params: syncfree("SGD")(params, lr=0.1, momentum=0.9),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01, maximize=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rates": lambda params: torch.optim.Rprop(params, lr=0.01, capturable=True),
    "reading": lambda params: torch.optim.Rprop(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
AFTER = ("reading", "reading asgd", "adafactor")
WITHOUT_MADE_STATE = ("syncfree", "syncfree momentum")
"""Their first step makes the state, outside of the loop."""
LOOPS = {"radam": 2}
"""In its first step 1 - beta1 and the correction by it are equal, and torch_xla hands equal numbers
over as one."""
QUICK = ("adamw", "sgd", *AFTER)


def model_of(kind: str = "stacked", *, net: Any = None, **options: Any) -> Any:
    """All of a block's parameters travel in the loop; of a ``net`` some as rows, others joined."""
    from xla_fsdp import scan_blocks

    model = nested(make(net), **options) if net else of_kind("single", **options)
    if kind != "single":
        model.scan = scan_blocks(model.blocks, stacked=kind == "stacked", gather_once_below=0)
    return model


def loops_of(model: Any) -> dict[str, int]:
    """How many different loops backward has run, that step and that do not."""
    [loop] = [
        program.loop
        for (direction, *_), program in model.scan._loops.made.items()
        if direction == "backward"
    ]
    stepping = sum(bool(update) for update in loop._computations)
    return {"stepping": stepping, "plain": len(loop._computations) - stepping}


def mean_square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(
    make_optimizer: Make,
    *,
    within: bool,
    in_loops: bool = True,
    loss_of: Callable[[Any, Tensor], Tensor] = mean_square,
    watch: Callable[[Any, Any], None] = lambda model, optimizer: None,
    quiet: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """What is left of a model, and of the optimizer, after some steps at falling rates, each with
    so many backward passes under ``no_sync`` before its last."""
    import torch_xla

    from xla_fsdp.optim import step_in_backward

    model = model_of(**options)
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if within:
        step_in_backward(model, optimizer, in_loops=in_loops)
    watch(model, optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        for micro in range(quiet):
            with model.no_sync():
                loss_of(model, batch(100 + micro)).backward()
        loss_of(model, batch(number)).backward()
        optimizer.step()
        schedule.step()
        torch_xla.sync()
    state = optimizer.state_dict()["state"]
    entries = {number: sorted(each) for number, each in state.items()}
    values = [value for number in sorted(state) for value in state[number].values()]
    kept = [value.cpu() for value in values if value is not None]
    return {"values": whole(model), "kept": kept, "entries": entries, "loops": loops_of(model)}


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["values"].keys() == expected["values"].keys()
    assert found["entries"] == expected["entries"]
    for name, value in expected["values"].items():
        torch.testing.assert_close(found["values"][name], value, rtol=1e-5, atol=1e-6, msg=name)
    for mine, other in zip(found["kept"], expected["kept"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def train_with(rank: int, names: Sequence[str]) -> dict[Any, Any]:
    return {
        (name, within): train(OPTIMIZERS[name], within=within)
        for name in names
        for within in (False, True)
    }


@scenario
def optimizers(rank: int) -> dict[Any, Any]:
    return train_with(rank, QUICK)


def assert_stepped(found: dict[Any, Any], name: str) -> None:
    """The same values and state as with steps after backward; in one loop, once there is something
    kept, also where numbers change from step to step (rates, counts, corrections)."""
    assert_alike(found[name, True], found[name, False])
    plain = {"stepping": 0, "plain": 1}
    assert found[name, False]["loops"] == plain
    in_loops = {"stepping": LOOPS.get(name, 1), "plain": int(name in WITHOUT_MADE_STATE)}
    assert found[name, True]["loops"] == (plain if name in AFTER else in_loops)


@pytest.mark.parametrize("name", QUICK)
def test_the_same_as_with_steps_after_backward(name: str) -> None:
    for rank in range(2):
        assert_stepped(result("optimizers", rank), name)


@pytest.mark.slow
def test_the_same_with_all_optimizers() -> None:
    names = tuple(name for name in OPTIMIZERS if name not in QUICK)
    for found in run_on_ranks(train_with, 2, names):
        for name in names:
            assert_stepped(found, name)


# ---------------------------------------------------------------- what others have a part in


def twice(model: Any, x: Tensor) -> Tensor:
    """Blocks that run in two loops of one step."""
    return model(model(x)).square().mean()


def with_penalty(model: Any, x: Tensor) -> Tensor:
    """A loss that sees the shards, too."""
    return mean_square(model, x) + sum(each.square().sum() for each in model.parameters())


def with_hook_on_stacks(model: Any, optimizer: Any) -> None:
    for param in model.blocks[0].parameters():
        param.register_hook(lambda grad: 2 * grad)


def with_hook_on_steps(model: Any, optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *given: None)


def of_features(model: Any, x: Tensor) -> Tensor:
    return mean_square(model, x[:, :FEATURES])


def with_own_step(model: Any, optimizer: Any) -> None:
    optimizer.step = partial(type(optimizer).step, optimizer)


NOT_IN_LOOP: dict[str, dict[str, Any]] = {
    "used twice": {"loss_of": twice},
    "hook on stacks": {"watch": with_hook_on_stacks},
    "hook on steps": {"watch": with_hook_on_steps},
    "a step of its own": {"watch": with_own_step},
    "penalty": {"loss_of": with_penalty, "in_loops": False},
}
OTHERS: dict[str, dict[str, Any]] = {
    "rows": {"net": ScanNet, "loss_of": of_features},
    "numbers": {"net": NumbersNet, "loss_of": of_features},
    "two kinds": {"net": TwoKindsNet, "loss_of": of_features},
    "bf16": {"compute_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16},
    "scanned, not stacked": {"kind": "scanned"},
    "no_sync": {"quiet": 1},
    **NOT_IN_LOOP,
}


@scenario
def others(rank: int) -> dict[Any, Any]:
    return {
        (name, within): train(OPTIMIZERS["adamw"], within=within, **options)
        for name, options in OTHERS.items()
        for within in (False, True)
    }


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_with_other_models_and_losses(name: str) -> None:
    for rank in range(2):
        found = result("others", rank)
        assert_alike(found[name, True], found[name, False])


@pytest.mark.parametrize("name", NOT_IN_LOOP)
def test_where_others_take_part_steps_are_made_after_the_loop(name: str) -> None:
    assert result("others")[name, True]["loops"]["stepping"] == 0


def test_halves_of_gradients_are_not_stepped_with() -> None:
    assert result("others")["bf16", True]["loops"]["stepping"] == 1
    assert result("others")["rows", True]["loops"]["stepping"] == 1
    # no_sync: the gradients of the passes before are added outside of loops.
    assert result("others")["no_sync", True]["loops"]["stepping"] == 0


@scenario
def handled(rank: int) -> dict[str, Any]:
    """What is refused, and what stays right afterwards."""
    import copy

    import torch_xla

    from xla_fsdp.optim import step_in_backward

    model = model_of()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    handle = step_in_backward(model, optimizer)
    for number in range(2):
        mean_square(model, batch(number)).backward()
        torch_xla.sync()
    found: dict[str, Any] = {"loops": loops_of(model)}
    # Backward passes that are not asked for gradients of parameters.
    start = whole(model)
    x = batch(2).requires_grad_()
    torch.autograd.grad(mean_square(model, x), x)
    mean_square(model, x).backward(inputs=[x])
    found["for inputs"] = all(torch.equal(start[name], each) for name, each in whole(model).items())
    model.zero_grad()
    copied = copy.deepcopy(model)
    mean_square(copied, batch(2)).backward()
    found["copy keeps gradients"] = all(p.grad is not None for p in copied.parameters())
    mean_square(model, batch(2)).backward()  # after the loop, as forwards above came to nothing
    torch_xla.sync()
    found["penalty"] = message(lambda: with_penalty(model, batch(3)).backward())
    handle.remove()
    model.zero_grad()
    mean_square(model, batch(4)).backward()
    found["removed"] = all(p.grad is not None for p in model.parameters())
    torch_xla.sync()
    return found


@scenario
def abandoned(rank: int) -> list[dict[str, int]]:
    """Loops before and after a forward without a backward, whose graph is there still or gone."""
    import torch_xla

    from xla_fsdp.optim import step_in_backward

    model = model_of()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step_in_backward(model, optimizer)
    mean_square(model, batch(0)).backward()
    found = [loops_of(model)]
    unused = model(batch(1))
    kept = unused.detach() if rank == 0 else unused
    del unused
    torch_xla.sync()
    mean_square(model, batch(1)).backward()
    torch_xla.sync()
    del kept
    return [*found, loops_of(model)]


def test_ranks_agree_on_a_forward_whose_backward_may_not_come() -> None:
    """It costs one step in the loop, whether its graph is still there or not."""
    for rank in range(2):
        before, after = result("abandoned", rank)
        assert before == {"stepping": 1, "plain": 0}
        assert after == {"stepping": 1, "plain": 1}


def test_backward_that_asks_for_other_gradients_steps_nothing() -> None:
    assert result("handled")["loops"] == {"stepping": 1, "plain": 0}
    assert result("handled")["for inputs"]


def test_a_gradient_from_elsewhere_after_the_step_is_refused() -> None:
    assert "then got a gradient from elsewhere" in result("handled")["penalty"]


def test_copies_and_removal_step_after_backward() -> None:
    assert result("handled")["copy keeps gradients"]
    assert result("handled")["removed"]


# ---------------------------------------------------------------- other numbers of ranks, hybrid


def on_ranks(rank: int, replicas: int) -> dict[Any, Any]:
    """As ``optimizers``, of some; over replicas, too, whose sums come after the loop."""
    from xla_fsdp import init_mesh
    from xla_fsdp.xla import ops

    size = ops.world_size()
    mesh = init_mesh((replicas, size // replicas), ("replica", "shard"))
    return {
        (name, within): train(OPTIMIZERS[name], within=within, mesh=mesh)
        for name in ("adamw", "momentum")
        for within in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (3, 1), (4, 1), (8, 1), (4, 2)])
def test_the_same_on_other_numbers_of_ranks(ranks: int, replicas: int) -> None:
    for found in run_on_ranks(on_ranks, ranks, replicas):
        for name in ("adamw", "momentum"):
            assert_alike(found[name, True], found[name, False])
            assert found[name, True]["loops"]["stepping"] == (1 if replicas == 1 else 0)
