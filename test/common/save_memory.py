"""Asynchronous saves where memory is short."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

from test.common.scenarios import fsdp, message

ROWS, WIDTH = 8192, 4096
BYTES = 4 * ROWS * WIDTH  # of the shards of all ranks, which are threads of one process
SLACK = BYTES // 4  # for all else


def save_often(rank: int, folder: str) -> dict[str, Any]:
    """Save again and again; then with too little memory for a copy; then with enough."""
    from xla_fsdp import CheckpointManager, latest_step, save_checkpoint
    from xla_fsdp.xla.host import exchange

    with torch.device("meta"):
        plain = nn.Linear(WIDTH, ROWS, bias=False)
    model = fsdp(plain, param_init_fn=filled)
    exchange(b"")
    before = now("VmRSS")
    with CheckpointManager(Path(folder, "often"), keep_last=1) as manager:
        for step in (1, 2, 3, 4, 5, 6):
            manager.save(step, model)
        manager.wait()
        exchange(b"")
        kept, most = now("VmRSS") - before, now("VmHWM") - before
        exchange(b"")
    if rank == 0:
        limit(now("VmData") + SLACK)
    exchange(b"")
    short = Path(folder, "short")
    told = message(lambda: save_checkpoint(short, model, step=1, asynchronous=True).wait())
    exchange(b"")
    if rank == 0:
        limit(resource.RLIM_INFINITY)
    exchange(b"")
    save_checkpoint(short, model, step=2, asynchronous=True).wait()
    return {"kept": kept, "most": most, "told": told, "latest": latest_step(short)}


def filled(module: nn.Module) -> None:
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(3.0)


def limit(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.RLIM_INFINITY))


def now(what: str) -> int:
    """Of this process: a peak of resource.getrusage may be that of one from which it was forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024
