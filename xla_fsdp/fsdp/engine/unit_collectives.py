"""All-gather the shards of a unit's parameters, and reduce-scatter the gradients of these.

A shard is *sent* in the compute dtype, flat [n] or in rows [rows, width]. *Larger* shards are the
parameters divided over a smaller group of ranks, which holds them between forward and backward.

Invariants: one collective per dtype, and one for each large matrix, whose shards are rows, unless
the configuration asks for one per parameter, or for smaller buckets. What was gathered has no
autograd graph. Gradients are divided in two steps, before the sum and after it. The gradient of a
shard has the shard's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.comm_hooks import CommHook
from xla_fsdp.distributed.collectives import Collectives, SmallerGroups
from xla_fsdp.distributed.packing import Bucket, buckets_for, plan_buckets, shaped, viewable
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.schedule import ScheduleLog
from xla_fsdp.fsdp.engine.thread import current_pass, in_phase, scope
from xla_fsdp.xla import ops


def expect_on_all_ranks(what: str, params: Sequence[FSDPParam]) -> None:
    """Tell CPU ranks that every one of them traces ``what`` of these parameters now.

    Buckets of other parameters may have the same size, so that the sizes of collectives do not show
    that one rank runs another layer, or has a gradient of another parameter.
    """
    runtime = ops.runtime()
    for param in params if runtime.compares_facts() else ():
        if param.number:
            runtime.expect_on_all_ranks(partial(param.with_name, what))


ReducedBuckets = dict[Bucket, Tensor]
"""This rank's shards of summed gradients, one packed tensor for each bucket."""


# ---------------------------------------------------------------- parameters


