"""A Fabric program on two CPU ranks: trains with accumulation and clipping, saves and loads.

    python -m test.common.fabric_job directory sharded|full [recipe]

Leaves what rank 0 found in ``directory/found.pt``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.strategies import XLAFSDPStrategy

from test.common.accumulation import ACCUMULATE, MAX_NORM, RATE, STEPS, rows
from test.common.models import Block, Net
from test.common.scenarios import RANKS, make
from xla_fsdp.integrations.lightning import install

MICRO = 8  # rows in all ranks' parts of a micro batch


class Late(XLAFSDPStrategy):
    """Its first rank comes late to where ranks look for an old checkpoint before they save."""

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        given = super().broadcast(*args, **kwargs)
        time.sleep(1 if self.global_rank == 0 else 0)
        return given


def build(fabric: Fabric) -> tuple[Any, Any]:
    """The sharded model and its optimizer."""
    model = fabric.setup_module(make(Net))
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=RATE))


def train(fabric: Fabric, model: Any, optimizer: Any, first: int, last: int) -> list[Any]:
    """Steps ``first`` to ``last``; returns norms."""
    loader = torch.utils.data.DataLoader(rows(MICRO), batch_size=MICRO // RANKS)
    norms = []
    for index, (x, y) in enumerate(fabric.setup_dataloaders(loader)):
        if not first * ACCUMULATE <= index < last * ACCUMULATE:
            continue
        accumulating = (index + 1) % ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(F.cross_entropy(model(x), y) / ACCUMULATE)
        if not accumulating:
            norm = fabric.clip_gradients(
                model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False
            )
            norms.append(norm)
            optimizer.step()
            optimizer.zero_grad()
    return [norm.item() for norm in norms]


def run(fabric: Fabric, directory: Path) -> None:
    """On every rank."""
    from xla_fsdp import XlaFullyShardedDataParallel, full_state_dict

    model, optimizer = build(fabric)
    assert isinstance(model._forward_module, XlaFullyShardedDataParallel)
    norms = train(fabric, model, optimizer, 0, 1)
    fabric.save(str(directory / "saved"), {"model": model, "optimizer": optimizer, "step": 1})
    norms += train(fabric, model, optimizer, 1, STEPS)
    found = {"norms": norms, "whole": dict(full_state_dict(model._forward_module))}
    if (directory / "saved").is_dir():
        again, its_optimizer = build(fabric)
        state = {"model": again, "optimizer": its_optimizer, "step": 0}
        fabric.load(str(directory / "saved"), state)
        train(fabric, again, its_optimizer, state["step"], STEPS)
        found["resumed"] = dict(full_state_dict(again._forward_module))
    if fabric.global_rank == 0:
        torch.save(found, directory / "found.pt")


if __name__ == "__main__":
    install(cpu_ranks=RANKS)
    how = {"recipe": sys.argv[3]} if sys.argv[3:] else {"auto_wrap_policy": {Block}}
    strategy = Late(state_dict_type=sys.argv[2], **how)
    Fabric(accelerator="tpu", devices=RANKS, strategy=strategy).launch(run, Path(sys.argv[1]))
