"""Communication hooks: a user's function in place of the reduce-scatter of gradients.

Words: a *hook* is called as ``hook(state, grad, shard)``, as those of torch's FSDP: ``grad`` holds
the full gradients of a unit's parameters of one dtype, flat and padded, the parts of all ranks one
after the other; the hook puts this rank's part of their average into ``shard``, or returns it.
Always true: a hook does all that happens to gradients between ranks, division included.

From full gradients of a unit's parameters to shards of their average over the ranks.

Words: see ``operands``; to *scatter* is to sum over the ranks that share the parameters, each of
which gets its shard of the sum; *sums* are such shards, by operand; *replicas* are ranks that hold
the same shards.
Always true: one collective per dtype, and one for each large matrix, whose shards are rows; unless
the configuration asks for smaller buckets. Gradients are divided in two parts, before the sum and
after it; a parameter's shard gets a gradient of its own dtype.
Which gradients wait for others, and when they are reduced, is left to ``param_group``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.buckets import Operand, carried, operands_for, operands_of
from xla_fsdp.distributed.collectives import Collectives, LocalCollectives
from xla_fsdp.distributed.shard_layout import offsets
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam

Hook = Callable[[Any, Tensor, Tensor], Tensor | None]


@dataclass(frozen=True)
class DefaultState:
    """State of the hooks below: who the ranks are, which registration fills in for each unit."""

    collectives: Collectives = LocalCollectives()  # noqa: RUF009  (holds two numbers)

    def reduce_scatter(self, grad: Tensor) -> Tensor:
        """This rank's part of the sum of ``grad`` over the ranks."""
        stack = grad.reshape(self.collectives.num_shards, -1)
        operand = Operand((0,), ((stack.shape[1],),), grad.dtype)
        [shard] = operand.apart(self.collectives.reduce_scatter(operand.join_stacks({0: stack})))
        return shard


def reduce_scatter_hook(state: DefaultState, grad: Tensor, shard: Tensor) -> None:
    """The average, in the dtype of the gradients."""
    shard.copy_(state.reduce_scatter(grad) / state.collectives.num_shards)


def bf16_compress_hook(state: DefaultState, grad: Tensor, shard: Tensor) -> None:
    """The average, sent and added in bf16."""
    _compressed(torch.bfloat16, state, grad, shard)


def fp16_compress_hook(state: DefaultState, grad: Tensor, shard: Tensor) -> None:
    """The average, sent and added in fp16."""
    _compressed(torch.float16, state, grad, shard)


def _compressed(dtype: torch.dtype, state: DefaultState, grad: Tensor, shard: Tensor) -> None:
    # Divided before the sum: what is sent in 16 bits must not overflow.
    small = (grad / state.collectives.num_shards).to(dtype)
    shard.copy_(state.reduce_scatter(small))


class CommHook:
    """A hook with its state, as a unit calls it.

    Args:
        state: the user's; a ``DefaultState`` gets to know the unit's ranks.
        hook: see the module's docstring.
        collectives: joins the ranks.
    """

    def __init__(self, state: Any, hook: Hook, collectives: Collectives) -> None:
        if isinstance(state, DefaultState):
            state = replace(state, collectives=collectives)
        self._state = state
        self._hook = hook

    def __call__(self, stack: Tensor) -> Tensor:
        """[num_shards, n] to this rank's [n] of the average."""
        grad = stack.reshape(-1)
        shard = grad.new_zeros(stack.shape[1])
        result = self._hook(self._state, grad, shard)
        found = shard if result is None else result
        if found.numel() != shard.numel():
            raise ValueError(
                f"the communication hook returned {found.numel()} elements for a shard of "
                f"{shard.numel()}; return this rank's part, or fill the one that is given"
            )
        return found.reshape(-1)


Sums = dict[Operand, Tensor]


