"""Rehearse ``train.py`` on a slice that is not there, beside the plain model.

    python -m xla_fsdp.preflight examples.mnist.rehearse:build_step --topology v5e:2x2 --run 3

Without ``--set fake=off`` the digits are synthetic; then they are those that ``train.py`` finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from batches import Batch
from evaluate import load_digits
from job import parse_options
from model import normalize
from place import Place
from ranks import this_place
from train import build_model, make_batches, shard_model


def build_step(batch: int = 16, fake: bool = True, plain: int = 0) -> Callable[[], Tensor]:
    """Return a step that returns its loss.

    With ``plain``, of the unsharded model on the batches of so many ranks together.
    """
    options = parse_options(["--batch_size", str(batch)])
    digits = load_digits(options.data_dir, fake)
    model: nn.Module = build_model(options.seed)
    places = [Place(rank, plain, torch.device("cpu")) for rank in range(plain)]
    if not plain:
        model = shard_model(model, options)
        places = [this_place()]
    lr = options.lr * places[0].world_size
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=options.momentum)
    batches = [make_batches(digits, place, options).epoch(0) for place in places]

    def step() -> Tensor:
        optimizer.zero_grad()
        losses = [_backward(_loss(model, next(each)) / len(batches)) for each in batches]
        optimizer.step()
        return torch.stack(losses).sum()

    return step


def _backward(loss: Tensor) -> Tensor:
    """Let go of a batch's activations before the next: the plain model has those of all ranks."""
    loss.backward()
    return loss.detach()


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """Each rank's part by itself, as BatchNorm takes the statistics of a part."""
    images, labels = batch
    return F.nll_loss(model(normalize(images)).float(), labels)
