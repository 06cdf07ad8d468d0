"""Gradients of gradients through units and checkpoints, and the transforms of ``torch.func``.

Parity cases train with gradients of inputs in the loss. Scenarios compare, on each rank, with the
plain model on the joined batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.models import FEATURES, BatchNormNet, LinearNet, ScanNet
from test.common.parity import Case, Runs
from test.common.scenarios import RANKS, Scenarios, fsdp, make, message, nested

HELD = {"reshard_after_forward": False}
CASES = {
    (2, "penalty, remat inside"): Case(penalty="added", remat="inside", options=HELD),
    (2, "forces, flat"): Case(
        penalty="alone", nest="deep", options={"flatten_parameters": True}, optimizer="adamw"
    ),
    (2, "forces, in place"): Case(model="BatchNormNet", penalty="alone", in_place=True),
    (2, "forces, remat outside"): Case(
        penalty="alone", remat="outside", micro_batches=2, no_sync=True
    ),
}
SLOW = {
    (1, "penalty"): Case(penalty="added"),
    (1, "forces"): Case(penalty="alone", nest="root"),
    (2, "penalty, one unit"): Case(model="FunctionalNet", nest="root", penalty="added"),
    (2, "penalty, bf16"): Case(
        penalty="added", options={"compute_dtype": torch.bfloat16}, tolerance=0.1
    ),
    (2, "penalty, remat outside"): Case(penalty="added", remat="outside"),
    (2, "penalty, joint"): Case(penalty="added", micro_batches=2, joint_backward=True),
    (2, "penalty, frozen"): Case(model="FrozenNet", penalty="added"),
    (3, "penalty, rows"): Case(model="WideNet", penalty="added"),
    (3, "penalty, deep"): Case(penalty="added", nest="deep", optimizer="adamw"),
    (3, "forces, statistics"): Case(model="BatchNormNet", penalty="alone"),
    (3, "forces, remat inside"): Case(penalty="alone", remat="inside"),
    (4, "penalty, replicas"): Case(penalty="added", mesh=(2, 2)),
    (4, "forces, larger shards"): Case(
        penalty="alone", in_place=True, options={"reshard_after_forward": 2}
    ),
}
quick, slow = Runs(CASES), Runs(SLOW)
scenarios = Scenarios(__name__)
TOLERANCE = 1e-5


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_gradients_of_inputs_in_the_loss_train_as_the_plain_model(num_ranks: int, name: str):
    quick.check(num_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), SLOW)
def test_more_gradients_of_inputs_in_the_loss(num_ranks: int, name: str):
    slow.check(num_ranks, name)


# ---------------------------------------------------------------- models


def batch(rank: int) -> Tensor:
    return torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(rank))


class Force(nn.Module):
    """Minus the gradient of an energy, computed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LinearNet()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.net(x).logsumexp(-1).sum()
            [grad] = torch.autograd.grad(energy, x, create_graph=True)
        return -grad


class Sampler(nn.Module):
    """Steps down an energy before it is evaluated; the gradients of the steps have no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LinearNet()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            at = x.detach().requires_grad_()
            [grad] = torch.autograd.grad(self.net(at).logsumexp(-1).sum(), at)
            x = x - 0.1 * torch.tanh(grad)
        return self.net(x)


class Transformed(nn.Module):
    """A transform of ``torch.func`` over a part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LinearNet()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.net(x).logsumexp(-1).sum())(x)


def units_in_net(model: Any, **options: Any) -> Any:
    model.net = nested(model.net, **options)
    return fsdp(model, **options)


