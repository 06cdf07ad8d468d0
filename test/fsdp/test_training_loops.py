"""Loops that people write: gradients of gradients, quantization in training, sparse embeddings.

Each rank's losses are compared with those of plain copies of the model, one for each rank, whose
gradients are averaged. LBFGS is in ``test/optim/test_zero.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn import functional as F

from test.common.ranks import ChildError, run_on_ranks
from test.common.scenarios import make

RANKS = 2
STEPS = 4
WIDTH = 8
WAYS = ("wrapper", "fully_shard", "lean")


class Net(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor, task: Tensor | None = None) -> Tensor:
        x = self.emb(ids).mean(1)
        x = x if task is None else x + task
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build(kind: str) -> nn.Module:
    model = make(lambda: Net(sparse=kind == "sparse"))
    if kind == "quantized":
        with warnings.catch_warnings():  # torch.ao is deprecated
            warnings.simplefilter("ignore")
            for block in model.blocks:
                block.qconfig = quantization.get_default_qat_qconfig("fbgemm")
            model = quantization.prepare_qat(model.train())
    return model


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 11, (4, 3), generator=generator)
    return ids, torch.randint(0, 5, (4,), generator=generator)


def loss_of(kind: str, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    if kind != "meta-learning":
        return F.cross_entropy(model(ids), labels)
    # As MAML, with a vector of the task: the step of the inner loop is differentiated, too.
    task = torch.zeros(WIDTH, device=ids.device).requires_grad_()
    inner = F.cross_entropy(model(ids, task), labels)
    [grad] = torch.autograd.grad(inner, task, create_graph=True)
    return F.cross_entropy(model(ids, task - 0.5 * grad), labels)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sharded(way: str, model: Any) -> tuple[Any, torch.optim.Optimizer]:
    from xla_fsdp import XlaFullyShardedDataParallel, fully_shard, parallelize

    if way == "lean":
        optimizer = optimizer_of(model)
        return parallelize(model, optimizer, "lean").model, optimizer
    shard = XlaFullyShardedDataParallel if way == "wrapper" else fully_shard
    model.to("xla")
    for number, block in enumerate(model.blocks):
        model.blocks[number] = shard(block)
    model = shard(model)
    return model, optimizer_of(model)


def train(rank: int, kind: str, way: str) -> list[float]:
    import torch_xla

    model, optimizer = sharded(way, build(kind))
    losses = []
    for step in range(STEPS):
        ids, labels = (each.to("xla") for each in data(step, rank))
        optimizer.zero_grad()
        loss = loss_of(kind, model, ids, labels)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def train_copies(kind: str) -> list[list[float]]:
    models = [build(kind) for _ in range(RANKS)]
    optimizers = list(map(optimizer_of, models))
    losses: list[list[float]] = [[] for _ in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss = loss_of(kind, model, *data(step, rank))
            loss.backward()
            losses[rank].append(loss.item())
        for params in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([param.grad for param in params]).mean(0)
            for param in params:
                param.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["meta-learning", "quantized"])
def test_losses_are_those_of_plain_copies(kind: str, way: str) -> None:
    found = run_on_ranks(train, RANKS, kind, way)
    for mine, plain in zip(found, train_copies(kind), strict=True):
        assert mine == pytest.approx(plain, abs=1e-5)


@pytest.mark.slow
def test_torch_xla_has_no_sparse_gradients() -> None:
    """Of no model, sharded or not."""
    with pytest.raises(ChildError, match="SparseXLA"):
        run_on_ranks(train, RANKS, "sparse", "fully_shard")
