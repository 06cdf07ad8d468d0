"""Gradients of large matrices in a loop, which are products that its rings sum up part by part."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.ranks import cached_outcome, run_on_ranks
from xla_fsdp import name_activation

WIDTH, HIDDEN, ROWS, STEPS = 128, 384, 4, 2


class Block(nn.Module):
    """Two layers, whose weights are used in one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden = name_activation(torch.tanh(self.up(x)), "hidden")
        return x + self.down(hidden)


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return super().forward(x.unflatten(0, (2, -1))).flatten(0, 1)


class OtherWays(Block):
    """Weights that are factors of other functions, too, and views of them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(weight=self.up.weight, input=x)) + x @ self.up.weight.t()
        rows = F.linear(hidden, self.down.weight[: WIDTH // 2])
        one = F.linear(hidden[0], self.down.weight)
        return x + self.down(hidden) + self.down.weight.mean() + rows.sum() * 0.01 + one


class Differentiating(Block):
    """Computes a gradient inside, and goes on with it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            [grad] = torch.autograd.grad(torch.tanh(self.up(z)).sum(), z, create_graph=True)
        return super().forward(x) + 0.1 * grad


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down.weight.requires_grad_(False)


class Damping(Block):
    """Has a hook of its first weight's gradient: one, of each tensor that it is."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.up.weight
        if weight.requires_grad and not hasattr(weight, "damped"):
            weight.damped = weight.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


CASES: dict[str, tuple[type[Block], dict[str, Any]]] = {
    "plain": (Block, {}),
    "stacked": (Block, {"stacked": True}),
    "all kept": (Block, {"remat": "none"}),
    "one kept": (Block, {"remat": ["hidden"]}),
    "twice": (Twice, {}),
    "other ways": (OtherWays, {"remat": "none"}),
    "differentiating": (Differentiating, {}),
    "frozen": (Frozen, {}),
    "hooks": (Damping, {"remat": "none"}),
}


def made(block: type[Block]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(3)))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


@cache  # once for all ranks, which are threads of one process
def as_if_large(reuse: int) -> list[int]:
    """Let loops take all matrices for large, and go around rings; return a list of the matrices
    whose gradients were reduced as products, which grows."""
    from xla_fsdp.distributed import collectives
    from xla_fsdp.scan import weights

    def in_rings(self: Any) -> Any:
        return collectives.RingCollectives(self.groups, self.rank, self.num_shards, self._steps)

    reduce_matrix, reduced = weights.BlockWeights._reduce_matrix, []

    def noted(self: Any, at: int, *args: Any) -> Tensor:
        reduced.append(at)
        return reduce_matrix(self, at, *args)

    weights.TOGETHER, weights.PART_REUSE, collectives.RING = 1, reuse, 1
    collectives.XlaCollectives.in_rings = in_rings  # type: ignore[method-assign]
    weights.BlockWeights._reduce_matrix = noted  # type: ignore[method-assign]
    return reduced


def trained(rank: int, reuse: int) -> tuple[dict[str, dict[str, Tensor]], set[str]]:
    """Return each case's parameters after training, and the cases whose loop has reduced gradients
    as products."""
    reduced, found, with_products = as_if_large(reuse), {}, set()
    for name, (block, options) in CASES.items():
        before = len(reduced)
        found[name] = train(rank, block, options)
        if len(reduced) > before:
            with_products.add(name)
    return found, with_products


def train(rank: int, block: type[Block], options: dict[str, Any]) -> dict[str, Tensor]:
    import torch_xla

    from xla_fsdp import full_state_dict, fully_shard, scan_blocks

    model: Any = made(block).to(torch_xla.device())
    for each in model:
        fully_shard(each)
    fully_shard(model)
    scan_blocks(model, gather_once_below=WIDTH * WIDTH, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        model(batch(step, rank).to(torch_xla.device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    return {key: each.cpu() for key, each in full_state_dict(model).items()}


@cached_outcome
def outcome(num_ranks: int, reuse: int) -> Any:
    return run_on_ranks(trained, num_ranks, reuse)[0]


def expected(block: type[Block], num_ranks: int) -> dict[str, Tensor]:
    model = made(block)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        for rank in range(num_ranks):  # apart, as some blocks mix the rows of a batch
            (model(batch(step, rank)).square().mean() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("reuse", [1, 60])  # of both, or from two ranks on of the second one alone
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_plain_model(case: str, num_ranks: int, reuse: int) -> None:
    states, with_products = outcome(num_ranks, reuse)
    assert case in with_products
    for name, value in expected(CASES[case][0], num_ranks).items():
        torch.testing.assert_close(
            states[case][name], value, msg=lambda text, n=name: f"{n}: {text}"
        )
