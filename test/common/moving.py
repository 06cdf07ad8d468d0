"""A job that moves from ranks of XLA to torch's ``fully_shard`` and back, and the same job unmoved.

    python -m test.common.moving FOLDER RANK   (a process of gloo; the job is in FOLDER/move.json)

Imports no torch_xla, as the processes of gloo may be of an environment without it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

ROWS = 12  # of a batch, of all ranks together
WIDTH, WORDS, LENGTH = 24, 29, 6
PARTIAL: dict[str, Any] = {"allow_partial_load": True}


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

    def forward(self, tokens: Tensor, *targets: Tensor) -> Tensor:
        """Scores, or what a head that is given targets computes."""
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x * WIDTH**-0.5, *targets)  # losses of about 3


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is sharded on ranks of XLA.

    Args:
        recipe: "wrapper", "fully_shard", "streamed" (embedding and head, by ``parallelize``, or for
            the own model by hand), or a recipe of ``parallelize``.
        model: "own", or "llama" of transformers; with both, weights are tied and some are frozen.
        compute: dtype in which units compute.
    """

    recipe: str
    model: str = "own"
    compute: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """As torch has it."""
        found: torch.dtype = getattr(torch, self.compute)
        return found

    @property
    def streams_by_hand(self) -> bool:
        """Whether ranks of XLA have modules of this package in their model."""
        return (self.recipe, self.model) == ("streamed", "own")

    def build(self) -> Any:
        """The plain model."""
        torch.manual_seed(0)
        return Net() if self.model == "own" else build_llama()


def build_llama() -> Any:
    from test.common import hf_jobs

    model = hf_jobs.build_llama(vocab_size=WORDS)
    model.model.norm.weight.requires_grad_(False)
    return model


def blocks_of(model: Any) -> Any:
    """The list of a model's blocks."""
    return model.blocks if isinstance(model, Net) else model.model.layers


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


def loss_of(model: Any, tokens: Tensor, job: Job) -> Tensor:
    loss: Tensor
    if job.model == "llama":
        loss = model(input_ids=tokens, labels=tokens).loss
        return loss
    if job.streams_by_hand and tokens.device.type == "xla":
        loss = model(tokens[:, :-1], tokens[:, 1:])
        return loss
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train_plain(job: Job, steps: int) -> list[float]:
    """The losses of one process."""
    model = job.build()
    return list(_losses(InDtype(model, job.dtype), build_optimizer(model), range(steps), job))


class InDtype:
    """A model that computes with copies of its parameters in another dtype, as units do."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype is torch.float32:
            return self._model(*args, **kwargs)
        cast = {name: p.to(self._dtype) for name, p in self._model.named_parameters()}
        return torch.func.functional_call(self._model, cast, args, kwargs)


def _losses(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: range,
    job: Job,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[float]:
    for step in steps:
        loss = loss_of(model, batch(step, rank, ranks), job)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


# ---------------------------------------------------------------- on ranks of XLA


def train_here(rank: int, job: Job, first: int, last: int, load: str, save: str) -> list[float]:
    """This rank's losses in some steps of the job.

    Args:
        rank: of the caller.
        job: to train.
        first: step.
        last: step after the last one.
        load: run to go on with; "" to begin.
        save: run to save to.
    """
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import load_checkpoint, save_checkpoint

    model, optimizer = sharded_here(job)
    if load:
        load_checkpoint(load, model, optimizer)
    losses = []
    for step in range(first, last):
        tokens = batch(step, rank, xr.world_size()).to(torch_xla.device())
        loss = loss_of(model, tokens, job)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    save_checkpoint(save, model, optimizer, step=last)
    return losses


def sharded_here(job: Job) -> tuple[Any, Any]:
    """Model and optimizer on a rank of XLA."""
    from xla_fsdp import (
        MixedPrecisionPolicy,
        Recipe,
        XlaFullyShardedDataParallel,
        fully_shard,
        one_rank_at_a_time,
        parallelize,
    )
    from xla_fsdp.wrap import transformer_auto_wrap_policy

    with one_rank_at_a_time():
        model = job.build()
    if job.streams_by_hand:
        return streamed_by_hand(model, job)
    if job.recipe == "wrapper":
        classes = {type(blocks_of(model)[0])}
        model = XlaFullyShardedDataParallel(
            model,
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
            compute_dtype=job.dtype,
        )
        return model, build_optimizer(model)
    if job.recipe == "fully_shard":
        policy = MixedPrecisionPolicy(param_dtype=job.dtype)
        for block in blocks_of(model):
            fully_shard(block, mp_policy=policy)
        model = fully_shard(model, mp_policy=policy)
        return model, build_optimizer(model)
    streamed = {"streamed_embedding": True, "streamed_head": True}
    own = streamed if job.recipe == "streamed" else {}
    name = "lean" if own else job.recipe
    recipe = Recipe(name, compute_dtype=job.compute, **own)  # type: ignore[arg-type]
    model, optimizer, _ = parallelize(model, build_optimizer(model), recipe)
    return model, optimizer


def streamed_by_hand(model: Net, job: Job) -> tuple[Any, Any]:
    """Embedding and head in pieces, which stay tied, and the blocks in stacks."""
    from xla_fsdp import (
        LinearCrossEntropy,
        StreamedEmbedding,
        XlaFullyShardedDataParallel,
        scan_blocks,
    )

    wrap = partial(XlaFullyShardedDataParallel, compute_dtype=job.dtype, shard_param_on_dim_0=True)
    embed = StreamedEmbedding.from_embedding(model.embed, pieces=2)
    head = LinearCrossEntropy.from_linear(model.head, pieces=2)
    model.embed, model.head = wrap(embed), wrap(head)
    model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
    scan_blocks(model.blocks, stacked=True)
    sharded = wrap(model)
    return sharded, build_optimizer(sharded)


# ---------------------------------------------------------------- in a process of gloo


def train_there(folder: Path, rank: int) -> None:
    """Go on with a job that DCP's directory ``load`` holds; write losses and the directory
    ``save``."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    move = json.loads((folder / "move.json").read_text())
    job, ranks = Job(**move["job"]), move["ranks"]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    mesh = dist.init_device_mesh("cpu", (ranks,))
    model: Any = job.build()
    policy = MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = build_optimizer(model)
    if move["optimizer"]:
        content = state_there(model, optimizer)
        dcp.load(content, checkpoint_id=move["load"])
        set_state_dict(
            model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"]
        )
        dcp.save(state_there(model, optimizer), checkpoint_id=f"{folder}/arrived")
    else:  # tied weights are saved under one name, which is enough
        content = {"model": get_model_state_dict(model)}
        dcp.load(content, checkpoint_id=move["load"], planner=DefaultLoadPlanner(**PARTIAL))
        set_model_state_dict(model, content["model"])
    steps = range(move["first"], move["last"])
    losses = list(_losses(model, optimizer, steps, job, rank, ranks))
    dcp.save(state_there(model, optimizer), checkpoint_id=move["save"])
    (folder / f"losses{rank}.json").write_text(json.dumps([torch.__version__, losses]))
    dist.barrier()
    dist.destroy_process_group()


def state_there(model: Any, optimizer: Any) -> dict[str, Any]:
    """What torch saves."""
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    train_there(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # where the machine is busy, a thread of torch's may abort the end of Python
