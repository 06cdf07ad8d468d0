"""Models sharded in place by ``fully_shard``, and the gradients of one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from test.common.models import WIDTH
from test.common.scenarios import rows


def in_place(model: Any, **options: Any) -> Any:
    """Apply ``fully_shard`` to each block, and then to the model as the root."""
    from xla_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model: Any, x: Tensor | None = None) -> Tensor:
    """Return the mean square of the output for ``x``, or for ``rows()``."""
    return model(rows() if x is None else x).square().mean()


def grads(model: Any) -> dict[str, Tensor]:
    """Return the gradients of this rank's shards, on the host."""
    import torch_xla

    torch_xla.sync()
    shards = [(each.key, each.param.shard) for each in model._fsdp_named_shards()]
    return {name: shard.grad.cpu() for name, shard in shards if shard.grad is not None}


def most_apart(a: dict[str, Tensor], b: dict[str, Tensor], factor: float = 1.0) -> float:
    """Return the largest difference between ``a`` times ``factor`` and ``b``."""
    assert a.keys() == b.keys()
    return max((a[name] * factor - b[name]).abs().max().item() for name in a)


def step(model: Any) -> dict[str, Tensor]:
    """Run one forward and backward; returns its gradients, which the model no longer has."""
    loss_of(model).backward()
    found = grads(model)
    model.zero_grad()
    return found


def hidden() -> Tensor:
    """Return an input [2, WIDTH] of a block, on this rank's device."""
    import torch_xla

    return torch.ones(2, WIDTH).to(torch_xla.device())
