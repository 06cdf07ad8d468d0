"""State of optimizers that is made before their first step is traced: one program for all steps,
and the same numbers as with torch's way, which makes two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.ranks import cached_outcome, run_on_ranks
from test.common.recipes import WIDTH, Block, Transformer
from test.common.scenarios import Step, fsdp, make, nested, one_step

STEPS = 4


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(inner=42) for _ in range(3)])  # on up to 3 ranks
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-2)


def plain() -> tuple[Step, Any]:
    model = nested(make(Blocks))
    optimizer = adamw(model.parameters())
    return one_step(model, optimizer), optimizer


def fully_sharded() -> tuple[Step, Any]:
    from xla_fsdp import fully_shard

    model = make(Blocks).to("xla")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return one_step(model, optimizer), optimizer


def recomputed() -> tuple[Step, Any]:
    from xla_fsdp import checkpoint_module

    model = make(Blocks)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fsdp(checkpoint_module(block))
    optimizer = adamw(fsdp(model).parameters())
    return one_step(model, optimizer), optimizer


def accumulated() -> tuple[Step, Any]:
    """Two batches for a step: a program for each."""
    import torch_xla

    model = nested(make(Blocks))
    optimizer = adamw(model.parameters())

    def step(x: Tensor) -> Tensor:
        with model.no_sync():
            model(x * 0.5).square().mean().backward()
        torch_xla.sync()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def scanned(stacked: bool = False) -> tuple[Step, Any]:
    from xla_fsdp import scan_blocks

    model = nested(make(Blocks), **({"shard_param_on_dim_0": True} if stacked else {}))
    scan_blocks(model.module.blocks, stacked=stacked)
    optimizer = adamw(model.parameters())
    return one_step(model, optimizer), optimizer


def stepped_in_backward() -> tuple[Step, Any]:
    from xla_fsdp.optim import step_in_backward

    model = nested(make(Blocks))
    optimizer = adamw(model.parameters())
    step_in_backward(model, optimizer)
    return one_step(model, optimizer), optimizer


def streamed(recipe: str) -> tuple[Step, Any]:
    from xla_fsdp import LinearCrossEntropy, parallelize

    class Streamed(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.head = LinearCrossEntropy.from_linear(self.head)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x, ids)

    model = make(Streamed)
    model, optimizer, done = parallelize(model, adamw(model.parameters()), recipe)
    assert "  streamed_head: head" in done._report

    def step(x: Tensor) -> Tensor:
        loss = model((x.abs() * 5).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def zero() -> tuple[Step, Any]:
    from xla_fsdp.optim import ZeroRedundancyOptimizer

    model = make(Blocks).to("xla")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return one_step(model, optimizer), optimizer


def tensor_parallel() -> tuple[Step, Any]:
    import torch_xla.runtime as xr

    from xla_fsdp import init_mesh
    from xla_fsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_mesh((1, xr.world_size()), ("shard", "tensor"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    model = parallelize_module(make(Blocks), mesh["tensor"], plan).to("xla")
    optimizer = adamw(model.parameters())
    return one_step(model, optimizer), optimizer


def rounded() -> tuple[Step, Any]:
    """16-bit parameters without master weights."""
    from xla_fsdp.optim import HighPrecisionOptimizer

    model = nested(make(Blocks).bfloat16())
    optimizer = HighPrecisionOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, master_weights=False,
        stochastic_rounding=True,
    )  # fmt: skip
    step = one_step(model, optimizer)
    return lambda x: step(x.bfloat16()).float(), optimizer


def averaged() -> tuple[Step, Any]:
    from xla_fsdp.optim import PeriodicModelAverager, PostLocalSGDOptimizer

    model = make(Blocks).to("xla")
    local = torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.5)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=4, warmup_steps=100))
    return one_step(model, optimizer), optimizer


CASES: dict[str, Callable[[], tuple[Step, Any]]] = {
    "plain": plain,
    "fully_shard": fully_sharded,
    "recomputed": recomputed,
    "accumulated": accumulated,
    "scanned": scanned,
    "stacked": lambda: scanned(stacked=True),
    "step_in_backward": stepped_in_backward,
    "fast": lambda: streamed("fast"),
    "lean": lambda: streamed("lean"),
    "zero": zero,
    "tensor parallel": tensor_parallel,
    "rounded": rounded,
    "averaged": averaged,
}


READY = {plain, recomputed}
"""What others compute when they are made is in the first step's program, unless a script lets
it be computed before."""


def compiled() -> int:
    import torch_xla.debug.metrics

    found = torch_xla.debug.metrics.metric_data("CompileTime")
    return found[0] if found else 0


def train(rank: int, in_time: bool) -> dict[str, Any]:
    from xla_fsdp.optim import optimizers

    if not in_time:  # as torch does; in a process of its own
        optimizers.is_known = lambda optimizer: False  # type: ignore[assignment]
    return {name: train_one(build) for name, build in CASES.items()}


def train_one(build: Callable[[], tuple[Step, Any]]) -> tuple[list[float], list[int], int]:
    """Return losses, and how many programs each step has compiled; how many states there are."""
    import torch_xla

    step, optimizer = build()
    if build not in READY:
        torch_xla.sync()
    losses, counts = [], []
    for number in range(STEPS):
        x = torch.linspace(-1, 1 + number, 4 * WIDTH).reshape(4, WIDTH).to("xla")
        before = compiled()
        loss = step(x)
        torch_xla.sync()
        counts.append(compiled() - before)
        losses.append(loss.item())
    return losses, counts, len([state for state in optimizer.state.values() if state])


@cached_outcome
def outcome(num_ranks: int, in_time: bool) -> dict[str, Any]:
    return run_on_ranks(train, num_ranks, in_time)[0]


RANKS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_first_step_has_the_program_of_all(num_ranks: int, name: str) -> None:
    losses, counts, held = outcome(num_ranks, True)[name]
    expected, other_counts, also_held = outcome(num_ranks, False)[name]
    assert losses == expected
    assert held == also_held
    assert counts[1:] == [0, 0, 0]
    # fully_shard on the device counts 2 after other models and 1 alone; why is not known.
    most = 2 if name in ("accumulated", "fully_shard") else 1
    assert 1 <= counts[0] <= min(most, other_counts[0])
    assert other_counts[1] == 1  # what is not done any more
