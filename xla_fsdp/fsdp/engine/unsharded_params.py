"""Gather the parameters of units that the user names, before it is their turn.

Always true: units are named weakly, as those that name each other would be freed some time later,
with their parameters.

What may be changed of a unit between steps, and its place in the tree of units.

Always true: what was asked for when the unit was made is in its ``FSDPConfig``; here is what users
may still change, through the methods of ``fsdp_module`` and ``sharded_module``.
What the settings do is left to ``unit``, ``unit_backward`` and ``full_params``.

The full parameters of one unit: where they come from, and which of them its modules hold.

Words: the modules *show* full parameters where their attributes are these, and *hide* them where
they are shards again; parameters are *ahead* when they were gathered before their unit's turn.
Always true: the modules hold shards unless the state says otherwise; what was gathered from shards
that have changed since is not used for a forward or backward to come.
When parameters are gathered and freed is decided by ``unit`` and ``unit_backward``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.backward_pass import BackwardPass, current_pass
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.registry import remember_shown

if TYPE_CHECKING:
    from xla_fsdp.fsdp.engine.state import FSDPState


class StateRef:
    """A unit that another one names. Copied and pickled, it names the unit's copy.

    Args:
        unit: to name; None for one that is gone.
    """

    def __init__(self, unit: FSDPState | None) -> None:
        self._unit = None if unit is None else weakref.ref(unit)

    def __call__(self) -> FSDPState | None:
        """The unit, unless it is gone."""
        return None if self._unit is None else self._unit()

    def __reduce__(self) -> tuple[Any, ...]:
        return StateRef, (self(),)


def prefetch(
    units: Sequence[StateRef], before: Sequence[Tensor], *, in_backward: bool = False
) -> None:
    """Gather the parameters of ``units`` once ``before`` are computed.

    Args:
        units: that are to run next.
        before: what their gathers wait for.
        in_backward: leave out those that do not gather in backward.
    """
    for reference in units:
        unit = reference()
        if unit is not None and (unit.settings.gathers_in_backward or not in_backward):
            unit.gather_ahead(before)
            unit.linger()


@dataclass
class UnitSettings:
    """Of one unit.

    Args:
        backward: what the tree shares; the unit's own until it joins one.
        reshard_after_forward: free full parameters between forward and backward.
        keeps_larger: keep larger shards between them.
        keeps_on_root: hold full parameters until backward, where the unit is a root.
        reshard_after_backward: free full parameters after backward.
        unshard_in_backward: gather for backward without being asked.
        sync_gradients: reduce gradients in backward.
        is_last_backward: no further pass adds to the gradients before the step.
        forward_prefetch: units to gather no later than this one, in forward.
        backward_prefetch: the same in backward.
        is_root: whether the unit is in no other one.
    """

    backward: BackwardPass
    reshard_after_forward: bool
    keeps_larger: bool
    keeps_on_root: bool
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    sync_gradients: bool = True
    is_last_backward: bool = True
    forward_prefetch: list[StateRef] = field(default_factory=list)
    backward_prefetch: list[StateRef] = field(default_factory=list)
    is_root: bool = True

    @property
    def reshards_after_forward(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        if self.is_root and self.keeps_on_root:
            return False
        return self.reshard_after_forward

    @property
    def keeps_larger_shards(self) -> bool:
        """Whether backward gathers from larger shards."""
        return self.keeps_larger and self.reshards_after_forward

    @property
    def gathers_in_backward(self) -> bool:
        """Whether backward gathers from the shards."""
        return self.reshards_after_forward and not self.keeps_larger


class ShardedState(Enum):
    """What the attributes of a unit's modules hold."""

    SHARDED = auto()
    FORWARD = auto()  # full parameters, while the unit's forward runs
    BACKWARD = auto()  # full parameters, gathered for backward
    UNSHARDED = auto()  # full parameters, until the next forward or backward is done with them
    SUMMONED = auto()  # full leaf parameters, for the user to look at or change


@dataclass(frozen=True)
class Ahead:
    """Full parameters gathered before their unit's turn, of shards that had these versions; and
    the larger shards that backward gathers from, where there are."""

    full: list[Tensor]
    versions: list[int]
    kept: list[Tensor]


