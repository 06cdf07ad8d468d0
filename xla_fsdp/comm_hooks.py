"""Communication hooks: what stands in for a unit's reduce-scatter, as in torch's FSDP.

model.register_comm_hook(comm_hooks.DefaultState(), comm_hooks.bf16_compress_hook)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.collectives import Collectives, LocalCollectives
from xla_fsdp.distributed.packing import Bucket

Hook = Callable[[Any, Tensor, Tensor], Tensor | None]
"""A user's ``hook(state, grad, shard)`` in place of the reduce-scatter, as for torch's FSDP.

``grad`` holds the unsharded gradients of a unit's parameters of one dtype, padded, the part of rank
0 first: [num_shards * n]. The hook writes this rank's part of the average to ``shard``, [n], or
returns it. It must also divide the sum by the number of ranks.
"""


@dataclass(frozen=True)
class DefaultState:
    """State of the hooks below; registration sets ``collectives`` to those of each unit."""

    collectives: Collectives = LocalCollectives()  # noqa: RUF009  (holds two numbers)

    def reduce_scatter(self, grad: Tensor) -> Tensor:
        """Return this rank's part of the sum of ``grad`` over the ranks."""
        parts = grad.reshape(self.collectives.num_shards, -1)
        bucket = Bucket((0,), ((parts.shape[1],),), grad.dtype)
        packed = bucket.pack_gathered({0: parts})
        [shard] = bucket.unpack(self.collectives.reduce_scatter(packed))
        return shard


def reduce_scatter_hook(state: DefaultState, grad: Tensor, shard: Tensor) -> None:
    """Average in the dtype of the gradients."""
    shard.copy_(state.reduce_scatter(grad) / state.collectives.num_shards)


def bf16_compress_hook(state: DefaultState, grad: Tensor, shard: Tensor) -> None:
    """Average gradients, sent and summed in bf16."""
    _compressed(torch.bfloat16, state, grad, shard)


def fp16_compress_hook(state: DefaultState, grad: Tensor, shard: Tensor) -> None:
    """Average gradients, sent and summed in fp16."""
    _compressed(torch.float16, state, grad, shard)


def _compressed(dtype: torch.dtype, state: DefaultState, grad: Tensor, shard: Tensor) -> None:
    # Divide before the sum, so that fp16 does not overflow.
    small = (grad / state.collectives.num_shards).to(dtype)
    shard.copy_(state.reduce_scatter(small))


class CommHook:
    """A user's communication hook with its state.

    Args:
        state: first argument of ``hook``; a ``DefaultState`` gets ``collectives``.
        hook: the user's function.
        collectives: communication among the unit's ranks.
    """

    def __init__(self, state: Any, hook: Hook, collectives: Collectives) -> None:
        if isinstance(state, DefaultState):
            state = replace(state, collectives=collectives)
        self._state = state
        self._hook = hook

    def __call__(self, parts: Tensor) -> Tensor:
        """Return this rank's part [n] of the average of ``parts``, [num_shards, n]."""
        grad = parts.reshape(-1)
        shard = grad.new_zeros(parts.shape[1])
        result = self._hook(self._state, grad, shard)
        found = shard if result is None else result
        if found.numel() != shard.numel():
            raise ValueError(
                f"the communication hook returned {found.numel()} elements for a shard of "
                f"{shard.numel()}; return this rank's part, or fill the one that is given"
            )
        return found.reshape(-1)
