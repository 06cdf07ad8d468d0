"""Communication hooks: a user's function in place of the reduce-scatter of gradients.

Words: a *hook* is called as ``hook(state, grad, shard)``, as those of torch's FSDP: ``grad`` holds
the full gradients of a unit's parameters of one dtype, flat and padded, the parts of all ranks one
after the other; the hook puts this rank's part of their average into ``shard``, or returns it.
Always true: a hook does all that happens to gradients between ranks, division included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.collectives import Collectives, LocalCollectives
from xla_fsdp.operands import Operand

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
