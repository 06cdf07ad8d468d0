"""Access to full parameters between steps, and methods other than forward. Two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from test.common.models import FEATURES, WIDTH, BatchNormNet, Net, TiedNet
from test.common.scenarios import Scenarios, fsdp, make, message, nested, rows, states

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].cpu(), expected[name]) for name in expected
    )


def own_names(model: nn.Module) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the parameters that are each module's own."""
    return {
        name: [(own, tuple(p.shape)) for own, p in module.named_parameters(recurse=False)]
        for name, module in model.named_modules()
    }


@scenario
def summon_shows_the_plain_model(rank: int) -> dict[str, bool]:
    from xla_fsdp import XlaFullyShardedDataParallel

    found = {}
    for name, options, model_class in (
        ("nested", {}, Net),
        ("flat", {"flatten_parameters": True}, Net),
        ("rows", {"shard_param_on_dim_0": True}, Net),
        ("bf16", {"compute_dtype": torch.bfloat16}, BatchNormNet),
    ):
        plain, model = make(model_class), nested(make(model_class), **options)
        for on_host in (False, True):
            with XlaFullyShardedDataParallel.summon_full_params(model, offload_to_cpu=on_host):
                found[f"{name}, host {on_host}"] = equal(
                    dict(model.named_parameters()), dict(plain.named_parameters())
                )
                found[f"{name}, host {on_host}, own"] = own_names(model) == own_names(plain)
        shards = {n: p.to_local().shape for n, p in model.named_parameters()}
        again = nested(make(model_class), **options)
        found[f"{name}, shards afterwards"] = states(model) == {"SHARDED"} and shards == {
            n: p.to_local().shape for n, p in again.named_parameters()
        }
    return found


def test_summoned_parameters_are_those_of_the_plain_model() -> None:
    found = result("summon_shows_the_plain_model")
    assert len(found) == 20
    assert all(found.values()), found


@scenario
def changes_are_written_back(rank: int) -> dict[str, Any]:
    from xla_fsdp import XlaFullyShardedDataParallel

    found = {}
    for flat in (False, True):
        for on_host in (False, True):
            for writeback in (True, False):
                model = nested(make(), flatten_parameters=flat)
                before = model(rows()).detach().cpu()
                with (
                    XlaFullyShardedDataParallel.summon_full_params(
                        model, writeback=writeback, offload_to_cpu=on_host
                    ),
                    torch.no_grad(),
                ):
                    for param in model.parameters():
                        param.add_(torch.ones_like(param) / 8)
                plain = make()
                with torch.no_grad():
                    for param in plain.parameters() if writeback else ():
                        param.add_(0.125)
                after = model(rows()).detach().cpu()
                expected = plain(rows().cpu()).detach()
                name = f"flat {flat}, host {on_host}, writeback {writeback}"
                found[name] = torch.allclose(after, expected, atol=1e-5)
                found[f"{name}: changed"] = torch.equal(before, after) != writeback
    return found


def test_changes_are_written_back_on_request() -> None:
    found = result("changes_are_written_back")
    assert len(found) == 16
    assert all(found.values()), found


@scenario
def one_small_unit(rank: int) -> dict[str, Any]:
    """All of it lies on rank 0: rank 1 has no use for what it gathers."""
    from xla_fsdp import XlaFullyShardedDataParallel, full_state_dict

    summon = XlaFullyShardedDataParallel.summon_full_params
    model = fsdp(make(lambda: nn.Linear(4, 4)))
    before = full_state_dict(model)
    with summon(model):
        model.weight.data.mul_(2)
    doubled = torch.equal(full_state_dict(model)["weight"], 2 * before["weight"])
    with summon(model, writeback=False):
        read = model.weight[0, 0].item() if rank == 0 else None

    def replace() -> None:
        with summon(model):
            model.module.weight = nn.Parameter(torch.zeros(4, 4))

    def look() -> None:
        with summon(model):
            pass

    replaced, again = message(replace), message(look)
    model.module.bias = nn.Parameter(torch.zeros(4))
    broken = message(look)
    return {
        "doubled": doubled,
        "read": read == (2 * before["weight"][0, 0].item() if rank == 0 else None),
        "replaced": replaced,
        "again": again,
        "broken": [broken, message(look)],
    }


def test_a_unit_that_one_rank_holds_alone() -> None:
    for rank in (0, 1):
        found = result("one_small_unit", rank)
        assert (found["doubled"], found["read"]) == (True, True)
    assert "ValueError: weight was replaced inside summon_full_params" in found["replaced"]
    assert found["again"] == "nothing was raised"
    assert found["broken"][0].startswith("ValueError: bias was replaced after wrapping")
    assert found["broken"][0] == found["broken"][1]


@scenario
def a_tie_is_one_tensor(rank: int) -> dict[str, Any]:
    from xla_fsdp import XlaFullyShardedDataParallel

    model = make(TiedNet)
    model.first, model.second = fsdp(model.first), fsdp(model.second)
    model = fsdp(model)
    with XlaFullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        same = model.get_parameter("first.weight") is model.get_parameter("second.weight")
        model.get_parameter("first.weight").fill_(2.0)
    with XlaFullyShardedDataParallel.summon_full_params(model, writeback=False):
        values = model.get_parameter("second.weight").detach().cpu()
    return {"same": same, "values": values.unique().tolist()}


def test_a_weight_of_two_units_is_summoned_once() -> None:
    assert result("a_tie_is_one_tensor") == {"same": True, "values": [2.0]}


