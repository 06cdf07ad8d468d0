"""All-gather the shards of a unit's parameters to unsharded tensors.

A shard is *sent* in the compute dtype, flat [n] or in rows [rows, width]. *Larger* shards are the
parameters divided over a smaller group of ranks, which holds them between forward and backward.

Invariants: one collective per dtype, and one for each large matrix, whose shards are rows, unless
the configuration asks for one per parameter. Results have no autograd graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from xla_fsdp.distributed.collectives import (
    Bucket,
    Collectives,
    SmallerGroups,
    buckets_for,
    by_number,
    plan_buckets,
)
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.schedule import ScheduleLog
from xla_fsdp.fsdp.engine.scopes import in_phase
from xla_fsdp.xla import ops


class AllGather:
    """All-gathers of one unit.

    Args:
        params: the unit's parameters, in the order of the module's.
        collectives: communication among the ranks that share them.
        smaller: groups of ranks that share larger shards, if any.
        config: whether tensors share collectives.
        log: tells of what is gathered.
    """

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
        self._smaller = smaller
        self._limit = math.inf if config.coalesce_all_gather_ops else 0
        self._buckets: dict[tuple[torch.dtype, ...], tuple[Bucket, ...]] = {}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What is sent to gather all parameters, by one collective each."""
        return self._buckets_of([param.slots.shard for param in self._params])

    # ------------------------------------------------------------ all parameters

    @in_phase("all-gather")
    def pack(self, before: Sequence[Tensor] = (), *, again: bool = False) -> dict[Bucket, Tensor]:
        """Pack all shards into buckets for ``unshard``, in the dtype of the shards.

        They are cast to the compute dtype only when sent, as a cast copy takes memory until then.

        Args:
            before: tensors to be computed first.
            again: whether the program has gathered the same shards already. A barrier then keeps
                XLA from reusing the packed copies, which take as much memory as all shards.
        """
        with torch.no_grad():
            shards = [*map(ops.viewable, [param.shard for param in self._params])]
            buckets = self._buckets_of(shards)
            if again:
                first = [each for each in before if each.is_floating_point()][:1]
                # Behind the barrier first: XLA would fuse what is added with the optimizer's step,
                # and gather a shard only once its gradient has been reduced.
                shards = ops.barrier_after_(before, [shard.detach().clone() for shard in shards])
                shards, before = ops.with_data_dependency(first, shards), ()
            pairs = zip(self._params, shards, strict=True)
            rows = [param.packing.in_rows(shard) for param, shard in pairs]
            packed = ops.barrier_after_(before, [bucket.pack(rows) for bucket in buckets])
            return dict(zip(buckets, packed, strict=True))

    @in_phase("all-gather")
    def unshard(self, packed: Mapping[Bucket, Tensor]) -> list[Tensor]:
        """Return the unsharded tensors of all original parameters, in the compute dtype.

        Args:
            packed: the result of ``pack``.
        """
        return self._unshard(packed, lambda by, sent: by.all_gather(sent))

    @in_phase("all-gather")
    def gather_larger(self, packed: Mapping[Bucket, Tensor]) -> list[Tensor]:
        """Return this rank's larger shards, one packed tensor for each bucket, in its dtype."""
        across = self._smaller_groups.across
        with torch.no_grad():
            return [
                across.all_gather(self._sent(each, t.to(each.dtype), self._params)).clone()
                for each, t in packed.items()
            ]

    @in_phase("all-gather")
    def unshard_larger(self, larger: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded tensors of all original parameters from packed larger shards."""
        buckets = self._buckets_of([param.leaf for param in self._params])
        return self._unshard(dict(zip(buckets, larger, strict=True)), self._gather_within)

    @torch.no_grad()
    def _unshard(
        self, packed: Mapping[Bucket, Tensor], gather: Callable[[Collectives, Tensor], Tensor]
    ) -> list[Tensor]:
        for param in self._params:
            param.expect_on_all_ranks("all-gather")

        def unpacked(bucket: Bucket) -> list[Tensor]:
            by = self._by(bucket, self._params)
            sent = self._sent(bucket, packed[bucket].to(bucket.dtype), self._params)
            return bucket.unpack(gather(by, sent), by.num_shards)

        return _unpack(self._params, by_number(packed, unpacked))

    def _by(self, bucket: Bucket, params: Sequence[FSDPParam]) -> Collectives:
        """Return the collectives of a bucket of these parameters; without any, of no experts."""
        return self._collectives.of(bool(params) and params[bucket.numbers[0]].is_expert)

    def _sent(self, bucket: Bucket, sent: Tensor, params: Sequence[FSDPParam]) -> Tensor:
        return self.log.sends("all-gather", sent, bucket.numbers, params)

    def _gather_within(self, _: Collectives, larger: Tensor) -> Tensor:
        groups, width = self._smaller_groups, larger.shape[-1]
        gathered = groups.within.all_gather(larger)
        # [ranks of a group, groups]: number i of each group holds the shards of the ranks r with
        # r % (ranks of a group) == i. Transposed, the shards are in the order of the ranks.
        shards = gathered.reshape(groups.within.num_shards, groups.across.num_shards, -1, width)
        return shards.transpose(0, 1).reshape(-1, width)

    @property
    def _smaller_groups(self) -> SmallerGroups:
        if self._smaller is None:
            raise RuntimeError("the ranks of this unit are not in smaller groups")
        return self._smaller

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
        """Return this rank's shards of some parameters in the dtype and shape to be sent.

        Args:
            params: some of the unit's.
            shards: of this rank; if ``stacked``, [length, *shape of a shard] each.
            stacked: whether shards of several blocks lie along a first dim, as do the results.
        """
        return [
            ops.shaped(
                param.packing.in_rows(ops.viewable(shard).to(param.compute_dtype or shard.dtype)),
                (*shard.shape[: int(stacked)], *param.packing.sent_shape),
            )
            for param, shard in zip(params, shards, strict=True)
        ]

    @in_phase("all-gather")
    def unshard_sent(self, params: Sequence[FSDPParam], sent: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded tensors of some of the unit's parameters from results of
        ``sent``."""
        buckets = self._plan(params, [each.dtype for each in sent])
        for param in params:
            param.expect_on_all_ranks("all-gather")
        return _unpack(params, self._gather(buckets, sent, params))

    def as_stored(self, params: Sequence[FSDPParam], shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded tensors of ``shards``, in their dtype: of some of the unit's
        parameters, or of their gradients or optimizer states."""
        with torch.no_grad():
            pairs = zip(params, shards, strict=True)
            rows = [param.packing.in_rows(ops.viewable(shard)) for param, shard in pairs]
            return self.unshard_sent(params, rows)

    @in_phase("all-gather")
    def gather_tensors(
        self, tensors: Sequence[Tensor], params: Sequence[FSDPParam] = ()
    ) -> list[Tensor]:
        """Gather each of ``tensors``, [n] on every rank, to [num_shards, n]: of the ranks that
        share ``params``, one for each, if they are given."""
        found = buckets_for(dict(enumerate(tensors)), self._limit, _of_experts(params))
        gathered = self._gather(found, tensors, params)
        return [gathered[at] for at in range(len(tensors))]

    @torch.no_grad()
    def _gather(
        self,
        buckets: Sequence[Bucket],
        sent: Sequence[Tensor],
        params: Sequence[FSDPParam] = (),
    ) -> dict[int, Tensor]:
        def unpacked(bucket: Bucket) -> list[Tensor]:
            by = self._by(bucket, params)
            packed = self._sent(bucket, bucket.pack(sent), params)
            return bucket.unpack(by.all_gather(packed), by.num_shards)

        return by_number(buckets, unpacked)

    def _plan(
        self, params: Sequence[FSDPParam], dtypes: Sequence[torch.dtype]
    ) -> tuple[Bucket, ...]:
        shapes = {at: param.packing.sent_shape for at, param in enumerate(params)}
        of_experts = _of_experts(params)
        return plan_buckets(shapes, dict(enumerate(dtypes)), self._limit, of_experts=of_experts)


def _of_experts(params: Sequence[FSDPParam]) -> list[int]:
    return [at for at, param in enumerate(params) if param.is_expert]


@torch.no_grad()
def _unpack(params: Sequence[FSDPParam], gathered: Mapping[int, Tensor]) -> list[Tensor]:
    return [
        unsharded
        for at, param in enumerate(params)
        for unsharded in param.packing.unpack(gathered[at])
    ]
