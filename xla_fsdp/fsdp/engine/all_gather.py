"""From the shards of a unit's parameters to full tensors.

Words: see ``operands``; what is *sent* of a shard is the tensor that travels: in the compute dtype,
flat [n] or in rows [rows, width]; a *larger* shard is shared by the ranks of one smaller group.
Always true: one collective per dtype, and one for each large matrix, whose shards are rows; unless
the configuration asks for one per parameter. Nothing here is known to autograd.
When parameters are gathered is decided by ``unit``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from xla_fsdp.distributed.buckets import Operand, carried, operands_for, operands_of
from xla_fsdp.distributed.collectives import Collectives, SmallerGroups
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam


class AllGather:
    """All-gathers of one unit.

    Args:
        params: the unit's shards, in the order of the module's parameters.
        collectives: communication among the ranks that share them.
        smaller: for parameters that are kept in larger shards between forward and backward.
        config: whether collectives are joined.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        collectives: Collectives,
        smaller: SmallerGroups | None,
        config: FSDPConfig,
    ) -> None:
        self._params = tuple(params)
        self._collectives = collectives
        self._smaller = smaller
        self._limit = math.inf if config.coalesce_all_gather_ops else 0
        self._operands: dict[tuple[torch.dtype, ...], tuple[Operand, ...]] = {}

    # ------------------------------------------------------------ all parameters

    def after(self, before: Sequence[Tensor] = (), *, again: bool = False) -> list[Tensor]:
        """What ``full`` makes full tensors of; not available until ``before`` are. In the dtype of
        the shards: what is cast ahead of time takes memory until then.

        Args:
            before: what is to be computed first.
            again: there was a gather of the same shards in the program. What was cast and laid out
                for that is not to be kept for this: it takes as much memory as all shards.
        """
        with torch.no_grad():
            shards = [param.shard for param in self._params]
            if again:
                first = [each for each in before if each.is_floating_point()][:1]
                shards = ops.once_computed(first, [shard.detach() for shard in shards])
            pairs = zip(self._params, shards, strict=True)
            rows = [param.packing.in_rows(shard) for param, shard in pairs]
            return ops.after_(before, [operand.join(rows) for operand in self._all])

    def full(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors of all members, in order, in their compute dtype."""
        with torch.no_grad():
            stacks = self._gathered(joined, self._collectives.all_gather)
            return _split(self._params, stacks)

    def larger(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """The larger shards by which the ranks of one smaller group share the parameters, in their
        compute dtype."""
        across = self._smaller_groups.across
        with torch.no_grad():
            pairs = zip(self._all, joined, strict=True)
            return [across.all_gather(each.to(operand.dtype)).clone() for operand, each in pairs]

    def full_of_larger(self, larger: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors of all members from this rank's larger shards, within its smaller group."""
        with torch.no_grad():
            return _split(self._params, self._gathered(larger, self._gather_within))

    def _gather_within(self, larger: Tensor) -> Tensor:
        """A stack of the operands of some ranks to that of all."""
        by, width = self._smaller_groups, larger.shape[-1]
        stack = by.within.all_gather(larger)
        # Rank r is number r % ranks of its group, and each group holds one of each.
        in_order = stack.reshape(by.within.num_shards, by.across.num_shards, -1, width)
        return in_order.transpose(0, 1).reshape(-1, width)

    @property
    def _smaller_groups(self) -> SmallerGroups:
        if self._smaller is None:
            raise RuntimeError("the ranks of this unit are not in smaller groups")
        return self._smaller

    @property
    def _all(self) -> tuple[Operand, ...]:
        """The operands of all parameters."""
        dtypes = tuple(param.compute_dtype or param.leaf.dtype for param in self._params)
        if dtypes not in self._operands:
            self._operands[dtypes] = self._planned(self._params, dtypes)
        return self._operands[dtypes]

    def _gathered(
        self, joined: Sequence[Tensor], gather: Callable[[Tensor], Tensor]
    ) -> dict[int, Tensor]:
        sent = dict(zip(self._all, joined, strict=True))
        return self._carried(sent, lambda operand: gather(sent[operand].to(operand.dtype)))

    # ------------------------------------------------------------ some parameters

    def sent(self, params: Sequence[FSDPParam], shards: Sequence[Tensor]) -> list[Tensor]:
        """What is sent of this rank's ``shards`` of some of the unit's parameters."""
        return [
            ops.shaped(
                param.packing.in_rows(shard.to(param.compute_dtype or shard.dtype)),
                param.packing.sent_shape,
            )
            for param, shard in zip(params, shards, strict=True)
        ]

    def sent_of_all(self, params: Sequence[FSDPParam], stacks: Sequence[Tensor]) -> list[Tensor]:
        """``sent`` of each of what has a first dim more, [length, *shape of the shard]."""
        return [
            ops.shaped(
                param.packing.all_in_rows(stack.to(param.compute_dtype or stack.dtype)),
                (len(stack), *param.packing.sent_shape),
            )
            for param, stack in zip(params, stacks, strict=True)
        ]

    def of_sent(self, params: Sequence[FSDPParam], sent: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors of the members of some of the unit's parameters, from their ``sent``."""
        operands = self._planned(params, [each.dtype for each in sent])
        with torch.no_grad():
            return _split(params, self._stacks(operands, sent))

    def as_stored(self, params: Sequence[FSDPParam], shards: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors of the members of some of the unit's parameters, in the dtype of ``shards``,
        which may be anything that is cut like these: gradients, optimizer state."""
        with torch.no_grad():
            pairs = zip(params, shards, strict=True)
            return self.of_sent(params, [param.packing.in_rows(shard) for param, shard in pairs])

    def stacks(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """[num_shards, n] each, from [n] of every rank; these may be anything."""
        stacks = self._stacks(operands_for(dict(enumerate(sent)), self._limit), sent)
        return [stacks[at] for at in range(len(sent))]

    def _stacks(self, operands: Sequence[Operand], sent: Sequence[Tensor]) -> dict[int, Tensor]:
        with torch.no_grad():
            gather = self._collectives.all_gather
            return self._carried(operands, lambda operand: gather(operand.join(sent)))

    def _carried(
        self, operands: Iterable[Operand], send: Callable[[Operand], Tensor]
    ) -> dict[int, Tensor]:
        """Stacks by number."""
        ranks = self._collectives.num_shards
        return carried(operands, lambda operand: operand.stacks_apart(send(operand), ranks))

    def _planned(
        self, params: Sequence[FSDPParam], dtypes: Sequence[torch.dtype]
    ) -> tuple[Operand, ...]:
        shapes = {at: param.packing.sent_shape for at, param in enumerate(params)}
        return operands_of(shapes, dict(enumerate(dtypes)), self._limit)


def _split(params: Sequence[FSDPParam], stacks: Mapping[int, Tensor]) -> list[Tensor]:
    return [full for at, param in enumerate(params) for full in param.packing.split(stacks[at])]
