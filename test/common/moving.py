"""A job that moves from ranks of XLA to torch's ``fully_shard`` and back, and the same job unmoved.

    python -m test.common.moving FOLDER RANK   (a process of gloo; the job is in FOLDER/move.json)

Imports no torch_xla, as the processes of gloo may be of an environment without it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

ROWS = 12  # of a batch, of all ranks together
WIDTH, WORDS, LENGTH = 24, 29, 6


class Block(nn.Module):
    """An MLP with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head that are tied; places are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x * WIDTH**-0.5)  # losses of about 3


def build_model() -> Net:
    torch.manual_seed(0)
    return Net()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # By name: shards of the wrapper are vectors.
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    matrix = {name: name.endswith("weight") and "norm" not in name for name, _ in trained}
    groups = [[p for name, p in trained if matrix[name] == whether] for whether in (True, False)]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=2e-3,
    )


def batch(step: int, rank: int, num_ranks: int) -> Tensor:
    """Tokens (``ROWS / num_ranks``, ``LENGTH + 1``) of a rank in a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
    return tokens[rank::num_ranks]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def train_plain(steps: int) -> list[float]:
    """The losses of one process."""
    model = build_model()
    optimizer = build_optimizer(model)
    return list(_losses(model, optimizer, range(steps)))


def _losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, ranks: int = 1
) -> Iterator[float]:
    for step in steps:
        loss = loss_of(model, batch(step, rank, ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


# ---------------------------------------------------------------- on ranks of XLA


def train_here(rank: int, recipe: str, first: int, last: int, load: str, save: str) -> list[float]:
    """This rank's losses in some steps of the job.

    Args:
        rank: of the caller.
        recipe: "wrapper", or a recipe of ``parallelize``.
        first: step.
        last: step after the last one.
        load: run to go on with; "" to begin.
        save: run to save to.
    """
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import (
        XlaFullyShardedDataParallel,
        load_checkpoint,
        one_rank_at_a_time,
        parallelize,
        save_checkpoint,
    )
    from xla_fsdp.wrap import transformer_auto_wrap_policy

    with one_rank_at_a_time():
        model: Any = build_model()
    if recipe == "wrapper":
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        model = XlaFullyShardedDataParallel(model, auto_wrap_policy=policy)
        optimizer = build_optimizer(model)
    else:
        model, optimizer, _ = parallelize(model, build_optimizer(model), recipe)
    if load:
        load_checkpoint(load, model, optimizer)
    losses = []
    for step in range(first, last):
        tokens = batch(step, rank, xr.world_size()).to(torch_xla.device())
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    save_checkpoint(save, model, optimizer, step=last)
    return losses


# ---------------------------------------------------------------- in a process of gloo


def train_there(folder: Path, rank: int) -> None:
    """Go on with a job that DCP's directory ``load`` holds; write losses and the directory
    ``save``."""
    from torch.distributed.fsdp import fully_shard

    job = json.loads((folder / "move.json").read_text())
    ranks = job["ranks"]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    mesh = dist.init_device_mesh("cpu", (ranks,))
    model: Any = build_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model)
    model_state, optim_state = get_state_dict(model, optimizer)
    content = {"model": model_state, "optim": optim_state}
    dcp.load(content, checkpoint_id=job["load"])
    set_state_dict(
        model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"]
    )
    losses = list(_losses(model, optimizer, range(job["first"], job["last"]), rank, ranks))
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=job["save"])
    (folder / f"losses{rank}.json").write_text(json.dumps([torch.__version__, losses]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    train_there(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # where the machine is busy, a thread of torch's may abort the end of Python
