"""Models sharded in place by ``fully_shard``, and the gradients of one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from test.common.models import WIDTH
from test.common.scenarios import rows


def in_place(model: Any, **options: Any) -> Any:
    """``model`` with each block a unit, and the rest the root."""
    from xla_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model: Any, x: Tensor | None = None) -> Tensor:
    return model(rows() if x is None else x).square().mean()


def grads(model: Any) -> dict[str, Tensor]:
    import torch_xla

    torch_xla.sync()
    shards = [(each.key, each.param.shard) for each in model._fsdp_named_shards()]
    return {name: shard.grad.cpu() for name, shard in shards if shard.grad is not None}


def most_apart(a: dict[str, Tensor], b: dict[str, Tensor], factor: float = 1.0) -> float:
    assert a.keys() == b.keys()
    return max((a[name] * factor - b[name]).abs().max().item() for name in a)


def step(model: Any) -> dict[str, Tensor]:
    """Gradients of one pass, which are then dropped."""
    loss_of(model).backward()
    found = grads(model)
    model.zero_grad()
    return found


def hidden() -> Tensor:
    import torch_xla

    return torch.ones(2, WIDTH).to(torch_xla.device())
