"""Reduce-scatter unsharded gradients of a unit's parameters to averaged gradients of the shards.

Invariants: one collective per dtype, and one for each large matrix, whose shards are rows, unless
the configuration asks for smaller buckets. Gradients are divided in two steps, before the sum and
after it. The gradient of a shard has the shard's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from xla_fsdp.comm_hooks import CommHook
from xla_fsdp.distributed.collectives import (
    Bucket,
    Collectives,
    buckets_for,
    by_number,
    plan_buckets,
)
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.registry import note_grads
from xla_fsdp.fsdp.engine.schedule import ScheduleLog
from xla_fsdp.fsdp.engine.scopes import in_phase
from xla_fsdp.xla import ops

ReducedBuckets = dict[Bucket, Tensor]
"""This rank's shards of summed gradients, one packed tensor for each bucket."""


# ---------------------------------------------------------------- gradients of a unit


class ReduceScatter:
    """Reduces the gradients of one unit.

    Args:
        params: the unit's parameters, in the order of the module's.
        collectives: communication among the ranks that share them.
        replicas: communication among the ranks that hold the same shards.
        config: dtypes and bucket sizes.
        log: tells of what is reduced.

    Attributes:
        dtype: in which gradients are summed; None for their own.
        alone: the parameters whose gradients have a bucket of their own, by original.
        predivide: divisor before the sum.
        postdivide: divisor after the sum.
        comm_hook: averages in place of the reduce-scatter and the divisions.
        all_reduce_hook: called with each summed shard before the division by ``postdivide``.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        collectives: Collectives,
        replicas: Collectives,
        config: FSDPConfig,
        log: ScheduleLog,
    ) -> None:
        self._params = tuple(params)
        self.log = log
        self._collectives = collectives
        self._replicas = replicas
        self.dtype = config.gradient_dtype
        megabytes = config.reduce_scatter_bucket_size_mb
        self._limit = math.inf if megabytes is None else megabytes * 2**20
        self.predivide, self.postdivide = 1.0, 1.0
        self.divide_by(collectives.num_shards * replicas.num_shards)
        self.comm_hook: CommHook | None = None
        self.all_reduce_hook: Callable[[Tensor], Tensor | None] | None = None
        # For each parameter, the numbers of its originals among all of the unit.
        bounds = accumulate((len(param.originals) for param in self._params), initial=0)
        self._originals = dict(enumerate(range(start, end) for start, end in pairwise(bounds)))
        self.alone = {
            numbers[0]: at
            for at, numbers in self._originals.items()
            if len(numbers) == 1 and len(self._params[at].packing.sent_shape) > 1
        }
        self._buckets: dict[tuple[tuple[int, torch.dtype], ...], tuple[Bucket, ...]] = {}
        self._of_experts = [at for at, param in enumerate(self._params) if param.is_expert]

    @property
    def has_hooks(self) -> bool:
        """Whether the user has registered a hook."""
        return (self.comm_hook, self.all_reduce_hook) != (None, None)

    def divide_by(self, divisor: float) -> None:
        """Divide sums of gradients by ``divisor``, usually the number of ranks."""
        # Divide before the sum also where nothing can overflow: without an operation in between,
        # the TPU compiler computes the matmul that makes a gradient in the shape in which it is
        # sent, and for that copies an HLO operand as large as the logits.
        self.predivide, self.postdivide = split_divisor(divisor)

    def to_reduce_dtype(self, grad: Tensor) -> Tensor:
        """Cast a gradient to the dtype in which it is reduced."""
        return grad if self.dtype is None else grad.to(self.dtype)

    def to_sum(self, grad: Tensor) -> Tensor:
        """Return a gradient as it is sent to be summed by the caller: cast and divided."""
        cast = self.to_reduce_dtype(grad)
        divided = cast if self.predivide == 1 else cast / self.predivide
        return self.log.sends("reduce-scatter", divided)

    # ------------------------------------------------------------ sums

    @in_phase("reduce-scatter")
    def scatter(
        self,
        grads: Mapping[int, Tensor],
        numbers: Iterable[int] | None = None,
        by: Collectives | None = None,
    ) -> ReducedBuckets:
        """Reduce-scatter gradients over the ranks that share the parameters, not over replicas;
        only ``predivide`` is applied.

        Args:
            grads: unsharded gradients, by number of the original parameter.
            numbers: of the parameters (default: all). Those without a gradient are left out.
            by: collectives to use (default: the unit's own).
        """
        by = by or self._collectives
        packed = {
            at: self._pack(at, grads)
            for at in (self._originals if numbers is None else numbers)
            if any(each in grads for each in self._originals[at])
        }
        for at in packed:
            self._params[at].expect_on_all_ranks("reduce-scatter of the gradient")
        buckets = self._buckets_of(packed)
        return {each: self._scatter(each, packed, by, self._params) for each in buckets}

    @in_phase("reduce-scatter")
    def scatter_alone(self, number: int, grad: Tensor) -> ReducedBuckets:
        """Reduce-scatter the gradient of original parameter ``number``, one of ``alone``."""
        return self.scatter({number: grad}, [self.alone[number]])

    def as_bucket(self, at: int, total: Tensor) -> ReducedBuckets:
        """Return the result of ``scatter`` for parameter ``at``, reduced elsewhere, [rows, width],
        which has a bucket of its own."""
        return dict.fromkeys(self._buckets_of({at: total}), total)

    @in_phase("reduce-scatter")
    def scatter_tensors(
        self,
        tensors: Sequence[Tensor],
        by: Collectives | None = None,
        params: Sequence[FSDPParam] = (),
    ) -> list[Tensor]:
        """Return this rank's part [n] of the sum of each tensor; only ``predivide`` is applied.

        Args:
            tensors: gradients, [num_shards, n] each.
            by: collectives to use (default: the unit's own).
            params: that they are of, one for each, if experts may be among them.
        """
        by = by or self._collectives
        numbered = dict(enumerate(tensors))
        buckets = plan_buckets(
            {at: tuple(each.shape[1:]) for at, each in numbered.items()},
            {at: each.dtype for at, each in numbered.items()},
            self._limit,
            by.num_shards,
            [at for at, param in enumerate(params) if param.is_expert],
        )
        found = self.unpack({each: self._scatter(each, numbered, by, params) for each in buckets})
        return [found[at] for at in range(len(tensors))]

    @in_phase("all-reduce")
    def sum_replicas(self, reduced: ReducedBuckets) -> ReducedBuckets:
        """Sum ``reduced`` over the replicas."""
        if self._replicas.num_shards == 1:
            return reduced
        return {
            each: self._replicas.all_reduce("sum", self.log.sends("all-reduce", total))
            for each, total in reduced.items()
        }

    @in_phase("all-reduce")
    def sum_replicas_of(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sum tensors of any shapes, by number, over the replicas."""
        buckets = buckets_for(tensors, self._limit)
        return self.unpack(self.sum_replicas({each: each.pack(tensors) for each in buckets}))

    def add(self, first: ReducedBuckets, second: ReducedBuckets) -> ReducedBuckets:
        """Add gradients of two backward passes, or merge those of different parameters."""
        if not _numbers(first) & _numbers(second) or first.keys() == second.keys():
            both = [each for each in first if each in second]
            return {**first, **second, **{each: first[each] + second[each] for each in both}}
        total = self.unpack(first)
        for at, each in self.unpack(second).items():
            total[at] = total[at] + each if at in total else each
        buckets = self._buckets_of({at: total[at] for at in sorted(total)})
        return {bucket: bucket.pack(total) for bucket in buckets}

    def unpack(self, reduced: ReducedBuckets) -> dict[int, Tensor]:
        """Return the tensors in all buckets, by number of the parameter."""
        return by_number(reduced, lambda bucket: bucket.unpack(reduced[bucket]))

    # ------------------------------------------------------------ gradients of shards

    def finish(self, reduced: ReducedBuckets) -> list[Tensor | None]:
        """Return the gradient of each of the unit's shards from sums over all ranks."""
        if self.all_reduce_hook is None:
            means = self.unpack({b: self._mean(each, b.numbers) for b, each in reduced.items()})
            found = {at: _as_grad(each, self._params[at]) for at, each in means.items()}
        else:
            found = {
                at: self._finish_hooked(each, self._params[at], self.all_reduce_hook)
                for at, each in self.unpack(reduced).items()
            }
        return [found.get(at) for at in range(len(self._params))]

    def finish_one(self, total: Tensor, param: FSDPParam, *length: int) -> Tensor:
        """Return the gradient of one parameter's shard, or of a stack of shards.

        Args:
            total: sum over all ranks, of any shape with the elements of the result.
            param: one of the unit's.
            length: number of shards along the first dim of ``total``, if it is of a stack.
        """
        return _as_grad(self._mean(total, [self._params.index(param)]), param, *length)

    def _mean(self, total: Tensor, numbers: Sequence[int]) -> Tensor:
        if self.comm_hook is not None:
            return total
        # Divide in the wider dtype: a sum of fp32 gradients may be too large for fp16.
        dtypes = {total.dtype, *(self._params[at].slots.shard.dtype for at in numbers)}
        return total.to(_widest(frozenset(dtypes))) / self.postdivide

    def _finish_hooked(
        self, total: Tensor, param: FSDPParam, hook: Callable[[Tensor], Tensor | None]
    ) -> Tensor:
        given = ops.shaped(total, param.packing.sent_shape)
        result = hook(given)
        return self.finish_one(given if result is None else result, param)

    # ------------------------------------------------------------ buckets

    def _pack(self, at: int, grads: Mapping[int, Tensor]) -> Tensor:
        """Pack the gradients of a parameter's originals, with zeros for those that have none."""
        originals = self._originals[at]
        example = next(grads[each] for each in originals if each in grads)
        packed = self._params[at].packing.pack(
            [
                grads[each] if each in grads else example.new_zeros(original.shape)
                for each, original in zip(originals, self._params[at].originals, strict=True)
            ]
        )
        if self.comm_hook is None:
            return packed
        return packed.reshape(self._collectives.num_shards, -1)

    def _buckets_of(self, tensors: Mapping[int, Tensor]) -> tuple[Bucket, ...]:
        return self.plan({at: tensor.dtype for at, tensor in tensors.items()})

    def plan(self, found: Mapping[int, torch.dtype]) -> tuple[Bucket, ...]:
        """Return buckets for gradients of these dtypes, by number of the parameter."""
        dtypes = {at: self.dtype or dtype for at, dtype in found.items()}
        if self.comm_hook is not None:
            numels = {at: (self._params[at].packing.layout.shard_numel,) for at in dtypes}
            return plan_buckets(numels, dtypes, math.inf)
        key = tuple(dtypes.items())
        if key not in self._buckets:
            shapes = {at: self._params[at].packing.sent_shape for at in dtypes}
            copies = self._collectives.num_shards
            limits = self._limit, copies, self._of_experts
            self._buckets[key] = plan_buckets(shapes, dtypes, *limits)
        return self._buckets[key]

    def _scatter(
        self,
        bucket: Bucket,
        packed: Mapping[int, Tensor],
        by: Collectives,
        params: Sequence[FSDPParam] = (),
    ) -> Tensor:
        by = by.of(bool(params) and params[bucket.numbers[0]].is_expert)
        gathered = bucket.pack_gathered(packed)
        gathered = gathered if self.dtype is None else gathered.to(self.dtype)
        self.log.sends("reduce-scatter", gathered, bucket.numbers, params)
        if self.comm_hook is not None and gathered.numel():
            flat = gathered.reshape(by.num_shards, -1)[:, : sum(bucket.sizes)]
            return bucket.pack_flat([self.comm_hook(flat)])
        return by.reduce_scatter(gathered if self.predivide == 1 else gathered / self.predivide)


def split_divisor(divisor: float) -> tuple[float, float]:
    """Return the divisors of gradients before and after the sum; their product is ``divisor``.

    The first is near the square root, so that 16-bit gradients neither underflow before the sum nor
    overflow in it (the rule of torch's own FSDP).
    """
    before = 1
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return float(before), divisor / before


@functools.cache
def _widest(dtypes: frozenset[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def _numbers(reduced: ReducedBuckets) -> set[int]:
    return {number for bucket in reduced for number in bucket.numbers}


def _as_grad(mean: Tensor, param: FSDPParam, *length: int) -> Tensor:
    if (part := param.slots.part) is not None and not length:
        note_grads(param.slots.shard, [part.number])
    return param.as_shard(mean.to(param.slots.shard.dtype), *length)
