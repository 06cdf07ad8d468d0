"""Refuse torch_xla's own reduction of gradients where it is given shards.

Always true: it is refused in the whole process once asked for, and goes on for other optimizers,
and between replicas of the same slices.
Which parameters are shards is said by ``guards``, which installs this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_xla.core.xla_model as xm

from .xla_ops import Groups


def refuse_reduce_gradients_of(is_part: Any) -> None:
    """Make ``xm.reduce_gradients`` (called by ``xm.optimizer_step``) raise for sharded parameters,
    and what accelerate does in its place.

    Each rank holds a different slice, so averaging them over all ranks destroys the gradients
    silently. Wrapping torch_xla's functions is the only place where this can be seen: accelerate
    fetches an optimizer's gradients by the same function, and only to average them. Who gives
    ``groups`` averages between replicas of the same slices.
    """
    reduce, fetch = xm.reduce_gradients, xm._fetch_gradients
    if getattr(reduce, "refuses_shards", False):
        return
    between_replicas: set[int] = set()  # ids of optimizers, each of one rank

    def holds_part(optimizer: torch.optim.Optimizer) -> bool:
        return any(is_part(p) for group in optimizer.param_groups for p in group["params"])

    def reduce_gradients(
        optimizer: torch.optim.Optimizer, groups: Groups = None, *args: Any, **kwargs: Any
    ) -> None:
        if groups is None and holds_part(optimizer):
            raise RuntimeError(
                f"xm.optimizer_step / xm.reduce_gradients was called with {_WOULD_MIX}. Call "
                f"optimizer.step() instead."
            )
        between_replicas.add(id(optimizer))
        try:
            reduce(optimizer, groups, *args, **kwargs)
        finally:
            between_replicas.discard(id(optimizer))

    def fetch_gradients(optimizer: torch.optim.Optimizer) -> Any:
        if id(optimizer) not in between_replicas and holds_part(optimizer):
            raise RuntimeError(
                f"an optimizer of accelerate was called with {_WOULD_MIX}. Use the Accelerator of "
                f"xla_fsdp.integrations.accelerate; for transformers' Trainer, call install() of "
                f"xla_fsdp.integrations.transformers first."
            )
        return fetch(optimizer)

    reduce_gradients.refuses_shards = True  # type: ignore[attr-defined]
    xm.reduce_gradients, xm._fetch_gradients = reduce_gradients, fetch_gradients


_WOULD_MIX = (
    "parameters sharded by xla_fsdp. Their gradients are already reduced, and each rank holds "
    "different slices: averaging them would mix unrelated values"
)
