"""Stacks of fewer matrices than ranks: cut between rows of these, so that no rank holds padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scenarios import fsdp, make
from xla_fsdp.distributed.shard_layout import LANES, has_few_rows, shard_multiple

WIDTH, INNER, MATRICES = LANES, 32, 3
SHAPE = (MATRICES, INNER, WIDTH)


class Stack(nn.Module):
    """All of a stack's matrices, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SHAPE) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.weight:
            x = x + torch.tanh(x @ matrix.t()) @ matrix
        return x


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stack() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(rank: int, folder: str) -> dict[str, Any]:
    """One step by each way; a checkpoint of it, loaded where ``folder`` has one."""
    import torch_xla

    from xla_fsdp import (
        full_state_dict,
        load_checkpoint,
        optim_state_dict,
        parallelize,
        save_checkpoint,
    )
    from xla_fsdp.fsdp.engine.param import held_shape

    x = batch(rank).to(torch_xla.device())
    found: dict[str, Any] = {}
    for way in ("units", "loop"):
        model = make(Stacks)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        if way == "loop":
            model, optimizer, _ = parallelize(model, optimizer, "fast")
        else:
            for number, block in enumerate(model.blocks):
                model.blocks[number] = fsdp(block, shard_param_on_dim_0=True)
            model = fsdp(model, shard_param_on_dim_0=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        found[f"{way} shapes"] = [tuple(held_shape(each)) for each in model.parameters()]
        model(x).square().mean().backward()
        optimizer.step()
        found[way] = {name: each.cpu() for name, each in full_state_dict(model).items()}
        found[f"{way} momentum"] = momentum(optim_state_dict(model, optimizer))
        place = Path(folder, way)
        if not place.exists():
            save_checkpoint(place, model, optimizer, step=1)
            place = Path(folder, "units")
        load_checkpoint(place, model, optimizer)
        loaded = full_state_dict(model).items()
        found[f"{way} loaded"] = {name: each.cpu() for name, each in loaded}
        found[f"{way} momentum loaded"] = momentum(optim_state_dict(model, optimizer))
    return found


def momentum(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: each["momentum_buffer"] for name, each in state["state"].items()}


@cached_outcome
def outcome() -> dict[int, dict[str, Any]]:
    """By number of ranks: two save, and their loop loads what their units have saved; three, of
    which each has a matrix, load what two have saved in the same way."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return {ranks: run_on_ranks(train, ranks, folder)[0] for ranks in (2, 3)}


def plain(num_ranks: int) -> dict[str, Tensor]:
    model = make(Stacks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.stack([model(batch(r)).square().mean() for r in range(num_ranks)]).mean().backward()
    optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(("ranks", "way"), [(2, "units"), (2, "loop"), (3, "units"), (3, "loop")])
def test_numbers_are_those_of_the_plain_model(way: str, ranks: int) -> None:
    assert_close(outcome()[ranks][way], plain(ranks), atol=1e-6, of_largest=1e-5)


def test_ranks_hold_no_padding() -> None:
    half = MATRICES * INNER * WIDTH // 2
    assert outcome()[2]["units shapes"] == [(half,)] * 2
    assert outcome()[2]["loop shapes"] == [(2, half // WIDTH, WIDTH)]  # as they are sent
    assert outcome()[3]["units shapes"] == [(1, INNER, WIDTH)] * 2


def test_other_ranks_load_their_checkpoints() -> None:
    found = outcome()
    for ranks, way, saved in ((2, "loop", "units"), (3, "units", "units"), (3, "loop", "loop")):
        for what in ("", " momentum"):
            own, expected = found[ranks][f"{way}{what} loaded"], found[2][f"{saved}{what}"]
            assert_close(own, expected, atol=0)


@pytest.mark.parametrize(
    ("shape", "num_shards", "few", "multiple"),
    [
        ((8, 7168, 1024), 64, True, LANES),  # 896 rows a rank as it is
        ((8, 1000, 1024), 64, True, 8 * 1024),  # 128 rows a rank for 125
        ((8, 7168, 1024), 4, False, LANES),
        ((9, 7168, 1024), 4, True, LANES),
        ((8, 7168, 1000), 64, False, LANES),  # rows are no whole lanes
        ((8, 1024), 64, False, LANES),
    ],
)
def test_where_matrices_are_too_few(
    shape: tuple[int, ...], num_shards: int, few: bool, multiple: int
) -> None:
    assert has_few_rows(shape, num_shards) is few
    assert shard_multiple(shape, num_shards) == multiple
