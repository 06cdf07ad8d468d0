"""A script as users start it: by torchrun with a process group of XLA, or by ``torch_xla.launch``.

``torchrun -m test.common.start_user xla://``, ``torchrun -m test.common.start_user env://``, or
``python -m test.common.start_user launch``. Two steps over a mesh, losses as JSON on stdout.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn


def train(index: int = 0) -> None:
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import XlaFullyShardedDataParallel, init_mesh

    torch.manual_seed(0)
    device = torch_xla.device()
    mesh = init_mesh((1, xr.world_size()), ("replica", "shard"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0] = XlaFullyShardedDataParallel(model[0], mesh=mesh)
    wrapped = XlaFullyShardedDataParallel(model, mesh=mesh, device_id=device)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = wrapped(torch.ones(4, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    print(json.dumps({"ranks": xr.world_size(), "losses": losses}), flush=True)


def main(how: str) -> None:
    if how == "launch":
        import torch_xla

        torch_xla.launch(train)
        return
    import torch_xla.distributed.xla_backend

    assert torch_xla.distributed.xla_backend  # importing it registers the backend
    dist.init_process_group("xla", init_method=how)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
