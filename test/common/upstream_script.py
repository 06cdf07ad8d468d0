"""A training script as people wrote them for torch_xla: it knows nothing of xla_fsdp.

    python -m xla_fsdp.launch --compat --num_ranks 2 test/common/upstream_script.py --out out.json

Wraps by policy or by hand with rematerialization, trains on torch_xla's fake data, tests and saves
shards by ``xm.save`` to the same files after every epoch, merges them on the master right after the
last save, with which other ranks are late, loads the result into the plain model, and writes what
it saw.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814
from torch_xla.distributed.fsdp import checkpoint_module, consolidate_sharded_model_checkpoints
from torch_xla.distributed.fsdp.utils import apply_xla_patch_to_nn_linear
from torch_xla.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

ROWS, STEPS, EPOCHS = 8, 3, 2
LATE = 0.5  # seconds
POLICIES = {
    "size": partial(size_based_auto_wrap_policy, min_num_params=100),
    "type": partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
}


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, kernel_size=3)
        self.bn = nn.BatchNorm2d(3)
        self.fc1 = nn.Linear(3 * 36, 20)
        self.fc2 = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(F.relu(self.conv(x)))
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def wrap(model: nn.Module, flags: argparse.Namespace) -> FSDP:
    """By hand, inner modules first, or by a policy."""

    def remat(module: nn.Module, *args: Any, **kwargs: Any) -> FSDP:
        return FSDP(checkpoint_module(apply_xla_patch_to_nn_linear(module)), *args, **kwargs)

    options: Any = {
        "compute_dtype": getattr(torch, flags.compute_dtype),
        "fp32_reduce_scatter": flags.fp32_reduce_scatter,
        "flatten_parameters": flags.flatten_parameters,
        "pin_layout_in_collective_ops": False,
    }
    if flags.policy == "none":
        for name in ("conv", "fc1", "fc2"):
            setattr(model, name, remat(getattr(model, name), **options))
        return FSDP(model, **options)
    policy = POLICIES[flags.policy]
    return FSDP(model, auto_wrap_policy=policy, auto_wrapper_callable=remat, **options)


def train(flags: argparse.Namespace) -> None:
    device = torch_xla.device()
    torch.manual_seed(1)
    images = torch.linspace(-1, 1, ROWS * 64).reshape(ROWS, 1, 8, 8)
    data = (images, torch.arange(ROWS, dtype=torch.int64))
    loader = pl.MpDeviceLoader(xu.SampleGenerator(data=data, sample_count=STEPS), device)
    model = wrap(Digits(), flags)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses: list[float] = []
    accuracies = []
    for epoch in range(EPOCHS):
        train_epoch(model, optimizer, loader, losses)
        accuracies.append(accuracy(model, loader))
        if epoch == EPOCHS - 1 and not xm.is_master_ordinal(local=False):
            time.sleep(LATE)
        save(flags, model, optimizer)
    merge(flags)
    compare(flags, model, images.to(device), {"losses": losses, "accuracies": accuracies})


def train_epoch(model: FSDP, optimizer: Any, loader: Any, losses: list[float]) -> None:
    model.train()
    tracker = xm.RateTracker()
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = nn.NLLLoss()(model(inputs), target)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        tracker.add(ROWS)
        xm.add_step_closure(lambda value: losses.append(value.item()), args=(loss.detach(),))


def accuracy(model: nn.Module, loader: Any) -> float:
    model.eval()
    total = 0
    correct: Any = 0
    for inputs, target in loader:
        guess = model(inputs).max(1, keepdim=True)[1]
        correct += guess.eq(target.view_as(guess)).sum()
        total += inputs.size()[0]
    return xm.mesh_reduce("accuracy", 100.0 * correct.item() / total, np.mean)


def save(flags: argparse.Namespace, model: Any, optimizer: Any) -> None:
    rank, world = xr.global_ordinal(), xr.world_size()
    ckpt = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": optimizer.state_dict(),
    }
    xm.save(ckpt, f"{flags.ckpt_prefix}_rank-{rank:08d}-of-{world:08d}.pth", master_only=False)


def merge(flags: argparse.Namespace) -> None:
    if xm.is_master_ordinal(local=False):
        consolidate_sharded_model_checkpoints(flags.ckpt_prefix, "_rank-*-of-*.pth")
    xm.rendezvous("merged")


def compare(flags: argparse.Namespace, model: Any, images: torch.Tensor, seen: Any) -> None:
    plain = Digits().to(images.device)
    plain.load_state_dict(torch.load(f"{flags.ckpt_prefix}_consolidated.pth")["model"])
    model.eval()
    plain.eval()
    with torch.no_grad():
        apart = (model(images) - plain(images)).abs().max().item()
    ranks = xm.mesh_reduce("ranks", 1, sum)
    if xm.is_master_ordinal():
        with open(flags.out, "w") as out:
            found = {"home": FSDP.__module__, "apart": apart, "ranks": ranks, **seen}
            json.dump({**found, "times run": os.environ["TIMES_RUN"]}, out)


def _mp_fn(index: int, flags: argparse.Namespace) -> None:
    train(flags)


parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--ckpt_prefix")
parser.add_argument("--policy", choices=["none", *POLICIES], default="size")
parser.add_argument("--compute_dtype", default="float32")
parser.add_argument("--fp32_reduce_scatter", action="store_true")
parser.add_argument("--flatten_parameters", action="store_true")
FLAGS, rest = parser.parse_known_args()
sys.argv = [sys.argv[0], *rest]  # as torch_xla's own example scripts do
os.environ["TIMES_RUN"] = os.environ.get("TIMES_RUN", "") + "x"

if __name__ == "__main__":
    xmp.spawn(_mp_fn, args=(FLAGS,))
