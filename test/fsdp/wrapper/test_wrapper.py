"""What a wrapped module is between and around its steps: state, names, errors. Two ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import re
import sys
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.garbage import is_freed, live_tensors
from test.common.in_place import in_place
from test.common.models import CLASSES, FEATURES, WIDTH, Net, TiedNet
from test.common.ranks import ROOT
from test.common.recipes import language_model
from test.common.scenarios import RANKS, Scenarios, fsdp, make, message, nested, rows, states
from xla_fsdp.distributed.garbage import collect_garbage
from xla_fsdp.wrap import transformer_auto_wrap_policy

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result

# ---------------------------------------------------------------- stale weights


@scenario
def load_after_forward(rank: int) -> list[float]:
    found = []
    for options in ({}, {"reshard_after_forward": False}, {"disable_reshard_on_root": False}):
        model = nested(make(), **options)
        model(rows())
        model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
        with torch.no_grad():
            found.append(model(rows()).abs().sum().item())
    return found


def test_loaded_values_are_used_by_the_next_forward() -> None:
    assert result("load_after_forward") == [0.0, 0.0, 0.0]


@scenario
def forward_between_backward_and_step(rank: int) -> tuple[Tensor, Tensor]:
    outputs = []
    for extra_forward in (False, True):
        model = nested(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(rows()).sum().backward()
        if extra_forward:
            model(rows())
        optimizer.step()
        outputs.append(model(rows()).detach().cpu())
    return outputs[0], outputs[1]


def test_a_forward_before_the_step_changes_nothing() -> None:
    without, with_forward = result("forward_between_backward_and_step")
    assert torch.equal(without, with_forward)


@scenario
def freed(rank: int) -> list[bool]:
    found = []
    gc.disable()  # what a cycle keeps is freed on each rank at another time, with its graph
    try:
        for options in ({}, {"flatten_parameters": True}):
            model = nested(make(), **options)
            model(rows()).sum().backward()
            model.load_state_dict(model.state_dict())
            alive = weakref.ref(model)
            del model
            found.append(is_freed(alive))
    finally:
        gc.enable()
    return found


def test_a_model_is_no_reference_cycle() -> None:
    assert result("freed") == [True, True]


# ---------------------------------------------------------------- full parameters come and go


class Peeking(nn.Module):
    """Keeps hold of its weight during forward, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, CLASSES)
        self.seen: list[Any] = []
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.lin.weight, self.lin.weight.t()]
        self.shape = self.lin.weight.shape
        y = self.lin(x)
        if self.fail:
            raise KeyError("on demand")
        return y + x @ self.seen[1]


@scenario
def handles_after_forward(rank: int) -> dict[str, Any]:
    model = fsdp(make(Peeking), disable_reshard_on_root=False)
    loss = model(rows().requires_grad_()).sum()
    inner = model.module
    with torch._C.DisableTorchFunctionSubclass():
        data = {tuple(handle.shape) for handle in inner.seen}
    found = {
        "shape in forward": tuple(inner.shape),
        "data of kept handles": data,
        "attribute is the shard": inner.lin.weight is next(iter(model.parameters())),
        "after forward": states(model),
    }
    loss.backward()
    found["after backward"] = states(model)
    inner.fail = True
    found["error"] = message(lambda: model(rows()))
    found["after error"] = states(model)
    return found


def test_full_parameters_are_freed() -> None:
    found = result("handles_after_forward")
    assert found["shape in forward"] == (CLASSES, FEATURES)
    assert len(found["data of kept handles"]) == 1  # the dummy's
    assert found["attribute is the shard"]
    assert found["after forward"] == found["after backward"] == {"SHARDED"}
    assert found["error"] == "KeyError: 'on demand'"
    assert found["after error"] == {"SHARDED"}


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("in backward")


class BackwardFails(Net):
    fail = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = self.blocks[0](x)
        x = FailsInBackward.apply(x) if self.fail else x
        return self.head(self.blocks[1](x))


@scenario
def backward_raises(rank: int) -> dict[str, Any]:
    model = nested(make(BackwardFails))
    found = {"error": message(lambda: model(rows()).sum().backward())}
    model.module.fail = False
    model.zero_grad()
    model(rows()).sum().backward()
    found["states"] = states(model)
    found["gradients"] = len(model.params_with_grad) > 0
    return found


def test_a_failed_backward_leaves_no_trace() -> None:
    found = result("backward_raises")
    assert "in backward" in found["error"]
    assert found["states"] == {"SHARDED"}
    assert found["gradients"]


class SelfChanging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return x * self.weight


@scenario
def changed_in_place(rank: int) -> str:
    return message(lambda: fsdp(SelfChanging())(rows()))


def test_a_change_that_would_be_lost_is_an_error() -> None:
    assert result("changed_in_place").startswith("ValueError: weight was changed in place")


# ---------------------------------------------------------------- names and state dicts


@scenario
def names(rank: int) -> dict[str, Any]:
    plain, model = make(), nested(make())
    plain_names = [n for n, _ in plain.named_parameters()]
    return {
        "parameters": sorted(n for n, _ in model.named_parameters()) == sorted(plain_names),
        "state dict": set(model.state_dict()) == set(plain.state_dict()),
        "modules": {n for n, _ in model.named_modules()} == {n for n, _ in plain.named_modules()},
        "originals": sorted(n for n, _ in model.get_original_names_and_sharded_parameters()),
        "plain": sorted(plain_names),
        "by type": sum(isinstance(m, nn.LayerNorm) for m in model.modules()),
        "submodule": type(model.get_submodule("blocks.0.up")).__name__,
        "sharded": all(p._is_sharded for p in model.parameters()),
        "in a plain parent": set(nn.Sequential(model).state_dict())
        == {f"0.{n}" for n in plain.state_dict()},
    }


