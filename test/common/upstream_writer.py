"""Writes shard files with torch_xla's own FSDP, every rank in turn on one CPU device.

    PJRT_DEVICE=CPU python -m test.common.upstream_writer OUTPUT_DIRECTORY [moving]

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

from test.common.moving import Job
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
        model: Any = arrange(net, partial(wrapped, rank=rank, **options))
        save(model, directory / f"rank{rank}.pth")


def wrapped(module: Any, rank: int, **options: Any) -> Any:
    """A unit as a rank has it."""
    return XlaFullyShardedDataParallel(
        module,
        sharding_groups=[list(range(WORLD_SIZE))],
        sharding_rank=rank,
        sharding_world_size=WORLD_SIZE,
        execute_sharding_on_init=False,
        pin_layout_in_collective_ops=False,
        **options,
    )


def save(model: Any, path: Path) -> None:
    checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    xm.save(checkpoint, str(path), master_only=False)


def write_job(directory: Path) -> None:
    """The files of all ranks of the model that moves, before its first step."""
    for rank in range(WORLD_SIZE):
        model = Job("wrapper").build()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrapped(block, rank)
        save(wrapped(model, rank), directory / f"epoch0_rank-{rank}.pth")


if __name__ == "__main__":
    if sys.argv[2:] == ["moving"]:
        Path(sys.argv[1]).mkdir()
        write_job(Path(sys.argv[1]))
    else:
        for name in CASES:
            target = Path(sys.argv[1]) / name
            target.mkdir()
            write_case(name, target)
