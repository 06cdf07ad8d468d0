"""Where a rank stands. Needs no torch_xla."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """A rank's number, how many there are, and its device."""

    rank: int
    world_size: int
    device: torch.device
