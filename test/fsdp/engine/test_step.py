"""What surrounds a training step: compilation, random numbers, loss scaling, statistics over ranks,
accumulation. Two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from test.common.models import FEATURES, WIDTH, BatchNormNet, ConvNet
from test.common.scenarios import Scenarios, fsdp, make, message, nested, rows

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result


def train(model: Any, step: Any, steps: int = 3) -> list[float]:
    import torch_xla

    losses = []
    for i in range(steps):
        losses.append(step(rows() + i))
        torch_xla.sync()
    return [loss.item() for loss in losses]


def simple_step(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


# ---------------------------------------------------------------- compilation


@scenario
def compiled(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp.xla.host import exchange

    plain, model = nested(make()), nested(make())
    inner = nn.Sequential(nn.Tanh(), fsdp(make(lambda: nn.Linear(FEATURES, 2))))
    found = {
        "expected": train(plain, simple_step(plain)),
        "found": train(model, torch_xla.compile(simple_step(model))),
        "model": message(lambda: torch.compile(model, backend="openxla")(rows())),
        "inside": message(lambda: torch.compile(inner.to("xla"), backend="openxla")(rows())),
        "afterwards": message(lambda: model(rows())),
    }
    # Dynamo restores the host's random numbers, which ranks share: not while a peer draws its next
    # model.
    exchange(b"")
    return found


def test_torch_xla_compile_around_the_step() -> None:
    found = result("compiled")
    assert found["found"] == found["expected"]


def test_torch_compile_is_refused() -> None:
    found = result("compiled")
    for case in ("model", "inside"):
        assert found[case].startswith("RuntimeError: torch.compile was used on a model with FSDP")
        assert "torch_xla.compile(step)" in found[case]
    assert found["afterwards"] == "nothing was raised"


# ---------------------------------------------------------------- random numbers


class Dropping(nn.Module):
    """Drops half of what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = (self.drop(torch.ones_like(x)) > 0).float()
        return self.lin(x * self.kept)


@scenario
def dropout(rank: int) -> dict[str, Any]:
    import torch_xla.core.xla_model as xm

    from xla_fsdp import checkpoint_module

    found: dict[str, Any] = {}
    x = torch.ones(16, FEATURES).to(xm.xla_device())
    for name, seed, wrap in (
        ("own", 5 + rank, lambda m: m),
        ("again", 5 + rank, lambda m: m),
        ("remat", 5 + rank, checkpoint_module),
        ("same", 5, lambda m: m),
    ):
        model = fsdp(wrap(make(Dropping)), disable_reshard_on_root=False)
        xm.set_rng_state(seed)
        masks = []
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            masks.append(model.module.kept.detach().cpu())
        found[name] = masks
        with model.summon_full_params(model, with_grads=True, writeback=False):
            found[f"{name} gradient"] = model.module.lin.weight.grad[0].cpu()
    return found


def test_masks_differ_between_ranks_and_steps_and_are_reproducible() -> None:
    first, second = result("dropout", 0), result("dropout", 1)
    assert not torch.equal(first["own"][0], second["own"][0])
    assert not torch.equal(first["own"][0], first["own"][1])
    for rank in (first, second):
        assert all(map(torch.equal, rank["own"], rank["again"]))
    assert torch.equal(first["same"][0], second["same"][0])
    # The gradient of a weight is the mean over ranks of how often its input was kept: the same
    # masks in forward, backward and recomputation.
    expected = (first["own"][1] + second["own"][1]).sum(0) / 2
    assert torch.equal(first["own gradient"], expected)
    assert torch.equal(first["remat gradient"], (first["remat"][1] + second["remat"][1]).sum(0) / 2)


# ---------------------------------------------------------------- statistics over ranks


def part(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 * step + rank)
    return torch.randn(3 + 2 * rank, FEATURES, generator=generator)


