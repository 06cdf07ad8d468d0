"""The parameters of one FSDP unit: shards, what the modules hold of them, waiting gradients.

Invariants: the modules hold shards unless ``sharded_state`` says otherwise. What was gathered from
shards that have changed since is not used for a forward or backward to come. Gradients are averaged
over the ranks (scattered over those that share the parameters, then, as shards, summed over their
replicas), and have the dtype of the shard parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.collectives import Collectives, LocalCollectives, SmallerGroups
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.all_gather import AllGather
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import (
    FSDPParam,
    is_first,
    remember,
    remember_group,
    remember_shown,
    whole_mesh,
)
from xla_fsdp.fsdp.engine.reduce_scatter import ReducedBuckets, ReduceScatter


class ShardedState(Enum):
    """What the attributes of a unit's modules hold."""

    SHARDED = auto()
    FORWARD = auto()  # unsharded parameters, while the unit's forward runs
    BACKWARD = auto()  # unsharded parameters, gathered for backward
    UNSHARDED = auto()  # until the next forward or backward is done with them
    SUMMONED = auto()  # unsharded leaf parameters, for the user to look at or change


@dataclass(frozen=True)
class Unsharded:
    """Gathered parameters.

    Args:
        params: one for each original parameter, in the compute dtype.
        post_forward_shards: the larger shards that backward gathers from, where there are any.
    """

    params: list[Tensor]
    post_forward_shards: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Reduced:
    """Reduced gradients of a unit.

    Args:
        grads: of the shard parameters.
        sums: what they are computed from, one tensor for each collective.
    """

    grads: list[Tensor | None]
    sums: list[Tensor]