class FullParams:
    """Of one unit.

    Args:
        group: the unit's parameters.
        settings: whether backward gathers from larger shards.

    Attributes:
        state: what the modules hold.
        full: the full parameters that they hold while not SHARDED.
        versions: of the shards that ``full`` was gathered from.
    """

    def __init__(self, group: FSDPParamGroup, settings: UnitSettings) -> None:
        self.state = ShardedState.SHARDED
        self.full: list[Tensor] = []
        self.versions: list[int] = []
        self._group = group
        self._settings = settings
        self._ahead: Ahead | None = None

    # ------------------------------------------------------------ what the modules hold

    def show(
        self,
        full: list[Tensor],
        state: ShardedState,
        *,
        idle: bool = False,
        versions: list[int] | None = None,
    ) -> None:
        """Point the modules at ``full``, gathered from shards of ``versions`` (default: now)."""
        if self.state is not ShardedState.SHARDED:
            self.hide()
        for param in self._group.params:  # all, before any is changed
            param.check_owners()
        at = 0
        for param in self._group.params:
            param.unshard(full[at : at + len(param.members)], idle=idle)
            at += len(param.members)
        if state is ShardedState.UNSHARDED:
            remember_shown(full)
        self.full, self.state = full, state
        self.versions = self._group.versions if versions is None else versions

    def hide(self) -> None:
        """Point the modules at shards."""
        for param in self._group.params:
            param.reshard()
        self.full, self.state = [], ShardedState.SHARDED

    def reshard(self) -> None:
        """Undo what the user's ``unshard`` did."""
        self.drop_ahead()
        if self.state is ShardedState.UNSHARDED:
            self.hide()

    @contextlib.contextmanager
    def summoned(self, full: list[nn.Parameter]) -> Iterator[None]:
        """Let the modules hold these leaf parameters inside the block, in place of shards.

        Raises:
            RuntimeError: if they hold other full parameters at the time.
        """
        self.reshard()
        if self.state is not ShardedState.SHARDED:
            raise RuntimeError(
                f"full parameters cannot be summoned while a unit is in state {self.state.name}; "
                f"do it outside of forward, backward and other summon_full_params blocks"
            )
        with contextlib.ExitStack() as stack:
            self.show(list(full), ShardedState.SUMMONED)
            stack.callback(self.hide)
            for param in self._group.params:
                stack.enter_context(param.without_shard())
            yield

    # ------------------------------------------------------------ where they come from

    def for_forward(self, before: Sequence[Tensor], kept: list[Tensor]) -> list[Tensor]:
        """Full parameters for a forward, once ``before`` are computed; what backward is to gather
        from goes into ``kept``."""
        if self._shows_current:
            return self.copies()
        if self._ahead is not None and self.has_ahead():
            kept += self._ahead.kept
            return self.take_ahead()
        self.reshard()
        return self._gather(before, kept)

    def for_backward(
        self, before: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """What full parameters come from in backward, once ``before`` are computed."""
        if self._shows_current:
            return self.copies
        if self.has_ahead():
            return self.take_ahead
        if kept:
            own = [tensor.clone() for tensor in kept]
            return partial(self._group.gather.unshard_larger, ops.after_(before, own))
        return partial(self._group.gather.unshard, self._group.gather.pack(before, again=True))

    def copies(self) -> list[Tensor]:
        """Of the full parameters that the modules hold."""
        return [tensor.detach().clone() for tensor in self.full]

    def gather_ahead(self, before: Sequence[Tensor] = ()) -> None:
        """Gather now, once ``before`` are computed, for the next forward or backward to use."""
        if self.state is not ShardedState.SHARDED or self.has_ahead() or not self._group.params:
            return
        kept: list[Tensor] = []
        with torch.no_grad():
            full = self._gather(before, kept)
        self._ahead = Ahead(full, self._group.versions, kept)

    def has_ahead(self) -> bool:
        """Whether there are parameters ahead; outdated ones are dropped."""
        if self._ahead is not None and self._ahead.versions != self._group.versions:
            self.drop_ahead()
        return self._ahead is not None

    def take_ahead(self) -> list[Tensor]:
        """The full parameters that are ahead."""
        ahead, self._ahead = self._ahead, None
        return [] if ahead is None else ahead.full

    def drop_ahead(self) -> None:
        """Forget what was gathered ahead."""
        self._ahead = None

    @property
    def _shows_current(self) -> bool:
        """Whether the modules hold full parameters, at the user's request, of today's shards."""
        return self.state is ShardedState.UNSHARDED and self.versions == self._group.versions

    def _gather(self, before: Sequence[Tensor], kept: list[Tensor]) -> list[Tensor]:
        gather = self._group.gather
        joined = gather.pack(before, again=current_pass() != -1)
        if not self._settings.keeps_larger_shards:
            return gather.unshard(joined)
        kept += gather.gather_larger(joined)
        return gather.unshard_larger(kept)