def test_names_are_original_everywhere() -> None:
    found = result("names")
    assert found["parameters"]
    assert found["state dict"]
    assert found["modules"]
    assert found["originals"] == found["plain"]
    assert found["by type"] == 2
    assert found["submodule"] == "Linear"
    assert found["sharded"]
    assert found["in a plain parent"]


@scenario
def state_dict_round_trip(rank: int) -> dict[str, Any]:
    first, second = nested(make(seed=1)), nested(make(seed=2))
    state = {name: value.cpu() for name, value in first.state_dict().items()}
    report = second.load_state_dict(copy.deepcopy(state))
    with torch.no_grad():
        same = torch.equal(first(rows()).cpu(), second(rows()).cpu())
    missing, wrong = dict(state), dict(state)
    del missing["blocks.1.up.weight"]
    missing["blocks.0.strange"] = torch.zeros(1)
    wrong["blocks.0.up.bias"] = torch.zeros(5)
    loose = second.load_state_dict(missing, strict=False)
    return {
        "same": same,
        "report": str(report),
        "missing": message(lambda: second.load_state_dict(missing)),
        "wrong": message(lambda: second.load_state_dict(wrong)),
        "loose": (loose.missing_keys, loose.unexpected_keys),
    }


def test_state_dicts_load_again_and_errors_use_original_names() -> None:
    found = result("state_dict_round_trip")
    assert found["same"]
    assert found["report"] == "<All keys matched successfully>"
    assert found["loose"] == (["blocks.1.up.weight"], ["blocks.0.strange"])
    for text in (found["missing"], found["wrong"]):
        assert "_fsdp_wrapped_module" not in text
    assert '"blocks.1.up.weight"' in found["missing"]
    assert '"blocks.0.strange"' in found["missing"]
    assert "size mismatch for blocks.0.up.bias" in found["wrong"]


@scenario
def looks_like_the_module(rank: int) -> dict[str, Any]:
    sequence = fsdp(make(lambda: nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU())))
    sequence.module.config = "its own"
    flat = fsdp(make(lambda: nn.Sequential(nn.Linear(FEATURES, WIDTH))), flatten_parameters=True)
    return {
        "index": type(sequence[1]).__name__,
        "length": len(sequence),
        "attribute": sequence.config,
        "module": type(sequence.module).__name__,
        "absent": message(lambda: sequence.nothing),
        "representation": "world_size=2" in repr(sequence),
        "layers of a flat one": "Linear(in_features" in repr(flat),
        "a layer of a flat one": "bias=True" in repr(flat[0]),
        "attributes of a flat one": hasattr(flat[0], "bias"),
    }


def test_the_wrapper_forwards_what_it_lacks() -> None:
    found = result("looks_like_the_module")
    assert found["index"] == "ReLU"
    assert found["length"] == 2
    assert found["attribute"] == "its own"
    assert found["module"] == "Sequential"
    assert found["absent"].startswith("AttributeError")
    assert found["representation"]
    assert found["layers of a flat one"]
    assert found["a layer of a flat one"]
    assert not found["attributes of a flat one"]


@scenario
def walked_by_children(rank: int) -> dict[str, Any]:
    model = make()
    model.mid = fsdp(model.mid)
    model = nested(model)
    visited: list[str] = []
    model.apply(lambda module: visited.append(type(module).__name__))
    model.eval()
    found: dict[str, Any] = {
        "names": names_by_children(model),
        "applied": visited.count("Linear"),
        "training": [module.training for module in model.modules()],
    }
    model.mid.bias = nn.Parameter(torch.zeros(WIDTH))
    found["replaced"] = message(lambda: model(rows()))
    return found


def names_by_children(module: nn.Module) -> list[str]:
    """Parameter names, found as transformers looks for those that decay."""
    below = [
        f"{child}.{name}"
        for child, inner in module.named_children()
        for name in names_by_children(inner)
    ]
    return [*below, *module._parameters]


def test_walking_by_children_finds_everything_by_its_own_name() -> None:
    plain, found = make(), result("walked_by_children")
    assert found["names"] == names_by_children(plain)
    assert found["applied"] == sum(isinstance(module, nn.Linear) for module in plain.modules())
    assert not any(found["training"])
    assert "bias was replaced after wrapping" in found["replaced"]


# ---------------------------------------------------------------- ties across units


@scenario
def tied_across_units(rank: int) -> dict[str, Any]:
    plain, model = make(TiedNet), make(TiedNet)
    model.first = fsdp(model.first)
    model.second = fsdp(model.second)
    model = fsdp(model)
    for net, data in ((plain, rows().cpu()), (model, rows())):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            net(data).square().sum().backward()
            optimizer.step()
    return {
        "parameters": len(list(model.parameters())),
        "ties": model.get_shard_metadata()["ties"],
        "output": model(rows()).detach().cpu(),
        "expected": plain(rows().cpu()).detach(),
    }


