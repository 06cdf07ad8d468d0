"""One optimizer for several parts. On the host: what it does has nothing to do with devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from test.common.scenarios import make

HOOKS = ["step_pre", "step_post", "state_dict_pre", "state_dict_post"]
HOOKS += ["load_state_dict_pre", "load_state_dict_post"]
X = torch.linspace(-1, 1, 6).reshape(2, 3)


def parts() -> tuple[nn.Module, nn.Module]:
    return make(lambda: nn.Linear(3, 4)), make(lambda: nn.Linear(4, 2))


def joint(*args: Any, **options: Any) -> Any:
    from xla_fsdp.optim import DistributedOptimizer

    return DistributedOptimizer(*args, **options)


def train(first: nn.Module, second: nn.Module, *steppers: Any, steps: int = 3) -> list[list[float]]:
    for _ in range(steps):
        for each in steppers:
            each.zero_grad()
        second(torch.tanh(first(X))).square().sum().backward()
        for each in steppers:
            each.step()
    return [param.flatten().tolist() for model in (first, second) for param in model.parameters()]


def test_every_part_is_stepped_as_by_an_optimizer_of_its_own() -> None:
    first, second = parts()
    own = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (first, second)]
    expected = train(first, second, *own)
    first, second = parts()
    optimizer = joint(torch.optim.AdamW, [first, second], lr=0.1)
    assert train(first, second, optimizer) == expected
    assert list(optimizer.optimizers) == ["0", "1"]
    assert set(optimizer.state) == {*first.parameters(), *second.parameters()}


def test_parts_may_have_classes_groups_and_schedules_of_their_own() -> None:
    first, second = parts()
    optimizer = joint(
        {"a": torch.optim.SGD, "b": torch.optim.Adagrad},
        {"a": [{"params": [first.weight], "lr": 0.5}, {"params": first.bias}], "b": second},
        lr=0.25,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert optimizer.step(lambda: 7) == 7
    scheduler.step()
    rates = {name: [g["lr"] for g in o.param_groups] for name, o in optimizer.optimizers.items()}
    assert rates == {"a": [0.25, 0.125], "b": [0.125]}


def test_state_goes_by_part() -> None:
    first, second = parts()
    optimizer = joint(torch.optim.AdamW, {"a": first, "b": second, "elsewhere": None}, lr=0.1)
    train(first, second, optimizer)
    state = optimizer.state_dict()
    assert set(state["parts"]) == {"a", "b"}
    again = joint(torch.optim.AdamW, {"a": first, "b": second}, lr=0.1)
    again.load_state_dict(state)
    moments = [o.state[first.weight]["exp_avg"] for o in (optimizer, again)]
    assert torch.equal(*moments)
    alone = joint(torch.optim.AdamW, {"a": first}, lr=0.1)
    with pytest.raises(ValueError, match=r"the state has parts \['a', 'b'\], this optimizer"):
        alone.load_state_dict(state)


def test_state_of_one_model_in_parts_is_loaded_as_a_checkpoint_has_it() -> None:
    from xla_fsdp.state.full_optim import state_made
    from xla_fsdp.state.optim import read_optimizer, write_optimizer

    def new() -> tuple[Any, dict[str, nn.Parameter], Any]:
        first, second = parts()
        groups = [{"params": [second.weight], "lr": 0.5}, {"params": second.bias}]
        optimizer = joint(torch.optim.AdamW, {"a": first, "b": groups}, lr=0.1)
        return (first, second), dict(nn.Sequential(first, second).named_parameters()), optimizer

    models, params, optimizer = new()
    train(*models, optimizer)
    saved = read_optimizer(optimizer, params)
    models, params, again = new()
    with state_made(again, params, {}, restore=True) as template:
        assert set(template.states) == set(params)
    assert not any(each.state for each in again.optimizers.values())
    write_optimizer(again, params, saved)
    assert len(again.state) == len(params)
    for name, values in read_optimizer(again, params).states.items():
        for entry in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(values[entry].value, saved.states[name][entry].value)
    with pytest.raises(ValueError, match="2 parameter groups, the parts of this optimizer have 3"):
        again.load_state_dict({"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]})
    with pytest.raises(KeyError):
        again.state[nn.Parameter(torch.zeros(1))]


def test_hooks_run_for_every_part_until_they_are_removed() -> None:
    first, second = parts()
    optimizer = joint(torch.optim.SGD, {"a": first, "b": second}, lr=0.1)
    seen: list[str] = []
    handles = [
        getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: seen.append(name))
        for name in HOOKS
    ]
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert sorted(seen) == sorted(HOOKS * 2)
    for handle in handles:
        handle.remove()
    train(first, second, optimizer, steps=1)
    assert len(seen) == 2 * len(HOOKS)


class RemoteReference:
    """As torch's RRef, which needs a worker to be made."""

    def to_here(self) -> None:
        """Fetch the value."""


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([RemoteReference()], TypeError, "RPC workers hold no XLA devices"),
        ([[RemoteReference()]], TypeError, "RPC workers hold no XLA devices"),
        (nn.Linear(2, 2), TypeError, "give a list or a mapping of parts"),
        ({"a": None}, ValueError, "has parameters on this rank"),
        ([3], TypeError, "holds a int"),
    ],
)
def test_what_is_no_part_is_refused(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        joint(torch.optim.SGD, given, lr=0.1)


def test_parts_must_not_overlap_and_must_be_named() -> None:
    first, second = parts()
    with pytest.raises(ValueError, match="would be stepped twice"):
        joint(torch.optim.SGD, [first, [second.weight, first.bias]], lr=0.1)
    with pytest.raises(ValueError, match="names the parts"):
        joint({"b": torch.optim.SGD}, {"a": first}, lr=0.1)
    optimizer = joint(torch.optim.SGD, {"a": first}, lr=0.1)
    with pytest.raises(ValueError, match=r"optimizers\[name\].add_param_group"):
        optimizer.add_param_group({"params": [second.weight]})
