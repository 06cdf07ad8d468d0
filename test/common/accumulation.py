"""The training that the integrations do with gradients of several micro batches, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from test.common.models import CLASSES, FEATURES, Net

STEPS, ACCUMULATE = 3, 2
MAX_NORM = 0.2
RATE = 0.05


def rows(micro: int) -> TensorDataset:
    """Return all inputs and targets; ``micro`` rows are all ranks' parts of a micro batch."""
    generator = torch.Generator().manual_seed(1)
    count = micro * ACCUMULATE * STEPS
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.arange(count) % CLASSES)


def train_plain(
    steps: int, micro: int, *, clips: bool = True
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the state and the norms after so many steps on one rank."""
    torch.manual_seed(3)  # as make does
    model, norms = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    inputs, targets = rows(micro).tensors
    for part in torch.arange(len(inputs)).split(micro * ACCUMULATE)[:steps]:
        F.cross_entropy(model(inputs[part]), targets[part]).backward()
        norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if clips else 1e9).item()
        )
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), norms
