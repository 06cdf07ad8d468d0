"""A step for ``python -m xla_fsdp.preflight --run``, right or with a fault on one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from test.common.chip_training import labelled
from test.common.models import Net
from test.common.scenarios import make, nested
from xla_fsdp import compile_step, scan_blocks
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.optim import step_in_backward

FAULTY = 1  # the rank


def build_step(
    fault: str = "none", way: str = "ordinary", mesh: Mesh | None = None, plain: int = 0
) -> Callable[[], Tensor]:
    """Return a step.

    Args:
        fault: "none"; or on one rank "infinite" (the inputs), "apart" (the parameters, of which
            another rank has copies, are changed) or "raises"; or "plain" (raises, too).
        way: "ordinary"; "in_backward" (steps), "in_loop" (so of stacked blocks), or "compiled".
        mesh: of replicas and shards.
        plain: number of ranks whose batches the plain model is given; 0 for the sharded one.
    """
    scale = 1 + torch.rand(())  # both sides draw the same
    if plain and fault == "plain":
        raise ValueError("view size is not\ncompatible")
    if plain:
        model, places = make(Net), range(plain)
    else:
        from xla_fsdp.xla import ops

        model, places = nested(make(Net), mesh=mesh), range(ops.rank(), ops.rank() + 1)
        if way == "in_loop":
            scan_blocks(model.blocks, stacked=True, gather_once_below=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    if not plain and way in ("in_backward", "in_loop"):
        step_in_backward(model, optimizer)
    faulty = not plain and places[0] == FAULTY
    steps = 0

    def step() -> Tensor:
        nonlocal steps
        if fault == "apart" and steps == 1:
            with torch.no_grad():  # by a value, as all ranks are to trace the same
                for param in model.parameters():
                    param.mul_(torch.tensor([1.0 + faulty]).to(param.device)[0])
        if fault == "raises" and faulty and steps == 1:
            raise ValueError("no batch is left")
        device = next(model.parameters()).device
        factor = scale * (torch.inf if fault == "infinite" and faulty else 1)
        batches = [labelled(steps, rank) for rank in places]
        parts = [[(factor * x).to(device), y.to(device)] for x, y in batches]
        steps += 1
        loss = train_on(parts)
        if not plain:
            tell(loss, steps)
        return loss

    def train(parts: list[list[Tensor]]) -> Tensor:
        loss = torch.stack([F.cross_entropy(model(x), y) for x, y in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def tell(loss: Tensor, steps: int) -> None:
        """Log as scripts do, with torch_xla's means."""
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        xm.add_step_closure(float, (loss.detach(),))
        if xm.mesh_reduce("steps", steps, sum) != steps * xr.world_size():
            raise AssertionError("the ranks do not hear of each other")

    train_on = (
        compile_step(train, state=[model, optimizer]) if way == "compiled" and not plain else train
    )
    return step
