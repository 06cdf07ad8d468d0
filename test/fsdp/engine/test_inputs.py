"""What a unit's forward does to its arguments, as its caller sees it.

One model holds all cases; the oracle is the same model without FSDP. Two ranks, slow tests also on
one and three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from test.common.argument_cases import CASES, ROWS, WIDTH, Around, Model, loss_of
from test.common.compare import assert_close
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scenarios import fsdp, make, message

STEPS = 2

Step = dict[str, tuple[list[Tensor], list[Any]]]  # what the callers saw, by case
Found = dict[str, Any]  # by what was found


# ---------------------------------------------------------------- ways to shard


def wrapped(model: Any, **options: Any) -> Any:
    for name, block in model.blocks.items():
        model.blocks[name] = fsdp(block, **options)
    return fsdp(model, **options)


def in_place(model: Any) -> Any:
    from xla_fsdp import fully_shard

    for block in model.blocks.values():
        fully_shard(block)
    return fully_shard(model)


def nested(model: Any) -> Any:
    for name, block in model.blocks.items():
        model.blocks[name] = Around(fsdp(block))
    return wrapped(model)


def remat_inside(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    for block in model.blocks.values():
        checkpoint_module(block)
    return nested(model)


def remat_outside(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    model = in_place(model)
    for block in model.blocks.values():
        checkpoint_module(block)
    return model


NO_BARRIERS = {
    "optimization_barrier_in_forward": False,
    "optimization_barrier_in_backward": False,
}

WAYS: dict[str, Callable[[Any], Any]] = {
    "wrapped": wrapped,
    "in_place": in_place,
    "nested": nested,
    "remat_inside": remat_inside,
    "remat_outside": remat_outside,
    "bfloat16": lambda model: wrapped(model, compute_dtype=torch.bfloat16),
    "no_barriers": lambda model: wrapped(model, **NO_BARRIERS),
}
QUICK = ("remat_inside", "bfloat16")


# ---------------------------------------------------------------- training


def train(model: Any, device: torch.device) -> list[Step]:
    """Return what the callers saw in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        seen = model(batch(step).to(device))
        loss_of(seen).backward()
        optimizer.step()
        steps.append(on_host(seen, device))
    return steps


def evaluate(model: Any, device: torch.device) -> Step:
    """Return what the callers saw without gradients."""
    with torch.no_grad():
        return on_host(model(batch(STEPS).to(device)), device)


def batch(step: int) -> Tensor:
    return torch.linspace(-1, 1 + step, ROWS * WIDTH).reshape(ROWS, WIDTH)


def on_host(seen: Any, device: torch.device) -> Step:
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()  # else each of the tensors is a program of its own
    return {
        name: ([tensor.detach().float().cpu() for tensor in tensors], facts)
        for name, (tensors, facts) in seen.items()
    }


def run(rank: int, ways: tuple[str, ...]) -> dict[str, Any]:
    """Return what the callers saw, by way, and what was refused."""
    import torch_xla

    device = torch_xla.device()
    found: dict[str, Any] = {"refused": refused(device)}
    for way in ways:
        model = WAYS[way](make(Model).to(device))
        found[way] = [*train(model, device), evaluate(model, device)]
    return found


@cached_outcome
def plain() -> list[Step]:
    model = make(Model)
    device = torch.device("cpu")
    return [*train(model, device), evaluate(model, device)]


