"""What a unit does at which event: the table, and a unit that follows it. No program is traced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from test.common.ranks import skip_without_torch_xla
from xla_fsdp.fsdp.engine.transitions import (
    AT_ANY_TIME,
    TRANSITIONS,
    Action,
    Event,
    UnitState,
)

ALL = [(state, event) for state in UnitState for event in Event]
SHARDED = UnitState.SHARDED


@pytest.mark.parametrize(("state", "event"), ALL)
def test_modules_hold_what_the_state_says(state: UnitState, event: Event) -> None:
    if event not in AT_ANY_TIME and (state, event) not in TRANSITIONS:
        return  # a unit refuses it
    action, found = TRANSITIONS[state, event]
    if action in (Action.HOLD, Action.KEEP):
        assert found is not SHARDED
    elif action in (Action.FREE, Action.END_FORWARD):
        assert state is not SHARDED
        assert found is SHARDED
    else:
        assert (state is SHARDED) == (found is SHARDED)


def after(state: UnitState) -> set[UnitState]:
    return {new for (before, _), (_, new) in TRANSITIONS.items() if before is state}


def test_every_state_is_reached_and_left() -> None:
    reached, waiting = {SHARDED}, [SHARDED]
    while waiting:
        new = after(waiting.pop()) - reached
        reached |= new
        waiting += new
    assert reached == set(UnitState)
    assert all(SHARDED in after(state) for state in reached)


@pytest.mark.parametrize("state", [UnitState.BACKWARD, UnitState.WAITING])
def test_what_is_held_for_a_pass_is_freed_when_it_ends(state: UnitState) -> None:
    for event in (Event.BACKWARD_DONE, Event.PASS_DONE):
        _, state = TRANSITIONS[state, event]
    assert state is SHARDED


def test_a_backward_inside_of_a_forward_leaves_the_forward_its_parameters() -> None:
    inside = [Event.BACKWARD, Event.BACKWARD_DONE, Event.BACKWARD_DONE_KEPT, Event.PASS_DONE]
    for event in (*inside, Event.RESHARD, Event.UNSHARD):
        assert TRANSITIONS[UnitState.FORWARD, event] == (Action.NOTHING, UnitState.FORWARD)


# ---------------------------------------------------------------- a unit


class Group:
    """The part of ``FSDPParamGroup`` that events reach."""

    params = ("one",)
    versions = unsharded_versions = (0,)
    smaller = None
    has_unreduced = False

    def __init__(self) -> None:
        self.log = SimpleNamespace(unit="blocks.0")
        self.unsharded: list[Any] = []
        self.calls: list[str] = []

    def to_unsharded(
        self, unsharded: list[Any], *, versions: Any, idle: bool, revokes: bool
    ) -> None:
        self.unsharded = unsharded
        self.calls.append("hold" + " idle" * idle + " revoked" * revokes)

    def to_sharded(self, *, kept: bool = False) -> None:
        self.unsharded = []
        self.calls.append("free")

    def take_prefetched(self) -> None:
        self.calls.append("drop")


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> Any:
    skip_without_torch_xla()
    monkeypatch.setenv("XLA_FSDP_CHECK", "1")
    from xla_fsdp.fsdp.engine import schedule, state
    from xla_fsdp.fsdp.engine.config import FSDPConfig

    group: Any = Group()
    with mock.patch.object(schedule, "Dummies"):
        return state.FSDPState(group, FSDPConfig(), torch.device("cpu"))


def test_a_unit_does_what_the_table_says(unit: Any) -> None:
    value = [torch.ones(1)]
    for event in (Event.FORWARD, Event.FORWARD_DONE, Event.BACKWARD):
        unit._on(event, value)
    unit.end_pass()
    unit.settings.reshard_after_backward = False
    unit._on(Event.BACKWARD, value)
    unit.end_pass()
    assert unit.state is UnitState.UNSHARDED
    unit.reshard()
    assert unit.group.calls == [
        "hold",
        "free",
        "hold idle revoked",
        "free",
        "drop",
        "hold idle revoked",
        "hold revoked",
        "free",
    ]


def test_a_wrong_event_leaves_a_unit_as_it_is(unit: Any) -> None:
    with pytest.raises(RuntimeError, match="SHARDED cannot take FORWARD_DONE"):
        unit._on(Event.FORWARD_DONE)
    assert (unit.state, unit.group.calls) == (SHARDED, [])


def end_of_pass(unit: Any) -> None:
    unit.schedule._end(7)


def forgotten(unit: Any) -> None:
    unit._on(Event.BACKWARD, [torch.ones(1)])


def without_state(unit: Any) -> None:
    unit._on(Event.RESHARD)
    unit.group.unsharded = [torch.ones(1)]


def left(unit: Any) -> None:
    unit._on(Event.RESHARD)
    unit.group.has_unreduced = True


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (forgotten, "blocks.0: BACKWARD, .* is still in backward .SHARDED -BACKWARD-> BACKWARD"),
        (without_state, "holds other parameters than its state says .SHARDED -RESHARD-> SHARDED"),
        (left, "keeps gradients that nobody will reduce"),
    ],
)
def test_what_is_wrong_after_a_pass_is_told_with_its_history(
    unit: Any, wrong: Any, said: str
) -> None:
    end_of_pass(unit)
    wrong(unit)
    with pytest.raises(AssertionError, match=said):
        end_of_pass(unit)


def test_tensors_that_outlive_a_pass_are_told(unit: Any) -> None:
    unit.schedule._unfinished.append(torch.ones(1))
    with pytest.raises(AssertionError, match="the schedule keeps 1 tensors"):
        unit.schedule._check([])