def test_a_weight_tied_across_units_stays_one() -> None:
    found = result("tied_across_units")
    assert found["parameters"] == 3
    assert found["ties"] == {"second.weight": "first.weight"}
    torch.testing.assert_close(found["output"], found["expected"])


@scenario
def tied_and_flat(rank: int) -> str:
    model = make(TiedNet)
    model.first = fsdp(model.first, flatten_parameters=True)
    return message(lambda: fsdp(model, flatten_parameters=True))


def test_a_tie_that_cannot_be_kept_is_an_error() -> None:
    text = result("tied_and_flat")
    tied = "ValueError: second.weight is tied to a parameter of another FSDP unit, and flatten"
    assert text.startswith(tied)
    assert "flatten_parameters=False" in text


# ---------------------------------------------------------------- gradients


@scenario
def clipping(rank: int) -> dict[str, Any]:
    model = nested(make())
    before_forward = model.clip_grad_norm_(1.0)
    model(rows()).square().sum().backward()
    frozen_type = message(lambda: model.clip_grad_norm_(1.0, norm_type=0))
    return {
        "before": before_forward.item(),
        "device": before_forward.device.type,
        "dtype": str(before_forward.dtype),
        "error": frozen_type,
    }


def test_clipping_works_at_any_time() -> None:
    found = result("clipping")
    assert found["before"] == 0.0
    assert found["device"] == "xla"
    assert found["dtype"] == "torch.float32"
    assert found["error"] == "ValueError: norm_type must be positive or inf, got 0"


@scenario
def optimizer_step(rank: int) -> str:
    import torch_xla.core.xla_model as xm

    model = nested(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rows()).sum().backward()
    return message(lambda: xm.optimizer_step(optimizer))


def test_optimizer_step_of_torch_xla_is_refused() -> None:
    assert "Call optimizer.step() instead" in result("optimizer_step")


@scenario
def divide_factors(rank: int) -> dict[str, Any]:
    gradients = []
    for factors in (None, (1.0, 1.0), (4.0, 2.0)):
        model = nested(make())
        if factors:
            model.set_gradient_divide_factors(*factors, recursive=True)
        model(rows()).sum().backward()
        gradients.append(model.get_parameter("blocks.0.up.bias").grad.cpu())
    return {
        "mean": gradients[0],
        "sum": gradients[1],
        "eighth": gradients[2],
        "error": message(lambda: model.set_gradient_divide_factors(0, 1, recursive=False)),
    }


def test_gradient_divide_factors() -> None:
    found = result("divide_factors")
    torch.testing.assert_close(found["sum"], 2 * found["mean"])
    torch.testing.assert_close(found["eighth"], found["sum"] / 8)
    assert found["error"].startswith("ValueError: gradient divide factors must be positive")


@scenario
def frozen_after_wrapping(rank: int) -> dict[str, bool]:
    model = nested(make())
    has_grad = {}
    for step, trainable in enumerate((True, False, True)):
        model.get_parameter("blocks.0.up.weight").requires_grad_(trainable)
        model.zero_grad()
        model(rows()).sum().backward()
        has_grad[f"step {step}"] = model.get_parameter("blocks.0.up.weight").grad is not None
        has_grad[f"other {step}"] = model.get_parameter("blocks.0.up.bias").grad is not None
    return has_grad


def test_freezing_between_steps() -> None:
    found = result("frozen_after_wrapping")
    assert [found[f"step {step}"] for step in range(3)] == [True, False, True]
    assert all(found[f"other {step}"] for step in range(3))


# ---------------------------------------------------------------- construction


@scenario
def misuse(rank: int) -> dict[str, str]:
    wrapped = fsdp(make(lambda: nn.Linear(2, 2)))
    return {
        "not a module": message(lambda: fsdp(3)),
        "twice": message(lambda: fsdp(wrapped)),
        "list": message(lambda: fsdp(make(lambda: nn.ModuleList([nn.Linear(2, 2)])))),
        "policy": message(lambda: fsdp(make(lambda: nn.Linear(2, 2)), auto_wrap_policy=3)),
        "both": message(lambda: fsdp(nn.Sequential(wrapped), auto_wrap_policy=lambda **_: True)),
    }


def test_misuse_is_explained() -> None:
    found = result("misuse")
    assert found["not a module"] == "TypeError: FSDP wraps an nn.Module, got int"
    assert found["twice"].startswith("ValueError: this module is sharded with FSDP already")
    assert found["list"].startswith("ValueError: ModuleList has no forward")
    assert found["policy"].startswith(
        "TypeError: auto_wrap_policy must be callable, or a policy of"
    )
    assert found["both"].startswith("ValueError: 0 is wrapped with FSDP already")


@scenario
def integer_parameters(rank: int) -> dict[str, Any]:
    module = make(lambda: nn.Linear(FEATURES, WIDTH))
    module.table = nn.Parameter(torch.arange(4), requires_grad=False)
    model = fsdp(module)
    model(rows()).sum().backward()
    return {
        "table": model.state_dict()["table"].cpu().tolist(),
        "device": model.table.device.type,
    }


def test_integer_parameters_stay_whole() -> None:
    found = result("integer_parameters")
    assert found == {"table": [0, 1, 2, 3], "device": "xla"}


