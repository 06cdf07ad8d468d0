"""The parameters of one FSDP unit: their shards, unsharded tensors and unreduced gradients.

Invariants: the modules hold shards unless there are ``unsharded`` tensors. Parameters gathered
before their shards changed are not used for a later forward or backward. Gradients are averaged
over the ranks (reduce-scattered over those that share the parameters, then all-reduced over
replicas), and have the dtype of the shard. Nothing references an unsharded parameter strongly once
the modules hold shards again, so that its memory is freed, unless the user holds its ``data`` or
``detach()``, which keep the value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.collectives import Collectives, LocalCollectives, SmallerGroups
from xla_fsdp.distributed.mesh import SHARD, Mesh, mesh_of
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam, OriginalParam, WeakRef, is_first, remember
from xla_fsdp.fsdp.engine.param_guards import Reads, name_of, read_by, without_values
from xla_fsdp.fsdp.engine.schedule import ScheduleLog
from xla_fsdp.fsdp.engine.unit_collectives import AllGather, ReducedBuckets, ReduceScatter
from xla_fsdp.xla import ops


class Unsharded(NamedTuple):
    """Gathered parameters."""

    params: list[Tensor]  # one for each original parameter, in the compute dtype
    post_forward_shards: Sequence[Tensor] = ()  # the larger shards that backward gathers from


class Reduced(NamedTuple):
    """Reduced gradients of a unit."""

    grads: list[Tensor | None]  # of the shards
    sums: list[Tensor]  # the buckets that they are computed from, one for each collective


class FSDPParamGroup:
    """The parameters that are gathered and freed together.

    Args:
        params: in the order of the module's parameters.
        collectives: communication among the ranks that share them.
        config: dtypes and bucket sizes.
        replicas: communication among the ranks that hold the same shards.
        smaller: groups of ranks that share larger shards between forward and backward.

    Attributes:
        log: tells what the unit gathers, frees and reduces; has its name.
        gather: all-gathers shards.
        reduction: reduce-scatters gradients.
        unsharded: the parameters that the modules hold, if they do not hold shards.
        unsharded_versions: versions of the shards from which ``unsharded`` was gathered.
        all_reduces: whether gradients are summed over replicas.
        stepper: the ``StepInBackward`` that steps the shards and drops their gradients.
        at_unshard: called with the group whenever its modules hold other unsharded parameters.
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
        self.log = ScheduleLog()
        self.gather = AllGather(self.params, collectives, smaller, config, self.log)
        self.reduction = ReduceScatter(self.params, collectives, self.replicas, config, self.log)
        self.unsharded: Sequence[Tensor] = ()
        self.unsharded_versions: Sequence[int] = ()
        self.all_reduces = True
        self.stepper: Any = None
        self.at_unshard: list[Callable[[FSDPParamGroup], None]] = []
        self._mesh = config.mesh
        self._revokes = False  # whether ``unsharded`` become ``ReshardedParam``s
        self._prefetched: tuple[Sequence[int], Unsharded] | None = None  # with versions of shards
        self._unreduced: dict[int, Tensor] = {}  # unsharded gradients, by original parameter
        self._not_all_reduced: ReducedBuckets = {}  # reduce-scattered, not summed over replicas
        for param in self.params:
            param.group = WeakRef(self)

    def __repr__(self) -> str:
        held = f"{len(self.params)} parameters of {self.collectives.num_shards} ranks"
        return f"{type(self).__name__}({self.log.unit}: {held})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "stepper": None}  # it steps the original's shards, not the copy's

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for param in self.params:
            # A stack is registered once, for its first slice.
            if param.slots.part is None or param.slots.part.number == 0:
                remember(param, [param.leaf])

    def replay_facts(self) -> tuple[Any, ...]:
        """Return what a traced step depends on besides tensors."""
        return (
            self.all_reduces,
            self._prefetched is None,
            (*self._unreduced,),
            (*self._not_all_reduced,),
            self.stepper,
        )

    def replay_places(self) -> list[tuple[tuple[str, Any], ...]]:
        """Return the ways that lead from the group to gradients that ``no_sync`` left: an attribute
        of it, and a key in that."""
        return [
            (("attribute", name), ("item", key))
            for name in ("_unreduced", "_not_all_reduced")
            for key in vars(self)[name]
        ]

    @property
    def steps_in_backward(self) -> bool:
        """Whether gradients are gone when backward ends."""
        return self.stepper is not None

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shards, one for each parameter."""
        return [param.shard for param in self.params]

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The leaf parameters: the shards, or stacks that hold them."""
        return [param.leaf for param in self.params]

    @property
    def versions(self) -> list[int]:
        """How often each shard was changed in place."""
        return [param.version for param in self.params]

    @property
    def originals(self) -> list[OriginalParam]:
        """The original parameters, in the order of unsharded ones."""
        return [original for param in self.params for original in param.originals]

    # ------------------------------------------------------------ ranks

    @property
    def mesh(self) -> Mesh:
        """Mesh of the ranks that share the parameters."""
        num_ranks = self.collectives.num_shards
        return self._mesh or mesh_of(list(range(num_ranks)), (num_ranks,), (SHARD,))

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all that hold these parameters."""
        originals = (original for param in self.params for original in param.originals)
        return self.collectives.rank == self.replicas.rank == 0 and is_first(originals)

    @property
    def waits_for_replicas(self) -> bool:
        """Whether there are replicas, and gradients are not summed over them now."""
        return self.replicas.num_shards > 1 and not self.all_reduces

    # ------------------------------------------------------------ what the modules hold

    def to_unsharded(
        self,
        unsharded: Sequence[Tensor],
        *,
        versions: Sequence[int] | None = None,
        idle: bool = False,
        revokes: bool = True,
    ) -> None:
        """Point the modules at unsharded parameters, one for each original.

        Args:
            unsharded: the parameters.
            versions: of the shards that they were gathered from (default: the current ones).
            idle: as for ``ParamSlots.show``.
            revokes: whether who still holds them after ``to_sharded`` holds ``ReshardedParam``s.

        Raises:
            ValueError: if a parameter was replaced after wrapping.
        """
        if self.unsharded:
            self.to_sharded()
        _reopen(unsharded)
        for param in self.params:  # check all before any module changes
            param.check_owners()
        at = 0
        for param in self.params:
            param.to_unsharded(unsharded[at : at + len(param.originals)], idle=idle)
            at += len(param.originals)
        self.unsharded, self._revokes, self._prefetched = list(unsharded), revokes, None
        self.unsharded_versions = self.versions if versions is None else versions
        for change in self.at_unshard:
            change(self)

    def to_sharded(self, *, kept: bool = False) -> None:
        """Point the modules at the shards; ``kept`` if autograd keeps the parameters."""
        if self.params:
            self.log.frees(kept=kept)
        for param in self.params:
            param.to_sharded()
        if self._revokes:
            Reshard(self, self.unsharded_versions, freed=False).take(self.unsharded)
        self.unsharded = ()

    # ------------------------------------------------------------ all-gather

    def unshard(
        self,
        before: Sequence[Tensor],
        *,
        larger: bool = False,
        from_larger: Sequence[Tensor] = (),
    ) -> Unsharded:
        """Return the parameters for a forward or backward: copies of those that the modules hold at
        the user's request, or prefetched ones, if no shard has changed since; else gather them.

        Args:
            before: tensors to be computed first.
            larger: gather larger shards first, and the parameters from these.
            from_larger: larger shards to gather from.
        """
        if self.unsharded and self.unsharded_versions == self.versions:
            return Unsharded([tensor.detach().clone() for tensor in self.unsharded])
        if found := self.take_prefetched():
            return found
        if from_larger:
            own = [tensor.detach().clone() for tensor in from_larger]
            return Unsharded(self.gather.unshard_larger(ops.barrier_after_(before, own)))
        if not larger:
            return Unsharded(self.gather.unshard(before))
        shards = self.gather.gather_larger(before)
        return Unsharded(self.gather.unshard_larger(shards), shards)

    def prefetch(self, before: Sequence[Tensor], *, larger: bool) -> None:
        """Gather the parameters for the next forward or backward, unless that was done already;
        arguments as for ``unshard``."""
        if self.params and not self.unsharded:
            with torch.no_grad():
                self._prefetched = self.versions, self.unshard(before, larger=larger)

    def take_prefetched(self) -> Unsharded | None:
        """Remove and return the prefetched parameters; None if there are none, or if a shard has
        changed since."""
        found, self._prefetched = self._prefetched, None
        return found[1] if found is not None and found[0] == self.versions else None

    # ------------------------------------------------------------ gradients

    @property
    def reduces_plainly(self) -> bool:
        """Whether ``reduce`` needs no other input than the gradients: no unreduced ones of earlier
        passes, no later all-reduce, no user's hooks."""
        return not (self.has_unreduced or self.waits_for_replicas or self.reduction.has_hooks)

    def reduce(
        self, grads: Sequence[Tensor | None], early: ReducedBuckets | None = None
    ) -> Reduced | None:
        """Return averaged gradients of the shards, with unreduced gradients of earlier passes; None
        while ``waits_for_replicas``, which a later call will sum over.

        Args:
            grads: unsharded, one for each original parameter. A parameter gets None if no original
                of it has a gradient, as in an unsharded model.
            early: gradients of other parameters that were reduce-scattered before.
        """
        reduction, waits = self.reduction, self.waits_for_replicas
        sums = reduction.scatter(self._with_unreduced(grads))
        for more in (early, self._not_all_reduced):
            sums = reduction.add(more, sums) if more else sums
        self._not_all_reduced = sums if waits else {}
        if waits:
            return None
        sums = reduction.sum_replicas(sums)
        return Reduced(reduction.finish(sums), list(sums.values()))

    def mean(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return what ``reduce`` does for these gradients alone, without a change of state."""
        given = {at: grad for at, grad in enumerate(grads) if grad is not None}
        return self.reduction.finish(self.reduction.sum_replicas(self.reduction.scatter(given)))

    def unsharded_grads(self, shards: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gather gradients with respect to results of ``mean``, the backward of that: of each
        parameter to each original.

        Raises:
            RuntimeError: if a hook of the user computes means.
        """
        if self.reduction.has_hooks:
            raise RuntimeError(
                f"gradients of {', '.join(param.key for param in self.params)} were differentiated "
                f"again, and a hook (register_comm_hook, set_all_reduce_hook) has reduced them, "
                f"whose derivative is not known. Remove the hook"
            )
        found = {at: shard for at, shard in enumerate(shards) if shard is not None}
        params = [self.params[at] for at in found]
        full = iter(self.gather.as_stored(params, [*found.values()]))
        return [
            None if shard is None else next(full)
            for param, shard in zip(self.params, shards, strict=True)
            for _ in param.originals
        ]

    def accumulate(self, reduced: Sequence[Tensor | None]) -> None:
        """Add gradients to those of the shards that require one."""
        for param, grad in zip(self.params, reduced, strict=True):
            if grad is not None and param.leaf.requires_grad:
                own = param.grad
                param.grad = grad if own is None else own + grad

    def leave_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        """Store unsharded gradients for the next ``reduce``, added to those already stored."""
        self._unreduced = {
            at: self.reduction.to_reduce_dtype(grad)
            for at, grad in self._with_unreduced(grads).items()
        }

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait for the next ``reduce``."""
        return bool(self._unreduced) or bool(self._not_all_reduced)

    def drop_unreduced(self) -> None:
        """Drop the gradients that wait for the next ``reduce``."""
        self._unreduced, self._not_all_reduced = {}, {}

    def _with_unreduced(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        found, self._unreduced = self._unreduced, {}
        for at, grad in enumerate(grads):
            if grad is not None:
                found[at] = found[at] + grad if at in found else grad
        return found


# ---------------------------------------------------------------- names in a model


@dataclass(frozen=True)
class NamedShard:
    """A sharded parameter, and the names of its unit's modules in a model, which are those before
    wrapping."""

    prefixes: tuple[Sequence[str], ...]  # names of each module of the unit that is in the model
    param: FSDPParam

    @property
    def group(self) -> FSDPParamGroup:
        """Gathers the parameter."""
        return self.param.group()

    @property
    def key(self) -> str:
        """Name of the shard in a sharded state dict."""
        if self.param.is_flat:
            return join_name(self.prefixes[0][0], self.param.key)
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """The canonical name of each original."""
        return [self.names_of(original)[0] for original in self.param.originals]

    @property
    def rank(self) -> int:
        """Rank of this process among those that share the parameter."""
        return self.param.collectives.rank

    def is_of(self, rank: int) -> bool:
        """Return whether this process is ``rank`` in the first replica and the first of its
        tensor-parallel group."""
        return (
            self.rank == rank and self.group.replicas.rank == 0 and is_first(self.param.originals)
        )

    def names_of(self, original: OriginalParam) -> list[str]:
        """Return every name of an original, the canonical one first."""
        parts = original.parts or (0,) * len(original.names)
        return [
            join_name(prefix, name)
            for part, name in zip(parts, original.names, strict=True)
            for prefix in self.prefixes[part]
        ]


# ---------------------------------------------------------------- unsharded, after reshard


class Reshard:
    """One time at which the modules of a unit let go of unsharded parameters, gathered from shards
    of these ``versions``; ``freed`` if the parameters have lost their values."""

    def __init__(self, group: FSDPParamGroup, versions: Sequence[int], *, freed: bool) -> None:
        self._group = weakref.ref(group)
        self._versions = versions
        self._freed = freed

    def take(self, unsharded: Sequence[Tensor], views: Iterable[tuple[int, Tensor]] = ()) -> None:
        """Turn all original parameters of the group, and views of them by their numbers, into
        ``ReshardedParam``s."""
        pairs = [(*pair, False) for pair in enumerate(unsharded)]
        for index, tensor, is_view in (*pairs, *((*pair, True) for pair in views)):
            handle: Any = tensor
            handle._reshard, handle._index, handle._views = self, index, is_view
            handle.__class__ = ReshardedParam

    def now(self, handle: ReshardedParam, func: Any) -> Tensor:
        """Return what ``func`` computes with: the parameter that the modules hold now in the place
        of ``handle``; itself if they hold shards, and its values are still those of the shards.

        Raises:
            RuntimeError: if these values are gone.
        """
        group = self._group()
        if group is not None and group.unsharded:
            return handle._like(group.unsharded[handle._index])
        if group is not None and not self._freed and group.versions == self._versions:
            return handle
        raise RuntimeError(
            f"{self.name(handle._index)} was used (by {name_of(func)}) while its FSDP unit is "
            f"sharded, so its full values are not there: they are in the unit's own forward and "
            f"in its backward. Use them there, also in a method that "
            f"register_fsdp_forward_method knows; or return them, or what is computed from them, "
            f"as an output of the unit's forward; or set reshard_after_forward=False for the unit; "
            f"or call it inside summon_full_params"
        )

    def shape_of(self, handle: ReshardedParam) -> Tensor:
        """Return a tensor without values that has the shape that ``handle`` had."""
        group = self._group()
        if group is None or not self._freed:
            return handle
        shape = group.originals[handle._index].shape
        return handle._like(without_values(shape, handle.dtype))

    def name(self, index: int) -> str:
        """Return the name of original parameter ``index``."""
        group = self._group()
        return "a parameter of a freed model" if group is None else group.originals[index].names[0]


class ReshardedParam(Tensor):
    """An unsharded parameter, or a view of one, after its unit has resharded, that somebody still
    holds: an autograd function in its ``ctx``, a hook, an object of the user.

    Torch functions compute with the parameter that the modules hold by then, such as the one
    gathered for backward, or raise.
    """

    _reshard: Reshard
    _index: int  # of the original parameter
    _views: bool  # whether it is a view of the parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) == "__repr__":
            return f"ReshardedParam({args[0]._reshard.name(args[0]._index)})"
        reads = read_by(func, args, cls)
        with torch._C.DisableTorchFunctionSubclass():
            if reads is Reads.VALUES:
                args, kwargs = _replaced(args, kwargs, lambda each: each._reshard.now(each, func))
            elif reads is Reads.SHAPE:
                args, kwargs = _replaced(args, kwargs, lambda each: each._reshard.shape_of(each))
            return func(*args, **(kwargs or {}))

    def _like(self, base: Tensor) -> Tensor:
        # The strides of an XLA tensor do not describe its views; the recorded view ops do.
        return self._view_func_unsafe(base) if self._views else base


def _reopen(tensors: Sequence[Tensor]) -> None:
    """Make tensors common ones again that modules hold once more."""
    for tensor in tensors:
        if type(tensor) is ReshardedParam:
            tensor.__class__ = Tensor  # type: ignore[assignment]


def _replaced(args: Any, kwargs: Any, fn: Callable[[ReshardedParam], Tensor]) -> tuple[Any, Any]:
    return map_tensors(
        lambda each: fn(each) if isinstance(each, ReshardedParam) else each, (args, kwargs or {})
    )


class CannotSliceError(Exception):
    """A step cannot be made slice by slice and must use unsliced stacks."""
