"""A model and ways to wrap it, for the shard files of torch_xla's own FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
