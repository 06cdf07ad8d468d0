"""Blocks whose parameters are stacked: parity, state dicts, checkpoints, refusals, programs.

A *kind* is how the same model runs: block by block ("single"), as a loop ("scanned"), as a loop
over stacks ("stacked"). Two ranks in the quick tests.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.parity import Case, Runs, assert_parity, run_cases
from test.common.ranks import run_on_ranks
from test.common.scan import CASES as SCANNED
from test.common.scan import DEPTH, HIDDEN, WIDTH, Block, Net, batch, of_kind, whole, wrapped
from test.common.scenarios import RANKS, Scenarios, fsdp, make, message
from test.common.warned import recorded_warnings
from xla_fsdp.fsdp.engine.param import held_shape

scenarios = Scenarios(__name__)
result = scenarios.result

KINDS = ("single", "scanned", "stacked")


def trained(kind: str, steps: int = 2, seed: int = 3) -> tuple[Any, Any]:
    """The model, and an optimizer that has made so many steps."""
    model = of_kind(kind, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(1, steps + 1):
        step(model, optimizer, number)
    return model, optimizer


def step(model: Any, optimizer: Any, seed: int = 1) -> None:
    import torch_xla

    optimizer.zero_grad()
    model(batch(seed)).square().mean().backward()
    optimizer.step()
    torch_xla.sync()


# ---------------------------------------------------------------- parity with the plain model


def as_stacked(case: Case) -> Case:
    """With the blocks' parameters in stacks."""
    if case.policy:
        return replace(case, options={**case.options, "scan_stacked": True})
    return replace(case, scan={**(case.scan or {}), "stacked": True})


LEFT_OUT = ("flat", "adapters", "adapters_no_remat", "offload_adapters")  # are refused
CASES = {
    **{n: as_stacked(c) for n, c in SCANNED.items() if n not in LEFT_OUT},
    "adapters": as_stacked(Case("AllAdaptersNet", scan={})),
    "matrices": as_stacked(Case("MatricesNet", scan={}, in_place=True, clip=(0.3, 2.0))),
    "clipped_adamw": as_stacked(
        Case(
            "Net", scan={"gather_once_below": 1}, clip=(0.3, 2.0), optimizer="adamw", tolerance=1e-3
        )
    ),
}
QUICK = ("clipped_adamw", "no_sync", "adapters", "pattern", "matrices")
SLOW = Runs({(n, name): c for n in (1, 3, 4, 8) for name, c in CASES.items() if c.fits(n)})


@scenarios.add
def parity(rank: int) -> dict[str, Any]:
    return run_cases(rank, {name: CASES[name] for name in QUICK})


@pytest.mark.parametrize("name", QUICK)
def test_stacks_train_like_the_plain_model(name: str) -> None:
    ranks = [result("parity", rank)[name] for rank in range(RANKS)]
    assert_parity(CASES[name], ranks)
    assert_only_first_block_is_named(CASES[name], ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), SLOW.cases)
def test_stacks_train_like_the_plain_model_in_full(num_ranks: int, name: str) -> None:
    assert_only_first_block_is_named(CASES[name], SLOW.check(num_ranks, name))


def assert_only_first_block_is_named(case: Case, ranks: list[dict[str, Any]]) -> None:
    """The optimizer sees stacks, by the names in the first block; and what is beside the loop."""
    of_blocks = {each.split(".")[1] for each in ranks[0]["names"] if each.startswith("blocks.")}
    assert of_blocks == ({"0", "1", "5"} if case.model == "PatternNet" else {"0"})


# ---------------------------------------------------------------- what an optimizer sees