class FSDPParamGroup:
    """The parameters that are gathered and freed together.

    Args:
        params: in the order of the module's parameters.
        collectives: communication among the ranks that share them.
        config: dtypes and bucket sizes.
        replicas: communication among the ranks that hold the same shards (default: no others).
        smaller: for parameters that are kept in larger shards between forward and backward.

    Attributes:
        gather: all-gathers shards.
        reduction: reduce-scatters gradients.
        sharded_state: what the modules hold.
        unsharded: the parameters that they hold while not SHARDED.
        unsharded_versions: of the shards that ``unsharded`` was gathered from.
        all_reduces: whether replicas add their gradients.
        stepper: steps the shards in backward; their gradients are gone when it ends.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        collectives: Collectives,
        config: FSDPConfig,
        replicas: Collectives | None = None,
        smaller: SmallerGroups | None = None,
    ) -> None:
        self.params = tuple(params)
        self.collectives = collectives
        self.replicas = replicas or LocalCollectives()
        self.smaller = smaller
        self.gather = AllGather(self.params, collectives, smaller, config)
        self.reduction = ReduceScatter(self.params, collectives, self.replicas, config)
        self.sharded_state = ShardedState.SHARDED
        self.unsharded: list[Tensor] = []
        self.unsharded_versions: list[int] = []
        self.all_reduces = True
        self.stepper: Stepper | None = None
        self._mesh = config.mesh
        self._prefetched: Unsharded | None = None
        self._prefetched_versions: list[int] = []
        self._unreduced: dict[int, Tensor] = {}  # unsharded gradients, by original parameter
        self._not_summed: ReducedBuckets = {}  # that replicas are to add
        for param in self.params:
            remember_group(param.leaf, self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has shards of its own, which nobody steps in backward."""
        return {**vars(self), "stepper": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or what was pickled: its shards are known like any others."""
        vars(self).update(state)
        for param in self.params:
            if param.slots.part is None or param.slots.part.number == 0:  # stacks are the first's
                remember(param, [param.leaf])
                remember_group(param.leaf, self)

    @property
    def steps_in_backward(self) -> bool:
        """Whether gradients are gone when backward ends."""
        return self.stepper is not None

    @property
    def shards(self) -> list[Tensor]:
        """The shards."""
        return [param.shard for param in self.params]

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The leaf parameters: the shards, or stacks that hold them."""
        return [param.leaf for param in self.params]

    @property
    def versions(self) -> list[int]:
        """How often each shard was changed in place."""
        return [0 if leaf.is_inference() else leaf._version for leaf in self.leaves]

    @property
    def num_originals(self) -> int:
        """Number of original parameters."""
        return sum(len(param.originals) for param in self.params)

    # ------------------------------------------------------------ ranks

    @property
    def mesh(self) -> Mesh:
        """The ranks that share the parameters."""
        return self._mesh or whole_mesh(self.collectives.num_shards)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all that hold these parameters."""
        originals = (original for param in self.params for original in param.originals)
        return self.collectives.rank == self.replicas.rank == 0 and is_first(originals)

    @property
    def waits_for_replicas(self) -> bool:
        """Whether there are replicas that are not to add their gradients yet."""
        return self.replicas.num_shards > 1 and not self.all_reduces

    # ------------------------------------------------------------ what the modules hold

    def to_unsharded(
        self,
        unsharded: list[Tensor],
        state: ShardedState,
        *,
        idle: bool = False,
        versions: list[int] | None = None,
    ) -> None:
        """Point the modules at these parameters.

        Args:
            unsharded: one for each original parameter.
            state: what they are for.
            idle: no forward is about to use them, so one that another unit runs keeps its own.
            versions: of the shards that they were gathered from (default: of the shards now).

        Raises:
            ValueError: if a parameter was replaced after wrapping.
        """
        if self.sharded_state is not ShardedState.SHARDED:
            self.to_sharded()
        for param in self.params:  # all, before any is changed
            param.check_owners()
        at = 0
        for param in self.params:
            param.to_unsharded(unsharded[at : at + len(param.originals)], idle=idle)
            at += len(param.originals)
        if state is ShardedState.UNSHARDED:
            remember_shown(unsharded)
        self.unsharded, self.sharded_state = unsharded, state
        self.unsharded_versions = self.versions if versions is None else versions

    def to_sharded(self) -> None:
        """Point the modules at shards."""
        for param in self.params:
            param.to_sharded()
        self.unsharded, self.sharded_state = [], ShardedState.SHARDED

    def reshard(self) -> None:
        """Free what was gathered at the user's request, or ahead of time."""
        self._prefetched = None
        if self.sharded_state is ShardedState.UNSHARDED:
            self.to_sharded()

    @contextlib.contextmanager
    def summoned(self, unsharded: list[nn.Parameter]) -> Iterator[None]:
        """Let the modules hold these leaf parameters inside the block, in place of shards.

        Raises:
            RuntimeError: if they hold other unsharded parameters at the time.
        """
        self.reshard()
        if self.sharded_state is not ShardedState.SHARDED:
            raise RuntimeError(
                f"full parameters cannot be summoned while a unit is in state "
                f"{self.sharded_state.name}; do it outside of forward, backward and other "
                f"summon_full_params blocks"
            )
        with contextlib.ExitStack() as stack:
            self.to_unsharded(list(unsharded), ShardedState.SUMMONED)
            stack.callback(self.to_sharded)
            for param in self.params:
                stack.enter_context(param.without_shard())
            yield

    # ------------------------------------------------------------ all-gather

    def unshard(
        self, before: Sequence[Tensor], *, again: bool, to_post_forward_shards: bool
    ) -> Unsharded:
        """Gather the parameters.

        Args:
            before: tensors to be computed first.
            again: there was a gather of the same shards in the program.
            to_post_forward_shards: gather larger shards first, and the parameters from these.
        """
        joined = self.gather.pack(before, again=again)
        if not to_post_forward_shards:
            return Unsharded(self.gather.unshard(joined))
        larger = self.gather.gather_larger(joined)
        return Unsharded(self.gather.unshard_larger(larger), larger)

    def unshard_again(
        self, before: Sequence[Tensor], post_forward_shards: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gather the parameters for backward, once ``before`` are computed, from the larger shards
        where there are any."""
        if not post_forward_shards:
            return self.gather.unshard(self.gather.pack(before, again=True))
        own = [tensor.detach().clone() for tensor in post_forward_shards]
        return self.gather.unshard_larger(ops.after_(before, own))

    def copies(self) -> list[Tensor]:
        """Return copies of the parameters that the modules hold."""
        return [tensor.detach().clone() for tensor in self.unsharded]

    @property
    def holds_current(self) -> bool:
        """Whether the modules hold parameters, at the user's request, of the shards as they are."""
        return (
            self.sharded_state is ShardedState.UNSHARDED
            and self.unsharded_versions == self.versions
        )

    def prefetch(self, before: Sequence[Tensor], *, again: bool, larger: bool) -> None:
        """Gather now, once ``before`` are computed, for the next forward or backward to use; the
        arguments are those of ``unshard``."""
        if self.sharded_state is not ShardedState.SHARDED or not self.params:
            return
        if not self.has_prefetched:
            with torch.no_grad():
                self._prefetched = self.unshard(before, again=again, to_post_forward_shards=larger)
            self._prefetched_versions = self.versions

    @property
    def has_prefetched(self) -> bool:
        """Whether prefetched parameters are there, of the shards as they are."""
        return self._prefetched is not None and self._prefetched_versions == self.versions

    def take_prefetched(self) -> Unsharded | None:
        """Return the prefetched parameters, unless they are outdated, and forget them."""
        found = self._prefetched if self.has_prefetched else None
        self._prefetched = None
        return found

    def drop_prefetched(self) -> None:
        """Forget the prefetched parameters."""
        self._prefetched = None

    # ------------------------------------------------------------ gradients

    @property
    def reduces_plainly(self) -> bool:
        """Whether nothing but the next gradients themselves decides what ``reduce`` makes of
        them."""
        return not (self.has_unreduced or self.waits_for_replicas or self.reduction.has_hooks)

    def reduce(
        self, grads: Sequence[Tensor | None], early: ReducedBuckets | None = None
    ) -> Reduced:
        """Return averaged gradient shards.

        A parameter none of whose originals has a gradient gets None, as in an unsharded model; all
        do while replicas are not to add theirs. Unreduced gradients of passes before are added.

        Args:
            grads: unsharded gradients, one for each original parameter.
            early: sums of other gradients, scattered before.
        """
        reduction = self.reduction
        sums = reduction.scatter(self._with_unreduced(grads))
        for more in (early, self._not_summed):
            sums = reduction.add(more, sums) if more else sums
        self._not_summed = {}
        if self.waits_for_replicas:
            self._not_summed = sums
            return Reduced([None] * len(self.params), [])
        sums = reduction.sum_replicas(sums)
        return Reduced(reduction.finish(sums), list(sums.values()))

    def accumulate(self, reduced: Sequence[Tensor | None]) -> None:
        """Add gradient shards to the shard parameters' gradients, where they are needed."""
        for param, grad in zip(self.params, reduced, strict=True):
            if grad is not None and param.leaf.requires_grad:
                own = param.grad
                param.grad = grad if own is None else own + grad

    def leave_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        """Add unsharded gradients to those that wait on this rank for the next ``reduce``."""
        self._unreduced = {
            at: self.reduction.to_reduce_dtype(grad)
            for at, grad in self._with_unreduced(grads).items()
        }

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait for the next ``reduce``."""
        return bool(self._unreduced) or bool(self._not_summed)

    def drop_unreduced(self) -> None:
        """Forget the gradients that wait for the next ``reduce``."""
        self._unreduced, self._not_summed = {}, {}

    def _with_unreduced(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        found, self._unreduced = self._unreduced, {}
        for at, grad in enumerate(grads):
            if grad is not None:
                found[at] = found[at] + grad if at in found else grad
        return found


# ---------------------------------------------------------------- stepping in backward


class SliceSteps(Protocol):
    """One step of an optimizer on some stacks, made slice by slice inside a loop."""

    @property
    def kept(self) -> list[list[Tensor]]:
        """Of each stack, itself and what the optimizer keeps in its shape."""
        ...

    def new_slices(self, grads: Sequence[Tensor], slices: Sequence[Tensor]) -> list[Tensor]:
        """Return the new values of ``slices`` of all that is kept, in that order, for these
        gradients of the stacks' slices.

        Raises:
            CannotSliceError: if the optimizer would have to keep more than it does.
        """
        ...

    def take(self, stacks: Sequence[Tensor]) -> None:
        """Make the step: these are the new values of all that is kept, in that order."""
        ...


class Stepper(Protocol):
    """Steps shards while backward still runs; ``optim.in_backward`` implements it."""

    def slice_steps(self, stacks: Sequence[Tensor]) -> SliceSteps | None:
        """Return how to step these slice by slice; None if they cannot be, or not now."""
        ...


class CannotSliceError(Exception):
    """A step cannot be made slice by slice; it is made with whole stacks then."""
