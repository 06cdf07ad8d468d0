"""What the modules of a unit hold, and what changes it: one table."""

from __future__ import annotations

from enum import Enum, auto


class UnitState(Enum):
    """What the attributes of a unit's modules hold."""

    SHARDED = auto()
    FORWARD = auto()  # unsharded parameters, while the forward of one of the modules runs
    WAITING = auto()  # the same, while none does, and some of several modules have not run yet
    BACKWARD = auto()  # unsharded parameters, gathered for backward
    UNSHARDED = auto()  # unsharded parameters, until the next forward or backward has used them
    SUMMONED = auto()  # unsharded leaf parameters that the user may read or change


class Event(Enum):
    """What happens to a unit."""

    FORWARD = auto()  # the forward of a module begins
    LOOP_BODY = auto()  # a forward or backward begins that is traced as a program of its own
    MODULE_DONE = auto()  # a forward has returned, and other modules have not run yet
    FORWARD_DONE = auto()  # all forwards have returned, or one has raised
    BACKWARD = auto()  # backward needs unsharded parameters
    BACKWARD_DONE = auto()  # the unit's backward is done, or the pass is over, or has raised
    BACKWARD_DONE_KEPT = auto()  # the same, without ``reshard_after_backward``
    PASS_DONE = auto()  # the pass is over, or has raised, for which the unit has waited
    UNSHARD = auto()
    RESHARD = auto()
    SUMMON = auto()
    RELEASE = auto()  # the end of a ``summoned`` block


class Action(Enum):
    """What a unit does."""

    NOTHING = auto()
    HOLD = auto()  # let the modules hold unsharded parameters, gathered or given
    KEEP = auto()  # let them hold the parameters of backward, without their graph
    FREE = auto()  # let them hold shards
    END_FORWARD = auto()  # the same; what the forward computed with loses its values
    DROP = auto()  # free prefetched parameters, which no module holds


_S, _E, _A = UnitState, Event, Action

AT_ANY_TIME = (
    _E.BACKWARD, _E.BACKWARD_DONE, _E.BACKWARD_DONE_KEPT, _E.PASS_DONE, _E.UNSHARD, _E.RESHARD,
)  # fmt: skip
"""Events that change nothing in the states for which they are not listed. All others are errors
there."""

TRANSITIONS: dict[tuple[UnitState, Event], tuple[Action, UnitState]] = {
    **{(state, event): (_A.NOTHING, state) for state in _S for event in AT_ANY_TIME},
    (_S.SHARDED, _E.FORWARD): (_A.HOLD, _S.FORWARD),
    (_S.SHARDED, _E.LOOP_BODY): (_A.HOLD, _S.FORWARD),
    (_S.SHARDED, _E.BACKWARD): (_A.HOLD, _S.BACKWARD),
    (_S.SHARDED, _E.UNSHARD): (_A.HOLD, _S.UNSHARDED),
    (_S.SHARDED, _E.SUMMON): (_A.HOLD, _S.SUMMONED),
    (_S.SHARDED, _E.PASS_DONE): (_A.DROP, _S.SHARDED),
    (_S.SHARDED, _E.RESHARD): (_A.DROP, _S.SHARDED),
    # A backward pass inside of a forward computes with the parameters of that.
    (_S.FORWARD, _E.FORWARD): (_A.NOTHING, _S.FORWARD),
    (_S.FORWARD, _E.MODULE_DONE): (_A.NOTHING, _S.WAITING),
    (_S.FORWARD, _E.FORWARD_DONE): (_A.END_FORWARD, _S.SHARDED),
    (_S.WAITING, _E.FORWARD): (_A.NOTHING, _S.FORWARD),
    (_S.WAITING, _E.FORWARD_DONE): (_A.END_FORWARD, _S.SHARDED),
    (_S.WAITING, _E.PASS_DONE): (_A.END_FORWARD, _S.SHARDED),
    (_S.BACKWARD, _E.LOOP_BODY): (_A.HOLD, _S.FORWARD),
    (_S.BACKWARD, _E.BACKWARD_DONE): (_A.FREE, _S.SHARDED),
    (_S.BACKWARD, _E.BACKWARD_DONE_KEPT): (_A.KEEP, _S.UNSHARDED),
    (_S.UNSHARDED, _E.FORWARD): (_A.HOLD, _S.FORWARD),
    (_S.UNSHARDED, _E.LOOP_BODY): (_A.HOLD, _S.FORWARD),
    (_S.UNSHARDED, _E.BACKWARD): (_A.HOLD, _S.BACKWARD),
    (_S.UNSHARDED, _E.RESHARD): (_A.FREE, _S.SHARDED),
    (_S.SUMMONED, _E.RELEASE): (_A.FREE, _S.SHARDED),
}

NEEDS_GATHER = {_S.SHARDED, _S.UNSHARDED}
"""States in which backward gathers, or copies what was unsharded at the user's request."""

REVOKED = {_S.BACKWARD, _S.UNSHARDED}
"""States after which those who still hold the parameters hold ``ReshardedParam``s. Not after a
forward, whose outputs are still to come and may be parameters; and leaves belong to the user."""