@scenarios.add
def leaves(rank: int) -> dict[str, Any]:
    from xla_fsdp import fully_shard, scan_blocks
    from xla_fsdp.xla.host import execute_pending
    from xla_fsdp.xla.ops import is_pending

    model = of_kind("stacked")
    execute_pending()
    held = model(batch())
    pending = [name for name, p in model.named_parameters() if is_pending(p)]
    del held
    model.blocks[0].up._parameters["weight"].requires_grad_(False)
    model(batch()).sum().backward()
    in_place = make(Net)
    for block in in_place.blocks:
        fully_shard(block)
    fully_shard(in_place)
    full = in_place.blocks[2].up.weight.full_tensor().cpu()
    scan_blocks(in_place.blocks, stacked=True)
    stack = in_place.blocks[0].up.weight
    shown = in_place.state_dict()["blocks.2.up.weight"]
    return {
        "pending": pending,
        "shapes": {name: tuple(held_shape(p)) for name, p in model.named_parameters()},
        "of a shard": tuple(dict(model.named_parameters())["blocks.0.up.weight"].shard_shape),
        "shards": {
            name: tuple(shard.shape)
            for name, shard in model.get_original_names_and_sharded_parameters()
        },
        "frozen": [name for name, p in model.named_parameters() if p.grad is None],
        "placements": [str(each) for each in (*stack.placements, *shown.placements)],
        "full": full,
        "fulls": [stack.full_tensor()[2].cpu(), shown.full_tensor().cpu()],
        "to_local": tuple(stack.to_local().shape),
        "printed": repr(in_place),
        "a layer": repr(in_place.blocks[1].up),
    }


def test_an_optimizer_sees_one_parameter_for_all_blocks() -> None:
    found = result("leaves")
    shapes = {name: shape for name, shape in found["shapes"].items() if "blocks" in name}
    assert sorted(shapes) == [
        f"blocks.0.{name}"
        for name in ("down.weight", "norm.bias", "norm.weight", "up.bias", "up.weight")
    ]
    shards = found["shards"]
    assert len(shards) == DEPTH * len(shapes) + 2
    assert all(shape == (DEPTH, *shards[name]) for name, shape in shapes.items())
    assert found["of a shard"] == shards["blocks.2.up.weight"]
    assert found["frozen"] == ["blocks.0.up.weight"]
    assert found["pending"] == []  # a forward alone leaves stacks as they are


def test_a_model_with_stacks_is_printed_as_without() -> None:
    printed = result("leaves")["printed"]
    assert result("leaves")["a layer"] in printed
    assert f"(0-{DEPTH - 1}): {DEPTH} x " in printed
    assert f"(up): Linear(in_features={WIDTH}, out_features={HIDDEN}" in printed


def test_stacks_say_where_they_are_cut() -> None:
    found = result("leaves")
    assert found["placements"] == ["S(1)", "S(0)"]
    assert all(torch.equal(each, found["full"]) for each in found["fulls"])
    assert found["to_local"] == (DEPTH, 12, WIDTH)


# ---------------------------------------------------------------- state dicts


@scenarios.add
def state_dicts(rank: int) -> dict[str, Any]:
    from xla_fsdp import load_optim_state_dict, optim_state_dict
    from xla_fsdp.state.optim_api import load_sharded_optim_state_dict, sharded_optim_state_dict

    found: dict[str, Any] = {}
    for kind in KINDS:
        model, optimizer = trained(kind, steps=1)
        shards = {name: t.cpu() for name, t in model.state_dict().items()}
        found[kind] = {
            "full": whole(model),
            "shards": shards,
            "metadata": model.get_shard_metadata(),
            "optim": optim_state_dict(model, optimizer),
            "optim shards": sharded_optim_state_dict(model, optimizer),
        }
    given = found["single"]
    for kind, form in (("stacked", "full"), ("stacked", "shards"), ("single", "full")):
        source = given if kind == "stacked" else found["stacked"]
        model, optimizer = trained(kind, steps=0, seed=9)
        model.load_state_dict(source[form])
        if form == "full":
            load_optim_state_dict(model, optimizer, source["optim"])
        else:
            load_sharded_optim_state_dict(model, optimizer, source["optim shards"])
        step(model, optimizer, 2)
        found[f"{kind} from {form}"] = whole(model)
    found["expected"] = whole(trained("single")[0])
    return found


@pytest.mark.parametrize("kind", KINDS[1:])
def test_state_dicts_are_those_of_single_blocks(kind: str) -> None:
    found, expected = (result("state_dicts")[each] for each in (kind, "single"))
    assert found["metadata"] == expected["metadata"]
    assert_close(found["full"], expected["full"], atol=1e-6, rtol=1e-5)
    assert_close(found["shards"], expected["shards"], atol=1e-6, rtol=1e-5)
    for form in ("optim", "optim shards"):
        mine, theirs = found[form], expected[form]
        assert mine["state"].keys() == theirs["state"].keys()
        for name, entries in theirs["state"].items():
            assert_close(mine["state"][name], entries, atol=1e-6, rtol=1e-5)
        for group, other in zip(mine["param_groups"], theirs["param_groups"], strict=True):
            assert sorted(group.pop("params")) == sorted(other["params"])
            assert group == {key: value for key, value in other.items() if key != "params"}


