"""State dicts in and out of a sharded model and its optimizer, by original names. Two ranks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.compare import same
from test.common.models import FEATURES, BatchNormNet, FrozenNet, TiedNet
from test.common.scenarios import Scenarios, fsdp, make, message, nested, rows

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flat": {"flatten_parameters": True},
    "rows": {"shard_param_on_dim_0": True},
}


class Square(nn.Module):
    """All parameters have 128 elements: on two ranks a shard has the shape of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        nn.init.uniform_(self.norm.weight)
        nn.init.uniform_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


# ---------------------------------------------------------------- the model


@scenario
def snapshots(rank: int) -> dict[str, Any]:
    """Of the best step, say: each is loaded twice, with steps in between."""
    import copy

    import torch_xla

    from xla_fsdp import full_state_dict

    found: dict[str, Any] = {}
    for name, take in {
        "deepcopy": copy.deepcopy,
        "clone": lambda state: {key: value.clone() for key, value in state.items()},
        "host": lambda state: {key: value.cpu() for key, value in state.items()},
    }.items():
        model = nested(make(BatchNormNet))
        optimizer = torch.optim.Adam(model.parameters())
        snapshot, before = take(model.state_dict()), full_state_dict(model)
        loaded = []
        for _ in range(2):
            model.load_state_dict(snapshot)
            torch_xla.sync()
            loaded.append(same(full_state_dict(model), before))
            model(rows()).square().mean().backward()
            optimizer.step()
            torch_xla.sync()
        found[name] = [*loaded, not same(full_state_dict(model), before)]
    return found


@pytest.mark.parametrize("way", ["deepcopy", "clone", "host"])
def test_a_snapshot_is_there_for_the_next_load(way: str) -> None:
    assert result("snapshots")[way] == [True, True, True]


