"""The MNIST network, as a plain module, and what its input looks like.

Always true: nothing here knows about ranks or needs torch_xla, so a merged checkpoint can be used
with this file alone (see ``evaluate.py``). Wrapping and training are left to ``train.py``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from data import MEAN, STD


class MnistNet(nn.Module):
    """Two convolutions and two linear layers; the network of torch_xla's MNIST examples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities ``[N, 10]`` of normalized images ``[N, 1, 28, 28]``."""
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(images), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def normalize(pixels: Tensor) -> Tensor:
    """Images as the network takes them, fp32 ``[N, 1, 28, 28]``, from uint8 ``[N, 28, 28]``."""
    return ((pixels.float() / 255 - MEAN) / STD).unsqueeze(1)