@scenario
def without_communication(rank: int) -> dict[str, Any]:
    from test.common.hlo import Program
    from xla_fsdp import LocalCollectives
    from xla_fsdp.xla.graph import lowered_hlo

    model = fsdp(make(Peeking), collectives=LocalCollectives(rank, 2))
    model(rows()).sum().backward()
    program = Program(lowered_hlo([p.grad for p in model.parameters()]))
    return {
        "collectives": len(program.all("all-gather", "reduce-scatter", "all-reduce")),
        "shapes": all(p.grad.shape == p.to_local().shape for p in model.parameters()),
    }


def test_local_collectives_take_the_communication_out() -> None:
    assert result("without_communication") == {"collectives": 0, "shapes": True}


# ---------------------------------------------------------------- unusual modules and uses


@scenario
def integer_indices(rank: int) -> list[Any]:
    """torch_xla aborts the process if an index comes out of an optimization barrier."""
    from xla_fsdp import checkpoint_module

    ids = torch.tensor([0, 2, 1]).to(rows().device)
    plain = make(lambda: nn.Embedding(4, FEATURES))
    model = fsdp(checkpoint_module(copy.deepcopy(plain)))
    model(ids).square().sum().backward()
    expected = plain(ids.cpu())
    return [model(ids).detach().cpu(), expected.detach()]


def test_one_dimensional_indices() -> None:
    torch.testing.assert_close(*result("integer_indices"))


@scenario
def held_losses(rank: int) -> dict[str, int]:
    """How many more tensors live on all ranks after each of three steps whose losses are kept."""
    import torch_xla

    from xla_fsdp import checkpoint_module

    found = {}
    for name, wrap in (("root", lambda m: m), ("remat", checkpoint_module)):
        model, counts = fsdp(nn.Sequential(wrap(make()))), []
        losses = []
        for _ in range(3):
            model.zero_grad()
            losses.append(model(rows()).sum())
            losses[-1].backward()
            torch_xla.sync()
            collect_garbage()
            counts.append(live_tensors())
        found[name] = counts[-1] - counts[-2]
    return found


def test_a_loss_that_is_kept_keeps_nothing_else() -> None:
    assert result("held_losses") == {"root": RANKS, "remat": RANKS}  # the losses themselves


class _Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


@scenario
def freed_by_wrapping(rank: int) -> dict[str, bool]:
    """Whether wrapping collects garbage, by where the parameters are."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    def zeros(**options: Any) -> nn.Module:
        module = nn.Linear(4, 4, **options)
        for each in module.parameters():
            nn.init.zeros_(each)
        return module

    def held_in_a_cycle() -> nn.Module:
        module = zeros(device=torch_xla.device())
        module.weight.own = [module.weight]
        return module

    builds = {
        "host": zeros,
        "device": lambda: zeros(device=torch_xla.device()),
        "in a cycle": held_in_a_cycle,
    }
    found = {}
    gc.disable()
    try:
        for name, build in builds.items():
            garbage = weakref.ref(_Cycle())
            fsdp(build())
            found[name] = garbage() is None
            xm.rendezvous(name)  # a collection frees the garbage of all ranks
    finally:
        gc.enable()
    return found


def test_wrapping_collects_garbage_only_if_a_parameter_lives_on() -> None:
    assert result("freed_by_wrapping") == {"host": False, "device": False, "in a cycle": True}


@scenario
def pending_after_wrapping(rank: int) -> dict[str, tuple[bool, bool]]:
    """Whether another tensor, and a shard, is still to be computed; by where the parameters are."""
    import torch_xla

    from xla_fsdp.xla import ops

    found = {}
    for on in ("cpu", "xla"):
        module = nn.Linear(4, 4)
        for each in module.parameters():
            nn.init.zeros_(each)
        module.to(torch_xla.device() if on == "xla" else on)
        other = rows() + 1
        model = fsdp(module)
        found[on] = ops.is_pending(other), any(map(ops.is_pending, model.parameters()))
    return found


def test_wrapping_computes_the_shards_alone() -> None:
    """A sync would look at all units: wrapping would be quadratic in their number."""
    assert result("pending_after_wrapping") == {"cpu": (True, False), "xla": (True, False)}


@scenario
def saved_after_failure(rank: int) -> bool:
    model = nested(make(BackwardFails))
    message(lambda: model(rows()).sum().backward())
    found, expected = model.state_dict(), nested(make(BackwardFails)).state_dict()
    return {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}


def test_a_state_dict_after_a_failed_backward_holds_shards() -> None:
    assert result("saved_after_failure")


@scenario
def replaced(rank: int) -> dict[str, str]:
    found = {}
    for flat in (False, True):
        model = nested(make(), flatten_parameters=flat)
        zeros = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
        model.load_state_dict(zeros, assign=True)
        found[f"assign, flat {flat}"] = message(lambda m=model: m(rows()))
    return found


def test_a_replaced_parameter_is_an_error() -> None:
    for text in result("replaced").values():
        assert "was replaced after wrapping" in text
        assert text.startswith("ValueError")


@scenario
def kept_gradients(rank: int) -> dict[str, Any]:
    def bias_grad(model: Any) -> Tensor:
        return model.get_parameter("blocks.0.up.bias").grad.cpu()

    model = nested(make())
    with model.no_sync():
        model(rows()).sum().backward()
    clip = message(lambda: model.clip_grad_norm_(1.0))
    model.zero_grad()
    model(rows()).sum().backward()
    dropped = bias_grad(model)
    once = nested(make())
    once(rows()).sum().backward()
    return {"clip": clip, "dropped": dropped, "once": bias_grad(once)}


def test_gradients_kept_by_no_sync_can_be_dropped() -> None:
    found = result("kept_gradients")
    assert found["clip"].startswith("RuntimeError: clip_grad_norm_ was called while gradients kept")
    torch.testing.assert_close(found["dropped"], found["once"])


class Optional(Net):
    """Runs its second block only when asked."""

    both = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inp(x))
        return self.head(self.blocks[1](x) if self.both else x)


@scenario
def unit_missing_from_the_last_pass(rank: int) -> list[Tensor]:
    grads = []
    for synchronized in (True, False):
        model = nested(make(Optional))
        with contextlib.nullcontext() if synchronized else model.no_sync():
            model(rows()).sum().backward()
        model.module.both = False
        model(rows()).sum().backward()
        grads.append(model.get_parameter("blocks.1.up.bias").grad.cpu())
    return grads


def test_no_sync_loses_no_gradient_of_a_unit_that_sits_out() -> None:
    torch.testing.assert_close(*result("unit_missing_from_the_last_pass"))


@scenario
def bf16_accumulation(rank: int) -> float:
    options = {"compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}
    model = fsdp(make(lambda: nn.Linear(1, 1, bias=False)), **options)
    one = torch.ones(1, 1).to(rows().device)
    with model.no_sync():
        for _ in range(300):
            model(one).sum().backward()
    model(one).sum().backward()
    return model.get_parameter("weight").grad.sum().item()


def test_no_sync_accumulates_in_the_reduce_dtype() -> None:
    assert result("bf16_accumulation") == 301.0  # bf16 stops at 256


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu, self.lin = nn.ReLU(inplace=True), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.relu(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = ChangesItsInput()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return x + self.block(x)


@scenario
def inputs_changed_in_place(rank: int) -> list[tuple[Tensor, Tensor]]:
    plain = make(Residual)
    expected = plain(rows().cpu())
    expected.square().sum().backward()
    pairs = []
    for barriers in (True, False):
        model = make(Residual)
        options = {
            "optimization_barrier_in_forward": barriers,
            "optimization_barrier_in_backward": barriers,
        }
        model.block = fsdp(model.block, **options)
        model = fsdp(model, **options)
        output = model(rows())
        output.square().sum().backward()
        pairs.append((output.detach().cpu(), expected.detach()))
        own = model.get_parameter("block.lin.bias").grad.cpu()
        if rank == 0:
            pairs.append((own[:FEATURES], plain.block.lin.bias.grad))
    return pairs


def test_an_input_changed_in_place_is_changed_for_the_caller() -> None:
    for found, expected in result("inputs_changed_in_place"):
        torch.testing.assert_close(found, expected)


class Scaling(nn.Module):
    """Computes with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.scale


