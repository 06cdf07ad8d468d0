"""Where a loop takes the shards of its blocks from, and where it gives their gradients to.

Words: *sent* and *small* are those of ``weights``; a stack is [length, ...]. Always true: a loop
sees stacks alone. Blocks that keep shards of their own have them joined in every pass; of blocks
whose shards are stacked for good (``shard_stacks``) nothing is joined or taken apart, so that the
program has as many operations for any number of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup


class Shards(Protocol):
    """What a loop computes with."""

    @property
    def leaves(self) -> list[Tensor]:
        """Leaf parameters of all blocks, which get gradients."""
        ...

    @property
    def versions(self) -> list[int]:
        """How often each was changed in place."""
        ...

    def of(self, numbers: Sequence[int]) -> list[Tensor]:
        """The leaves of these parameters."""
        ...

    def sent(
        self, numbers: Sequence[int], leaves: Sequence[Tensor], after: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Stacks of what is sent.

        Args:
            numbers: of which parameters.
            leaves: theirs, as ``of`` returns them.
            after: what is to be computed first.
        """
        ...

    def to_send(
        self, numbers: Sequence[int], leaves: Sequence[Tensor], after: Sequence[Tensor]
    ) -> list[Tensor]:
        """Stacks of which each round sends a slice, once it is cast; arguments as of ``sent``."""
        ...

    def is_sent_as_stored(self, number: int) -> bool:
        """Whether what ``to_send`` makes of this parameter is its leaf."""
        ...

    def finished(self, sums: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Gradients of all leaves, from stacks of sums by parameter."""
        ...

    def joined(self, grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Gradients of all leaves, from those of shards, by block."""
        ...


def shards_of(groups: Sequence[FSDPParamGroup]) -> Shards:
    """Those of blocks with these groups."""
    stacked = [param for param in groups[0].params if param.slots.part is not None]
    return StackedShards(groups) if stacked else SingleShards(groups)


class SingleShards:
    """Every block has its own."""

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._groups = groups

    @property
    def leaves(self) -> list[Tensor]:
        """See ``Shards``; one block after the other."""
        return [leaf for group in self._groups for leaf in group.leaves]

    @property
    def versions(self) -> list[int]:
        """See ``Shards``."""
        return [version for group in self._groups for version in group.versions]

    def of(self, numbers: Sequence[int]) -> list[Tensor]:
        """See ``Shards``; one block after the other."""
        by_block = (group.leaves for group in self._groups)
        return [leaves[at] for leaves in by_block for at in numbers]

    def sent(
        self, numbers: Sequence[int], leaves: Sequence[Tensor], after: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """See ``Shards``."""
        if not numbers:
            return []
        by_block = [leaves[at : at + len(numbers)] for at in range(0, len(leaves), len(numbers))]
        with torch.no_grad():
            sent = [
                group.gather.sent([group.params[at] for at in numbers], own)
                for group, own in zip(self._groups, by_block, strict=True)
            ]
            by_param = list(zip(*sent, strict=True))
            params = [self._groups[0].params[at] for at in numbers]
            joined = [
                torch.cat([_as_stored(param, each) for each in own])
                for param, own in zip(params, by_param, strict=True)
            ]
            stacks = ops.barrier(ops.once_computed(after, joined))
            pairs = zip(stacks, by_param, strict=True)
            return [stack.reshape(len(own), *own[0].shape) for stack, own in pairs]

    def to_send(
        self, numbers: Sequence[int], leaves: Sequence[Tensor], after: Sequence[Tensor]
    ) -> list[Tensor]:
        """See ``Shards``; cast as they are joined, which takes less memory."""
        return self.sent(numbers, leaves, after)

    def is_sent_as_stored(self, number: int) -> bool:
        """See ``Shards``."""
        return False

    def finished(self, sums: Mapping[int, Tensor]) -> list[Tensor | None]:
        """See ``Shards``."""
        params = self._groups[0].params
        pieces = {at: _unstacked(params[at], stack) for at, stack in sums.items()}
        return [
            group.reduction.finish_one(pieces[at][block], param)
            if at in pieces and param.leaf.requires_grad
            else None
            for block, group in enumerate(self._groups)
            for at, param in enumerate(group.params)
        ]  # fmt: skip

    def joined(self, grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """See ``Shards``."""
        return [grad for of_block in grads for grad in of_block]


class StackedShards:
    """All blocks share stacks, one for each parameter."""

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._group = groups[0]

    @property
    def leaves(self) -> list[Tensor]:
        """See ``Shards``."""
        return list(self._group.leaves)

    @property
    def versions(self) -> list[int]:
        """See ``Shards``."""
        return self._group.versions

    def of(self, numbers: Sequence[int]) -> list[Tensor]:
        """See ``Shards``."""
        leaves = self._group.leaves
        return [leaves[at] for at in numbers]

    def sent(
        self, numbers: Sequence[int], leaves: Sequence[Tensor], after: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """See ``Shards``."""
        params = [self._group.params[at] for at in numbers]
        with torch.no_grad():
            return ops.once_computed(after, self._group.gather.sent(params, leaves, stacked=True))

    def to_send(
        self, numbers: Sequence[int], leaves: Sequence[Tensor], after: Sequence[Tensor]
    ) -> list[Tensor]:
        """See ``Shards``; the leaves themselves, where they lie as they travel, take no memory."""
        as_it_is = {
            at: leaf.detach()
            for at, leaf in zip(numbers, leaves, strict=True)
            if self.is_sent_as_stored(at)
        }
        others = [at for at in numbers if at not in as_it_is]
        pairs = zip(numbers, leaves, strict=True)
        sent = self.sent(others, [leaf for at, leaf in pairs if at in others], after)
        found = {**as_it_is, **dict(zip(others, sent, strict=True))}
        return [found[at] for at in numbers]

    def is_sent_as_stored(self, number: int) -> bool:
        """See ``Shards``."""
        param = self._group.params[number]
        return not param.packing.dim and tuple(param.leaf.shape[1:]) == tuple(
            param.packing.sent_shape
        )

    def finished(self, sums: Mapping[int, Tensor]) -> list[Tensor | None]:
        """See ``Shards``."""
        return [
            self._group.reduction.finish_one(sums[at], param, len(sums[at]))
            if at in sums and param.leaf.requires_grad
            else None
            for at, param in enumerate(self._group.params)
        ]

    def joined(self, grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """See ``Shards``.

        Raises:
            RuntimeError: if some blocks have gradients and others kept theirs.
        """
        kept = [at for at, of_block in enumerate(grads) if all(each is None for each in of_block)]
        if kept and len(kept) < len(grads):
            raise RuntimeError(
                f"the gradients of scanned blocks {', '.join(map(str, kept))} are kept, and those "
                f"of others were reduced; their parameters are stacked, so they have one gradient. "
                f"Synchronize the gradients of all blocks, or of none"
            )
        return [_stacked(of_param) for of_param in zip(*grads, strict=True)]


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    """With zeros for what is missing; None if all is."""
    example = next((grad for grad in grads if grad is not None), None)
    if example is None:
        return None
    return torch.stack([torch.zeros_like(example) if grad is None else grad for grad in grads])


def _unstacked(param: FSDPParam, stack: Tensor) -> list[Tensor]:
    """The slices of a stack of what is cut like shards of ``param``."""
    joined = stack.flatten(0, 1) if stack.dim() > 2 else stack.reshape(-1)
    return list(_as_stored(param, joined).chunk(len(stack)))


def _as_stored(param: FSDPParam, sent: Tensor) -> Tensor:
    """Flat, if shard parameters are; else in rows. To lay rows out is an operation of its own on
    the TPU; joined, and behind a barrier, all blocks are laid out in one."""
    return sent if param.by_rows else ops.shaped(sent, (sent.numel(),))