@scenario
def gradients_are_summoned(rank: int) -> dict[str, Any]:
    from xla_fsdp import XlaFullyShardedDataParallel

    plain, model = make(), nested(make())
    plain(rows().cpu()).square().sum().backward()
    model(rows()).square().sum().backward()
    with XlaFullyShardedDataParallel.summon_full_params(model, with_grads=True), torch.no_grad():
        close = all(
            torch.allclose(p.grad.cpu(), q.grad, atol=1e-5)
            for p, q in zip(
                dict(sorted(model.named_parameters())).values(),
                dict(sorted(plain.named_parameters())).values(),
                strict=True,
            )
        )
        for param in model.parameters():
            param.grad.zero_()
    return {"close": close, "written": model.clip_grad_norm_(1.0).item()}


def test_gradients_too_on_request() -> None:
    assert result("gradients_are_summoned") == {"close": True, "written": 0.0}


@scenario
def only_rank_0(rank: int) -> dict[str, Any]:
    from xla_fsdp import XlaFullyShardedDataParallel

    summon = XlaFullyShardedDataParallel.summon_full_params
    model = nested(make())

    def shape_of(name: str) -> tuple[int, ...]:  # of what is there: a shard is a vector
        return tuple(model.get_parameter(name).detach().shape)

    with summon(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        shape = shape_of("head.weight")
    with summon(model, recurse=False):
        found = [(shape_of("blocks.0.up.weight"), shape_of("head.weight"))]
    for part in (model.blocks[0], model.blocks):  # what is in the outermost module
        with summon(part, recurse=False):
            found.append((shape_of("blocks.0.up.weight"), shape_of("head.weight")))

    def enter(**options: Any) -> None:
        with summon(model, **options):
            pass

    def call_inside() -> None:
        with summon(model):
            model(rows())

    def twice() -> None:
        with summon(model), summon(model):
            pass

    def in_backward() -> None:
        loss = model(rows()).sum()
        loss.register_hook(lambda grad: enter())
        loss.backward()

    def own() -> list[str]:
        layer = fsdp(make(lambda: nn.Linear(WIDTH, WIDTH)))
        with summon(layer):
            return [name for name, _ in layer.named_parameters(recurse=False)]

    return {
        "shape": shape,
        "recurse": found,
        "backward": message(in_backward),
        "own": own(),
        "both": message(lambda: enter(rank0_only=True)),
        "call": message(call_inside),
        "twice": message(twice),
        "states": states(model),
    }


def test_options_of_summoning() -> None:
    assert result("only_rank_0", 0)["shape"] == (7, WIDTH)
    assert len(result("only_rank_0", 1)["shape"]) == 1
    found = result("only_rank_0")
    dims = [tuple(len(shape) for shape in shapes) for shapes in found["recurse"]]
    assert dims == [(1, 2), (2, 1), (2, 1)]
    assert found["both"].startswith("ValueError: writeback=True needs every rank's")
    assert "was called inside summon_full_params" in found["call"]
    assert "holds full parameters, not shards (a unit is in state SUMMONED)" in found["twice"]
    assert "cannot be summoned inside a backward pass" in found["backward"]
    assert found["own"] == ["weight", "bias"]
    assert found["states"] == {"SHARDED"}


@scenario
def between_forward_and_backward(rank: int) -> str:
    from xla_fsdp import XlaFullyShardedDataParallel

    model = nested(make())
    one = model(rows())
    with XlaFullyShardedDataParallel.summon_full_params(model):
        pass
    return message((one + model(rows())).sum().backward)


def test_looking_between_forward_and_backward_changes_nothing() -> None:
    assert result("between_forward_and_backward") == "nothing was raised"


class Coder(nn.Module):
    """A model that is used by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.out = nn.Linear(WIDTH, FEATURES)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.inp(x)) * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(x))

    def refine(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self(x)
        return x


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()

    def forward(self, x: Tensor) -> Tensor:
        return self.coder.encode(x, scale=2.0)


@scenario
def other_methods(rank: int) -> dict[str, Any]:
    from xla_fsdp import register_fsdp_forward_method

    plain, holder = make(Holder), make(Holder)
    holder.coder = fsdp(holder.coder)
    model = fsdp(holder)
    before = message(lambda: model(rows()))
    register_fsdp_forward_method(model.coder, "encode")
    register_fsdp_forward_method(model.coder, "refine")
    register_fsdp_forward_method(nn.Linear(1, 1), "nothing")
    output = model(rows())
    output.square().sum().backward()
    plain(rows().cpu()).square().sum().backward()
    with torch.no_grad():
        refined = model.coder.refine(rows(), 2).cpu()
    return {
        "before": before,
        "gradient": torch.allclose(
            model.get_parameter("coder.inp.bias").grad.cpu()[:WIDTH] * (rank == 0),
            plain.coder.inp.bias.grad * (rank == 0),
        ),
        "refined": torch.allclose(refined, plain.coder.refine(rows().cpu(), 2), atol=1e-6),
        "states": states(model),
        "unknown": message(lambda: register_fsdp_forward_method(model.coder, "decode")),
    }


def test_registered_methods_run_like_forward() -> None:
    found = result("other_methods")
    assert found["before"] != "nothing was raised"
    assert found["gradient"]
    assert found["refined"]
    assert found["states"] == {"SHARDED"}
    assert found["unknown"].startswith("ValueError: Coder has no method 'decode' to register")
