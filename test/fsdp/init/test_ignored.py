"""Parameters and modules that FSDP was told to leave alone. Two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from test.common.models import FEATURES, WIDTH, Net
from test.common.scenarios import Scenarios, fsdp, make, message, nested, rows
from xla_fsdp.fsdp.engine.param import held_shape
from xla_fsdp.wrap import always_wrap_policy

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result


def on_device(model: Any, *names: str) -> Any:
    """Ignored parts are moved by their user."""
    import torch_xla

    for name in names:
        model.get_submodule(name).to(torch_xla.device())
    return model


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(held_shape(param)) for name, param in model.named_parameters()}


@scenario
def left_alone(rank: int) -> dict[str, Any]:
    model = on_device(make(), "blocks.0", "head")
    head, block = model.head, model.blocks[0]
    model.blocks[1] = fsdp(model.blocks[1])
    model = fsdp(model, ignored_modules=[block], ignored_params=[head.bias])
    policy_model = on_device(make(), "blocks.0")
    policy_model = fsdp(
        policy_model,
        auto_wrap_policy=always_wrap_policy,
        ignored_states=[policy_model.blocks[0], policy_model.scale],
    )
    return {
        "by hand": shapes(model),
        "same objects": model.head.bias is head.bias and model.blocks[0] is block,
        "by policy": shapes(policy_model),
        "not wrapped": type(policy_model.blocks[0].up).__name__,
        "on host": policy_model.scale.device.type,
        "metadata": [p["key"] for p in policy_model.get_shard_metadata()["params"]],
    }


def test_ignored_parameters_stay_whole_and_where_they_are() -> None:
    found = result("left_alone")
    plain = shapes(Net())
    block = {name for name in plain if name.startswith("blocks.0.")}
    for case, ignored in (("by hand", block | {"head.bias"}), ("by policy", block | {"scale"})):
        assert all(found[case][name] == plain[name] for name in ignored)
        assert all(len(shape) == 1 for n, shape in found[case].items() if n not in ignored)
    assert (found["same objects"], found["not wrapped"]) == (True, "Linear")
    assert found["on host"] == "cpu"
    assert not set(found["metadata"]) & (block | {"scale"})


@scenario
def trained(rank: int) -> dict[str, bool]:
    """The same data on both ranks, so that a gradient that is not reduced is the same, too."""
    found = {}
    for norm_type in (2.0, 1.0, float("inf")):
        plain = make()
        plain(rows().cpu()).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        model = on_device(make(), "blocks.0")
        model = fsdp(model, ignored_modules=[model.blocks[0]])
        model(rows()).square().sum().backward()
        norm = model.clip_grad_norm_(0.1, norm_type)
        found[f"norm {norm_type}"] = abs(norm.item() - expected.item()) < 1e-4 * expected.item()
        found[f"clipped {norm_type}"] = torch.allclose(
            model.blocks[0].up.weight.grad.cpu(), plain.blocks[0].up.weight.grad, atol=1e-5
        )
    return found


def test_the_norm_counts_an_ignored_gradient_once() -> None:
    found = result("trained")
    assert len(found) == 6
    assert all(found.values()), found


@scenario
def clipped_by_value(rank: int) -> dict[str, Any]:
    plain, model = make(), nested(make())
    plain(rows().cpu()).square().sum().backward()
    model(rows()).square().sum().backward()
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    model.clip_grad_value_(0.01)
    from xla_fsdp import XlaFullyShardedDataParallel

    with XlaFullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        found = {name: param.grad.cpu() for name, param in model.named_parameters()}
    with model.no_sync():
        model(rows()).square().sum().backward()
    return {
        "values": all(
            torch.allclose(found[name], param.grad, atol=1e-6)
            for name, param in plain.named_parameters()
        ),
        "negative": message(lambda: make_empty().clip_grad_value_(-1.0)),
        "nothing": message(lambda: make_empty().clip_grad_value_(1.0)),
        "kept": message(lambda: model.clip_grad_value_(1.0)),
    }


def make_empty() -> Any:
    return fsdp(make(lambda: nn.Linear(2, 2)))


def test_clipping_by_value() -> None:
    found = result("clipped_by_value")
    assert found["values"]
    assert found["negative"] == "ValueError: clip_value must not be negative, got -1.0"
    assert found["nothing"] == "nothing was raised"
    assert "clip_grad_value_ was called while gradients kept by no_sync()" in found["kept"]


@scenario
def refused(rank: int) -> dict[str, str]:
    wrapped = fsdp(make(lambda: nn.Linear(FEATURES, WIDTH)))

    def wrap(**options: Any) -> str:
        return message(lambda: fsdp(make(), **options))

    return {
        "names": wrap(ignored_params=["head.bias"]),
        "one": wrap(ignored_modules=make(lambda: nn.Linear(2, 2))),
        "params": wrap(ignored_modules=[nn.Parameter(torch.zeros(1))]),
        "shard": wrap(ignored_params=list(wrapped.parameters())[:1]),
    }


def test_what_cannot_be_ignored() -> None:
    found = result("refused")
    assert found["names"].startswith("TypeError: ignored_params holds a str; give the objects")
    assert found["one"] == "TypeError: ignored_modules is one Linear; put it into a list"
    assert found["params"].startswith("TypeError: ignored_modules holds a Parameter")
    assert "is a shard of an FSDP unit already" in found["shard"]
