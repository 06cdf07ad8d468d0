"""Optimizers that are not elementwise step a sharded model as the plain one, from wrapped, flat,
stacked, 16-bit, hybrid and tensor-parallel parameters, and go on on other numbers of ranks."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scenarios import fsdp, make, message, nested, rows
from xla_fsdp import init_mesh

TENSOR = 2  # ranks along the tensor-parallel axis
STEPS, ROWS, FEATURES, WIDTH, HIDDEN, CLASSES = 3, 4, 5, 7, 11, 3  # nothing divides the shapes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Small(nn.Module):
    """Two blocks, a scalar parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.inp.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Even(nn.Module):
    """Of which two ranks can share every dim."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid = nn.Linear(FEATURES, 6), nn.Linear(6, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(torch.tanh(self.inp(x))))


class Lamb(torch.optim.Optimizer):
    """Y. You et al., Large Batch Optimization for Deep Learning (2020), algorithm 2. The count of
    steps is one for a group, as in timm's."""

    def __init__(self, params: Any, lr: float = 1e-2, keeps_ratio: bool = True) -> None:
        super().__init__(params, {"lr": lr, "step": 0, "keeps_ratio": keeps_ratio})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group)

    def _step(self, param: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["mean"], state["square"] = torch.zeros_like(param), torch.zeros_like(param)
        state["mean"].lerp_(param.grad, 0.1)
        state["square"].lerp_(param.grad.square(), 0.01)
        mean = state["mean"] / (1 - 0.9 ** group["step"])
        square = state["square"] / (1 - 0.99 ** group["step"])
        update = mean / (square.sqrt() + 1e-3) + 0.1 * param
        ratio = param.norm().clamp(max=10) / update.norm()
        if group["keeps_ratio"]:  # a number on the device, another one for each parameter
            state["ratio"] = ratio.clone()
        param.sub_(group["lr"] * ratio * update)


class Orthogonal(torch.optim.Optimizer):
    """As Muon, but not in bf16, whose rounding its products enlarge."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            update = self.state[param].setdefault("momentum", torch.zeros_like(param))
            update.mul_(0.9).add_(param.grad)
            update = update / update.norm()
            for _ in range(5):
                update = 1.5 * update - 0.5 * (update @ update.T) @ update
            param.sub_(0.05 * update)


def of_transformers(params: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params, beta1=0.9)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "lamb": (Lamb, {}),
    "lean": (Lamb, {"keeps_ratio": False}),
    "muon": (torch.optim.Muon, {"lr": 0.005}),
    "orthogonal": (Orthogonal, {}),
    "transformers": (of_transformers, {}),
}


def chosen(model: nn.Module, optimizer: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that an optimizer gets; some take matrices, which flat shards do not show."""
    for name, param in model.named_parameters():
        if optimizer not in ("muon", "orthogonal") or name.endswith("weight"):
            yield name, param


def model_of(kind: str) -> Any:
    return make(Even if kind.startswith("tensor") else Small)


def data(num_parts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS, num_parts, ROWS, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (STEPS, num_parts, ROWS), generator=generator)


@cached_outcome
def plain(optimizer: str, kind: str, num_parts: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters, and the optimizer's state by name, after steps on the joined batch."""
    model = model_of(kind)
    optimizer_class, options = OPTIMIZERS[optimizer]
    own = optimizer_class([param for _, param in chosen(model, optimizer)], **options)
    for x, y in zip(*data(num_parts), strict=True):
        own.zero_grad()
        F.cross_entropy(model(x.flatten(0, 1)), y.flatten()).backward()
        own.step()
    names = {param: name for name, param in model.named_parameters()}
    return model.state_dict(), {names[param]: state for param, state in own.state.items()}


# ---------------------------------------------------------------- ways to shard


def in_place(model: Any, **options: Any) -> Any:
    from xla_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def stacked(model: Any, **options: Any) -> Any:
    from xla_fsdp import scan_blocks

    model = nested(model, **options)
    scan_blocks(model.blocks, stacked=True)
    return model


def hybrid(model: Any) -> Any:
    return nested(model, mesh=init_mesh((2, 2), ("replica", "shard")))


def tensor_parallel(model: Any, *, sharded: bool) -> Any:
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_mesh((xr.world_size() // TENSOR, TENSOR), ("shard", "tensor"))
    plan = {"inp": ColwiseParallel(), "mid": RowwiseParallel()}
    model = parallelize_module(model, mesh["tensor"], plan)
    if not sharded:
        return model.to(torch_xla.device())
    model.inp = fsdp(model.inp, mesh=mesh["shard"])
    return fsdp(model, mesh=mesh["shard"])


SHARDED: dict[str, Callable[[Any], Any]] = {
    "wrapped": nested,
    "flat": partial(nested, flatten_parameters=True),
    "rows": partial(nested, shard_param_on_dim_0=True),
    "in place": in_place,
    "stacked": stacked,
    "bf16": partial(nested, compute_dtype=torch.bfloat16),
    "hybrid": hybrid,
    "tensor": partial(tensor_parallel, sharded=False),
    "tensor sharded": partial(tensor_parallel, sharded=True),
}
QUICK = {
    1: ["lean flat"],
    2: ["lamb stacked", "lean flat", "muon in place", "orthogonal stacked", "lamb tensor"],
    3: ["adafactor rows", "lamb wrapped", "orthogonal wrapped", "lamb bf16"],
}
SLOW = {
    2: ["transformers wrapped", "transformers stacked", "adafactor stacked", "adafactor bf16"],
    4: ["lamb hybrid", "adafactor hybrid", "orthogonal hybrid", "lamb tensor sharded"],
}


def train(rank: int, names: list[str], run: str) -> dict[str, Any]:
    import torch_xla.runtime as xr

    trained = {name: train_one(rank, *name.split(" ", 1)) for name in names}
    others = {1: count_fallbacks, 2: save, 3: resume, 4: lambda _: None}
    return {**trained, "others": others[xr.world_size()](Path(run))}


def train_one(rank: int, optimizer: str, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same as ``plain`` on a rank, unsharded."""
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import full_state_dict, optim_state_dict
    from xla_fsdp.optim import WholeParameterOptimizer

    model, device = SHARDED[kind](model_of(kind)), torch_xla.device()
    num_parts, part = parts_of(kind, xr.world_size(), rank)
    optimizer_class, options = OPTIMIZERS[optimizer]
    params = [param for _, param in chosen(model, optimizer)]
    own = WholeParameterOptimizer(params, optimizer_class, **options)
    for x, y in zip(*data(num_parts), strict=True):
        own.zero_grad()
        F.cross_entropy(model(x[part].to(device)).float(), y[part].to(device)).backward()
        own.step()
        torch_xla.sync()
    state = {} if kind == "tensor" else optim_state_dict(model, own)["state"]
    return full_state_dict(model), state


def parts_of(kind: str, num_ranks: int, rank: int) -> tuple[int, int]:
    """Number of parts of the batch, and this rank's."""
    same = TENSOR if kind.startswith("tensor") else 1
    return num_ranks // same, rank // same


@cached_outcome
def outcomes(num_ranks: int, *, slow: bool = False) -> list[dict[str, Any]]:
    return run_on_ranks(train, num_ranks, (SLOW if slow else QUICK)[num_ranks], directory().name)


def compare(name: str, found: tuple[dict[str, Tensor], dict[str, Any]], num_ranks: int) -> None:
    optimizer, kind = name.split(" ", 1)
    exact = kind != "bf16" and optimizer != "muon"  # which computes in bf16
    params, state = plain(optimizer, kind, parts_of(kind, num_ranks, 0)[0])
    expected = params, state if found[1] else {}  # it is not gathered without units
    assert_same(found, expected, 2e-5 if exact else 0.05)


def assert_same(
    found: tuple[dict[str, Tensor], dict[str, Any]],
    expected: tuple[dict[str, Tensor], dict[str, Any]],
    limit: float,
) -> None:
    """Parameters and state are close, also in what is state, and its shapes."""
    limits = {"atol": 1e-6, "of_largest": limit, "smallest": 1e-3}
    assert_close(found[0], expected[0], what="parameter", **limits)
    assert found[1].keys() == expected[1].keys()
    for key, values in expected[1].items():
        own = {n: torch.as_tensor(v) for n, v in found[1][key].items()}
        tensors = {n: torch.as_tensor(v) for n, v in values.items()}
        assert_close(own, tensors, what=f"state of {key}", **limits)


@pytest.mark.parametrize(("num_ranks", "name"), [(n, name) for n in QUICK for name in QUICK[n]])
def test_steps_and_state_are_those_of_the_plain_model(num_ranks: int, name: str) -> None:
    for found in outcomes(num_ranks):
        compare(name, found[name], num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), [(n, name) for n in SLOW for name in SLOW[n]])
def test_steps_and_state_are_those_of_the_plain_model_slow(num_ranks: int, name: str) -> None:
    for found in outcomes(num_ranks, slow=True):
        compare(name, found[name], num_ranks)


def count_fallbacks(_: Path) -> int:
    """How often a step of Muon computes on the host."""
    import torch_xla.debug.metrics as metrics

    from xla_fsdp.optim import WholeParameterOptimizer

    model = fsdp(make(lambda: nn.Linear(FEATURES, WIDTH, bias=False)))
    optimizer = WholeParameterOptimizer(model.parameters(), torch.optim.Muon)
    metrics.clear_all()
    steps(model, optimizer, 2)
    return sum(
        metrics.counter_value(name)
        for name in metrics.counter_names()
        if name.startswith("aten::") and name != "aten::_local_scalar_dense"
    )


def test_products_stay_on_the_device() -> None:
    assert outcomes(1)[0]["others"] == 0


# ---------------------------------------------------------------- save and resume


@functools.cache
def directory() -> Any:
    return tempfile.TemporaryDirectory()


SAVED = {"adafactor": ("wrapped", "rows"), "lamb": ("stacked", "wrapped")}
"""How the model is sharded that is saved, and the one that goes on."""


def steps(model: Any, optimizer: Any, number: int) -> None:
    import torch_xla

    for _ in range(number):
        optimizer.zero_grad()
        model(rows()).square().sum().backward()
        optimizer.step()
        torch_xla.sync()


def made(optimizer: str, kind: str) -> tuple[Any, Any]:
    from xla_fsdp.optim import WholeParameterOptimizer

    model = SHARDED[kind](make(Small))
    optimizer_class, options = OPTIMIZERS[optimizer]
    return model, WholeParameterOptimizer(model.parameters(), optimizer_class, **options)


def save(run: Path) -> dict[str, Any]:
    """Save two steps, on two ranks; what makes no sense is refused."""
    from xla_fsdp import load_optim_state_dict, optim_state_dict, save_checkpoint
    from xla_fsdp.optim import WholeParameterOptimizer

    same = {}
    for name, (kind, _) in SAVED.items():
        model, optimizer = made(name, kind)
        steps(model, optimizer, 2)
        save_checkpoint(run / name, model, optimizer, step=2)
        full = optim_state_dict(model, optimizer)
        model, fresh = made(name, kind)
        load_optim_state_dict(model, fresh, full)
        again = optim_state_dict(model, fresh)["state"]
        same[name] = all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(again[key][entry]))
            for key, values in full["state"].items()
            for entry, value in values.items()
        )
    flat = nested(make(Small), flatten_parameters=True)
    refused = WholeParameterOptimizer(flat.parameters(), Lamb)
    before = [param.detach().cpu() for param in flat.parameters()]
    lbfgs = torch.optim.LBFGS
    return {
        "same": same,
        "flat": message(lambda: steps(flat, refused, 1)),
        "unchanged": all(map(torch.equal, before, (p.detach().cpu() for p in flat.parameters()))),
        "closure": message(lambda: WholeParameterOptimizer(flat.parameters(), lbfgs)),
    }


def resume(run: Path) -> dict[str, Any]:
    """One more step, on three ranks and otherwise sharded."""
    from xla_fsdp import full_state_dict, load_checkpoint, optim_state_dict

    found = {}
    for name, (_, kind) in SAVED.items():
        model, optimizer = made(name, kind)
        load_checkpoint(run / name, model, optimizer)
        steps(model, optimizer, 1)
        found[name] = full_state_dict(model), optim_state_dict(model, optimizer)["state"]
    return found


@pytest.mark.parametrize("optimizer", SAVED)
def test_state_goes_on_on_other_ranks(optimizer: str) -> None:
    assert outcomes(2)[0]["others"]["same"][optimizer]
    model = make(Small)
    optimizer_class, options = OPTIMIZERS[optimizer]
    own = optimizer_class(model.parameters(), **options)
    x = torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES)
    for _ in range(3):
        own.zero_grad()
        model(x).square().sum().backward()
        own.step()
    names = {param: name for name, param in model.named_parameters()}
    expected = model.state_dict(), {names[param]: state for param, state in own.state.items()}
    for found in outcomes(3):
        assert_same(found["others"][optimizer], expected, 2e-5)


def test_what_has_no_place_is_refused() -> None:
    found = outcomes(2)[0]["others"]
    assert found["flat"].startswith("ValueError: the optimizer keeps 'ratio' of another shape")
    assert "Shard with flatten_parameters=False" in found["flat"]
    assert found["unchanged"]
    assert found["closure"].startswith("ValueError: LBFGS needs a closure, which it calls several")