class AllGather:
    """All-gathers of one unit; arguments as for ``FSDPParamGroup``."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        collectives: Collectives,
        smaller: SmallerGroups | None,
        config: FSDPConfig,
        log: ScheduleLog,
    ) -> None:
        self._params = tuple(params)
        self.log = log
        self._collectives = collectives
        self._smaller: Any = smaller
        self._limit = math.inf if config.coalesce_all_gather_ops else 0
        self._buckets: dict[tuple[torch.dtype, ...], tuple[Bucket, ...]] = {}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What is sent to gather all parameters, by one collective each."""
        return self._buckets_of([param.slots.shard for param in self._params])

    # ------------------------------------------------------------ all parameters

    @in_phase("all-gather")
    @torch.no_grad()
    def unshard(self, before: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded tensors of all original parameters, in the compute dtype, once
        ``before`` are computed."""
        return self._unshard(self._packed(before))

    @in_phase("all-gather")
    @torch.no_grad()
    def gather_larger(self, before: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's larger shards, one packed tensor for each bucket, in its dtype."""
        packed = self._packed(before)
        sent = {each: tensor.to(each.dtype) for each, tensor in packed.items()}
        self.log.sends("all-gather", sent, self._params)
        return [self._smaller.across.all_gather(tensor).clone() for tensor in sent.values()]

    @in_phase("all-gather")
    @torch.no_grad()
    def unshard_larger(self, larger: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded tensors of all original parameters from packed larger shards."""
        buckets = self._buckets_of([param.leaf for param in self._params])
        return self._unshard(dict(zip(buckets, larger, strict=True)), larger=True)

    def _packed(self, before: Sequence[Tensor]) -> dict[Bucket, Tensor]:
        """Pack all shards into buckets, in their own dtype: they are cast to the compute dtype only
        when sent, as a cast copy takes memory until then.

        In backward the program has gathered the same shards already. A barrier then keeps XLA from
        reusing the packed copies, which take as much memory as all shards.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a forward of the user's may run
            shards = [param.shard for param in self._params]
            if current_pass() != -1:
                first = [each for each in before if each.is_floating_point()][:1]
                # Behind the barrier first: XLA would fuse what is added with the optimizer's step,
                # and gather a shard only once its gradient has been reduced.
                shards = ops.barrier_after_(before, [shard.detach().clone() for shard in shards])
                shards, before = ops.with_data_dependency(first, shards), ()
            pairs = zip(self._params, shards, strict=True)
            rows = [param.packing.in_rows(viewable(shard)) for param, shard in pairs]
            buckets = self._buckets_of(shards)
            packed = ops.barrier_after_(before, [bucket.pack(rows) for bucket in buckets])
        return dict(zip(buckets, packed, strict=True))

    def _unshard(self, packed: Mapping[Bucket, Tensor], *, larger: bool = False) -> list[Tensor]:
        expect_on_all_ranks("all-gather", self._params)
        sent = {bucket: tensor.to(bucket.dtype) for bucket, tensor in packed.items()}
        return _unpack(self._params, self._gather(sent, self._params, larger=larger))

    def _gather_within(self, larger: Tensor) -> Tensor:
        groups, width = self._smaller, larger.shape[-1]
        gathered = groups.within.all_gather(larger)
        # [ranks of a group, groups]: number i of each group holds the shards of the ranks r with
        # r % (ranks of a group) == i. Transposed, the shards are in the order of the ranks.
        shards = gathered.reshape(groups.within.num_shards, groups.across.num_shards, -1, width)
        return shards.transpose(0, 1).reshape(-1, width)

    def _buckets_of(self, shards: Sequence[Tensor]) -> tuple[Bucket, ...]:
        """Return the buckets of all parameters, in the dtypes in which they are sent."""
        pairs = zip(self._params, shards, strict=True)
        dtypes = tuple(param.compute_dtype or shard.dtype for param, shard in pairs)
        if dtypes not in self._buckets:
            self._buckets[dtypes] = self._plan(self._params, dtypes)
        return self._buckets[dtypes]

    # ------------------------------------------------------------ some parameters

    def sent(
        self, params: Sequence[FSDPParam], shards: Sequence[Tensor], *, stacked: bool = False
    ) -> list[Tensor]:
        """Return this rank's ``shards`` of some parameters in the dtype and shape to be sent; if
        ``stacked``, shards of several blocks [length, *shape of a shard], as are the results."""
        return [
            shaped(
                param.packing.in_rows(viewable(shard).to(param.compute_dtype or shard.dtype)),
                (*shard.shape[: int(stacked)], *param.packing.sent_shape),
            )
            for param, shard in zip(params, shards, strict=True)
        ]

    @in_phase("all-gather")
    def unshard_sent(self, params: Sequence[FSDPParam], sent: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded tensors of some of the unit's parameters from results of
        ``sent``."""
        buckets = self._plan(params, [each.dtype for each in sent])
        expect_on_all_ranks("all-gather", params)
        return _unpack(params, self._gather(_packed(buckets, sent), params))

    @torch.no_grad()
    def as_stored(self, params: Sequence[FSDPParam], shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded tensors of ``shards``, in their dtype: of some of the unit's
        parameters, or of their gradients or optimizer states."""
        pairs = zip(params, shards, strict=True)
        rows = [param.packing.in_rows(viewable(shard)) for param, shard in pairs]
        return self.unshard_sent(params, rows)

    @in_phase("all-gather")
    def gather_tensors(
        self, tensors: Sequence[Tensor], params: Sequence[FSDPParam] = ()
    ) -> list[Tensor]:
        """Gather each of ``tensors``, [n] on every rank, to [num_shards, n]: of the ranks that
        share ``params``, one for each, if they are given."""
        found = buckets_for(dict(enumerate(tensors)), self._limit, _of_experts(params))
        gathered = self._gather(_packed(found, tensors), params)
        return [gathered[at] for at in range(len(tensors))]

    @torch.no_grad()
    def _gather(
        self,
        sent: Mapping[Bucket, Tensor],
        params: Sequence[FSDPParam] = (),
        *,
        larger: bool = False,
    ) -> dict[int, Tensor]:
        """Return what the ranks that share ``params`` have sent, by number; of packed larger
        shards, those of a smaller group."""
        self.log.sends("all-gather", sent, params)
        unpacked = {}
        for bucket, tensor in sent.items():
            by = self._collectives.of(bool(params) and params[bucket.numbers[0]].is_expert)
            gathered = self._gather_within(tensor) if larger else by.all_gather(tensor)
            unpacked[bucket] = bucket.unpack(gathered, by.num_shards)
        return _by_number(unpacked)

    def _plan(
        self, params: Sequence[FSDPParam], dtypes: Sequence[torch.dtype]
    ) -> tuple[Bucket, ...]:
        shapes = {at: param.packing.sent_shape for at, param in enumerate(params)}
        of_experts = _of_experts(params)
        return plan_buckets(shapes, dict(enumerate(dtypes)), self._limit, of_experts=of_experts)


def _of_experts(params: Sequence[FSDPParam]) -> list[int]:
    return [at for at, param in enumerate(params) if param.is_expert]


@torch.no_grad()
def _packed(buckets: Iterable[Bucket], tensors: Sequence[Tensor]) -> dict[Bucket, Tensor]:
    return {bucket: bucket.pack(tensors) for bucket in buckets}


def _by_number(unpacked: Mapping[Bucket, Sequence[Tensor]]) -> dict[int, Tensor]:
    return {
        number: tensor
        for bucket, tensors in unpacked.items()
        for number, tensor in zip(bucket.numbers, tensors, strict=True)
    }


@torch.no_grad()
def _unpack(params: Sequence[FSDPParam], gathered: Mapping[int, Tensor]) -> list[Tensor]:
    return [
        unsharded
        for at, param in enumerate(params)
        for unsharded in param.packing.unpack(gathered[at])
    ]


# ---------------------------------------------------------------- gradients


class ReduceScatter:
    """Reduces the gradients of one unit; arguments as for ``FSDPParamGroup``.

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
        self._of_experts = _of_experts(self._params)

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
        divided = self._predivided(self.to_reduce_dtype(grad))
        self.log.sends_one("reduce-scatter of a part", divided)
        return divided

    def _predivided(self, grad: Tensor) -> Tensor:
        return grad if self.predivide == 1 else grad / self.predivide

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
        params = [self._params[at] for at in packed]
        expect_on_all_ranks("reduce-scatter of the gradient", params)
        return self._scatter(self._buckets_of(packed), packed, by, self._params)

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
            _of_experts(params),
        )
        found = self.unpack(self._scatter(buckets, numbered, by, params))
        return [found[at] for at in range(len(tensors))]

    def sum_replicas(self, reduced: ReducedBuckets) -> ReducedBuckets:
        """Sum ``reduced`` over the replicas."""
        if self._replicas.num_shards == 1:
            return reduced
        self.log.sends("all-reduce", reduced)
        all_reduce = partial(self._replicas.all_reduce, "sum")
        with scope(self.log.unit, "all-reduce"):
            return {each: all_reduce(total) for each, total in reduced.items()}

    def sum_replicas_of(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sum tensors of any shapes, by number, over the replicas."""
        buckets = buckets_for(tensors, self._limit)
        return self.unpack(self.sum_replicas({each: each.pack(tensors) for each in buckets}))

    def add(self, first: ReducedBuckets, second: ReducedBuckets) -> ReducedBuckets:
        """Add gradients of two backward passes, or merge those of different parameters."""
        numbers = [{at for bucket in each for at in bucket.numbers} for each in (first, second)]
        if not numbers[0] & numbers[1] or first.keys() == second.keys():
            both = [each for each in first if each in second]
            return {**first, **second, **{each: first[each] + second[each] for each in both}}
        total = self.unpack(first)
        for at, each in self.unpack(second).items():
            total[at] = total[at] + each if at in total else each
        buckets = self._buckets_of({at: total[at] for at in sorted(total)})
        return {bucket: bucket.pack(total) for bucket in buckets}

    def unpack(self, reduced: ReducedBuckets) -> dict[int, Tensor]:
        """Return the tensors in all buckets, by number of the parameter."""
        return _by_number({bucket: bucket.unpack(total) for bucket, total in reduced.items()})

    # ------------------------------------------------------------ gradients of shards

    def finish(self, reduced: ReducedBuckets) -> list[Tensor | None]:
        """Return the gradient of each of the unit's shards from sums over all ranks."""
        found: dict[int, Tensor] = {}
        if (hook := self.all_reduce_hook) is not None:
            for at, total in self.unpack(reduced).items():
                given = shaped(total, self._params[at].packing.sent_shape)
                result = hook(given)
                found[at] = self.finish_one(given if result is None else result, self._params[at])
        else:
            with torch._C.DisableTorchFunctionSubclass():  # shards tell their dtypes
                means = {b: self._mean(each, b.numbers) for b, each in reduced.items()}
                for at, mean in self.unpack(means).items():
                    found[at] = self._params[at].as_grad(mean)
        return [found.get(at) for at in range(len(self._params))]

    def finish_one(self, total: Tensor, param: FSDPParam, *length: int) -> Tensor:
        """Return the gradient of one parameter's shard from a sum over all ranks, of any shape with
        its elements; of a stack, with so many shards along the first dim."""
        return param.as_grad(self._mean(total, [self._params.index(param)]), *length)

    def _mean(self, total: Tensor, numbers: Sequence[int]) -> Tensor:
        if self.comm_hook is not None:
            return total
        # Divide in the wider dtype: a sum of fp32 gradients may be too large for fp16.
        dtypes = {total.dtype, *(self._params[at].slots.shard.dtype for at in numbers)}
        return total.to(functools.reduce(torch.promote_types, dtypes)) / self.postdivide

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
        buckets: Iterable[Bucket],
        packed: Mapping[int, Tensor],
        by: Collectives,
        params: Sequence[FSDPParam] = (),
    ) -> ReducedBuckets:
        joined = {each: each.pack_gathered(packed) for each in buckets}
        gathered = {each: self.to_reduce_dtype(tensor) for each, tensor in joined.items()}
        self.log.sends("reduce-scatter", gathered, params)
        found = {}
        if self.comm_hook is not None:
            for bucket, each in gathered.items():
                flat = each.reshape(by.num_shards, -1)[:, : sum(bucket.sizes)]
                found[bucket] = bucket.pack_flat([self.comm_hook(flat)]) if each.numel() else each
            return found
        of = {bucket: params[bucket.numbers[0]] for bucket in gathered if params}
        # Of a stack of matrices, as experts, which a kernel may have made: divided before, it would
        # be read and written once more. Of a matrix, the product divides it.
        late = {bucket for bucket, param in of.items() if len(param.originals[0].shape) == 3}
        sent = {b: each if b in late else self._predivided(each) for b, each in gathered.items()}
        for bucket, each in sent.items():
            own = by.of(bucket in of and of[bucket].is_expert)
            finish = [self._predivided] if bucket in late else []
            found[bucket] = own.reduce_scatter(each, *finish)
        return found


def split_divisor(divisor: float) -> tuple[float, float]:
    """Return the divisors of gradients before and after the sum; their product is ``divisor``.

    The first is near the square root, so that 16-bit gradients neither underflow before the sum nor
    overflow in it (the rule of torch's own FSDP).
    """
    before = 1
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return float(before), divisor / before
