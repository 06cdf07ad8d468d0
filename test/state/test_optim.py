"""The state of optimizers by key: reading, writing, creating it, and what is refused. Two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from test.common.models import FEATURES
from test.common.scenarios import Scenarios, fsdp, make, message, rows

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw for": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), capturable=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


class Pair(nn.Module):
    """As small as can be: what is tested costs one compilation for each optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 3)
        self.head = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inp(x)))


LOADED = ("momentum", "adamw capturable")


def params(model: Any) -> dict[str, Tensor]:
    from xla_fsdp.state.optim import params_by_key

    return params_by_key(model)


def train(model: Any, optimizer: Any, steps: int, **arguments: Any) -> list[Tensor]:
    import torch_xla

    for _ in range(steps):
        optimizer.zero_grad()
        model(rows()).square().sum().backward()
        optimizer.step(**arguments)
        torch_xla.sync()
    return [param.detach().cpu() for param in model.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def continues(make_optimizer: Callable[[Any], Any], **arguments: Any) -> bool:
    """Whether two steps and one more equal three steps, with state moved in between."""
    from xla_fsdp.state.optim import read_optimizer, write_optimizer

    model, straight = fsdp(make(Pair)), fsdp(make(Pair))
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, 2, **arguments)
    state = read_optimizer(optimizer, params(model))
    fresh = make_optimizer(model.parameters())
    write_optimizer(fresh, params(model), state)
    whole = train(straight, make_optimizer(straight.parameters()), 3, **arguments)
    return same(train(model, fresh, 1, **arguments), whole)


@scenario
def moved_to_another_optimizer(rank: int) -> dict[str, bool]:
    import torch_xla
    from torch_xla.amp import syncfree

    found = {name: continues(make_optimizer) for name, make_optimizer in OPTIMIZERS.items()}
    on_device = torch.zeros((), device=torch_xla.device())
    for syncfree_class in (syncfree.AdamW, syncfree.SGD):
        found[syncfree_class.__name__] = continues(
            lambda p, make_one=syncfree_class: make_one(p, lr=0.01), found_inf=on_device
        )
    return found


def test_a_new_optimizer_goes_on_where_the_old_one_was() -> None:
    for rank in range(2):
        found = result("moved_to_another_optimizer", rank)
        assert len(found) == len(OPTIMIZERS) + 2
        assert [name for name in found if not found[name]] == []


@scenario
def scaled_states(rank: int) -> dict[str, bool]:
    """Whether a new optimizer, which has made no step, takes a whole state and goes on like the
    old one, of optimizers that keep one thing with a scaler and another without."""
    import torch_xla
    from torch_xla.amp import syncfree

    from xla_fsdp import load_optim_state_dict, optim_state_dict

    found = {}
    on_device = torch.zeros((), device=torch_xla.device())
    for make_optimizer in (syncfree.AdamW, syncfree.SGD):
        for name, arguments in {"scaler": {"found_inf": on_device}, "none": {}}.items():
            options = {"momentum": 0.9} if make_optimizer is syncfree.SGD else {}
            model = fsdp(make(Pair))
            old = make_optimizer(model.parameters(), lr=0.01, **options)
            train(model, old, 1, **arguments)
            state = optim_state_dict(model, old)
            new = make_optimizer(model.parameters(), lr=0.01, **options)
            load_optim_state_dict(model, new, state)
            again = optim_state_dict(model, new)["state"]
            found[f"{make_optimizer.__name__}, {name}"] = all(
                torch.equal(value, again[key][entry])
                for key, values in state["state"].items()
                for entry, value in values.items()
            )
            train(model, new, 1, **arguments)
    return found


def test_new_optimizers_take_what_is_kept_with_a_scaler_and_without() -> None:
    found = result("scaled_states")
    assert len(found) == 4
    assert [name for name in found if not found[name]] == []


@scenario
def places(rank: int) -> dict[str, Any]:
    from xla_fsdp.state.optim import read_optimizer

    model = fsdp(make(Pair), shard_param_on_dim_0=True)
    found: dict[str, Any] = {}
    for name in ("adamw for", "adamw capturable", "adafactor"):
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, 1)
        state = read_optimizer(optimizer, params(model))
        entries = state.states["head.weight"]
        found[name] = {state: entry.kind.name for state, entry in entries.items()}
        found[f"{name}, lr"] = type(state.groups[0].options["lr"]).__name__
    found["keys"] = state.groups[0].params == tuple(params(model))
    return found


def test_what_is_cut_and_what_is_whole() -> None:
    moments = {"exp_avg": "SHARD", "exp_avg_sq": "SHARD"}
    assert result("places") == {
        "adamw for": {"step": "HOST", **moments},
        "adamw for, lr": "float",
        "adamw capturable": {"step": "DEVICE", **moments},
        "adamw capturable, lr": "float",
        "adafactor": {"step": "HOST", "row_var": "DEVICE", "col_var": "DEVICE"},
        "adafactor, lr": "float",
        "keys": True,
    }


