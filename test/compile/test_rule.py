"""A compiled step depends on its arguments and its state; a value of elsewhere never goes stale
without a word."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import os
import types
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from test.common.scenarios import Scenarios, fsdp, make, message
from xla_fsdp import compile_step
from xla_fsdp.xla import ops

scenarios = Scenarios(__name__, num_ranks=1)  # others would wait for one that raises
result = scenarios.result
scenario = scenarios.add


def ones(*shape: int, value: float = 1.0) -> Tensor:
    """Return a tensor of one value on the device."""
    return torch.full(shape, value).to(ops.device())


# ---------------------------------------------------------------- values outside of the state


@dataclasses.dataclass(slots=True)
class Slots:
    """A value in a slot."""

    scale: float = 1.0


class Bag:
    """Attributes that ``__getattr__`` finds."""

    def __init__(self) -> None:
        self.data = {"scale": 1.0}

    def __getattr__(self, name: str) -> float:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class ByProperty:
    """A value that a property computes."""

    def __init__(self) -> None:
        self.half = 0.5

    @property
    def scale(self) -> float:
        return 2 * self.half


variable = contextvars.ContextVar("variable", default=1.0)
GLOBAL = {"scale": 1.0}


def _nested(depth: int) -> Any:
    found = types.SimpleNamespace(scale=1.0)
    for _ in range(depth):
        found = types.SimpleNamespace(inner=found)
    return found


def _outside() -> dict[str, tuple[Callable[[], float], Callable[[], Any]]]:
    """Return places outside of the state that hold 1.0: what reads each, and what makes it 3.0."""
    slots, bag, computed, deep = Slots(), Bag(), ByProperty(), _nested(5)
    array, queue, held = np.ones(1), collections.deque([1.0]), collections.UserDict(scale=1.0)
    plain, numbers, functions = types.SimpleNamespace(scale=1.0), [1.0], [lambda: 1.0]
    name = "sc" + "ale".lower()
    os.environ["SCALE_OF_A_TEST"] = "1.0"
    return {
        "slots": (lambda: slots.scale, lambda: setattr(slots, "scale", 3.0)),
        "numpy": (lambda: float(array[0]), lambda: array.fill(3.0)),
        "deque": (lambda: queue[0], lambda: queue.appendleft(3.0)),
        "environment": (
            lambda: float(os.environ["SCALE_OF_A_TEST"]),
            lambda: os.environ.update(SCALE_OF_A_TEST="3.0"),
        ),
        "context variable": (variable.get, lambda: variable.set(3.0)),
        "getattr": (lambda: getattr(plain, name), lambda: setattr(plain, "scale", 3.0)),
        "__getattr__": (lambda: bag.scale, lambda: bag.data.update(scale=3.0)),
        "UserDict": (lambda: held["scale"], lambda: held.update(scale=3.0)),
        "property": (lambda: computed.scale, lambda: setattr(computed, "half", 1.5)),
        "nested": (
            lambda: deep.inner.inner.inner.inner.inner.scale,
            lambda: setattr(deep.inner.inner.inner.inner.inner, "scale", 3.0),
        ),
        "list": (lambda: numbers[0], lambda: numbers.__setitem__(0, 3.0)),
        "global": (lambda: GLOBAL["scale"], lambda: GLOBAL.update(scale=3.0)),
        "another function": (lambda: functions[-1](), lambda: functions.append(lambda: 3.0)),
    }


def _losses(step: Callable[..., Any], change: Callable[[], Any], *args: Any) -> list[float]:
    """Return the losses of seven steps, after the fifth of which a value is changed."""
    found = []
    for number in range(7):
        if number == 5:
            change()
        found.append(step(ones(2, 3), *(each() for each in args)).item())
    return found


@scenario
def outside(rank: int) -> dict[str, Any]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    found = {}
    for name, (read, change) in _outside().items():
        step = compile_step(lambda x, read=read: model(x).sum() * read(), state=[model], check=1)
        found[name] = message(lambda step=step, change=change: _losses(step, change))
    given = {}
    for name, (read, change) in _outside().items():
        step = compile_step(lambda x, scale: model(x).sum() * scale, state=[model], check=1)
        variable.set(1.0)
        GLOBAL["scale"] = 1.0
        given[name] = [_losses(step, change, read), step.replays, step.checks]
    return {"outside": found, "given": given}


def test_a_changed_value_of_outside_is_an_error_that_names_the_operation() -> None:
    for name, text in result("outside")["outside"].items():
        assert "found another program than the one replayed: first differs mul(" in text, name
        assert "3.0" in text, (name, text)
        assert "test_rule.py" in text, (name, text)
        assert "as an argument" in text, (name, text)


def test_such_a_value_is_right_as_an_argument() -> None:
    for name, (losses, replays, checks) in result("outside")["given"].items():
        assert losses[:5] == [losses[0]] * 5, name
        assert losses[5:] == pytest.approx([3 * losses[0]] * 2), name
        assert replays == checks == 3, name  # each of the two programs is traced twice


@scenario
def by_default(rank: int) -> list[list[int]]:
    """Before which replays a step is checked."""
    with mock.patch.dict(os.environ):
        os.environ.pop("XLA_FSDP_CHECK", None)
        steps = [
            compile_step(lambda x: x.sum(), state=[], check=check, unknown=unknown)
            for check, unknown in ((None, "raise"), (None, "trace"), (5, "raise"), (0, "raise"))
        ]
    found: list[list[int]] = [[], [], [], []]
    for number in range(132):
        # A check takes more than this part of the time at first, then less.
        with mock.patch("xla_fsdp.compile.step.MOST_CHECKED", 0.0 if number < 40 else 1e9):
            for each, at in zip(steps, found, strict=True):
                checks = each.checks
                each(ones(2))
                if each.checks > checks:
                    at.append(each.replays)
    return found


def test_replays_are_checked_now_and_then() -> None:
    default, traced, fifth, never = result("by_default")
    assert default == [2, 39, 128]  # the second waits for its time
    assert traced == [2, 16, 128]  # on all ranks at the same steps
    assert fifth == [*range(5, 131, 5)]
    assert never == []


# ---------------------------------------------------------------- what the state is


@scenario
def without_state(rank: int) -> list[str]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))

    def train(x: Tensor) -> Tensor:
        return model(x).sum()

    step = compile_step(lambda model, x: model(x).sum())
    given = [step(model, ones(2, 3)).item() for _ in range(4)]
    partial = compile_step(functools.partial(lambda model, x: model(x).sum(), model))
    return [
        message(lambda: compile_step(train)(ones(2, 3))),
        [given, step.replays],
        [[partial(ones(2, 3)).item() for _ in range(4)], partial.replays],
    ]


def test_a_step_without_state_says_what_to_write() -> None:
    text, given, partial = result("without_state")
    assert "compile_step(train, state=[model, optimizer])" in text
    assert given == partial
    assert given[1] == 2


@scenario
def unknown(rank: int) -> dict[str, str]:
    model, other = (fsdp(make(lambda: nn.Linear(3, 3))) for _ in range(2))
    outside, scalar = ones(3), ones(value=2.5)
    kept = {"first": ones(3)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * outside

    def in_backward(x: Tensor) -> None:
        Doubled.apply(model(x)).sum().backward()

    steps = {
        "closure": lambda x: (model(x) * outside).sum(),
        "dict": lambda x: (model(x) * kept["first"]).sum(),
        "view": lambda x: (model(x) * outside[:1]).sum(),
        "scalar": lambda x: (model(x) * scalar).sum() + 2.5,  # torch_xla gives both one buffer
        "model": lambda x: other(model(x)).sum(),
        "optimizer": train,
        "backward": in_backward,
    }
    return {
        name: message(lambda step=step: compile_step(step, state=[model])(ones(2, 3)))
        for name, step in steps.items()
    }


def test_a_tensor_of_neither_state_nor_arguments_is_refused_with_its_place() -> None:
    found = result("unknown")
    for name in ("closure", "dict", "view", "scalar"):
        assert "neither an argument nor inside of its state; it entered at" in found[name], found
        assert "test_rule.py" in found[name], found[name]
    assert "neither an argument nor inside of its state" in found["model"]
    assert (
        "the step calls the step of SGD, an optimizer that is not in state=" in found["optimizer"]
    )
    assert "it entered at backward" in found["backward"]


class Average:
    """Keeps averages, in ways that people write."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.pair = (ones(3), [ones(3)])
        self.last = ones()

    def update(self, model: nn.Module, loss: Tensor) -> None:
        for name, param in model.named_parameters():
            self.shadow[name].lerp_(param.detach(), 0.5)
        self.pair = (self.pair[0] + self.pair[1][0], [self.pair[1][0] * 0.5])
        self.last = loss.detach()


