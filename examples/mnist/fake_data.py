"""Synthetic digits for runs without MNIST files: each class is a pattern of its own, plus noise.

Everybody gets the same images, without any file or network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data import MnistData
from sources import SIDE

TRAIN, TEST = 2048, 509
"""The number of test images is a prime, so that it never divides by the number of ranks."""


def make_fake_digits() -> MnistData:
    """Digits that a network learns to tell apart within some 50 steps."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(0, 2, (10, 1, 7, 7), generator=generator).float()
    patterns = torch.nn.functional.interpolate(coarse, (SIDE, SIDE))[:, 0] * 80

    def digits(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 10, (count,), generator=generator)
        noise = torch.rand((count, SIDE, SIDE), generator=generator) * 175
        return (patterns[labels] + noise).to(torch.uint8), labels

    return MnistData(*digits(TRAIN), *digits(TEST), source="synthetic patterns, not MNIST")
