"""What a unit's forward does to its arguments, as its caller sees it. Two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.argument_cases import CASES, ROWS, WIDTH, Around, Model, loss_of
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scenarios import fsdp, make

STEPS = 2

Step = dict[str, tuple[list[Tensor], list[Any]]]  # what the callers saw, by case


# ---------------------------------------------------------------- ways to shard


def wrapped(model: Any, **options: Any) -> Any:
    for name, block in model.blocks.items():
        model.blocks[name] = fsdp(block, **options)
    return fsdp(model, **options)


def in_place(model: Any, **options: Any) -> Any:
    from xla_fsdp import fully_shard

    for block in model.blocks.values():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def nested(model: Any) -> Any:
    for name, block in model.blocks.items():
        model.blocks[name] = Around(fsdp(block))
    return wrapped(model)


def remat_inside(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    for name, block in model.blocks.items():
        model.blocks[name] = checkpoint_module(block)
    return wrapped(model)


def remat_outside(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    model = in_place(model)
    for block in model.blocks.values():
        checkpoint_module(block)
    return model


NO_BARRIERS = {
    "optimization_barrier_in_forward": False,
    "optimization_barrier_in_backward": False,
}

WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "wrapped": wrapped,
    "in_place": in_place,
    "nested": nested,
    "remat_inside": remat_inside,
    "remat_outside": remat_outside,
    "bfloat16": lambda model: wrapped(model, compute_dtype=torch.bfloat16),
    "no_barriers": lambda model: wrapped(model, **NO_BARRIERS),
}


# ---------------------------------------------------------------- on ranks


def train(rank: int, way: str, names: tuple[str, ...] = ()) -> tuple[list[Step], Any]:
    """Return what the callers saw in each step, and the trained parameters."""
    import torch_xla

    device = torch_xla.device() if way != "plain" else torch.device("cpu")
    model = WAYS[way](make(lambda: Model(*names)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        seen = model(batch(step).to(device))
        loss_of(seen).backward()
        optimizer.step()
        steps.append(on_host(seen))
    with contextlib.nullcontext() if way == "plain" else model.summon_full_params():
        return steps, {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def evaluate(rank: int, way: str, inference: bool) -> Step:
    ...


def batch(step: int) -> Tensor:
    return torch.linspace(-1, 1 + step, ROWS * WIDTH).reshape(ROWS, WIDTH)


def on_host(seen: Any) -> Step:
    return {
        name: ([tensor.detach().float().cpu() for tensor in tensors], facts)
        for name, (tensors, facts) in seen.items()
    }