class ReduceScatter:
    """Reduces the gradients of one unit.

    Args:
        params: the unit's shards, in the order of the module's parameters.
        collectives: communication among the ranks that share them.
        replicas: communication among the ranks that hold the same shards.
        config: dtypes and bucket sizes.

    Attributes:
        dtype: of sums; None for that of the gradients.
        predivide: divisor before the sum.
        postdivide: divisor after it.
        comm_hook: scatters in place of the collectives, and divides.
        all_reduce_hook: changes a shard between the sums and the last division.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        collectives: Collectives,
        replicas: Collectives,
        config: FSDPConfig,
    ) -> None:
        self._params = tuple(params)
        self._collectives = collectives
        self._replicas = replicas
        self.dtype = config.gradient_dtype
        megabytes = config.reduce_scatter_bucket_size_mb
        self._limit = math.inf if megabytes is None else megabytes * 2**20
        self.predivide, self.postdivide = 1.0, 1.0
        self.divide_by(collectives.num_shards * replicas.num_shards)
        self.comm_hook: CommHook | None = None
        self.all_reduce_hook: Callable[[Tensor], Tensor | None] | None = None
        counts = [len(param.members) for param in self._params]
        self._members = {
            at: range(start, start + count)
            for at, (start, count) in enumerate(zip(offsets(counts), counts, strict=True))
        }
        self._operands: dict[tuple[tuple[int, torch.dtype], ...], tuple[Operand, ...]] = {}

    @property
    def has_hooks(self) -> bool:
        """Whether a user's function takes part."""
        return (self.comm_hook, self.all_reduce_hook) != (None, None)

    def divide_by(self, divisor: float) -> None:
        """Divide sums of gradients by ``divisor``, usually the number of ranks."""
        # Part of it ahead of the sum also where nothing can overflow: without an operation between
        # them the TPU compiler gives the product that makes a gradient the shape in which it
        # travels, and copies an operand as large as the logits for that.
        self.predivide, self.postdivide = split_divisor(divisor)

    def to_reduce_dtype(self, grad: Tensor) -> Tensor:
        """A gradient as it is reduced."""
        return grad if self.dtype is None else grad.to(self.dtype)

    # ------------------------------------------------------------ sums

    def scatter(
        self,
        grads: Mapping[int, Tensor],
        numbers: Iterable[int] | None = None,
        by: Collectives | None = None,
    ) -> Sums:
        """Sums over the ranks that share the parameters: neither summed over replicas nor divided
        to the end.

        Args:
            grads: full gradients, by number of the member.
            numbers: of the parameters (default: all). Those without a gradient are left out.
            by: joins the ranks (default: the unit's own).
        """
        stacks = {
            at: self._stack(at, self._with_zeros(at, grads))
            for at in (self._members if numbers is None else numbers)
            if any(member in grads for member in self._members[at])
        }
        return {
            operand: self._scattered(operand, stacks, by or self._collectives)
            for operand in self._operands_of(stacks)
        }

    def scatter_alone(self, member: int, grad: Tensor) -> Sums | None:
        """As ``scatter``, for the gradient of one full parameter; None if it is not alone in its
        collective."""
        at = next(at for at, members in self._members.items() if member in members)
        if len(self._members[at]) != 1 or len(self._params[at].packing.sent_shape) < 2:
            return None
        return self.scatter({member: grad}, [at])

    def scatter_stacks(
        self, stacks: Sequence[Tensor], by: Collectives | None = None
    ) -> list[Tensor]:
        """This rank's [n] of the sum of each [num_shards, n], not divided to the end.

        Args:
            stacks: gradients.
            by: joins the ranks (default: the unit's own).
        """
        by = by or self._collectives
        by_number = dict(enumerate(stacks))
        operands = operands_of(
            {at: tuple(each.shape[1:]) for at, each in by_number.items()},
            {at: each.dtype for at, each in by_number.items()},
            self._limit,
            by.num_shards,
        )
        found = self.apart({each: self._scattered(each, by_number, by) for each in operands})
        return [found[at] for at in range(len(stacks))]

    def sum_replicas(self, sums: Sums) -> Sums:
        """Added over the replicas."""
        if self._replicas.num_shards == 1:
            return sums
        return {each: self._replicas.all_reduce_operand(total) for each, total in sums.items()}

    def sum_replicas_of(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The same for tensors of any shapes."""
        operands = operands_for(tensors, self._limit)
        return self.apart(self.sum_replicas({each: each.join(tensors) for each in operands}))

    def added(self, first: Sums, second: Sums) -> Sums:
        """Sums of the gradients of two passes, or of different parameters."""
        if not _numbers(first) & _numbers(second) or first.keys() == second.keys():
            both = [each for each in first if each in second]
            return {**first, **second, **{each: first[each] + second[each] for each in both}}
        pieces = self.apart(first)
        for at, piece in self.apart(second).items():
            pieces[at] = pieces[at] + piece if at in pieces else piece
        joined = self._operands_of({at: pieces[at] for at in sorted(pieces)})
        return {operand: operand.join(pieces) for operand in joined}

    def apart(self, sums: Sums) -> dict[int, Tensor]:
        """By number of the parameter."""
        return carried(sums, lambda operand: operand.apart(sums[operand]))

    # ------------------------------------------------------------ gradients of shards

    def finish(self, sums: Sums) -> list[Tensor | None]:
        """Gradients of the shard parameters from sums over all ranks."""
        if self.all_reduce_hook is not None:
            found = {
                at: self.finish_one(self._hooked(piece, self._params[at]), self._params[at])
                for at, piece in self.apart(sums).items()
            }
        else:
            means = {each: self._mean(total, each.numbers) for each, total in sums.items()}
            found = {at: _as_grad(each, self._params[at]) for at, each in self.apart(means).items()}
        return [found.get(at) for at in range(len(self._params))]

    def finish_one(self, total: Tensor, param: FSDPParam) -> Tensor:
        """The gradient of one of the shard parameters."""
        return _as_grad(self._mean(total, [self._params.index(param)]), param)

    def finish_all(self, totals: Tensor, param: FSDPParam) -> Tensor:
        """``finish_one`` of each of what has a first dim more."""
        means = self._mean(totals, [self._params.index(param)])
        return param.all_as_shards(means.to(param.leaf.dtype))

    def _mean(self, total: Tensor, numbers: Sequence[int]) -> Tensor:
        """Divided to the end, for some of the parameters."""
        if self.comm_hook is not None:
            return total
        # Divided in the wider dtype: a sum of fp32 gradients may be too large for fp16.
        dtypes = {total.dtype, *(self._params[at].leaf.dtype for at in numbers)}
        return total.to(_widest(frozenset(dtypes))) / self.postdivide

    def _hooked(self, total: Tensor, param: FSDPParam) -> Tensor:
        if self.all_reduce_hook is None:
            return total
        given = ops.shaped(total, param.packing.sent_shape)
        result = self.all_reduce_hook(given)
        return given if result is None else result

    # ------------------------------------------------------------ operands

    def _with_zeros(self, at: int, grads: Mapping[int, Tensor]) -> list[Tensor]:
        """Gradients of all members of a parameter, of which there is one at least."""
        members = self._members[at]
        if len(members) == 1:
            return [grads[members[0]]]
        example = next(grads[each] for each in members if each in grads)
        return [
            grads[each] if each in grads else example.new_zeros(member.shape)
            for each, member in zip(members, self._params[at].members, strict=True)
        ]

    def _stack(self, at: int, full: Sequence[Tensor]) -> Tensor:
        stack = self._params[at].packing.stack(full)
        if self.comm_hook is None:
            return stack
        return stack.reshape(self._collectives.num_shards, -1)

    def _operands_of(self, tensors: Mapping[int, Tensor]) -> tuple[Operand, ...]:
        """Of what there is of the parameters with these numbers."""
        dtypes = {at: self.dtype or tensor.dtype for at, tensor in tensors.items()}
        if self.comm_hook is not None:
            numels = {at: (self._params[at].packing.layout.shard_numel,) for at in dtypes}
            return operands_of(numels, dtypes, math.inf)
        key = tuple(dtypes.items())
        if key not in self._operands:
            shapes = {at: self._params[at].packing.sent_shape for at in dtypes}
            copies = self._collectives.num_shards
            self._operands[key] = operands_of(shapes, dtypes, self._limit, copies)
        return self._operands[key]

    def _scattered(self, operand: Operand, stacks: Mapping[int, Tensor], by: Collectives) -> Tensor:
        stack = self.to_reduce_dtype(operand.join_stacks(stacks))
        if self.comm_hook is not None and stack.numel():
            flat = stack.reshape(by.num_shards, -1)[:, : sum(operand.sizes)]
            return operand.laid_out([self.comm_hook(flat)])
        return by.reduce_scatter(stack if self.predivide == 1 else stack / self.predivide)


def split_divisor(divisor: float) -> tuple[float, float]:
    """What gradients are divided by before and after the sum over ranks; the product is
    ``divisor``, usually the number of ranks. Splitting it near the square root keeps 16-bit sums
    from overflow before and from underflow after (the rule of torch's own FSDP)."""
    before = 1
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return float(before), divisor / before


@functools.cache
def _widest(dtypes: frozenset[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def _numbers(sums: Sums) -> set[int]:
    return {number for operand in sums for number in operand.numbers}


def _as_grad(mean: Tensor, param: FSDPParam) -> Tensor:
    return param.as_shard(mean.to(param.leaf.dtype))
