"""A model that reads weights of modules which it never calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Reader(nn.Module):
    """Reads four embeddings, as SAM's encoder of prompts does, and linear layers; calls blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.point_embed = nn.ModuleList([nn.Embedding(1, WIDTH) for _ in range(4)])
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        )
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.add_(1)
        for number, each in enumerate(self.point_embed):
            x = x + each.weight * (number + 1)
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight, layer.bias))
        for block in self.blocks:
            x = block(x)
        return x


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
