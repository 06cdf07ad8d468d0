"""A step for ``python -m xla_fsdp.preflight --run``, right or with a fault on one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from test.common.chip_training import labelled
from test.common.models import Net
from test.common.scenarios import make, nested
from xla_fsdp.distributed.mesh import Mesh

FAULTY = 1  # the rank


def build_step(
    fault: str = "none", mesh: Mesh | None = None, plain: int = 0
) -> Callable[[], Tensor]:
    """Return a step.

    Args:
        fault: "none"; "infinite" (the inputs); or on one rank "apart" (a parameter that another
            rank has a copy of is changed) or "raises".
        mesh: of replicas and shards.
        plain: number of ranks whose batches the plain model is given; 0 for the sharded one.
    """
    if plain:
        model, places = make(Net), range(plain)
    else:
        from xla_fsdp.distributed.xla import ops

        model, places = nested(make(Net), mesh=mesh), range(ops.rank(), ops.rank() + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    faulty = not plain and places[0] == FAULTY
    steps = 0

    def step() -> Tensor:
        nonlocal steps
        if fault == "apart" and steps == 1:
            with torch.no_grad():  # by a value, as all ranks are to trace the same
                param = next(model.parameters())
                param.mul_(torch.tensor([1.0 + faulty]).to(param.device))
        if fault == "raises" and faulty and steps == 1:
            raise ValueError("no batch is left")
        parts = [labelled(steps, rank) for rank in places]
        losses = [_loss(model, x * torch.inf if fault == "infinite" else x, y) for x, y in parts]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        return loss

    return step


def _loss(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    device = next(model.parameters()).device
    return F.cross_entropy(model(x.to(device)), y.to(device))