@pytest.mark.parametrize("what", ["stacked from full", "stacked from shards", "single from full"])
def test_state_dicts_move_between_kinds(what: str) -> None:
    found = result("state_dicts")
    assert_close(found[what], found["expected"], atol=1e-6, rtol=1e-5)


@scenarios.add
def partial_loads(rank: int) -> dict[str, Any]:
    model, other = of_kind("stacked"), of_kind("stacked", seed=9)
    state = whole(other)
    found: dict[str, Any] = {"own": whole(model), "other": state}
    name = "blocks.1.up.weight"
    without = {key: value for key, value in state.items() if key != name}
    found["missing"] = message(lambda: model.load_state_dict(without))
    report = of_kind("stacked").load_state_dict(without, strict=False)
    found["report"] = (report.missing_keys, report.unexpected_keys)
    wrong = {**state, name: torch.zeros(2, 2)}
    found["size"] = message(lambda: of_kind("stacked").load_state_dict(wrong))
    model = of_kind("stacked")
    for number in (0, 2):
        part = other.blocks[number].state_dict()
        found[f"names {number}"] = sorted(part)
        model.blocks[number].load_state_dict(part)
    found["two loaded"] = whole(model)
    return found


def test_loading_reports_names_of_single_blocks() -> None:
    found = result("partial_loads")
    assert 'Missing key(s) in state_dict: "blocks.1.up.weight"' in found["missing"]
    assert found["report"] == (["blocks.1.up.weight"], [])
    assert "size mismatch for blocks.1.up.weight" in found["size"]
    assert "(2, 2)" in found["size"]


def test_one_block_is_loaded_without_the_others() -> None:
    found = result("partial_loads")
    plain = sorted(Block().state_dict())
    assert found["names 0"] == found["names 2"] == plain
    expected = {
        name: found["other" if name.startswith(("blocks.0", "blocks.2")) else "own"][name]
        for name in found["own"]
    }
    assert_close(found["two loaded"], expected, atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------- checkpoints


@scenarios.add
def checkpoints(rank: int) -> dict[str, Any]:
    """One step of one kind, and a second of another over a checkpoint."""
    from xla_fsdp import load_checkpoint, save_checkpoint

    found = {"expected": whole(trained("single")[0])}
    for first, second in (("stacked", "single"), ("stacked", "stacked"), ("scanned", "stacked")):
        folder = shared_folder(rank)
        model, optimizer = trained(first, steps=1)
        save_checkpoint(folder, model, optimizer, step=1)
        model, optimizer = trained(second, steps=0, seed=9)
        load_checkpoint(folder, model, optimizer)
        step(model, optimizer, 2)
        found[f"{first} to {second}"] = whole(model)
    found["in place"], found["from in place"] = _over_files_of_an_in_place_model(rank)
    return found


def _over_files_of_an_in_place_model(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from xla_fsdp import fully_shard, load_checkpoint, save_checkpoint, scan_blocks

    model = make(Net)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    scan_blocks(model.blocks, stacked=True)
    folder = shared_folder(rank)
    save_checkpoint(folder, model, step=1)
    other = wrapped(seed=9)
    load_checkpoint(folder, other)
    return whole(model), whole(other)


def shared_folder(rank: int) -> str:
    from xla_fsdp.xla.host import exchange

    made = tempfile.mkdtemp() if rank == 0 else ""
    return exchange(made.encode())[0].decode()


@pytest.mark.parametrize(
    "way", ["stacked to single", "stacked to stacked", "scanned to stacked"]
)  # fmt: skip
def test_checkpoints_move_between_kinds(way: str) -> None:
    found = result("checkpoints")
    assert_close(found[way], found["expected"], atol=1e-6, rtol=1e-5)


def test_files_of_stacks_made_in_place_are_those_of_single_blocks() -> None:
    found = result("checkpoints")
    assert_close(found["from in place"], found["in place"], atol=1e-6, rtol=1e-5)


def saved(rank: int, folder: str, kind: str) -> dict[str, Any]:
    from xla_fsdp import optim_state_dict, save_checkpoint

    model, optimizer = trained(kind)
    save_checkpoint(folder, model, optimizer, step=2)
    return {"model": whole(model), "optim": optim_state_dict(model, optimizer)["state"]}


def loaded(rank: int, folder: str, kind: str) -> dict[str, Any]:
    from xla_fsdp import load_checkpoint, optim_state_dict

    model, optimizer = trained(kind, steps=0, seed=9)
    load_checkpoint(folder, model, optimizer)
    return {"model": whole(model), "optim": optim_state_dict(model, optimizer)["state"]}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("stacked", "single"), ("single", "stacked")])