launch = cached_outcome(lambda num_ranks, ways: run_on_ranks(run, num_ranks, ways, timeout=900)[0])
TOLERANCE = {"bfloat16": 0.1}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", QUICK)
def test_callers_see_the_same_as_without_fsdp(way: str, name: str) -> None:
    compare(launch(2, QUICK)[way], name, TOLERANCE.get(way, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_in_all_ways_on_one_to_three_ranks(num_ranks: int, way: str) -> None:
    for name in CASES:
        compare(launch(num_ranks, tuple(WAYS))[way], name, TOLERANCE.get(way, 1e-5))


def compare(found: list[Step], name: str, tolerance: float) -> None:
    """Check the tensors and facts of one case in all steps."""
    for step, (mine, theirs) in enumerate(zip(found, plain(), strict=True)):
        (tensors, facts), (expected, expected_facts) = mine[name], theirs[name]
        assert facts == expected_facts, f"step {step}"
        numbered = ({str(at): t for at, t in enumerate(each)} for each in (tensors, expected))
        assert_close(*numbered, atol=0, of_largest=tolerance, what=f"step {step}")


# ---------------------------------------------------------------- refused


class Changes(nn.Module):
    """Changes its first argument in place."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.lin, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.change(x)
        return self.lin(others[0].view(-1, WIDTH))


def refused(device: torch.device) -> dict[str, str]:
    x = torch.ones(WIDTH, WIDTH, device=device)
    add, transpose = (
        fsdp(make(lambda change=change: Changes(change)))
        for change in (lambda x: x.add_(1), lambda x: x.t_())
    )
    found = {
        "detached": message(lambda: add(x, x.detach())),
        "other dtype": message(lambda: add(x.view(torch.int32), x)),
        "same part twice": message(lambda: add(x[0], x[0])),
        "reshaped": message(lambda: transpose(x, x.clone())),
        "leaf": message(lambda: add(x.clone().requires_grad_(), x)),
        "detached, another changed": message(lambda: add(x.clone(), x, x.detach())),
    }
    with torch.inference_mode():
        y = torch.ones_like(x)
        found["inference"] = message(lambda: add(y, y.view(-1)))
        add(y, y)
        found["changed in inference mode"] = str(y.mean().item())
    return found


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("detached", ["ValueError", "shape [6, 6] was changed in place", "shares memory", "clone"]),
        ("other dtype", ["ValueError", "shares memory"]),
        ("same part twice", ["ValueError", "shape [6]", "shares memory"]),
        ("reshaped", ["ValueError", "shape [6, 6] was reshaped in place", "without underscore"]),
        ("leaf", ["RuntimeError", "leaf Variable that requires grad"]),
        ("detached, another changed", ["nothing was raised"]),
        ("inference", ["ValueError", "shares memory"]),
        ("changed in inference mode", ["3.0"]),
    ],
)
def test_changes_that_would_be_lost_are_refused(what: str, said: list[str]) -> None:
    found = launch(2, QUICK)["refused"][what]
    assert all(part in found for part in said), found


# ---------------------------------------------------------------- in host memory


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


class Takes(nn.Module):
    """Takes tensors in containers of all kinds, through a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, pair: Pair, *, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        batch["mask"].add_(1)
        batch["hidden"] = self.inner(x + pair.first)
        found = pair.second[0].t() * batch["mask"] * batch["scale"]
        return self.out(batch["hidden"] + found), x


def moved(model: nn.Module, on: torch.device, device: torch.device) -> dict[str, Any]:
    """Return results and gradients for arguments on ``on``."""
    values = [torch.linspace(-1, 1 + n, WIDTH * WIDTH).reshape(WIDTH, WIDTH) for n in range(4)]
    x, first, second, mask = (value.to(on) for value in values)
    x.requires_grad_()
    given = {"mask": mask, "scale": torch.tensor(0.5, device=on)}
    out, same = model(x, Pair(first, [second.t()]), batch=given)
    out.float().square().mean().backward()
    seen = {"out": out, "x.grad": x.grad, "hidden": given["hidden"]}
    devices = [each.device == device for each in (out, same, given["hidden"])]
    grads = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    kept = given["mask"] is mask and x.grad is not None and x.grad.device == on
    values = {name: value.detach().cpu() for name, value in {**seen, **grads}.items()}
    return {"values": values, "devices": devices, "kept": kept, "mask": mask.cpu()}


def from_host(rank: int) -> dict[str, Any]:
    import torch_xla

    device, host = torch_xla.device(), torch.device("cpu")

    def wrap(**options: Any) -> nn.Module:
        model = make(Takes)
        model.inner = fsdp(model.inner, **options)
        return fsdp(model, **options)

    def shard() -> nn.Module:
        from xla_fsdp import fully_shard

        model = make(Takes)
        fully_shard(model.inner)
        return fully_shard(model)

    models = {
        "wrapper": wrap(),
        "flat, 16 bits": wrap(flatten_parameters=True, compute_dtype=torch.bfloat16),
        "fully_shard": shard(),
    }
    return {
        name: (moved(model, host, device), moved(model, device, device))
        for name, model in models.items()
    }


@pytest.mark.parametrize("way", ["wrapper", "flat, 16 bits", "fully_shard"])
def test_outermost_units_move_inputs_from_host_memory(way: str) -> None:
    of_host, of_device = hosted(2)[way]
    assert all(of_host["devices"])
    assert of_host["kept"]
    assert_close(of_host["values"], of_device["values"], atol=0)
    # As of mask.to(device): what the forward changes is not the caller's tensor.
    assert of_host["mask"].flatten()[0] == -1
    assert of_device["mask"].flatten()[0] == 0


hosted = cached_outcome(lambda num_ranks: run_on_ranks(from_host, num_ranks)[0])