@scenario
def sync_batch_norm(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import SyncBatchNorm, checkpoint_module, full_state_dict

    found = {}
    for name, model_class, options in (
        ("linear", BatchNormNet, {}),
        ("conv", ConvNet, {}),
        ("bf16", BatchNormNet, {"compute_dtype": torch.bfloat16}),
        ("remat", BatchNormNet, {}),
    ):
        model = SyncBatchNorm.convert_sync_batchnorm(make(model_class))
        if name == "remat":
            model = checkpoint_module(model)
        model = fsdp(model, **options)
        model.set_gradient_divide_factors(1.0, 1.0, recursive=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            # A sum over rows: ranks have batches of different sizes.
            model(part(rank, step).to(model.xla_device)).square().sum().backward()
            optimizer.step()
            torch_xla.sync()
        state = full_state_dict(model)
        model.eval()
        found[name] = (state, model(part(0, 9).to(model.xla_device)).detach().float().cpu())
    layer = fsdp_message(nn.Sequential(nn.Tanh(), nn.SyncBatchNorm(2)))
    return {**found, "torch's": layer, "shape": message(lambda: SyncBatchNorm(3)(torch.ones(2, 2)))}


def fsdp_message(module: nn.Module) -> str:
    return message(lambda: fsdp(module))


def joined_batch(model_class: type[nn.Module]) -> tuple[dict[str, Tensor], Tensor]:
    model = make(model_class)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.cat([part(0, step), part(1, step)])).square().sum().backward()
        optimizer.step()
    model.eval()
    return model.state_dict(), model(part(0, 9)).detach()


def test_sync_batch_norm_is_batch_norm_of_the_joined_batch() -> None:
    found = result("sync_batch_norm")
    for name, model_class in (("linear", BatchNormNet), ("conv", ConvNet), ("bf16", BatchNormNet)):
        state, output = joined_batch(model_class)
        tolerance = 0.1 if name == "bf16" else 2e-4
        assert found[name][0].keys() == state.keys()
        for key, value in state.items():
            close = torch.allclose(found[name][0][key], value, atol=tolerance, rtol=tolerance)
            assert close, (name, key)
        assert torch.allclose(found[name][1], output, atol=3 * tolerance, rtol=tolerance)
    for key, value in found["linear"][0].items():
        assert torch.allclose(found["remat"][0][key], value, atol=1e-6), key


def test_torchs_sync_batch_norm_is_refused() -> None:
    found = result("sync_batch_norm")
    assert found["torch's"].startswith("ValueError: 1 is torch.nn.SyncBatchNorm, which only runs")
    assert "SyncBatchNorm.convert_sync_batchnorm(model)" in found["torch's"]
    assert found["shape"].startswith("ValueError: expected an input of shape [batch, 3, ...]")


def test_conversion_keeps_parameters_and_buffers() -> None:
    from xla_fsdp import SyncBatchNorm

    layer = nn.BatchNorm2d(3, eps=1e-3, momentum=None)
    converted = SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(converted, SyncBatchNorm)
    assert converted.weight is layer.weight
    assert converted.running_var is layer.running_var
    assert (converted.eps, converted.momentum, converted.num_features) == (1e-3, None, 3)
    assert SyncBatchNorm.convert_sync_batchnorm(converted) is converted


def test_sync_batch_norm_of_one_rank_with_a_cumulative_average() -> None:
    from xla_fsdp import SyncBatchNorm

    layer = nn.BatchNorm1d(FEATURES, momentum=None)
    converted = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer))
    converted.groups = [[0]]
    for step in range(3):
        x = part(1, step)
        assert torch.allclose(converted(x), layer(x), atol=1e-5)
    for name, value in layer.state_dict().items():
        assert torch.allclose(converted.state_dict()[name], value, atol=1e-6), name


# ---------------------------------------------------------------- loss scaling


@scenario
def loss_scaling(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import ShardedGradScaler, full_state_dict

    found: dict[str, Any] = {}
    for name in ("reads", "syncfree"):
        model = fsdp(make(lambda: nn.Linear(FEATURES, 40)), compute_dtype=torch.float16)
        if name == "syncfree":
            from torch_xla.amp import syncfree

            optimizer: Any = syncfree.SGD(model.parameters(), lr=0.5)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = ShardedGradScaler(init_scale=2.0**8, growth_interval=2)
        states, scales = [], []
        for step in range(4):
            optimizer.zero_grad()
            output = model(rows())
            # An overflow in step 1, on rank 1, in a column whose weights lie on one rank.
            hole = 6e4 if (step, rank) == (1, 1) else 1.0
            loss = (output.float() * torch.tensor([1.0] * 39 + [hole]).to(output.device)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            torch_xla.sync()
            states.append({n: v.clone() for n, v in full_state_dict(model).items()})
            scales.append(scaler.get_scale())
        found[name] = {"states": states, "scales": scales}
    return found


def test_an_overflow_anywhere_stops_the_step_of_all() -> None:
    plain = make(lambda: nn.Linear(FEATURES, 40))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        plain(rows_on_host()).sum().backward()
        if step != 1:
            optimizer.step()
        expected.append({n: v.clone() for n, v in plain.state_dict().items()})
    for rank in (0, 1):
        for name in ("reads", "syncfree"):
            found = result("loss_scaling", rank)[name]
            assert found["scales"] == [256.0, 128.0, 128.0, 256.0]
            for step in range(4):
                for key, value in expected[step].items():
                    error = (found["states"][step][key] - value).abs().max()
                    assert error < 2e-2, (rank, name, step, key)
            before, after = found["states"][0], found["states"][1]
            assert all(torch.equal(before[key], after[key]) for key in before)


def rows_on_host() -> Tensor:
    return torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES)


# ---------------------------------------------------------------- accumulation


@scenario
def accumulation(rank: int) -> dict[str, Any]:
    """Gradients after three backward passes, and what is reduced in the first of them."""
    from test.common.hlo import Program
    from xla_fsdp.xla.graph import lowered_hlo

    found = {}
    for name in ("full", "sharded", "none"):
        model = nested(make())
        for index in range(3):
            context = model.no_sync(sharded=name == "sharded")
            if name == "none" or index == 2:
                model(rows() + index).square().sum().backward()
                continue
            with context:
                model(rows() + index).square().sum().backward()
            if index == 0:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                program = Program(lowered_hlo(grads)) if grads else None
                scattered = program.all("reduce-scatter") if program else []
                found[f"{name}: reduced in the first pass"] = len(scattered)
        found[name] = {n: p.grad.cpu() for n, p in model.named_parameters()}
    return found


def test_no_sync_accumulates_full_or_sharded_gradients() -> None:
    found = result("accumulation")
    assert found["full: reduced in the first pass"] == 0
    assert found["sharded: reduced in the first pass"] == 3
    for name in ("full", "sharded"):
        for key, value in found["none"].items():
            assert torch.allclose(found[name][key], value, atol=1e-4), (name, key)