@pytest.mark.parametrize("ranks", [(2, 3), (4, 1)])
def test_checkpoints_move_to_other_numbers_of_ranks(
    first: str, second: str, ranks: tuple[int, int], tmp_path: Any
) -> None:
    [expected, *_] = run_on_ranks(saved, ranks[0], str(tmp_path), first)
    [found, *_] = run_on_ranks(loaded, ranks[1], str(tmp_path), second)
    assert_close(found["model"], expected["model"], atol=1e-6, rtol=1e-5)
    assert found["optim"].keys() == expected["optim"].keys()
    for name, entries in expected["optim"].items():
        assert_close(found["optim"][name], entries, atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------- blocks one by one


@scenarios.add
def one_by_one(rank: int) -> dict[str, Any]:
    from xla_fsdp import scan_blocks
    from xla_fsdp.scan import blocks_one_by_one

    def gradients(how: str) -> dict[str, Tensor]:
        model = of_kind("stacked", execute_sharding_on_init=False)
        x = batch()
        if how == "removed":
            model.scan.remove()
        if how == "again":
            model(x).sum().backward()
            model.scan.remove()
            scan_blocks(model.blocks, stacked=True)
            model.zero_grad()
        if how == "no_sync":
            model.scan.remove()
            with model.no_sync():
                (model(x).square().mean() / 2).backward()
            (model(x).square().mean() / 2).backward()
        elif how == "context":
            with blocks_one_by_one():
                model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
        return {n: p.grad.cpu() for n, p in model.named_parameters()}

    return {how: gradients(how) for how in ("loop", "removed", "no_sync", "context", "again")}


@pytest.mark.parametrize("how", ["removed", "no_sync", "context", "again"])
def test_blocks_that_run_one_by_one_give_the_stack_its_gradient(how: str) -> None:
    found = result("one_by_one")
    assert_close(found[how], found["loop"], atol=1e-6, rtol=1e-5)


class Dropping(Net):
    """Leaves out a block."""

    left_out: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == self.left_out else block(x)
        return x


@scenarios.add
def dropped(rank: int) -> dict[str, Any]:
    from xla_fsdp import Recipe, full_state_dict, parallelize

    def train(recipe: Any, *left_out: int | None) -> dict[str, Tensor]:
        model = make(Dropping)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wrapped_model: Any
        wrapped_model, optimizer, _ = parallelize(model, optimizer, recipe)
        for number in left_out:
            model.left_out = number
            wrapped_model(batch(1)).square().mean().backward()
        optimizer.step()
        return full_state_dict(wrapped_model)

    alone = train(Recipe("fast", stacked=False), 1)
    plain = make(Dropping)
    return {
        "errors": [message(partial(train, each, 1)) for each in ("fast", "lean")],
        "of two passes": train("fast", 1, None)["blocks.1.up.weight"],
        "alone": [alone["blocks.1.up.weight"], plain.state_dict()["blocks.1.up.weight"]],
    }


def test_a_stack_of_which_a_step_leaves_out_blocks_is_refused() -> None:
    """AdamW would decay them, and move them by their momentum."""
    found = result("dropped")
    for error in found["errors"]:
        assert "RuntimeError: blocks 1 have no gradient in the stack of" in error
        assert "Recipe(stacked=False)" in error
    before = found["alone"][1]
    assert torch.equal(found["alone"][0], before)
    assert not torch.equal(found["of two passes"], before)  # the second pass has used all


# What people ask of a parameter to make the groups of an optimizer.
RULES: dict[str, Callable[[Tensor], Any]] = {
    "p.dim()": lambda p: p.dim(),
    "p.ndim": lambda p: p.ndim,
    "len(p.shape)": lambda p: len(p.shape),
    "p.shape ==": lambda p: p.shape == torch.Size([HIDDEN, WIDTH]),
    "p.size(0)": lambda p: (p.size(0), len(p), tuple(p.size())),
    "p.squeeze().dim()": lambda p: (p.squeeze().dim(), tuple(p.squeeze().shape)),
    "squeezed one": lambda p: torch.squeeze(p, -1).ndim,
    "p.stride()": lambda p: (p.stride(), p.is_contiguous()),
}


class Sizes(Net):
    """With parameters of one column and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x))


def decayed(model: nn.Module) -> tuple[torch.optim.Optimizer, list[str]]:
    """Return an optimizer that decays matrices only, and the names of these."""
    chosen = {name: p for name, p in model.named_parameters() if len(p.shape) >= 2}
    rest = [p for name, p in model.named_parameters() if name not in chosen]
    groups = [
        {"params": list(chosen.values()), "weight_decay": 0.5},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1), list(chosen)


@scenarios.add
def rules_by_shape(rank: int) -> dict[str, Any]:
    from xla_fsdp import fully_shard, parallelize, scan_blocks

    def stacked(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        scan_blocks(model.blocks, stacked=True)
        return model

    doors = {
        "plain": lambda model: model,
        "wrapper": fsdp,
        "rows": partial(fsdp, shard_param_on_dim_0=True),
        "fully_shard": fully_shard,
        "stacked": stacked,
        "lean": lambda model: parallelize(model, None, "lean").model,
        "fast": lambda model: parallelize(model, None, "fast").model,
    }
    found: dict[str, Any] = {}
    for door, shard in doors.items():
        model = shard(make(Sizes))
        named = dict(model.named_parameters())
        found[f"{door} rules"] = {
            name: {rule: ask(p) for rule, ask in RULES.items()} for name, p in named.items()
        }
        found[f"{door} elements"] = sum(p.numel() for p in model.parameters())
        found[f"{door} bytes"] = sum(p.nbytes for p in model.parameters())
        optimizer, found[f"{door} decayed"] = decayed(model)
        if door != "plain":
            step(model, optimizer)  # which sees shards
            found[f"{door} state"] = all(
                optimizer.state[p]["exp_avg"].shape == held_shape(p) for p in model.parameters()
            )
    return found


DOORS = ("wrapper", "rows", "fully_shard", "stacked", "lean", "fast")


@pytest.mark.parametrize("door", DOORS)
def test_a_leaf_has_the_shape_of_its_parameter_outside_of_steps(door: str) -> None:
    found = result("rules_by_shape")
    for name, answers in found[f"{door} rules"].items():
        assert answers == found["plain rules"][name], name
    for what in ("elements", "bytes"):
        assert found[f"{door} {what}"] == found[f"plain {what}"]
    stacks = found[f"{door} rules"].keys()  # named as in the first block
    assert found[f"{door} decayed"] == [n for n in found["plain decayed"] if n in stacks]
    assert found[f"{door} state"]


@scenarios.add
def summoned(rank: int) -> dict[str, Any]:
    model = of_kind("stacked")
    model(batch()).square().mean().backward()
    before = whole(model)
    with model.summon_full_params(model.blocks[1], with_grads=True), torch.no_grad():
        shape = tuple(model.blocks[1].up.weight.shape)
        model.blocks[1].up.weight.mul_(2)
        model.blocks[1].up.weight.grad.mul_(3)
        grad = model.blocks[1].up.weight.grad.cpu()
    after = whole(model)
    with model.summon_full_params(model, with_grads=True, writeback=False):
        again = model.blocks[1].up.weight.grad.cpu()
        names = [name for name, _ in model.named_parameters()]
    return {
        "shape": shape,
        "names": names,
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
        "twice": torch.equal(after["blocks.1.up.weight"], 2 * before["blocks.1.up.weight"]),
        "grads": torch.equal(grad, again),
        "frees": sorted(states(model)),
    }


def states(model: Any) -> set[str]:
    return {unit.state.name for unit in model._fsdp_units()}


def test_full_parameters_of_one_block_can_be_changed() -> None:
    found = result("summoned")
    assert found["shape"] == (HIDDEN, WIDTH)
    assert found["names"] == [name for name, _ in Net().named_parameters()]
    assert found["changed"] == ["blocks.1.up.weight"]
    assert found["twice"]
    assert found["grads"]
    assert found["frees"] == ["SHARDED"]


@scenarios.add
def copies(rank: int) -> dict[str, Any]:
    model = of_kind("stacked")
    found: dict[str, Any] = {"first": model(batch()).sum().item()}
    made = {"copy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    with torch.no_grad():
        dict(model.named_parameters())["blocks.0.up.weight"].zero_()
    found["changed"] = model(batch()).sum().item()
    for name, each in made.items():
        found[name] = each(batch()).sum().item()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        step(each, optimizer)
        found[f"{name} trained"] = each(batch()).sum().item()
        found[f"{name} shards"] = {key: tuple(t.shape) for key, t in each.state_dict().items()}
        found[f"{name} leaves"] = {key: tuple(held_shape(p)) for key, p in each.named_parameters()}
    found["shards"] = {key: tuple(t.shape) for key, t in model.state_dict().items()}
    found["leaves"] = {key: tuple(held_shape(p)) for key, p in model.named_parameters()}
    return found


def test_copies_have_stacks_of_their_own() -> None:
    found = result("copies")
    assert found["changed"] != found["first"] == found["copy"] == found["pickle"]
    assert found["copy trained"] == found["pickle trained"] != found["first"]
    for what in ("shards", "leaves"):
        assert found[f"copy {what}"] == found[f"pickle {what}"] == found[what]


# ---------------------------------------------------------------- optimizers


@scenarios.add
def optimizers(rank: int) -> dict[str, Any]:
    import torch_xla.core.xla_model as xm

    from xla_fsdp import scan_blocks
    from xla_fsdp.optim import HighPrecisionOptimizer, step_in_backward

    def before_stacking() -> None:
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scan_blocks(model.blocks, stacked=True)
        step(model, optimizer)

    def in_backward() -> dict[str, Tensor]:
        model = of_kind("stacked")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step_in_backward(model, optimizer)
        step(model, optimizer)
        return whole(model)

    def adafactor() -> str:
        model = of_kind("stacked")
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        with recorded_warnings() as texts:
            optimizer.step()
        return " ".join(texts)

    def high_precision(kind: str) -> dict[str, Tensor]:
        model = of_kind(kind, change=nn.Module.bfloat16, compute_dtype=torch.bfloat16)
        optimizer = HighPrecisionOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        step(model, optimizer)
        return whole(model)

    def with_dropout(kind: str) -> dict[str, Tensor]:
        def set_dropout(model: Any) -> None:
            for block in model.blocks:
                block.drop.p = 0.5

        model = of_kind(kind, change=set_dropout)
        xm.set_rng_state(7)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return whole(model)

    return {
        "before stacking": message(before_stacking),
        "in backward": in_backward(),
        "warning": adafactor(),
        "16 bits": {kind: high_precision(kind) for kind in KINDS[1:]},
        "dropout": {kind: with_dropout(kind) for kind in KINDS[1:]},
        "expected": whole(trained("single", steps=1)[0]),
    }


def test_an_optimizer_from_before_stacking_is_refused() -> None:
    said = result("optimizers")["before stacking"]
    assert said.startswith("ValueError: SGD holds norm.weight as it was before wrapping; FSDP")
    assert "stack of shards" in said


def test_stacks_are_stepped_in_backward() -> None:
    found = result("optimizers")
    assert_close(found["in backward"], found["expected"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("what", ["16 bits", "dropout"])
def test_a_step_is_that_of_scanned_blocks(what: str) -> None:
    found = result("optimizers")[what]
    assert_close(found["stacked"], found["scanned"], atol=1e-6, rtol=1e-5)


def test_an_optimizer_that_is_not_elementwise_is_warned_about() -> None:
    said = result("optimizers")["warning"]
    assert said.startswith("Adafactor is not known to treat every element")
    assert f"one parameter of {DEPTH} blocks" in said


# ---------------------------------------------------------------- refusals


def freeze_one(model: Any) -> None:
    model.blocks[1].up.weight.requires_grad_(False)


def tie_blocks(model: Any) -> None:
    model.blocks[1].down = model.blocks[0].down


def tie_outside(model: Any) -> None:
    model.blocks[1].norm.weight = model.head.bias


@scenarios.add
def refused(rank: int) -> dict[str, str]:
    import torch_xla

    from xla_fsdp import scan_blocks, wrap

    def stack(model: Any, blocks: Any = None) -> Any:
        return scan_blocks(blocks or list(model.blocks), stacked=True)

    def with_gradient() -> None:
        model = wrapped()
        model(batch()).sum().backward()
        torch_xla.sync()  # what an error leaves behind is freed sooner on one rank than another
        stack(model)

    def stepped_in_backward() -> None:
        from xla_fsdp.optim import step_in_backward

        model = wrapped()
        step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
        stack(model)

    def kept() -> None:
        model = wrapped()
        with model.no_sync():
            model(batch()).sum().backward()
        torch_xla.sync()
        stack(model)

    def other_order() -> None:
        model = of_kind("stacked")
        model.scan.remove()
        stack(model, list(model.blocks)[::-1])

    def fewer() -> None:
        model = of_kind("stacked")
        model.scan.remove()
        scan_blocks(list(model.blocks)[:2])

    def auto_wrapped_tie() -> None:
        model = make(lambda: changed(tie_outside))
        policy = partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
        fsdp(model, auto_wrap_policy=policy, scan_layers=True, scan_stacked=True)

    return {
        "frozen": message(lambda: stack(wrapped(freeze_one))),
        "flat": message(lambda: stack(wrapped(flatten_parameters=True))),
        "blocks tied": message(lambda: stack(wrapped(tie_blocks))),
        "tied outside": message(lambda: stack(wrapped(tie_outside))),
        "auto-wrapped tie": message(auto_wrapped_tie),
        "with gradient": message(with_gradient),
        "stepped in backward": message(stepped_in_backward),
        "kept": message(kept),
        "other order": message(other_order),
        "fewer": message(fewer),
        "without scan_layers": message(lambda: fsdp(make(Net), scan_stacked=True)),
    }


def changed(change: Callable[[Any], None]) -> nn.Module:
    model = Net()
    change(model)
    return model


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("frozen", ["block 1: up.weight is frozen, but is trained in block 0", "in all blocks"]),
        ("flat", ["every block: flat_param_0 joins several", "flatten_parameters=False"]),
        ("blocks tied", ["block 0, block 1: down.weight is tied to a parameter of another unit"]),
        ("tied outside", ["block 1: norm.weight is tied to a parameter of another unit"]),
        ("auto-wrapped tie", ["head.bias is tied to norm.weight of a stacked block"]),
        ("with gradient", ["every block: norm.weight has a gradient", "zero_grad()"]),
        ("stepped in backward", ["block 0 is stepped in backward"]),
        ("kept", ["block 0 has gradients that wait to be reduced (no_sync)"]),
        ("other order", ["block 0 of 3 is not at this place of a stack"]),
        ("fewer", ["block 0 of 2 is not at this place of a stack of 2 blocks"]),
        ("without scan_layers", ["give scan_layers=True"]),
    ],
)
def test_what_cannot_be_stacked_is_refused(what: str, said: list[str]) -> None:
    found = result("refused")[what]
    assert found.startswith(("NoLoopError: ", "ValueError: "))
    assert all(each in found for each in said), found


# ---------------------------------------------------------------- programs


@scenarios.add
def programs(rank: int) -> dict[str, Any]:
    runs = (("stacked", 4), ("stacked", 8), ("scanned", 8))
    return {f"{kind} {depth}": program(kind, depth) for kind, depth in runs}


def program(kind: str, depth: int) -> dict[str, int]:
    """Inputs and operations of a whole training step."""
    import torch_xla

    from xla_fsdp import scan_blocks
    from xla_fsdp.xla.graph import lowered_hlo

    model = wrapped(depth=depth)
    scan_blocks(model.blocks, stacked=kind == "stacked", gather_once_below=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    x = batch()
    torch_xla.sync()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    moments = [each for each in states if each.device.type == "xla"]
    text = lowered_hlo([*model.parameters(), *moments])
    torch_xla.sync()
    entry = text[text.index("ENTRY") :]
    return {"inputs": entry.count(" parameter("), "operations": text.count(" = ")}


def test_neither_inputs_nor_operations_grow_with_depth() -> None:
    found = result("programs")
    assert found["stacked 4"] == found["stacked 8"]
    assert found["scanned 8"]["inputs"] > 3 * found["stacked 8"]["inputs"]
    assert found["scanned 8"]["operations"] > 2 * found["stacked 8"]["operations"]
