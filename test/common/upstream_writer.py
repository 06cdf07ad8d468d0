"""Writes shard files with torch_xla's own FSDP, every rank in turn on one CPU device.

    PJRT_DEVICE=CPU python -m test.common.upstream_writer OUTPUT_DIRECTORY

Each case gets a directory with the files of three ranks and ``original.pt``, the state dict before
wrapping. A rank's parameters are its slices from construction on, so no second process is needed.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

from test.common.upstream_model import CASES, WORLD_SIZE, Net


def move_buffers(net: Net) -> None:
    """To the device: only buffers that are there before wrapping keep their original dtype.

    ``net.to(device)`` would move the parameters too, and untie those that are tied.
    """
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(torch_xla.device()))


def write_case(case: str, directory: Path) -> None:
    """The files of all ranks of one case."""
    arrange, options = CASES[case]
    for rank in range(WORLD_SIZE):
        torch.manual_seed(0)
        net = Net(scalar="shard_param_on_dim_0" not in options)
        torch.save(net.state_dict(), directory / "original.pt")
        move_buffers(net)
        wrap = partial(
            XlaFullyShardedDataParallel,
            sharding_groups=[list(range(WORLD_SIZE))],
            sharding_rank=rank,
            sharding_world_size=WORLD_SIZE,
            execute_sharding_on_init=False,
            pin_layout_in_collective_ops=False,
            **options,
        )
        model: Any = arrange(net, wrap)
        checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
        xm.save(checkpoint, str(directory / f"rank{rank}.pth"), master_only=False)


if __name__ == "__main__":
    for name in CASES:
        target = Path(sys.argv[1]) / name
        target.mkdir()
        write_case(name, target)
