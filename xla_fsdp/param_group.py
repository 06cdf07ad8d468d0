"""The parameters of one unit, gathered and reduced together.

Words: see ``sharded_param``; a *bucket* is what one collective carries.
Always true: gathering and reducing make one collective per dtype, and one for each large matrix,
whose shards are rows; unless the configuration asks for smaller buckets. A gradient is averaged
over the ranks: scattered over those that share the parameters, then, as a shard, summed over their
replicas; its shard has the dtype of the shard parameter. When to gather and reduce is decided by
``unit``.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp import xla_ops
from xla_fsdp.collectives import Collectives, LocalCollectives, SmallerGroups
from xla_fsdp.comm_hooks import CommHook
from xla_fsdp.config import FSDPConfig
from xla_fsdp.layout import LANES, LARGE, ROWS, offsets
from xla_fsdp.mesh import Mesh
from xla_fsdp.shard_view import whole_mesh
from xla_fsdp.sharded_param import ShardedParam
from xla_fsdp.ties import remember, remember_group
from xla_fsdp.whole_params import is_first


class ParamGroup:
    """Collectives over the shards of one unit.

    Args:
        params: the unit's shards, in the order of the module's parameters.
        collectives: communication among the ranks that share them.
        config: dtypes and bucket sizes.
        replicas: communication among the ranks that hold the same shards (default: no others).
        smaller: for parameters that are kept in larger shards between forward and backward.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        collectives: Collectives,
        config: FSDPConfig,
        replicas: Collectives | None = None,
        smaller: SmallerGroups | None = None,
    ) -> None:
        self.params = tuple(params)
        self.collectives = collectives
        self.replicas = replicas or LocalCollectives()
        self.smaller = smaller
        self._config = config
        num_ranks = collectives.num_shards * self.replicas.num_shards
        self.predivide, self.postdivide = 1.0, 1.0
        self.divide_by(num_ranks)
        self.all_reduces = True
        self.all_reduce_hook: Callable[[Tensor], Tensor | None] | None = None
        self.comm_hook: CommHook | None = None
        self.steps_in_backward = False  # gradients are gone when backward ends
        self._unreduced: dict[int, Tensor] = {}  # full gradients, by member
        self._not_summed: dict[int, Tensor] = {}  # shards that replicas are to add, by parameter
        for param in self.params:
            remember_group(param.shard, self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or what was pickled: its shards are known like any others."""
        vars(self).update(state)
        for param in self.params:
            remember(param, [param.shard])
            remember_group(param.shard, self)

    @property
    def shards(self) -> list[nn.Parameter]:
        """The shard parameters."""
        return [param.shard for param in self.params]

    @property
    def mesh(self) -> Mesh:
        """Who shares the parameters."""
        if self._config.mesh is not None:
            return self._config.mesh
        return whole_mesh(self.collectives.num_shards)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all that hold these parameters."""
        members = (member for param in self.params for member in param.members)
        return self.collectives.rank == self.replicas.rank == 0 and is_first(members)

    @property
    def versions(self) -> list[int]:
        """How often each shard was changed in place."""
        return [0 if shard.is_inference() else shard._version for shard in self.shards]

    @property
    def num_members(self) -> int:
        """Number of full parameters."""
        return sum(len(param.members) for param in self.params)

    def divide_by(self, divisor: float) -> None:
        """Divide sums of gradients by ``divisor``, usually the number of ranks."""
        # Part of it ahead of the sum also where nothing can overflow: without an operation between
        # them the TPU compiler gives the product that makes a gradient the shape in which it
        # travels, and copies an operand as large as the logits for that.
        self.predivide, self.postdivide = split_divisor(divisor)

    def accumulate(self, reduced: Sequence[Tensor | None]) -> None:
        """Add gradient shards to the shard parameters' gradients, where they are needed."""
        for param, grad in zip(self.params, reduced, strict=True):
            if grad is not None and param.shard.requires_grad:
                param.shard.grad = _add(param.shard.grad, grad)

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors of all members, in order, from this rank's ``shards`` (as in ``shards``),
        in their compute dtype."""
        with torch.no_grad():
            return self.gather_as_stored(self.params, _cast(self.params, shards))

    def sent(self, params: Sequence[ShardedParam], shards: Sequence[Tensor]) -> list[Tensor]:
        """What travels of this rank's ``shards`` of some of the unit's parameters when they are
        gathered: in the compute dtype, flat [n] or in rows [rows, width]."""
        return _as_sent(params, _cast(params, shards))

    def gather_sent(self, params: Sequence[ShardedParam], sent: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors of the members of some of the unit's parameters, from their ``sent``."""
        with torch.no_grad():
            return _split(params, self._gathered(sent, self.collectives))

    def gather_as_stored(
        self, params: Sequence[ShardedParam], shards: Sequence[Tensor]
    ) -> list[Tensor]:
        """Full tensors of the members of some of the unit's parameters, in the dtype of ``shards``,
        which may be anything that is cut like these: gradients, optimizer state."""
        with torch.no_grad():
            return self.gather_sent(params, _as_sent(params, shards))

    def gather_larger(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """From this rank's ``shards``, the larger ones by which the ranks of one smaller group
        share the parameters, in their compute dtype."""
        assert self.smaller is not None
        with torch.no_grad():
            sent = self.sent(self.params, shards)
            return [larger.clone() for larger in self._gathered(sent, self.smaller.across)]

    def gather_from_larger(self, larger: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors of all members from this rank's larger shards, within its smaller group."""
        assert self.smaller is not None
        # [across, *shard] each; flat shards of several ranks stay flat when they are joined.
        sent = [t.reshape(-1) if t.dim() == 2 else t for t in larger]
        stacks = self._gathered(sent, self.smaller.within)
        size = self.smaller.within.num_shards
        in_order = [  # rank r is number r % size of its group, and each group holds one of each
            stack.reshape(size, *t.shape).transpose(0, 1).reshape(-1, *t.shape[1:])
            for stack, t in zip(stacks, larger, strict=True)
        ]
        return _split(self.params, in_order)

    def gather_stacks(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """[num_shards, n] each, from [n] of every rank; these may be anything."""
        with torch.no_grad():
            return self._gathered(sent, self.collectives)

    def scatter_stacks(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """The inverse, for gradients: this rank's [n] of their sum, not divided to the end."""
        return self._scattered([self._divided(self.to_reduce_dtype(stack)) for stack in stacks])

    def _gathered(self, shards: Sequence[Tensor], by: Collectives) -> list[Tensor]:
        limit = math.inf if self._config.coalesce_all_gather_ops else 0
        return _in_buckets(shards, by.all_gather, limit)

    def reduce(
        self, grads: Sequence[Tensor | None], early: Mapping[int, Tensor] = MappingProxyType({})
    ) -> list[Tensor | None]:
        """Averaged gradient shards, one per parameter, from full gradients, one per member.

        A parameter none of whose members has a gradient gets None, as in an unsharded model; all
        do while replicas are not to add theirs. What was kept back is added first, and ``early``,
        which other gradients were scattered to before, by parameter.
        """
        grads = self._with_kept(grads)
        scattered = self.scatter(self.params, grads)
        kept, self._not_summed = self._not_summed, {}
        shards = {
            index: shard
            for index in range(len(self.params))
            if (shard := _sum(kept.get(index), early.get(index), scattered[index])) is not None
        }
        if self.waits_for_replicas:
            self._not_summed = shards
            return [None] * len(self.params)
        summed = dict(zip(shards, self.sum_replicas(list(shards.values())), strict=True))
        return [
            self.finish(self._hooked(summed[index]), param) if index in summed else None
            for index, param in enumerate(self.params)
        ]

    def scatter(
        self,
        params: Sequence[ShardedParam],
        grads: Sequence[Tensor | None],
        by: Collectives | None = None,
    ) -> list[Tensor | None]:
        """This rank's shards of the sums over the ranks that share the parameters, as they travel:
        neither summed over replicas nor divided to the end.

        Args:
            params: some of the unit's.
            grads: full gradients, one per member.
            by: joins the ranks (default: the unit's own).
        """
        stacked = [self._stack(param, own) for param, own in _by_param(params, grads)]
        present = {index: stack for index, stack in enumerate(stacked) if stack is not None}
        shards = dict(zip(present, self._scattered(list(present.values()), by), strict=True))
        return [shards.get(index) for index in range(len(params))]

    def scatter_alone(self, number: int, grad: Tensor) -> tuple[int, Tensor] | None:
        """As ``scatter``, with the number of the parameter, for the gradient of one full parameter;
        None if it is not alone in its collective."""
        counts = [len(param.members) for param in self.params]
        if number not in offsets(counts):
            return None
        at = offsets(counts).index(number)
        param = self.params[at]
        if counts[at] != 1 or len(_shard_shape(param)) < 2:
            return None
        [shard] = self.scatter([param], [grad])
        assert shard is not None
        return at, shard

    @property
    def reduces_plainly(self) -> bool:
        """Whether nothing but the next gradients themselves decides what ``reduce`` makes of
        them."""
        hooks = (self.comm_hook, self.all_reduce_hook)
        return hooks == (None, None) and not self.has_kept and not self.waits_for_replicas

    def _scattered(self, stacks: Sequence[Tensor], by: Collectives | None = None) -> list[Tensor]:
        """This rank's shards of the sums over the ranks that share the parameters."""
        if self.comm_hook is not None:
            return _in_buckets(stacks, self.comm_hook, math.inf)
        return _in_buckets(stacks, (by or self.collectives).reduce_scatter, self._limit)

    def sum_replicas(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Their sums over the replicas."""
        if self.replicas.num_shards == 1:
            return list(shards)
        return _in_buckets(shards, self.replicas.all_reduce_shards, self._limit)

    def _hooked(self, shard: Tensor) -> Tensor:
        if self.all_reduce_hook is None:
            return shard
        result = self.all_reduce_hook(shard)
        return shard if result is None else result

    @property
    def _limit(self) -> float:
        megabytes = self._config.reduce_scatter_bucket_size_mb
        return math.inf if megabytes is None else megabytes * 2**20

    def keep(self, grads: Sequence[Tensor | None]) -> None:
        """Add full gradients to those kept on this rank until the next ``reduce``."""
        self._unreduced = {
            index: self.to_reduce_dtype(grad)
            for index, grad in enumerate(self._with_kept(grads))
            if grad is not None
        }

    @property
    def waits_for_replicas(self) -> bool:
        """Whether there are replicas that are not to add their gradients yet."""
        return self.replicas.num_shards > 1 and not self.all_reduces

    @property
    def has_kept(self) -> bool:
        """Whether gradients wait for the next ``reduce``."""
        return bool(self._unreduced) or bool(self._not_summed)

    def drop_kept(self) -> None:
        """Forget the gradients that wait for the next ``reduce``."""
        self._unreduced, self._not_summed = {}, {}

    def to_reduce_dtype(self, grad: Tensor) -> Tensor:
        """A gradient as it is reduced."""
        dtype = self._config.gradient_dtype
        return grad if dtype is None else grad.to(dtype)

    def finish(self, reduced: Tensor, param: ShardedParam) -> Tensor:
        """A shard parameter's gradient from its sum over all ranks."""
        # Divided in the wider dtype: a sum of fp32 gradients may be too large for fp16.
        wide = reduced.to(torch.promote_types(reduced.dtype, param.shard.dtype))
        divided = wide if self.comm_hook is not None else wide / self.postdivide
        return param.as_shard(divided.to(param.shard.dtype))

    def _divided(self, stack: Tensor) -> Tensor:
        return stack if self.predivide == 1 else stack / self.predivide

    def _with_kept(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        kept, self._unreduced = self._unreduced, {}
        return [_add(kept.get(index), grad) for index, grad in enumerate(grads)]

    def _stack(self, param: ShardedParam, grads: Sequence[Tensor | None]) -> Tensor | None:
        """One parameter's gradient as a stack in the reduce dtype, divided ahead of the sum."""
        example = next((grad for grad in grads if grad is not None), None)
        if example is None:
            return None
        full = [
            example.new_zeros(member.shape) if grad is None else grad
            for member, grad in zip(param.members, grads, strict=True)
        ]
        stack = self.to_reduce_dtype(param.stack(full))
        if self.comm_hook is None:
            stack = self._divided(stack)
        return xla_ops.shaped(stack, (param.layout.num_shards, *_shard_shape(param)))


def _cast(params: Sequence[ShardedParam], shards: Sequence[Tensor]) -> list[Tensor]:
    return [
        shard.to(param.compute_dtype or shard.dtype)
        for param, shard in zip(params, shards, strict=True)
    ]


def _as_sent(params: Sequence[ShardedParam], shards: Sequence[Tensor]) -> list[Tensor]:
    return [
        xla_ops.shaped(param.in_rows(shard), _shard_shape(param))
        for param, shard in zip(params, shards, strict=True)
    ]


def _by_param(
    params: Sequence[ShardedParam], grads: Sequence[Tensor | None]
) -> list[tuple[ShardedParam, Sequence[Tensor | None]]]:
    pairs, at = [], 0
    for param in params:
        pairs.append((param, grads[at : at + len(param.members)]))
        at += len(param.members)
    return pairs


def _split(params: Sequence[ShardedParam], stacks: Sequence[Tensor]) -> list[Tensor]:
    return [
        full for param, stack in zip(params, stacks, strict=True) for full in param.split(stack)
    ]


def _shard_shape(param: ShardedParam) -> tuple[int, ...]:
    """Shape in which a shard travels: whole rows of the parameter where it consists of such, so
    that the gathered stack is the parameter as it is; else flat. Laying 50 million elements out
    anew takes the TPU compiler minutes and the program as much code as 20 transformer blocks."""
    size = param.layout.shard_numel
    width = param.row_numel if len(param.members) == 1 else 0
    if not width or width % LANES or size % (width * ROWS) or size < LARGE:
        return (size,)
    return (size // width, width)


def split_divisor(divisor: float) -> tuple[float, float]:
    """What gradients are divided by before and after the sum over ranks; the product is
    ``divisor``, usually the number of ranks. Splitting it near the square root keeps 16-bit sums
    from overflow before and from underflow after (the rule of torch's own FSDP)."""
    before = 1
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return float(before), divisor / before


def _sum(*parts: Tensor | None) -> Tensor | None:
    return functools.reduce(_add, parts)


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _in_buckets(
    tensors: Sequence[Tensor],
    collective: Callable[[Sequence[Tensor]], list[Tensor]],
    limit: float,
) -> list[Tensor]:
    """Run ``collective`` on runs of tensors of one dtype that hold at most ``limit`` bytes (but at
    least one tensor); results come back in the order of ``tensors``."""
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(index)
    results: dict[int, Tensor] = {}
    for indices in by_dtype.values():
        for bucket in _split_by_bytes(indices, tensors, limit):
            outputs = collective([tensors[index] for index in bucket])
            results.update(zip(bucket, outputs, strict=True))
    return [results[index] for index in range(len(tensors))]


def _split_by_bytes(
    indices: Sequence[int], tensors: Sequence[Tensor], limit: float
) -> list[list[int]]:
    buckets: list[list[int]] = []
    size = 0.0
    for index in indices:
        nbytes = tensors[index].numel() * tensors[index].element_size()
        if not buckets or size + nbytes > limit:
            buckets.append([])
            size = 0.0
        buckets[-1].append(index)
        size += nbytes
    return buckets
