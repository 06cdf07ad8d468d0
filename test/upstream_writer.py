"""Writes shard files with torch_xla's own FSDP, every rank in turn on one CPU device.

    PJRT_DEVICE=CPU python upstream_writer.py OUTPUT_DIRECTORY

Each case gets a directory with the files of three ranks and ``original.pt``, the state dict before
wrapping. A rank's parameters are its slices from construction on, so no second process is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

WORLD_SIZE = 3
Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """A linear layer and a batch norm with buffers that are not at their defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        for buffer in (self.norm.running_mean, self.norm.running_var):
            assert buffer is not None
            nn.init.uniform_(buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Net(nn.Module):
    """Two blocks, a frozen layer, two tied layers and a scalar."""

    def __init__(self, scalar: bool) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.frozen = nn.Linear(40, 11).requires_grad_(False)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.right.weight = self.left.weight
        if scalar:
            self.scalar = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


def wrap_plain(net: Net, wrap: Wrap) -> nn.Module:
    """One unit."""
    return wrap(net)


def wrap_nested(net: Net, wrap: Wrap) -> nn.Module:
    """A unit in a unit in a unit, and another one."""
    for parent, name in ((net.first, "linear"), (net, "first"), (net, "second")):
        setattr(parent, name, wrap(getattr(parent, name)))
    return wrap(net)


CASES: dict[str, tuple[Callable[[Net, Wrap], nn.Module], dict[str, Any]]] = {
    "plain": (wrap_plain, {}),
    "nested": (wrap_nested, {}),
    "flat": (wrap_plain, {"flatten_parameters": True}),
    "flat_nested": (wrap_nested, {"flatten_parameters": True}),
    "rows": (wrap_plain, {"shard_param_on_dim_0": True}),
    "rows_nested": (wrap_nested, {"shard_param_on_dim_0": True}),
    "bfloat16": (wrap_nested, {"compute_dtype": torch.bfloat16}),
}


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
