"""How the parameters of identical blocks travel when the blocks run as a loop.

Words: a parameter is *small* where gathering it in every round would not pay: it is gathered once
before the loop for all blocks, and its gradients are reduced once after it; the *large* ones travel
in the loop, one block at a time, the first of them *ahead*, one round early. *Sent* shards,
gathered stacks and gradients are those of ``shard_gather`` and
``grad_reduction``; here they are stacked, [length, ...].
Always true: nothing depends on the number of blocks but the first dim of stacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.shard_layout import offsets
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import cast_here
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup


class BlockWeights:
    """The parameters of one block, which stands for all.

    Args:
        group: its parameters.
        gather_once_below: elements below which a parameter is small.
    """

    def __init__(self, group: FSDPParamGroup, gather_once_below: int) -> None:
        self.group = group
        numels = [param.packing.layout.numel for param in group.params]
        self.small = [at for at, numel in enumerate(numels) if numel < gather_once_below]
        self.large = [at for at, numel in enumerate(numels) if numel >= gather_once_below]
        # Registered first is used first, in most modules: nothing hides its gather in a round.
        self.ahead = self.large[:1]
        self._hidden = group.collectives.in_rings()  # a round has compute that hides them
        counts = [len(param.members) for param in group.params]
        self._members = {
            at: range(start, start + count)
            for at, (start, count) in enumerate(zip(offsets(counts), counts, strict=True))
        }

    @property
    def num_members(self) -> int:
        """Number of full parameters of a block."""
        return self.group.num_members

    def members(self, params: Sequence[int]) -> list[int]:
        """Numbers of the full parameters that belong to these."""
        return [member for at in params for member in self._members[at]]

    def gather(self, params: Sequence[int], sent: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors of the members of these parameters of one block."""
        pairs = zip(self._params(params), sent, strict=True)
        cast = [each.to(param.compute_dtype or each.dtype) for param, each in pairs]
        return self.group.gather.unshard_sent(self._params(params), cast)

    def gather_in_round(self, params: Sequence[int], slices: Sequence[Tensor]) -> list[Tensor]:
        """The same in a loop, from slices of what is sent or is to be cast for that."""
        pairs = zip(self._params(params), slices, strict=True)
        cast = [cast_here(each, param.compute_dtype or each.dtype) for param, each in pairs]
        return self.gather(params, cast)

    def reduce(self, params: Sequence[int], grads: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sums, by parameter, as they travel, from one block's full gradients by member. What has
        no gradient is left out."""
        reduction = self.group.reduction
        return reduction.unpack(reduction.scatter(grads, params, self._hidden))

    def gather_small(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Full tensors, [length, *shape], of the members of small parameters from stacks of what is
        sent of them."""
        with torch.no_grad():
            sent = [stack.reshape(-1) for stack in stacks]
            gathered = self.group.gather.gather_tensors(sent)
            ranks = self.group.collectives.num_shards
            return [
                full
                for param, stack, own in zip(
                    self._params(self.small), gathered, stacks, strict=True
                )
                for full in _unjoined(param, _swapped(stack, ranks, len(own)))
            ]

    def reduce_small(self, grads: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sums, [length, n], by small parameter, as they travel, from full gradients, [length,
        *shape], by member."""
        joined = {
            at: self._joined(param, [grads.get(member) for member in self._members[at]])
            for at, param in zip(self.small, self._params(self.small), strict=True)
            if any(member in grads for member in self._members[at])
        }
        ranks = self.group.collectives.num_shards
        lengths = {at: len(stack) for at, stack in joined.items()}
        sent = [_swapped(stack, len(stack), ranks).reshape(ranks, -1) for stack in joined.values()]
        sums = self.group.reduction.scatter_tensors(sent)
        return {
            at: each.reshape(length, -1)
            for (at, length), each in zip(lengths.items(), sums, strict=True)
        }

    def sum_replicas(self, sums: dict[int, Tensor]) -> dict[int, Tensor]:
        """The stacks ``sums``, by parameter, added over the replicas."""
        flat = {at: stack.reshape(-1) if at in self.small else stack for at, stack in sums.items()}
        added = self.group.reduction.sum_replicas_of(flat)
        return {at: ops.shaped(added[at], stack.shape) for at, stack in sums.items()}

    def _params(self, numbers: Sequence[int]) -> list[FSDPParam]:
        return [self.group.params[at] for at in numbers]

    def _joined(self, param: FSDPParam, grads: Sequence[Tensor | None]) -> Tensor:
        """[length, padded size], from the members' gradients."""
        example = next(grad for grad in grads if grad is not None)
        length = len(example)
        full = [
            example.new_zeros(length, *member.shape) if grad is None else grad
            for member, grad in zip(param.members, grads, strict=True)
        ]
        rows = [
            each.movedim(1 + param.packing.dim, 1) if param.packing.dim else each for each in full
        ]
        flat = torch.cat([each.reshape(length, -1) for each in rows], dim=1)
        return F.pad(flat, (0, param.packing.layout.padded_numel - param.packing.layout.numel))


def _swapped(stack: Tensor, first: int, second: int) -> Tensor:
    """[first, second * n] to [second, first * n]."""
    return stack.reshape(first, second, -1).transpose(0, 1).reshape(second, -1)


def _unjoined(param: FSDPParam, joined: Tensor) -> list[Tensor]:
    """The members, [length, *shape], out of [length, padded size]."""
    length = len(joined)
    numels = [member.shape.numel() for member in param.members]
    pieces = [
        ops.cut(joined, 1, start, numel)
        for numel, start in zip(numels, offsets(numels), strict=True)
    ]
    if param.packing.dim:
        [piece] = pieces
        return [
            piece.reshape(length, -1, *param.packing.row_shape).movedim(1, 1 + param.packing.dim)
        ]
    return [
        piece.reshape(length, *member.shape)
        for piece, member in zip(pieces, param.members, strict=True)
    ]