def _averaged(*, compiled: bool) -> list[Any]:
    model = fsdp(make(lambda: nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = Average(model)

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model, loss)
        return loss

    state = [model, optimizer, average]
    step: Any = compile_step(train, state=state, check=1) if compiled else train
    losses = []
    for number in range(8):
        if number == 6:
            average.shadow = {name: each * 2 for name, each in average.shadow.items()}
        losses.append(step(ones(2, 3, value=0.1 * number)).item())
        ops.sync()
    held = [*average.shadow.values(), average.pair[0], *average.pair[1], average.last]
    return [losses, [each.tolist() for each in held], step.replays if compiled else 0]


@scenario
def averaged(rank: int) -> list[Any]:
    return [_averaged(compiled=each) for each in (False, True)]


def test_tensors_anywhere_inside_of_an_object_are_followed() -> None:
    (*traced, _), (*compiled, replays) = result("averaged")
    assert compiled == traced
    assert replays >= 4


@scenario
def in_two_places(rank: int) -> list[Any]:
    model, kept = make(lambda: nn.Linear(3, 3)).to(ops.device()), ones(3)
    model.register_buffer("first", kept)
    model.register_buffer("second", kept)
    step = compile_step(lambda: (model.first + 2 * model.second).sum(), state=[model])
    before = [step().item() for _ in range(4)]
    model.second = ones(3, value=5.0)
    return [before, step.replays, step().item()]


def test_of_two_places_with_one_tensor_each_may_get_another() -> None:
    assert result("in_two_places") == [[9.0] * 4, 2, 33.0]


class Trainer:
    """Has a compiled method, which calls a compiled function."""

    def __init__(self, shift: float) -> None:
        self.model = fsdp(make(lambda: nn.Linear(3, 3)))
        self.shift = shift

    @compile_step(check=1)
    def step(self, x: Tensor) -> Tensor:
        return doubled(self.model(x).sum()) + self.shift


@compile_step(state=[])
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@scenario
def methods(rank: int) -> list[Any]:
    trainers = [Trainer(1.0), Trainer(5.0)]
    found = [[each.step(ones(2, 3)).item() for each in trainers] for _ in range(5)]
    trainers[0].shift = 2.0
    text = message(lambda: trainers[0].step(ones(2, 3)))
    return [found, [each.step.replays for each in trainers], doubled.replays, text]


def test_the_object_of_a_method_is_state_and_its_numbers_are_constants() -> None:
    found, replays, inside, text = result("methods")
    assert all(pair == found[0] for pair in found)
    assert found[0][1] == pytest.approx(found[0][0] + 4)
    assert (replays, inside) == ([3, 3], 0)
    assert "first differs add(" in text


class Training:
    """Trains, by a method and by the same compiled, which its objects keep."""

    def __init__(self) -> None:
        self.model = fsdp(make(lambda: nn.Linear(3, 3)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
        return loss

    compiled = compile_step(step)


@scenario
def training_methods(rank: int) -> list[Any]:
    plain, compiled = Training(), Training()
    steps = plain.step, compiled.compiled
    return [*([step(ones(2, 3)).item() for _ in range(6)] for step in steps), steps[1].replays]


def test_what_a_compiled_method_keeps_is_no_state_of_its_object() -> None:
    plain, compiled, replays = result("training_methods")
    assert compiled == plain
    assert replays >= 3


class Counting(nn.Module):
    """Counts its forwards in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x)


@scenario
def counters(rank: int) -> list[str]:
    counting, model, count = fsdp(make(Counting)), fsdp(make(lambda: nn.Linear(3, 3))), 0

    def every_fourth(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return model(x).sum() if count % 4 else model(x).square().sum()

    def take(step: Any) -> str:
        return message(lambda: [step(ones(2, 3)) for _ in range(8)])

    return [
        take(compile_step(lambda x: counting(x).sum(), state=counting)),
        take(compile_step(every_fourth, state=[model], check=1)),
    ]


def test_what_the_step_itself_counts_is_refused() -> None:
    module, closure = result("counters")
    assert "the step changes a number of the host itself:" in module
    assert ".count" in module
    assert "found another program than the one replayed: first differs square(" in closure


@scenario
def told(rank: int) -> list[Any]:
    """What a check costs is told, and a step that fails one is traced from then on."""
    import warnings

    held = [1.0]
    step = compile_step(lambda x: x.sum() * held[0], state=[], check=1, unknown="trace")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [step(ones(2)).item() for _ in range(4)]
        held[0] = 3.0
        found += [step(ones(2)).item() for _ in range(3)]
    return [found, step.replays, step.checks, step.check_seconds, [str(e.message) for e in caught]]


def test_a_step_that_fails_a_check_may_be_traced_from_then_on() -> None:
    found, replays, checks, seconds, [text] = result("told")
    assert found == [2.0] * 4 + [6.0] * 3
    assert (replays, checks) == (2, 3)
    assert seconds > 0
    assert "every step is traced, because a check traced the step again" in text


@scenario
def kept(rank: int) -> list[float]:
    """What a step appends to a list, with a check before the second replay."""
    found: list[Tensor] = []

    @compile_step(state=[], check=2)
    def step(x: Tensor) -> Tensor:
        found.append(x.sum() * 2)
        return x.sum()

    for number in range(5):
        step(ones(2, value=number))
    return [each.item() for each in found]


def test_what_a_check_leaves_in_a_list_has_its_values() -> None:
    assert result("kept") == [0.0, 4.0, 12.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"check": -1}, "check=-1"), ({"check": "often"}, "check='often'"), ({"unknown": "x"}, "'x'")],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compile_step(lambda x: x, **options)


@pytest.mark.parametrize(
    "given",
    [{torch.ones(2)}, weakref.ref(nn.Linear(2, 2)), functools.partial(torch.tanh), torch.tanh],
)
def test_state_that_cannot_be_followed_is_refused(given: Any) -> None:
    for state in (given, [nn.Linear(2, 2), given]):
        with pytest.raises(TypeError, match=r"state= got .* cannot be followed"):
            compile_step(lambda x: x, state=state)