def unit(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    return fsdp(checkpoint_module(model))


def checkpoint_of_units(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    model.net = nested(model.net)
    return checkpoint_module(model)


def nested_checkpoints(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    for index, block in enumerate(model.net.blocks):
        model.net.blocks[index] = checkpoint_module(fsdp(block))
    return fsdp(checkpoint_module(model), reshard_after_forward=False)


def checkpoints_below(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    for block in model.net.blocks:
        checkpoint_module(block)
    return units_in_net(model)


# ---------------------------------------------------------------- comparison


def full(shard: Any, value: Tensor) -> Tensor:
    from xla_fsdp.fsdp.engine.shard_tensor import gather_like

    return gather_like(shard, value.detach()).cpu()


def part(shard: Any, value: Tensor) -> Tensor:
    """This rank's part of an unsharded tensor."""
    from xla_fsdp.fsdp.engine.param import known_group, known_shard

    param, group = known_shard(shard), known_group(shard)
    return param.slice_of([value.to(shard.device)], group.collectives.rank)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def worst_error(
    rank: int,
    model_class: Callable[[], nn.Module],
    wrap: Callable[[Any], Any],
    loss: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
) -> float:
    """Of the gradients of two backward passes from the plain model's on the joined batch."""
    import torch_xla

    plain, x = make(model_class), batch(rank).to(torch_xla.device())
    model = wrap(make(model_class))
    for _ in range(2):
        torch.stack([loss(plain, batch(each)) for each in range(RANKS)]).mean().backward()
        loss(model, x).backward()
    grads = {
        name.replace("_fsdp_wrapped_module.", ""): full(param, param.grad)
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    named = plain.named_parameters()
    expected = {name: param.grad for name, param in named if param.grad is not None}
    assert grads.keys() == expected.keys()
    return max(error(grads[name], expected[name]) for name in expected)


# ---------------------------------------------------------------- parameters


@scenarios.add
def hessian(rank: int) -> list[float]:
    """Errors of gradient, Hessian-vector product, its derivative, and gradient of the norm."""
    import torch_xla

    plain, model = make(LinearNet), nested(make(LinearNet))
    weights, shards = list(plain.parameters()), list(model.parameters())
    generator = torch.Generator().manual_seed(9)
    direction = [torch.randn(weight.shape, generator=generator) for weight in weights]
    parts = [part(*pair) for pair in zip(shards, direction, strict=True)]
    own = _loss(model, batch(rank).to(torch_xla.device()))
    joined = torch.stack([_loss(plain, batch(each)) for each in range(RANKS)]).mean()
    found = _derivatives(own, shards, parts)
    expected = _derivatives(joined, weights, direction)
    return [
        max(error(full(p, a), b) for p, a, b in zip(shards, *pair, strict=True))
        for pair in zip(found, expected, strict=True)
    ]


def _loss(model: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(5, device=x.device))


def _derivatives(loss: Tensor, params: list[Any], direction: list[Tensor]) -> list[Any]:
    grads = torch.autograd.grad(loss, params, create_graph=True)
    products = torch.autograd.grad(grads, params, direction, create_graph=True)
    third = torch.autograd.grad(products, params, direction, retain_graph=True)
    norm = torch.stack([grad.square().sum() for grad in grads]).sum()
    return [grads, products, third, torch.autograd.grad(loss + norm, params)]


def test_derivatives_of_gradients_of_shards_are_those_of_the_mean_loss():
    assert max(scenarios.result("hessian")) < TOLERANCE


# ---------------------------------------------------------------- in a forward


@scenarios.add
def in_forwards(rank: int) -> dict[str, float]:
    wraps = {
        Force: (unit, nested_checkpoints, checkpoints_below),
        Sampler: (units_in_net, checkpoint_of_units),
    }
    return {
        f"{model_class.__name__}, {wrap.__name__}": worst_error(rank, model_class, wrap)
        for model_class, of_model in wraps.items()
        for wrap in of_model
    }


@scenarios.add
def evaluated(rank: int) -> list[float]:
    """Errors of forces without grad mode around the model."""
    import torch_xla

    wraps, x = (units_in_net, unit), batch(rank)
    with torch.no_grad():
        expected = make(Force)(x)
        models = [wrap(make(Force)) for wrap in wraps]
        return [error(each(x.to(torch_xla.device())).cpu(), expected) for each in models]


def test_forces_are_computed_without_grad_mode_around_them():
    assert max(scenarios.result("evaluated")) < TOLERANCE


def test_a_forward_may_compute_gradients_in_units_and_checkpoints():
    for name, found in scenarios.result("in_forwards").items():
        assert found < TOLERANCE, name


# ---------------------------------------------------------------- statistics of all ranks


@scenarios.add
def statistics(rank: int) -> tuple[float, float]:
    """Errors of gradients with a gradient penalty under SyncBatchNorm; of sums over all ranks."""
    import torch_xla

    from xla_fsdp import SyncBatchNorm

    plain = make(BatchNormNet)
    model = nested(SyncBatchNorm.convert_sync_batchnorm(make(BatchNormNet)))
    model.set_gradient_divide_factors(1.0, 1.0, recursive=True)
    joined = torch.cat([batch(each) for each in range(RANKS)]).requires_grad_()
    own = batch(rank).to(torch_xla.device()).requires_grad_()
    for net, x in ((plain, joined), (model, own)):
        [grad] = torch.autograd.grad(net(x).logsumexp(-1).sum(), x, create_graph=True)
        grad.square().sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    errors = [
        error(full(param, param.grad), expected[name.replace("_fsdp_wrapped_module.", "")])
        for name, param in model.named_parameters()
        if param.grad is not None
    ]
    return max(errors), error(own.grad.cpu(), joined.grad.chunk(RANKS)[rank])


def test_a_penalty_under_sync_batch_norm_is_that_of_the_joined_batch():
    for rank in range(RANKS):
        assert max(scenarios.result("statistics", rank)) < 1e-4


# ---------------------------------------------------------------- transforms


def _of_grad(model: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: model(x).logsumexp(-1).sum())(x).square().mean()


def _of_jacrev(model: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: model(row[None])[0]))(x).square().mean()


def scanned(model: Any) -> Any:
    from xla_fsdp import scan_blocks

    sharded = nested(model)
    scan_blocks(sharded.blocks)
    return sharded


def rematerialized(model: Any) -> Any:
    from xla_fsdp import checkpoint_module

    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_module(fsdp(block))
    return fsdp(model)


@scenarios.add
def transforms(rank: int) -> dict[str, float]:
    found = {"jacrev": worst_error(rank, LinearNet, nested, _of_jacrev)}
    held = {"held": worst_error(rank, Transformed, lambda m: units_in_net(m, **HELD))}
    remat = {"remat": worst_error(rank, LinearNet, rematerialized, _of_grad)}
    return {**found, **held, **remat, "scanned": worst_error(rank, LinearNet, scanned, _of_grad)}


def test_transforms_of_units_are_those_of_the_plain_model():
    for name, found in scenarios.result("transforms").items():
        assert found < TOLERANCE, name


# ---------------------------------------------------------------- refused


@scenarios.add
def refused(rank: int) -> dict[str, str]:
    import torch_xla

    from xla_fsdp import scan_blocks

    x = batch(rank).to(torch_xla.device()).requires_grad_()
    blocks = nested(make(ScanNet))
    scan_blocks(blocks.blocks)

    def of_scanned() -> None:
        [grad] = torch.autograd.grad(blocks(x).sum(), x, create_graph=True)
        grad.square().sum().backward()

    model = nested(make(LinearNet))

    def without_sync() -> None:
        with model.no_sync():
            torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)

    def after_a_step() -> None:
        [grad] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        grad.square().sum().backward()

    def by_parameters() -> None:
        values = dict(model.named_parameters())
        torch.func.grad(lambda v: torch.func.functional_call(model, v, (x,)).sum())(values)

    hooked = nested(make(LinearNet))
    hooked.register_comm_hook(None, lambda state, grad, shard: shard.copy_(grad[: len(shard)]))

    def through_a_hook() -> None:
        params = list(hooked.parameters())
        grads = torch.autograd.grad(hooked(x).square().sum(), params, create_graph=True)
        torch.stack([grad.square().sum() for grad in grads]).sum().backward()

    def in_forward_mode() -> None:
        if rank == 0:  # ranks would disturb each other on the way to the error
            torch.func.jvp(model, (x.detach(),), (x.detach(),))

    calls = (in_forward_mode, of_scanned, without_sync, after_a_step, by_parameters, through_a_hook)
    found = {call.__name__: message(call) for call in calls}
    freed = fsdp(make(Transformed), disable_reshard_on_root=False)
    for name, inside in (("unit", freed), ("checkpoint", unit(make(Transformed)))):
        found[f"transform in a {name}"] = message(lambda inside=inside: inside(x))
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "of_scanned": "RuntimeError: a gradient was differentiated again. Scanned blocks",
        "in_forward_mode": "RuntimeError: an FSDP unit was called inside jvp, jacfwd or hessian",
        "without_sync": "RuntimeError: gradients of parameters were to have a graph",
        "after_a_step": "RuntimeError: parameters of an FSDP unit were changed between",
        "by_parameters": "torch.func.functional_call",
        "through_a_hook": "RuntimeError: gradients of",
        "transform in a unit": "reshard_after_forward=False",
        "transform in a checkpoint": "checkpoint no module around it",
    }.items(),
)
def test_what_cannot_be_differentiated_says_what_to_do(name: str, text: str):
    assert text in scenarios.result("refused")[name]