class CodesPair(Pair):
    """With a parameter that stays whole, as it is of an integer dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(7), requires_grad=False)


@scenario
def wide_and_whole(rank: int) -> dict[str, Any]:
    """State in a wider dtype than the parameter's, and a parameter that is not sharded."""
    from xla_fsdp.checkpoint.format.records import StateKind
    from xla_fsdp.state.optim import read_optimizer, write_optimizer

    model = fsdp(make(CodesPair).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in params(model).values():
        optimizer.state[param] = {"master": torch.full_like(param, 1.001, dtype=torch.float32)}
    state = read_optimizer(optimizer, params(model))
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    write_optimizer(fresh, params(model), state)
    again = {key: fresh.state[param]["master"] for key, param in params(model).items()}
    return {
        "dtypes": {str(value.dtype) for value in again.values()},
        "values": {value.unique().item() for value in again.values()}
        == {torch.tensor(1.001).item()},
        "own": all(again[k] is not e["master"].value for k, e in state.states.items()),
        "whole": state.states["codes"]["master"].kind is StateKind.DEVICE,
        "cut": state.states["head.weight"]["master"].kind is StateKind.SHARD,
    }


def test_state_keeps_its_dtype() -> None:
    found = result("wide_and_whole")
    assert found == {
        "dtypes": {"torch.float32"},
        "values": True,
        "own": True,
        "whole": True,
        "cut": True,
    }


class Three(nn.Sequential):
    """Parameters of the same shapes, so that nothing but their order tells them apart."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))


def two_units(wrap: Callable[[nn.Module], Any]) -> Any:
    model = make(Three)
    for index in (0, 2):
        model[index] = wrap(model[index])
    return wrap(model)


def by_kind(model: Any) -> list[dict[str, Any]]:
    """Two groups, as scripts make them."""
    params = list(model.parameters())
    return [
        {"params": [p for i, p in enumerate(params) if i % 2 == odd], "weight_decay": odd}
        for odd in (0, 1)
    ]


@scenario
def of_torch_xla(rank: int) -> dict[str, Any]:
    """A job of torch_xla's FSDP, whose files a script loads after its import was changed."""
    import io

    import torch_xla
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Upstream

    from xla_fsdp.state.model import full_state_dict

    plain = make(Three)
    optimizer = torch.optim.AdamW(by_kind(plain), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        plain(rows().cpu()).square().sum().backward()
        optimizer.step()
    device = torch_xla.device()
    theirs = two_units(
        lambda module: Upstream(module.to(device), pin_layout_in_collective_ops=False)
    )
    optimizer = torch.optim.AdamW(by_kind(theirs), lr=0.01)
    train(theirs, optimizer, 2)
    file = io.BytesIO()
    torch.save({"model": theirs.state_dict(), "optimizer": optimizer.state_dict()}, file)

    def read() -> Any:
        file.seek(0)
        return torch.load(file, map_location="cpu")

    model = two_units(fsdp)
    optimizer = torch.optim.AdamW(by_kind(model), lr=0.5)
    model.load_state_dict(read()["model"])
    optimizer.load_state_dict(read()["optimizer"])
    two_units(fsdp).load_state_dict(read()["model"])  # as other ranks do at any time
    again = message(lambda: optimizer.load_state_dict(read()["optimizer"]))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())  # after a step, in its own order
    own = torch.optim.AdamW(by_kind(model), lr=0.5)
    own.load_state_dict(read_of(optimizer))
    train(model, own, 1)
    full = full_state_dict(model)
    close = {
        name: (full[name].cpu() - v).abs().max().item() < 1e-5
        for name, v in plain.state_dict().items()
    }
    model.load_state_dict(read()["model"])
    mixed = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
    state = {"state": {}, "param_groups": [{**mixed.param_groups[0], "params": list(range(7))}]}
    pair = fsdp(make(Pair), shard_param_on_dim_0=True)
    narrow = torch.optim.AdamW(pair.parameters(), lr=0.01)
    train(pair, narrow, 1)
    turned = read_of(narrow)
    turned["param_groups"][0]["params"].reverse()
    return {
        "close": close,
        "again": again,
        "unknown": message(lambda: mixed.load_state_dict(state)),
        "shapes": message(lambda: torch.optim.AdamW(pair.parameters()).load_state_dict(turned)),
    }


def read_of(optimizer: torch.optim.Optimizer) -> Any:
    """A copy of an optimizer's state dict, as from a file."""
    from copy import deepcopy

    return deepcopy(optimizer.state_dict())


def test_state_of_torch_xla_goes_to_the_parameters_it_is_of() -> None:
    found = result("of_torch_xla")
    assert len(found["close"]) == 6
    assert all(found["close"].values())
    assert found["again"] == "nothing was raised"
    assert "The order of the parameters in this state dict cannot be told" in found["unknown"]
    assert "exp_avg of parameter 0 in group 0 has shape" in found["shapes"]
    assert "load_optim_state_dict of what optim_state_dict has returned" in found["shapes"]


@scenario
def loaded_before_a_step(rank: int) -> dict[str, bool]:
    """A new optimizer that takes a whole state, or refuses one; nothing else of it changes."""
    from xla_fsdp import load_optim_state_dict, optim_state_dict

    found = {}
    for name in LOADED:
        make_optimizer = OPTIMIZERS[name]
        model, other = fsdp(make(Pair)), fsdp(make(Pair))
        trained, straight = (make_optimizer(each.parameters()) for each in (model, other))
        train(model, trained, 1)
        state = optim_state_dict(model, trained)
        before = [param.detach().cpu() for param in model.parameters()]
        optimizer = make_optimizer(model.parameters())
        wrong = {**state, "state": {**state["state"], "other": {}}}
        refused = message(lambda: load_optim_state_dict(model, optimizer, wrong))  # noqa: B023
        found[f"{name}: refused"] = "entries for other" in refused and not optimizer.state
        load_optim_state_dict(model, optimizer, state)
        found[f"{name}: still"] = same(before, [p.detach().cpu() for p in model.parameters()])
        found[f"{name}: rates"] = [g["lr"] for g in optimizer.param_groups] == [
            g["lr"] for g in trained.param_groups
        ]
        found[f"{name}: gradients"] = all(p.grad is not None for p in model.parameters())
        # Not equal: XLA computes with a step that it knows when compiling, and rounds otherwise.
        found[f"{name}: same steps"] = all(
            torch.allclose(a, b, rtol=1e-6, atol=0)
            for a, b in zip(train(model, optimizer, 1), train(other, straight, 2), strict=True)
        )
    return found


def test_state_loaded_before_the_first_step_changes_nothing_else() -> None:
    found = result("loaded_before_a_step")
    assert len(found) == 5 * len(LOADED)
    assert [name for name in found if not found[name]] == []


@scenario
def refusals(rank: int) -> dict[str, str]:
    from xla_fsdp.state.optim import read_optimizer, write_optimizer

    plain, model = make(Pair), fsdp(make(Pair))
    before_wrapping = torch.optim.SGD(plain.parameters(), lr=0.1)
    adam = OPTIMIZERS["adamw for"](model.parameters())
    train(model, adam, 1)
    state = read_optimizer(adam, params(model))
    names = list(model.parameters())
    halves = torch.optim.AdamW([{"params": names[:3]}, {"params": names[3:]}])
    some = torch.optim.AdamW(names[1:])
    sgd = torch.optim.SGD(names, lr=0.1)
    lists = torch.optim.SGD(names, lr=0.1)
    lists.state[names[0]]["history"] = [1, 2]
    odd = torch.optim.SGD([{"params": names, "mask": torch.zeros(3)}], lr=0.1)

    def write(optimizer: Any) -> Callable[[], None]:
        return lambda: write_optimizer(optimizer, params(model), state)

    rows_model = fsdp(make(Pair), shard_param_on_dim_0=True)
    other_shapes = OPTIMIZERS["adamw for"](rows_model.parameters())
    return {
        "before wrapping": message(lambda: read_optimizer(before_wrapping, params(model))),
        "lists": message(lambda: read_optimizer(lists, params(model))),
        "odd option": message(lambda: read_optimizer(odd, params(model))),
        "groups": message(write(halves)),
        "missing": message(write(some)),
        "class": message(write(sgd)),
        "shapes": message(lambda: write_optimizer(other_shapes, params(rows_model), state)),
        "untouched": str(not sgd.state and not some.state and not other_shapes.state),
    }


def test_refusals_say_what_to_do() -> None:
    found = result("refusals")
    assert (
        "group 0 of SGD has a parameter of shape (3, 5) that is not in the model. Create the"
        in (found["before wrapping"])
    )
    assert "SGD keeps a list as 'history' of inp.weight; expected tensors" in found["lists"]
    assert "group 0 has a Tensor in 'mask'; expected numbers" in found["odd option"]
    assert "the state has 1 parameter groups, the optimizer 2" in found["groups"]
    first, second = found["missing"].splitlines()
    assert first.endswith("is in group 0 of the state, but not of the optimizer")
    assert "which is in no group of the optimizer" in second
    assert "is of another kind of optimizer: it has amsgrad, betas" in found["class"]
    assert (
        "exp_avg of inp.weight has shape (128,), expected that of the parameter" in found["shapes"]
    )
    assert found["untouched"] == "True"