class ScalingNet(Scaling):
    """Computes with buffers of its own and of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaling(), Scaling()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


@scenario
def functional_call(rank: int) -> dict[str, Any]:
    plain, model = make(ScalingNet), nested(make(ScalingNet))
    names = ["scale", "blocks.1.scale"]
    found = {}
    for name, each, x in (("plain", plain, rows().cpu()), ("sharded", model, rows())):
        given = {key: torch.tensor([2.0 + at], device=x.device) for at, key in enumerate(names)}
        called = torch.func.functional_call(each, given, (x,))
        before = each(x)
        each.scale = each.scale * 3  # by an assignment, too
        found[name] = [tensor.detach().cpu() for tensor in (called, before, each(x))]
    found["names"] = sorted(dict(model.named_buffers()))
    found["state"] = [name for name in model.state_dict() if "scale" in name]
    model.register_buffer("more", torch.ones(1), persistent=False)
    found["new"] = [model.module.more is model.more, "more" in model.state_dict()]
    return found


def test_functional_call_replaces_buffers() -> None:
    found = result("functional_call")
    torch.testing.assert_close(found["sharded"], found["plain"])
    assert found["names"] == ["blocks.0.scale", "blocks.1.scale", "scale"]
    assert found["state"] == []
    assert found["new"] == [True, False]


@scenario
def inference_mode(rank: int) -> list[bool]:
    import torch_xla

    found = []
    for model in (
        nested(make(), disable_reshard_on_root=False),
        in_place(make()),
        in_place(make().to(torch_xla.device())),
    ):
        with torch.inference_mode():
            first = model(rows()).cpu()
        model(rows()).sum().backward()
        with torch.inference_mode():
            model(rows())
        with torch.no_grad():
            found.append(torch.equal(model(rows()).cpu(), first))
    return found


def test_inference_mode() -> None:
    assert result("inference_mode") == [True, True, True]


class Masked(nn.Module):
    """Adds a frozen mask, which is gathered before the layer and begins with an infinite value."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(FEATURES, dtype=torch.bfloat16)
        mask[0] = float("-inf")
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.mask).softmax(-1)


