"""Ways to train that ``parity`` does not have, on a rank and plainly: ZeRO-1, post-local SGD, steps
in backward, a grad scaler, dropout, and experts that some ranks have no token for.

Functions of a rank return host values; ``plain_...`` is the same in the test's own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.models import CLASSES, FEATURES, Net, WideNet
from test.common.replicas import Tiny, batch, loss_of, on_device, train_replica, values
from test.common.scenarios import make, nested

STEPS = 5
ROUNDS = 6
REPLAYED = 2  # of these steps: three are traced, the second as gradients are there then
REPLAYED_IN_BACKWARD = 3  # no gradient is left


def adamw(params: Any) -> torch.optim.Optimizer:
    """The optimizer of most ways."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)  # of a zero gradient, only rounding is left


# ---------------------------------------------------------------- replicas


def zero(rank: int) -> dict[str, Any]:
    """ZeRO-1, with clipping."""
    from xla_fsdp.optim import ZeroRedundancyOptimizer

    make_optimizer = lambda params: ZeroRedundancyOptimizer(  # noqa: E731
        params, torch.optim.AdamW, lr=1e-2, eps=1e-3
    )
    model, optimizer, norms = train_replica(rank, make_optimizer, WideNet, clip=0.1)
    state = optimizer.consolidate_state_dict()
    return {"params": values(model), "norms": norms, "state": state}


def post_local_sgd(rank: int) -> list[list[Tensor]]:
    """Steps of each rank for itself, every second of which averages parameters."""
    import torch_xla

    from xla_fsdp.optim import PeriodicModelAverager, PostLocalSGDOptimizer

    model = on_device(Tiny)
    local = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2))
    history = []
    for step in range(ROUNDS):
        x = batch(step, rank).to(torch_xla.device())
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        torch_xla.sync()
        history.append(values(model))
    return history


def plain_local_sgd(num_ranks: int) -> list[list[list[Tensor]]]:
    """Parameters after each step, of each rank; steps 0, 2 and 4 average."""
    models = [make(Tiny) for _ in range(num_ranks)]
    history: list[list[list[Tensor]]] = [[] for _ in range(num_ranks)]
    for step in range(ROUNDS):
        for rank, model in enumerate(models):
            grads = torch.autograd.grad(loss_of(model, batch(step, rank)), [*model.parameters()])
            with torch.no_grad():
                for param, grad in zip(model.parameters(), grads, strict=True):
                    param -= 0.3 * grad
        if step % 2 == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([param.detach() for param in same]).mean(0)
                    for param in same:
                        param.copy_(mean)
        for rank, model in enumerate(models):
            history[rank].append([param.clone() for param in values(model)])
    return history


# ---------------------------------------------------------------- nodes of autograd


def unequal_nodes(rank: int) -> int:
    """How many nodes the autograd thread of this rank's device has made before it makes more of
    them than that of the rank before."""
    from xla_fsdp.xla.virtual_ranks import count_nodes

    found = count_nodes(rank, 0)
    count_nodes(rank, found + rank)
    return found


# ---------------------------------------------------------------- shards


def sharded(rank: int, way: str) -> dict[str, Tensor]:
    """The full state after the first and the last step of a sharded ``Net`` in this way, and then
    that of the optimizer."""
    import torch_xla

    from xla_fsdp import (
        ShardedGradScaler,
        compile_step,
        full_state_dict,
        optim_state_dict,
        scan_blocks,
    )
    from xla_fsdp.optim import step_in_backward

    model = nested(make(EXPERTS if way == "experts" else Net))
    if "stacked" in way:
        scan_blocks(model.blocks, stacked=True, gather_once_below=1)
    optimizer = adamw(model.parameters())
    if "in backward" in way:
        step_in_backward(model, optimizer)
    scaler = ShardedGradScaler(init_scale=2.0**10) if way == "scaler" else None

    def train(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    train_on = compile_step(train, state=[model, optimizer, scaler]) if "replayed" in way else train
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        train_on(*(each.to(torch_xla.device()) for each in labelled(step, rank)))
        torch_xla.sync()
        if step in (0, STEPS - 1):
            full = full_state_dict(model)
            found.update({f"step {step}: {name}": value.cpu() for name, value in full.items()})
    replays = REPLAYED_IN_BACKWARD if "in backward" in way else REPLAYED
    if "replayed" in way and train_on.replays != replays:
        raise AssertionError(f"{train_on.replays} replays; traced for {train_on.traces}")
    return {**found, **_by_name(optim_state_dict(model, optimizer)["state"])}


def plain(num_ranks: int, way: str) -> dict[str, Tensor]:
    """The same on the joined batch."""
    model = make(EXPERTS if way == "experts" else Net)
    optimizer = adamw(model.parameters())
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [labelled(step, rank) for rank in range(num_ranks)]
        torch.stack([F.cross_entropy(model(x), y) for x, y in parts]).mean().backward()
        optimizer.step()
        if step in (0, STEPS - 1):
            state = model.state_dict()
            found.update({f"step {step}: {name}": each.clone() for name, each in state.items()})
    return {**found, **_by_name({name: optimizer.state[p] for name, p in model.named_parameters()})}


def _by_name(states: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{key} of {name}": value.cpu()
        for name, state in states.items()
        for key, value in state.items()
    }


def labelled(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs [4, FEATURES] and labels [4] of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (4,), generator=generator)


class Experts(nn.Module):
    """Each row goes to one of several experts, by the sign of two features."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([torch.tanh(expert(x)) for expert in self.experts], 1)
        mask = F.one_hot(chosen_experts(x), len(self.experts)).to(x.dtype)
        return x + (outputs * mask[..., None]).sum(1)


def chosen_experts(x: Tensor) -> Tensor:
    """The number of the expert of each row."""
    return (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()


class ExpertNet(nn.Module):
    """Blocks of experts, of which a rank's four rows leave some without any."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts()])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


EXPERTS: Callable[[], nn.Module] = ExpertNet


# ---------------------------------------------------------------- dropout


class Dropped(nn.Module):
    """Ones, of which some are dropped, and a weight for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DROPPED))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5)


DROPPED = 512


def dropout(rank: int, seeds: str) -> list[dict[str, Tensor]]:
    """Masks, gradients and the steps' parameters of a sharded, rematerialized weight."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module, full_state_dict

    model = XlaFullyShardedDataParallel(checkpoint_module(Dropped()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # no weight becomes 0
    xm.set_rng_state(7 if seeds == "equal" else 7 + rank)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        output = model(torch.ones(DROPPED).to(torch_xla.device()))
        output.sum().backward()
        optimizer.step()
        output = output.detach()
        torch_xla.sync()
        found.append({"output": output.cpu(), **full_state_dict(model)})
    return found


def expected_weights(ranks: list[list[dict[str, Tensor]]]) -> Iterator[Tensor]:
    """The weight after each step, from the masks that the ranks' outputs show."""
    weight = torch.ones(DROPPED)
    for step in range(len(ranks[0])):
        kept = [rank[step]["output"] != 0 for rank in ranks]
        weight = weight - 0.1 * 2.0 * torch.stack(kept).float().mean(0)
        yield weight
