"""Train a replicated model on ranks with any optimizer, and plainly on the joined batch.

``train_replica`` runs on a rank, with the rank's own part of every batch; ``train_plain`` in the
test's own process. Both start from the same values and return the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from test.common.models import FEATURES, WIDTH, WideNet
from test.common.scenarios import make

STEPS = 3
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Tiny(nn.Module):
    """A matrix, a vector and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inp(x)) * self.scale


class Matrix(nn.Module):
    """Nothing but a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inp(x))


def batch(step: int, rank: int) -> Tensor:
    """Return a rank's inputs [3, FEATURES] of a step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, FEATURES, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss whose gradient is a mean over rows."""
    return model(x).square().sum(1).mean()


def on_device(model_class: Callable[[], nn.Module]) -> Any:
    """Build the model on this rank's device."""
    import torch_xla

    return make(model_class).to(torch_xla.device())


def train_replica(
    rank: int,
    make_optimizer: MakeOptimizer,
    model_class: Callable[[], nn.Module] = WideNet,
    *,
    steps: Sequence[int] = range(STEPS),
    clip: float | None = None,
    before_step: Callable[[Any], Any] = lambda optimizer: None,
) -> tuple[Any, Any, list[float]]:
    """Train on a rank; returns the model, the optimizer and the norms before clipping."""
    import torch_xla

    model = on_device(model_class)
    optimizer: Any = make_optimizer(model.parameters())
    norms = []
    for step in steps:
        x = batch(step, rank).to(torch_xla.device())

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        if isinstance(getattr(optimizer, "inner", None), torch.optim.LBFGS):
            optimizer.step(closure)
            continue
        closure()
        before_step(optimizer)
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        torch_xla.sync()
    return model, optimizer, [norm.item() for norm in norms]


def train_plain(
    num_ranks: int,
    make_optimizer: MakeOptimizer,
    model_class: Callable[[], nn.Module] = WideNet,
    *,
    steps: Sequence[int] = range(STEPS),
    clip: float | None = None,
    prepare: Callable[[Any], Any] = lambda optimizer: None,
) -> tuple[Any, Any, list[float]]:
    """Train in plain torch on the joined batches of all ranks; returns the same three."""
    model = make(model_class)
    optimizer: Any = make_optimizer(model.parameters())
    prepare(optimizer)
    norms = []
    for step in steps:

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([loss_of(model, batch(step, r)) for r in range(num_ranks)]).mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
            continue
        closure()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
    return model, optimizer, norms


def values(model: nn.Module) -> list[Tensor]:
    """Return the parameters, on the host."""
    return [param.detach().cpu() for param in model.parameters()]


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference between tensors of the same shapes."""
    pairs = list(zip(found, expected, strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def assert_same_state(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Equal optimizer state dicts on the host, up to an absolute error of their tensors."""
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert found["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            own = found["state"][number][name]
            if isinstance(value, Tensor):
                assert own.device.type == "cpu"
                assert largest_error([own], [value]) <= tolerance
            else:
                assert own == value