@scenario
def infinite_mask(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict

    plain, found = make(Masked), []
    for options in ({}, {"coalesce_all_gather_ops": False}):
        model = fsdp(make(Masked), **options)
        output = model(rows()).detach().cpu()
        found.append((output, full_state_dict(model)))
    expected = plain(rows().cpu()).detach(), plain.state_dict()
    return {"expected": expected, "found": found}


def test_an_infinite_value_stays_in_its_parameter() -> None:
    results = result("infinite_mask")
    for found in results["found"]:
        torch.testing.assert_close(found, results["expected"])


@scenario
def inherited_collectives(rank: int) -> set[str]:
    from xla_fsdp import LocalCollectives
    from xla_fsdp.wrap import always_wrap_policy

    model = fsdp(make(), auto_wrap_policy=always_wrap_policy, collectives=LocalCollectives(rank, 2))
    return {type(unit.group.collectives).__name__ for unit in model._fsdp_units()}


def test_auto_wrapped_units_get_the_same_collectives() -> None:
    assert result("inherited_collectives") == {"LocalCollectives"}


@scenario
def complex_parameters(rank: int) -> str:
    module = make(lambda: nn.Linear(2, 2))
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return message(lambda: fsdp(module))


def test_complex_parameters_are_refused() -> None:
    text = result("complex_parameters")
    assert text.startswith("ValueError: phase is torch.complex64 and needs a gradient")


class SideChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.lin(x))
        self.aux = hidden.square().sum()
        return hidden


@scenario
def side_channel(rank: int) -> list[bool]:
    from xla_fsdp import checkpoint_module

    found = []
    for wrap in (lambda module: module, checkpoint_module):
        inner = make(SideChannel)
        model = fsdp(wrap(inner), disable_reshard_on_root=False)
        model(rows())
        inner.aux.backward()
        plain = make(SideChannel)
        plain(rows().cpu())
        plain.aux.backward()
        own = model.get_parameter("lin.bias").grad.cpu()
        found.append(rank > 0 or torch.allclose(own[:FEATURES], plain.lin.bias.grad))
        found.append(states(model) == {"SHARDED"})
    return found


def test_backward_from_a_tensor_that_is_no_output() -> None:
    assert all(result("side_channel"))


class WithEmpties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.none = nn.Parameter(torch.zeros(0))
        self.rows = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.none.sum() + self.rows.sum()


@scenario
def empty_parameters(rank: int) -> list[Any]:
    found = []
    for flat in (False, True):
        model = fsdp(make(WithEmpties), flatten_parameters=flat)
        model(rows()).sum().backward()
        norm = model.clip_grad_norm_(1.0, float("inf"))
        found.append(norm.item())
    return found


def test_empty_parameters() -> None:
    first, second = result("empty_parameters")
    assert first == second > 0


@scenario
def step_between(rank: int) -> str:
    model = nested(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rows()).sum().backward()
    loss = model(rows()).sum()
    optimizer.step()
    return message(loss.backward)


def test_a_step_between_forward_and_backward_is_an_error() -> None:
    assert "changed between its forward and its backward" in result("step_between")


@scenario
def copies(rank: int) -> dict[str, Any]:
    plain = make()
    plain.head.bias.no_weight_decay = True
    model = nested(plain)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.get_parameter("head.bias").add_(1)
        different = not torch.equal(model(rows()).cpu(), copied(rows()).cpu())
    return {
        "sharded": all(p._is_sharded for p in copied.parameters()),
        "different": different,
        "mark": model.get_parameter("head.bias").no_weight_decay,
    }


def test_copies_and_marks() -> None:
    assert result("copies") == {"sharded": True, "different": True, "mark": True}


class SharedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        for part in (self.first, self.second):
            part.register_buffer("table", self.first._buffers.get("table", torch.zeros(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@scenario
def shared_buffers(rank: int) -> bool:
    model = fsdp(make(SharedBuffer))
    return model.module.first.table is model.module.second.table


def test_shared_buffers_stay_shared() -> None:
    assert result("shared_buffers")


class Buffers(nn.Module):
    """A unit inside another, whose forward changes two of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.tensor([1 / 3, 1 / 7, 0.1]))
        self.register_buffer("hidden", torch.tensor([1 / 3, 1 / 7, 0.1]), persistent=False)
        self.register_buffer("wide", torch.tensor([1 / 3], dtype=torch.float64))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("newest", torch.zeros(3))
        self.register_buffer("steps", torch.tensor(7))
        self.seen: dict[str, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: str(buffer.dtype) for name, buffer in self.named_buffers()}
        self.average += 0.5
        self.newest = self.average * 2
        self.steps += 1
        return self.norm(self.layer(x)) * self.table

    def scaled(self) -> str:
        return str((self.table * 2).dtype)


@scenario
def buffers_of_a_forward(rank: int) -> dict[str, Any]:
    from xla_fsdp import checkpoint_module, full_state_dict
    from xla_fsdp import register_fsdp_forward_method as register

    found: dict[str, Any] = {}
    for how, options in {
        "default": {},
        "buffer_dtype": {"buffer_dtype": torch.bfloat16},
        "remat": {"buffer_dtype": torch.bfloat16},
    }.items():
        inner = make(Buffers)
        own = dict(inner.named_buffers())
        unit = fsdp(
            checkpoint_module(inner) if how == "remat" else inner,
            compute_dtype=torch.bfloat16,
            **options,
        )
        register(unit, "scaled")
        model = fsdp(nn.Sequential(unit), compute_dtype=torch.bfloat16, **options)
        before = dict(inner.named_buffers())
        model(rows()).sum().backward()
        after, state = dict(inner.named_buffers()), full_state_dict(model)
        with contextlib.suppress(ZeroDivisionError):
            inner.layer.register_forward_hook(lambda *_: 1 / 0)
            model(rows())
        found[how] = {
            "seen": inner.seen,
            "same": sorted(name for name in before if before[name] is after[name]),
            "dtypes": {name: str(each.dtype) for name, each in inner.named_buffers()},
            "state": {name: state[f"0.{name}"] for name in own if name != "hidden"},
            "table": torch.equal(inner.table.cpu(), own["table"]),
            "method": unit.scaled(),
            "metadata": model.get_shard_metadata()["buffers"],
        }
    return found


def test_buffers_keep_their_dtype_and_are_cast_for_a_forward_only() -> None:
    float32, low = "torch.float32", "torch.bfloat16"
    own = {"table": float32, "hidden": float32, "wide": "torch.float64", "average": float32}
    own |= {"newest": float32, "steps": "torch.int64", "norm.running_mean": float32}
    own |= {"norm.running_var": float32, "norm.num_batches_tracked": "torch.int64"}
    found = result("buffers_of_a_forward")
    floats = ("table", "hidden", "wide", "average", "newest")
    seen = {"default": own, "buffer_dtype": own | dict.fromkeys(floats, low)}
    seen["remat"] = seen["buffer_dtype"]
    for how, each in found.items():
        assert each["seen"] == seen[how]
        assert each["dtypes"] == own
        assert each["same"] == sorted(set(own) - {"newest"})
        assert {name: str(t.dtype) for name, t in each["state"].items()} == {
            name: dtype for name, dtype in own.items() if name != "hidden"
        }
        assert each["state"]["table"].equal(torch.tensor([1 / 3, 1 / 7, 0.1]))
        assert each["state"]["wide"].item() == 1 / 3
        assert each["state"]["average"].tolist() == [0.5] * 3
        assert each["state"]["newest"].tolist() == [1.0] * 3
        assert each["state"]["steps"] == 8
        assert each["table"]
        assert each["metadata"] == {}
        assert each["method"] == (float32 if how == "default" else low)


@scenario
def halved(rank: int) -> str:
    model = fsdp(make()).bfloat16()
    return str(model(rows().bfloat16()).dtype)


def test_casting_the_wrapped_module_casts_its_computation() -> None:
    assert result("halved") == "torch.bfloat16"


# ---------------------------------------------------------------- a root's large gradients


class Headed(nn.Module):
    """A unit inside, and a head so large that its gradient travels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(128, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Reentrant(Headed):
    """Uses its head as it is, and in a checkpoint that runs a backward pass inside of backward."""

    def forward(self, x: Tensor) -> Tensor:
        from torch_xla.utils.checkpoint import checkpoint

        x = self.body(x).tanh()
        run = checkpoint if x.device.type == "xla" else lambda part, x: part(x)
        return self.head(x) + run(self.head, run(torch.sin, x)).cos()


class Headeds:
    """A plain model with a head, a sharded one, and an input of both."""

    def __init__(self, kind: type[Headed] = Headed) -> None:
        import torch_xla

        self.plain, model = make(kind), make(kind)
        model.body = fsdp(model.body)
        self.model = fsdp(model)
        self.x = torch.linspace(-1, 1, 4 * 128).view(4, 128).requires_grad_()
        self.given = self.x.detach().to(torch_xla.device()).requires_grad_()

    def loss(self) -> Tensor:
        return self.model(self.given).square().sum()

    def difference(self, backwards: int = 1) -> float:
        """Return that of both after a step, of the plain one with gradients of ``backwards``."""
        from xla_fsdp import full_state_dict

        for _ in range(backwards):
            self.plain(self.x).square().sum().backward()
        for each in (self.plain, self.model):
            torch.optim.SGD(each.parameters(), lr=1e-3).step()
            each.zero_grad()
        own = full_state_dict(self.model)
        pairs = ((own[key], value) for key, value in self.plain.state_dict().items())
        return max(float((a - b).abs().max()) for a, b in pairs)

    def fail_once(self) -> None:
        """Run a backward pass that raises in the body, and then to its end."""

        def stop(grad: Tensor) -> None:
            if fails:
                raise RuntimeError("stop")

        def watch(module: Any, given: Any, output: Tensor) -> None:
            output.register_hook(stop)

        fails = [True]
        hook = self.model.body.register_forward_hook(watch)
        loss = self.loss()
        hook.remove()
        with pytest.raises(RuntimeError, match="stop"):
            loss.backward(retain_graph=True)
        fails.clear()
        self.model.zero_grad()  # a pass inside of the other had ended
        loss.backward()


@scenario
def early(rank: int) -> dict[str, Any]:
    both, found = Headeds(), {}
    both.loss().backward()
    found["once"] = both.difference()
    loss = both.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    found["twice through one graph"] = both.difference(2)
    with both.model.no_sync():
        both.loss().backward()
    both.loss().backward()
    found["kept before"] = both.difference(2)
    (both.loss() + both.loss()).backward()
    found["two forwards"] = both.difference(2)
    both.fail_once()
    found["after one that raised"] = both.difference()
    return found


def test_gradients_that_a_root_reduces_early_are_complete() -> None:
    assert max(result("early").values()) < 1e-5


@scenario
def early_in_passes_inside_of_passes(rank: int) -> dict[str, Any]:
    both, found = Headeds(Reentrant), {}
    both.loss().backward()
    found["once"] = both.difference()
    both.fail_once()
    found["after one that raised"] = both.difference()
    return found


def test_gradients_that_a_root_reduces_early_in_reentrant_checkpoints_are_complete() -> None:
    assert max(result("early_in_passes_inside_of_passes").values()) < 1e-5


# ---------------------------------------------------------------- forwards without backward


class Marker:
    """Lives as long as the node of a graph that holds it."""


@scenario
def dropped_graphs(rank: int) -> tuple[int, int]:
    import torch_xla

    # Nodes of a softmax save what they return.
    model = nested(make(Softmaxes))
    loss = model(rows().to(torch_xla.device())).sum()
    markers, found, todo = [], set(), [loss.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            node.metadata["marker"] = marker = Marker()
            markers.append(weakref.ref(marker))
            todo += [each for each, _ in node.next_functions]
    del loss, node, found, todo, marker
    return len(markers), sum(each() is not None for each in markers)


class Softmaxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Softmax(-1)) for _ in range(2)]
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_graph_ends_with_its_loss_also_without_backward() -> None:
    nodes, alive = result("dropped_graphs")
    assert nodes > 10
    assert alive == 0


# ---------------------------------------------------------------- what wrapping costs

MOST_CALLS = 900
"""Of functions, Python's and C's, to wrap one more layer; 820 as it stands."""


@scenario
def calls_of_wrapping(rank: int) -> float:
    layers = make(lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(12)))
    wrapped = [fsdp(layer) for layer in layers[:2]]  # what the first one sets up is not counted
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        wrapped += [fsdp(layer) for layer in layers[2:]]
    finally:
        sys.setprofile(None)
    return count / 10


def test_wrapping_a_layer_stays_cheap() -> None:
    assert result("calls_of_wrapping") < MOST_CALLS


# ---------------------------------------------------------------- models of transformers


@scenario
def hidden_states(rank: int) -> dict[str, Any]:
    import torch_xla

    tokens = torch.arange(1, 13).reshape(2, 6)
    ids = tokens.to(torch_xla.device())
    by_hand, by_policy = make(tiny_llama), make(tiny_llama)
    for at, layer in enumerate(by_hand.model.layers):
        by_hand.model.layers[at] = fsdp(layer)
    layers = {type(layer) for layer in by_policy.model.layers}
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
    models = {
        "by hand": fsdp(by_hand),
        "by policy": fsdp(by_policy, auto_wrap_policy=policy),
    }
    found = {
        name: [each.cpu() for each in model(ids, output_hidden_states=True).hidden_states]
        for name, model in models.items()
    }
    found["plain"] = list(make(tiny_llama)(tokens, output_hidden_states=True).hidden_states)
    return {name: [each.detach() for each in states] for name, states in found.items()}


def tiny_llama() -> Any:
    return language_model("Llama", False)


def test_hidden_states_that_are_asked_for_after_wrapping_are_collected() -> None:
    found = result("hidden_states")
    assert len(found["plain"]) > 2
    for name in ("by hand", "by policy"):
        torch.testing.assert_close(found[name], found["plain"], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- what units are, and do

SECTION = re.search(
    r"## What did I get\?\n(.*?)\n## ", (ROOT / "docs" / "wrapper.md").read_text(), re.DOTALL
)
assert SECTION is not None
CODE = re.findall(r"```python\n(.*?)```", SECTION[1], re.DOTALL)[0]
EXPLAINED, TOLD = re.findall(r"```text\n(.*?)```", SECTION[1], re.DOTALL)


@scenario
def explained(rank: int) -> dict[str, Any]:
    from xla_fsdp.fsdp.explain import explain, lines_of

    names: dict[str, Any] = {}
    exec(CODE.replace("xla_fsdp.explain(model)\n", ""), names)
    kept = nested(make(), reshard_after_forward=False, fp32_reduce_scatter=True)
    unit = kept.blocks[1]._fsdp_unit
    return {
        "page": lines_of(names["model"]),
        "kept": lines_of(kept),
        "none": message(lambda: explain(nn.Linear(2, 2))),
        "reprs": [repr(unit), repr(unit.group.params[0])],
    }


def test_units_are_explained_as_on_the_page() -> None:
    found = result("explained")
    assert found["page"] == EXPLAINED.splitlines()
    assert [line.split("  ")[0] for line in found["kept"][1:3]] == ["root", "blocks.0-1 (2)"]
    assert all("forward, kept" in line for line in found["kept"][1:3])
    assert found["none"].startswith("ValueError: the model has no FSDP units to explain")
    assert found["reprs"] == REPRS


REPRS = [
    "FSDPState(blocks.1: SHARDED, FSDPParamGroup(blocks.1: 5 parameters of 2 ranks))",
    "FSDPParam(norm.weight [11]: 128 elements torch.float32 on each of 2 ranks, computes in "
    "torch.float32, SHARDED)",
]


@scenario
def told(rank: int) -> list[str]:
    """What the log says of a step of this rank, and nothing while it is off."""
    import torch_xla.core.xla_model as xm

    log, handler = logging.getLogger("xla_fsdp.schedule"), logging.Handler()
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    model = nested(make())
    log.addHandler(handler)
    model(rows()).sum().backward()
    assert lines == []
    xm.rendezvous("both were silent")
    log.setLevel(logging.DEBUG)
    model(rows()).sum().backward()
    xm.rendezvous("both have told")
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)
    return [each for each in lines if each.startswith(f"rank {rank},")]


def test_the_log_tells_what_is_gathered_freed_and_reduced() -> None:
    assert result("told") == TOLD.splitlines()
