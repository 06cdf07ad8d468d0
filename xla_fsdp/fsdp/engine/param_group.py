"""Who steps shards while a backward pass still runs, and how a loop has slices of stacks stepped.

Always true: these are roles alone. ``optim.in_backward`` plays them, and loops (``scan.stepping``)
need not know which optimizer there is.

The parameters of one unit: their shards, who shares them, and the gradients that wait.

Words: see ``sharded_param``; gradients are *kept* where a backward pass does not reduce them, to be
added to those of the first one that does.
Always true: a gradient is averaged over the ranks: scattered over those that share the parameters,
then, as a shard, summed over their replicas; its shard has the dtype of the shard parameter.
Collectives are left to ``shard_gather`` and ``grad_reduction``; when to gather and reduce is
decided by ``unit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from xla_fsdp.distributed.collectives import Collectives, LocalCollectives, SmallerGroups
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.fsdp.engine.all_gather import AllGather
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.reduce_scatter import ReducedBuckets, ReduceScatter
from xla_fsdp.fsdp.engine.registry import remember, remember_group
from xla_fsdp.fsdp.engine.shard_parameter import whole_mesh
from xla_fsdp.fsdp.engine.tp_params import is_first


class SliceSteps(Protocol):
    """One step of an optimizer on some stacks, made slice by slice."""

    @property
    def kept(self) -> list[list[Tensor]]:
        """Of each stack, itself and what the optimizer keeps in its shape."""
        ...

    def new_slices(self, grads: Sequence[Tensor], slices: Sequence[Tensor]) -> list[Tensor]:
        """What becomes of ``slices`` of all that is kept, in that order, if these are the gradients
        of those of the stacks.

        Raises:
            CannotSliceError: if the optimizer would have to keep more than it does.
        """
        ...

    def take(self, stacks: Sequence[Tensor]) -> None:
        """Make the step: these are the new values of all that is kept, in that order."""
        ...


class Stepper(Protocol):
    """Steps shards in backward."""

    def slice_steps(self, stacks: Sequence[Tensor]) -> SliceSteps | None:
        """How to step these slice by slice; None if they cannot be, or not now."""
        ...


class CannotSliceError(Exception):
    """A step cannot be made slice by slice; it is made with whole stacks then."""


@dataclass(frozen=True)
class Reduced:
    """What became of the gradients of a unit.

    Args:
        grads: of the shard parameters.
        sums: what they are computed from, one tensor for each collective.
    """

    grads: list[Tensor | None]
    sums: list[Tensor]


class FSDPParamGroup:
    """The shards of one unit.

    Args:
        params: in the order of the module's parameters.
        collectives: communication among the ranks that share them.
        config: dtypes and bucket sizes.
        replicas: communication among the ranks that hold the same shards (default: no others).
        smaller: for parameters that are kept in larger shards between forward and backward.

    Attributes:
        gather: makes full tensors of shards.
        reduction: makes gradient shards of full gradients.
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
        self.all_reduces = True
        self.stepper: Stepper | None = None
        self._mesh = config.mesh
        self._unreduced: dict[int, Tensor] = {}  # full gradients, by member
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
    def num_members(self) -> int:
        """Number of full parameters."""
        return sum(len(param.members) for param in self.params)

    # ------------------------------------------------------------ ranks

    @property
    def mesh(self) -> Mesh:
        """Who shares the parameters."""
        return self._mesh or whole_mesh(self.collectives.num_shards)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all that hold these parameters."""
        members = (member for param in self.params for member in param.members)
        return self.collectives.rank == self.replicas.rank == 0 and is_first(members)

    @property
    def waits_for_replicas(self) -> bool:
        """Whether there are replicas that are not to add their gradients yet."""
        return self.replicas.num_shards > 1 and not self.all_reduces

    # ------------------------------------------------------------ gradients

    @property
    def reduces_plainly(self) -> bool:
        """Whether nothing but the next gradients themselves decides what ``reduce`` makes of
        them."""
        return not (self.reduction.has_hooks or self.has_kept or self.waits_for_replicas)

    def reduce(
        self, grads: Sequence[Tensor | None], early: ReducedBuckets | None = None
    ) -> Reduced:
        """Averaged gradient shards, one per parameter, from full gradients, one per member.

        A parameter none of whose members has a gradient gets None, as in an unsharded model; all
        do while replicas are not to add theirs. What was kept back is added first, and ``early``,
        which other gradients were scattered to before.
        """
        reduction = self.reduction
        sums = reduction.scatter(self._with_kept(grads))
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

    def keep(self, grads: Sequence[Tensor | None]) -> None:
        """Add full gradients to those kept on this rank until the next ``reduce``."""
        self._unreduced = {
            at: self.reduction.to_reduce_dtype(grad) for at, grad in self._with_kept(grads).items()
        }

    @property
    def has_kept(self) -> bool:
        """Whether gradients wait for the next ``reduce``."""
        return bool(self._unreduced) or bool(self._not_summed)

    def drop_kept(self) -> None:
        """Forget the gradients that wait for the next ``reduce``."""
        self._unreduced, self._not_summed = {}, {}

    def _with_kept(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """By member."""
        found, self._unreduced = self._unreduced, {}
        for at, grad in enumerate(grads):
            if grad is not None:
                found[at] = found[at] + grad if at in found else grad
        return found