@scenario
def full_in_and_out(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict

    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        source, model = make(seed=1), nested(make(seed=2), **options)
        found[f"{name}: report"] = str(model.load_state_dict(source.state_dict()))
        found[f"{name}: full"] = same(full_state_dict(model), source.state_dict())
        model.load_state_dict(model.state_dict())
        found[f"{name}: shards"] = same(full_state_dict(model), source.state_dict())
    source, model = make(BatchNormNet, 1), nested(make(BatchNormNet), compute_dtype=torch.bfloat16)
    model.load_state_dict(source.state_dict())
    found["buffers: full"] = same(full_state_dict(model), source.state_dict())
    return found


def test_full_state_dicts_in_and_out() -> None:
    found = result("full_in_and_out")
    assert len(found) == 10
    assert all(v == "<All keys matched successfully>" for n, v in found.items() if "report" in n)
    assert all(value for name, value in found.items() if "report" not in name), found


@scenario
def inside_a_plain_module(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict

    source, model = make(seed=1), make(seed=2)
    model.blocks[0] = fsdp(model.blocks[0])
    model.blocks[1].up = fsdp(model.blocks[1].up)
    model.load_state_dict(source.state_dict())
    inner = nested(make(seed=2))
    inner.blocks[1].load_state_dict(source.blocks[1].state_dict())
    return {
        "all": same(full_state_dict(model), source.state_dict()),
        "inner": same(full_state_dict(inner.blocks[1]), source.blocks[1].state_dict()),
        "other": same(full_state_dict(inner.blocks[0]), make(seed=2).blocks[0].state_dict()),
    }


def test_units_inside_a_plain_module_and_units_alone() -> None:
    assert result("inside_a_plain_module") == {"all": True, "inner": True, "other": True}


@scenario
def inside_of_its_unit(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict

    found: dict[str, Any] = {}
    model = make()
    root = nested(model)
    found["inner"] = message(lambda: full_state_dict(model))
    tied = make(TiedNet)
    roots = root, fsdp(tied)
    found["tied"] = message(lambda: full_state_dict(tied))
    unit = next(module for module in model.modules() if type(module) is type(roots[0]))
    found["unit"] = sorted(full_state_dict(unit)) == sorted(unit.state_dict())
    return found


def test_a_model_without_the_unit_that_shards_it_is_refused() -> None:
    found = result("inside_of_its_unit")
    for each in (found["inner"], found["tied"]):
        assert each.startswith("ValueError: full_state_dict was given a ")
        assert "of which it has only shards; give it the sharded model" in each
    assert found["unit"]


@scenario
def what_does_not_fit(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict

    found = {}
    for name in ("plain", "flat"):
        model = nested(make(seed=2), **OPTIONS[name])
        state = make(seed=1).state_dict()
        del state["blocks.0.up.weight"], state["scale"]
        state["head.extra"] = torch.zeros(1)
        found[f"{name}: strict"] = message(lambda m=model, s=state: m.load_state_dict(s))
        report = model.load_state_dict(state, strict=False)
        found[f"{name}: missing"] = sorted(report.missing_keys)
        found[f"{name}: unexpected"] = report.unexpected_keys
        kept, taken = make(seed=2).state_dict(), make(seed=1).state_dict()
        expected = {**taken, **{n: kept[n] for n in ("blocks.0.up.weight", "scale")}}
        found[f"{name}: rest"] = same(full_state_dict(model), expected)
        state = make(seed=1).state_dict()
        state["blocks.1.up.bias"] = torch.zeros(3)
        found[f"{name}: size"] = message(lambda m=model, s=state: m.load_state_dict(s))
    one_unit, other = fsdp(make(), **OPTIONS["flat"]), nested(make(), **OPTIONS["flat"])
    found["layout"] = message(lambda: one_unit.load_state_dict(other.state_dict()))
    model = nested(make())
    shards, full = model.state_dict(), make().state_dict()
    mixed = {**full, "head.weight": shards["head.weight"]}
    found["mixed"] = message(lambda: model.load_state_dict(mixed))
    return found


def test_what_does_not_fit_is_reported_by_original_names() -> None:
    found = result("what_does_not_fit")
    for name in ("plain", "flat"):
        assert 'Missing key(s) in state_dict: "' in found[f"{name}: strict"]
        assert 'Unexpected key(s) in state_dict: "head.extra"' in found[f"{name}: strict"]
        assert found[f"{name}: missing"] == ["blocks.0.up.weight", "scale"]
        assert found[f"{name}: unexpected"] == ["head.extra"]
        assert found[f"{name}: rest"]
        assert (
            "size mismatch for blocks.1.up.bias: the state dict holds (3,), the full parameter of "
            "the model has shape (17,)" in found[f"{name}: size"]
        )
    assert (
        "size mismatch for head.weight: the state dict holds (128,), the full parameter of the "
        "model has shape (7, 11)" in found["mixed"]
    )
    assert "size mismatch for flat_param_0: the state dict holds (" in found["layout"]
    assert "merge the shards of all ranks (consolidate_sharded_state_dicts)" in found["layout"]


@scenario
def where_shapes_do_not_tell(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict, load_full_state_dict, load_sharded_state_dict

    source, model = make(Square, 1), fsdp(make(Square, 2))
    found: dict[str, Any] = {"asks": message(lambda: model.load_state_dict(source.state_dict()))}
    load_full_state_dict(model, source.state_dict())
    found["full"] = same(full_state_dict(model), source.state_dict())
    shards = model.state_dict()
    other = fsdp(make(Square, 3))
    other.load_state_dict(shards)
    found["marked"] = message(lambda: other.load_state_dict(full_state_dict(model)))
    third = fsdp(make(Square, 4))
    found["plain dict"] = message(lambda: third.load_state_dict(dict(shards)))
    load_sharded_state_dict(third, dict(shards))
    found["said"] = same(full_state_dict(third), source.state_dict())
    found["shards"] = same(full_state_dict(other), source.state_dict())
    found["shape"] = tuple(shards["norm.weight"].shape)
    deep = make(Square, 3)
    deep.norm = fsdp(deep.norm)
    deep = fsdp(deep)
    load_full_state_dict(deep, source.state_dict())
    found["nested"] = same(full_state_dict(deep), source.state_dict())
    return found


def test_where_shapes_do_not_tell_the_user_is_asked() -> None:
    found = result("where_shapes_do_not_tell")
    assert found["asks"].startswith("ValueError: whether the state dict holds full tensors or")
    assert "load_full_state_dict(model, state_dict)" in found["asks"]
    assert found["plain dict"] == found["asks"]
    assert (found["marked"], found["said"]) == ("nothing was raised", True)
    assert found["shape"] == (128,)
    assert (found["full"], found["shards"], found["nested"]) == (True, True, True)


@scenario
def ties(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict

    source, model = make(TiedNet, 1), make(TiedNet, 2)
    model.first, model.second = fsdp(model.first), fsdp(model.second)
    model = fsdp(model)
    state = source.state_dict()
    one_name = {name: value for name, value in state.items() if name != "second.weight"}
    model.load_state_dict(one_name)
    full = full_state_dict(model)
    return {
        "values": same(full, state),
        "shared": full["first.weight"].data_ptr() == full["second.weight"].data_ptr(),
    }


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    assert result("ties") == {"values": True, "shared": True}


@scenario
def optimizer_of_tied_weights(rank: int) -> dict[str, Any]:
    """State goes from one unit to two and back, by the plain model's first name."""
    from xla_fsdp import load_optim_state_dict, optim_state_dict

    one, two = make(TiedNet), make(TiedNet)
    two.first, two.second = fsdp(two.first), fsdp(two.second)
    found = {}
    models = {"one unit": fsdp(one), "two units": fsdp(two)}
    states = {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optimizer, rows())
        states[name] = optim_state_dict(model, optimizer)
        found[name] = sorted(states[name]["state"])
    for name, source in (("one unit", "two units"), ("two units", "one unit")):
        optimizer = torch.optim.AdamW(models[name].parameters(), lr=0.5)
        load_optim_state_dict(models[name], optimizer, states[source])
        again = optim_state_dict(models[name], optimizer)
        found[f"{name} loads"] = close(again["state"], states[source]["state"])
    before = states["one unit"]["state"]["first.bias"]["step"].item()
    step(models["two units"], optimizer, rows())
    found["a copy"] = states["one unit"]["state"]["first.bias"]["step"].item() == before
    return found


def test_optimizer_state_of_tied_weights() -> None:
    found = result("optimizer_of_tied_weights")
    names = sorted(name for name, _ in make(TiedNet).named_parameters())
    assert found["one unit"] == found["two units"] == names
    assert (found["one unit loads"], found["two units loads"], found["a copy"]) == (True,) * 3


@scenario
def two_names_of_a_module(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict

    def shared(wrap: Any, seed: int) -> Any:
        block = make(lambda: nn.Linear(FEATURES, FEATURES), seed)
        inner = wrap(block)
        return nn.Sequential(inner, nn.Tanh(), inner)

    source, found = shared(lambda m: m, 1), {}
    for name, wrap in (("unit", fsdp), ("module", lambda m: m)):
        model = fsdp(shared(wrap, 2))
        model.load_state_dict(source.state_dict())
        found[name] = same(full_state_dict(model), source.state_dict())
        metadata = model.get_shard_metadata()
        found[f"{name}, ties"] = metadata["ties"]
    return found


def test_a_module_with_two_names() -> None:
    tied = {"2.weight": "0.weight", "2.bias": "0.bias"}
    assert result("two_names_of_a_module") == {
        "unit": True,
        "unit, ties": tied,
        "module": True,
        "module, ties": tied,
    }


@scenario
def rank_0_only(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict, optim_state_dict

    model = nested(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(rows()).sum().backward()
    optimizer.step()
    return {
        "model": len(full_state_dict(model, rank0_only=True)),
        "optimizer": len(optim_state_dict(model, optimizer, rank0_only=True)),
        "states": {unit.state.name for unit in model._fsdp_units()},
    }


def test_rank_0_alone_gets_the_result_on_request() -> None:
    names = len(make().state_dict())
    assert result("rank_0_only", 0) == {"model": names, "optimizer": 2, "states": {"SHARDED"}}
    assert result("rank_0_only", 1) == {"model": 0, "optimizer": 0, "states": {"SHARDED"}}


# ---------------------------------------------------------------- the optimizer


def groups_of(model: Any) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    decay = [p for n, p in named.items() if not n.endswith("bias") and p.requires_grad]
    rest = [p for n, p in named.items() if n.endswith("bias") and p.requires_grad]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def step(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def close(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            close(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, Tensor):
        return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)
    return bool(found == expected)


@scenario
def optimizer_state_out(rank: int) -> dict[str, Any]:
    from xla_fsdp import optim_state_dict

    plain = make(FrozenNet)
    reference = torch.optim.AdamW(groups_of(plain), lr=0.01)
    step(plain, reference, rows().cpu())
    names = {id(p): n for n, p in plain.named_parameters()}
    expected = {names[id(p)]: dict(state) for p, state in reference.state.items()}
    found = {}
    for name, options in OPTIONS.items():
        model = nested(make(FrozenNet), **options)
        groups = [{"params": model.parameters()}] if name == "flat" else groups_of(model)
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        step(model, optimizer, rows())
        state = optim_state_dict(model, optimizer)
        found[name] = close(state["state"], expected)
        if name == "plain":
            found["groups"] = [
                (group["weight_decay"], sorted(group["params"])) for group in state["param_groups"]
            ]
    return found


def test_optimizer_state_is_that_of_the_plain_model() -> None:
    found = result("optimizer_state_out")
    plain = dict(FrozenNet().named_parameters())
    trained = [name for name, param in plain.items() if param.requires_grad]
    assert found == {
        "plain": True,
        "flat": True,
        "rows": True,
        "groups": [
            (0.1, sorted(name for name in trained if not name.endswith("bias"))),
            (0.0, sorted(name for name in trained if name.endswith("bias"))),
        ],
    }


@scenario
def optimizer_state_in(rank: int) -> dict[str, bool]:
    from xla_fsdp import full_state_dict, load_optim_state_dict, optim_state_dict

    found = {}
    for name, target in (("plain", "flat"), ("flat", "rows"), ("rows", "plain")):
        model = nested(make(), **OPTIONS[name])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optimizer, rows())
        again = nested(make(seed=9), **OPTIONS[target])
        again.load_state_dict(full_state_dict(model))
        restored = torch.optim.AdamW(again.parameters(), lr=0.5)
        load_optim_state_dict(again, restored, optim_state_dict(model, optimizer))
        step(model, optimizer, rows())
        step(again, restored, rows())
        found[f"{name} to {target}"] = close(full_state_dict(again), full_state_dict(model))
    return found


def test_training_goes_on_from_loaded_state_whatever_the_options() -> None:
    found = result("optimizer_state_in")
    assert len(found) == 3
    assert all(found.values()), found


@scenario
def optimizer_state_that_does_not_fit(rank: int) -> dict[str, Any]:
    from xla_fsdp import load_optim_state_dict, optim_state_dict

    model = nested(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, rows())
    good = optim_state_dict(model, optimizer)
    before = {n: v.clone() for n, v in optimizer.state[model.inp.weight].items()}

    def changed(**entries: Any) -> dict[str, Any]:
        return {"state": {**good["state"], **entries}, "param_groups": good["param_groups"]}

    def load(state: Any, into: Any = model, its: Any = optimizer) -> str:
        return message(lambda: load_optim_state_dict(into, its, state))

    wrong = {**good["state"]["scale"], "exp_avg": torch.zeros(2)}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    by_rows = fsdp(make(lambda: nn.Linear(FEATURES, 6)), **OPTIONS["rows"])
    factored = torch.optim.Adafactor(by_rows.parameters(), lr=0.01)
    step(by_rows, factored, rows())
    dampened = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    refused = load(good, its=dampened)
    return {
        "no state is left": refused.startswith("ValueError") and not dampened.state,
        "closure": load(good, its=torch.optim.LBFGS(model.parameters())),
        "factored": message(lambda: optim_state_dict(by_rows, factored)),
        "two": load(changed(other={}, scale=wrong)),
        "kind": load(good, its=sgd),
        "ids": load(optimizer.state_dict()),
        "none": load(changed(scale=None)),
        "nothing": load({}),
        "unchanged": close(dict(optimizer.state[model.inp.weight]), before),
        "foreign": message(
            lambda: optim_state_dict(nested(make()), torch.optim.SGD(make().parameters()))
        ),
    }


def test_optimizer_state_that_does_not_fit_is_refused() -> None:
    found = result("optimizer_state_that_does_not_fit")
    assert "the state has entries for other, which is not in the optimizer" in found["two"]
    assert "'exp_avg' of scale is (2,), expected ()" in found["two"]
    assert "inp.weight has no 'momentum_buffer'" in found["kind"]
    assert "holds no names; pass what optim_state_dict(" in found["ids"]
    assert "state['scale'] is a NoneType; give a dict of values by name" in found["none"]
    assert found["nothing"] == (
        "ValueError: expected an optimizer state dict with 'state' and 'param_groups'"
    )
    assert (found["unchanged"], found["no state is left"]) == (True, True)
    assert found["closure"].startswith("ValueError: LBFGS cannot make its state ahead of a step")
    assert "that is not in the model" in found["foreign"]
    assert "row_var of weight has shape (3, 1): it is computed from one rank's" in found["factored"]


@scenario
def names_of_a_part(rank: int) -> dict[str, Any]:
    """As PEFT asks for what an adapter's modules_to_save hold."""
    from xla_fsdp import full_state_dict

    plain = make(lambda: nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2))))
    model = fsdp(plain, **OPTIONS["flat"])
    part = model.module[1]
    outer = nn.Sequential(model)
    return {
        "part": {name: tuple(v.shape) for name, v in part.state_dict().items()},
        "meta": all(value.is_meta for value in part.state_dict().values()),
        "unit": list(model.state_dict()),
        "outer": list(outer.state_dict()),
        "full": all(f"1.{name}" in full_state_dict(model) for name in part.state_dict()),
    }


def test_a_module_of_a_flat_unit_has_its_names() -> None:
    assert result("names_of_a_part") == {
        "part": {"0.weight": (2, 2), "0.bias": (2,)},
        "meta": True,
        "unit": ["flat_param_0"],
        "outer": ["0.flat_param_0"],
        "full": True,
    }


class Adapted(nn.Module):
    """A layer for an adapter, and one that is trained as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x).tanh())


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["base"], modules_to_save=["head"])
    return get_peft_model(Adapted(), config)


@scenario
def adapters_of_a_flat_unit(rank: int) -> dict[str, Any]:
    """Two steps on the same rows, beside the plain model; what is saved, and the model without."""
    if find_spec("peft") is None:
        return {}
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    from xla_fsdp import full_state_dict

    plain, model = make(adapted), fsdp(make(adapted), **OPTIONS["flat"])
    outputs = []
    for each, batch in ((plain, rows().cpu()), (model, rows())):
        trained = [param for param in each.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.3)
        for _ in range(2):
            optimizer.zero_grad()
            each(batch).square().sum().backward()
            optimizer.step()
        with torch.no_grad(), each.disable_adapter():
            outputs.append(each(batch).cpu())

    def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
        return found.keys() == expected.keys() and all(
            torch.allclose(found[name], value, atol=1e-5) for name, value in expected.items()
        )

    whole = full_state_dict(model)
    saved = {k: v.cpu() for k, v in get_peft_model_state_dict(model.module, whole).items()}
    fresh = make(adapted)
    set_peft_model_state_dict(fresh, saved)
    with torch.no_grad():
        loaded = fresh(rows().cpu()), plain(rows().cpu())
    return {
        "without": torch.allclose(*outputs, atol=1e-5),
        "saved": close(saved, get_peft_model_state_dict(plain)),
        "loaded": torch.allclose(*loaded, atol=1e-5),
    }


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_an_adapter_and_what_it_saves_of_a_flat_unit() -> None:
    expected = {"without": True, "saved": True, "loaded": True}
    assert result("adapters_of_a_flat_unit") == expected
