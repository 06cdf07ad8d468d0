"""Hybrid sharding: what is sent, saved and shown. Training itself is in ``test_parity``."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.compare import same
from test.common.hlo import Instruction, Program
from test.common.in_place import in_place, loss_of
from test.common.models import FEATURES
from test.common.parity import Case, batches, build, forward_backward, make_optimizer, shard
from test.common.ranks import ChildError, cached_outcome, run_on_ranks
from test.common.scenarios import fsdp, make, nested
from xla_fsdp import ShardingStrategy, init_mesh
from xla_fsdp.checkpoint import consolidate_sharded_model_checkpoints

RANKS, REPLICAS, SHARDS = 4, 2, 2
HSDP = ("replica", "shard")
WITHIN, ACROSS = "{{0,1},{2,3}}", "{{0,2},{1,3}}"
LAYOUTS = ("plain", "hybrid", "replicated")


def layout(name: str) -> dict[str, Any]:
    """Options of a way to lay the ranks out; a name such as 2x4 is a mesh."""
    if name == "plain":
        return {}
    if name == "replicated":
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    shape = (REPLICAS, SHARDS) if name == "hybrid" else tuple(map(int, name.split("x")))
    return {"mesh": init_mesh(shape, HSDP)}


# ---------------------------------------------------------------- one launch


@cached_outcome
def outcomes() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        results = run_on_ranks(on_four_ranks, RANKS, folder)
        files = {
            name: sorted(p.name for p in Path(folder, name).rglob("rank*.safetensors"))
            for name in LAYOUTS
        }
        merged, _ = consolidate_sharded_model_checkpoints(
            f"{folder}/hybrid/step_00000001/rank", "*.safetensors", save_model=False
        )
        return [{**result, "files": files, "merged": merged} for result in results]


def on_four_ranks(rank: int, folder: str) -> dict[str, Any]:
    return {
        "program": program(rank),
        "state": one_replica_is_shown(),
        "sharded": sums_of_shards(rank),
        "factors": divide_factors(),
        "saved": save_and_load(folder),
        "explained": explained(),
        "gathers": {when: groups_of_gathers(when) for when in ("never", "before", "between")},
    }


# ---------------------------------------------------------------- what is sent


def program(rank: int) -> str:
    """HLO of the second step; on CPU ranks an all-reduce is a reduce-scatter and an all-gather."""
    import torch_xla

    from xla_fsdp.xla.graph import lowered_hlo

    options = {"compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}
    case = Case(model="LinearNet", mesh=(REPLICAS, SHARDS), options=options)
    model = shard(build(case), case, RANKS, rank)
    optimizer = make_optimizer(case, model.parameters())
    x, y = (t.to(torch_xla.device()) for t in batches(case, RANKS))
    for step in range(2):
        torch_xla.sync()
        optimizer.zero_grad()
        forward_backward(model, case, x[step, :, rank], y[step, :, rank])
        optimizer.step()
    text = lowered_hlo(list(model.parameters()))
    torch_xla.sync()
    return text


def groups_of_gathers(when: str) -> int:
    """How many gathers of a step are among some of the ranks, where parameters are to be kept in
    groups of two, until ``set_reshard_after_forward(True)``: before the forward, or after it."""
    import torch_xla

    from xla_fsdp.xla.graph import lowered_hlo

    model = in_place(make(), reshard_after_forward=2)
    if when == "before":
        model.set_reshard_after_forward(True)
    loss = loss_of(model)
    if when == "between":
        model.set_reshard_after_forward(True)
    loss.backward()
    shards = [each.param.shard for each in model._fsdp_named_shards()]
    text = lowered_hlo([shard.grad for shard in shards])
    torch_xla.sync()  # else the next program would hold these collectives, too
    gathers = Program(text).all("all-gather")
    return sum(each.groups in (WITHIN, ACROSS) for each in gathers)


def test_a_setting_overrules_smaller_groups_from_the_next_forward_on() -> None:
    found = outcomes()[0]["gathers"]
    assert found["never"] == found["between"] > found["before"] == 0


def explained() -> list[list[str]]:
    """The cells of one matrix of 64 x 64 as ``explain`` shows them: with replicas, and gathered for
    backward within groups of two."""
    from xla_fsdp.fsdp.explain import lines_of

    found = []
    for options in (layout("hybrid"), {"reshard_after_forward": 2}):
        inner = fsdp(make(partial(nn.Linear, 64, 64, bias=False)), **options)
        _, _, line, total, *_ = lines_of(fsdp(nn.Sequential(inner), **options))
        found.append([*re.split(r"  +", line), total])
    return found


def test_replicas_and_larger_shards_are_explained() -> None:
    shard = 64 * 64 * 4 / SHARDS  # bytes; gathered twice, reduced, and summed over two replicas
    quarter = 64 * 64 * 4 / RANKS  # gathered from three ranks, then two from one, and reduced
    sent = [2 * shard + shard + shard, 3 * quarter + 2 * quarter + 3 * quarter]
    shown = [f"{each / 1e6:.3g} MB" for each in sent]
    whole = "0.0164 MB float32 in 1"
    assert outcomes()[0]["explained"] == [
        ["0", "1: 4,096", whole, "both", "replica 2, shard 2", whole, shown[0], total(shown[0])],
        [
            *("0", "1: 4,096", whole, "both, then in groups", "shard 4", whole, shown[1]),
            total(shown[1]),
        ],
    ]


def total(sent: str) -> str:
    return f"A rank sends {sent} in a step."


INNER_UNITS = 3  # two blocks and the head of LinearNet
UNITS = INNER_UNITS + 1


def test_only_shards_travel_between_replicas() -> None:
    text = outcomes()[0]["program"]
    found = Program(text).all("all-gather", "reduce-scatter", "all-reduce")
    kinds = Counter((each.op, each.groups, each.dtype) for each in found)
    assert kinds == {
        ("all-gather", WITHIN, "bf16"): 2 * INNER_UNITS + 1,
        ("reduce-scatter", WITHIN, "f32"): UNITS,
        ("reduce-scatter", ACROSS, "f32"): UNITS,
        ("all-gather", ACROSS, "f32"): UNITS,
    }
    scattered = [numel(each) for each in found if each.op == "reduce-scatter"]
    within, across = scattered[::2], scattered[1::2]  # of each unit, one after the other
    assert across == [size // REPLICAS for size in within]
    gathers = [numel(each) for each in found if (each.op, each.groups) == ("all-gather", ACROSS)]
    assert gathers == within


def numel(instruction: Instruction) -> int:
    return torch.Size(instruction.shape).numel()


# ---------------------------------------------------------------- what is shown and summed


def one_replica_is_shown() -> dict[str, int]:
    from xla_fsdp import XlaFullyShardedDataParallel, full_state_dict, optim_state_dict
    from xla_fsdp.fsdp.engine.shard_tensor import is_sharded

    model = fsdp(make(), **layout("hybrid"))
    optimizer = trained(model)
    with XlaFullyShardedDataParallel.summon_full_params(model, writeback=True):
        torch.nn.init.constant_(model.head.weight, 3.0)
    head = full_state_dict(model)["head.weight"]
    with XlaFullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
        summoned = not is_sharded(model.head.weight)
    return {
        "changed": int((head == 3.0).all()),
        "summoned": int(summoned),
        "model": len(full_state_dict(model, rank0_only=True)),
        "optimizer": len(optim_state_dict(model, optimizer, rank0_only=True)),
    }


def trained(model: Any, steps: int = 1) -> torch.optim.Optimizer:
    """An optimizer that has made steps on this rank's data."""
    import torch_xla
    import torch_xla.runtime as xr

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES) + xr.global_ordinal()
        model(x.to(torch_xla.device())).square().sum().backward()
        optimizer.step()
        torch_xla.sync()
    return optimizer


def test_what_is_for_rank_0_is_not_for_other_replicas() -> None:
    for rank, found in enumerate(each["state"] for each in outcomes()):
        shown = (found["summoned"], found["model"] > 0, found["optimizer"] > 0)
        assert shown == (rank == 0,) * 3
        assert found["changed"]


def sums_of_shards(rank: int) -> dict[str, Tensor]:
    """Gradients of two batches, accumulated as shards, and as one batch."""
    import torch_xla

    model = fsdp(make(), **layout("hybrid"))
    x = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES).to(torch_xla.device()) + rank
    with model.no_sync(sharded=True):
        model(x[:2]).square().sum().backward()
    model(x[2:]).square().sum().backward()
    parts = model.head.weight.grad.cpu()
    model.zero_grad()
    model(x).square().sum().backward()
    return {"parts": parts, "whole": model.head.weight.grad.cpu()}


def test_gradients_accumulate_as_shards() -> None:
    for found in (each["sharded"] for each in outcomes()):
        torch.testing.assert_close(found["parts"], found["whole"], rtol=1e-4, atol=1e-3)


def divide_factors() -> tuple[float, float]:
    group = fsdp(make(), **layout("hybrid"))._fsdp_unit.group
    return group.reduction.predivide, group.reduction.postdivide


def test_gradients_are_averaged_over_all_ranks() -> None:
    before, after = outcomes()[0]["factors"]
    assert before * after == RANKS


# ---------------------------------------------------------------- what is saved


def save_and_load(folder: str) -> dict[str, Any]:
    """Every layout loads what the hybrid one saved, and the hybrid one what every other saved."""
    from xla_fsdp import save_checkpoint

    found: dict[str, Any] = {"loaded": {}}
    states = {}
    for name in LAYOUTS:
        model = fsdp(make(), **layout(name))
        optimizer = trained(model)
        states[name] = full_states(model, optimizer)
        save_checkpoint(f"{folder}/{name}", model, optimizer, step=1)
    for name in LAYOUTS:
        for source, target in dict.fromkeys((("hybrid", name), (name, "hybrid"))):
            loaded = load(f"{folder}/{source}", target)
            found["loaded"][source, target] = same(loaded, states[source])
    return {**found, "model": {k[1]: v for k, v in states["hybrid"].items() if k[0] == "model"}}


def load(folder: str, name: str) -> dict[tuple[str, ...], Tensor]:
    from xla_fsdp import load_checkpoint

    model = fsdp(make(seed=4), **layout(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
    load_checkpoint(folder, model, optimizer)
    return full_states(model, optimizer)


def full_states(model: Any, optimizer: Any) -> dict[tuple[str, ...], Tensor]:
    """Everything, on every rank."""
    from xla_fsdp import full_state_dict, optim_state_dict

    state = optim_state_dict(model, optimizer)["state"]
    return {
        **{("model", name): value for name, value in full_state_dict(model).items()},
        **{(name, key): v for name, each in state.items() for key, v in each.items()},
    }


def test_one_replica_is_saved() -> None:
    sizes = {name: len(found) for name, found in outcomes()[0]["files"].items()}
    assert sizes == {"plain": RANKS, "hybrid": SHARDS, "replicated": 1}


@pytest.mark.parametrize("other", LAYOUTS)
def test_a_checkpoint_goes_from_any_mesh_to_any_mesh(other: str) -> None:
    for found in (each["saved"]["loaded"] for each in outcomes()):
        assert found["hybrid", other]
        assert found[other, "hybrid"]


def test_a_hybrid_checkpoint_merges() -> None:
    found = outcomes()[0]
    merged, expected = found["merged"], found["saved"]["model"]
    assert set(merged) == set(expected)
    assert all(torch.equal(merged[name], value) for name, value in expected.items())


def save_on(rank: int, folder: str, name: str) -> Any:
    from xla_fsdp import save_checkpoint

    model = nested(make(), **layout(name))
    optimizer = trained(model)
    save_checkpoint(folder, model, optimizer, step=1)
    return full_states(model, optimizer)


def load_on(rank: int, folder: str, name: str) -> Any:
    return load(folder, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "loading"),
    [("2x4", "3x1"), ("4x2", "plain"), ("plain", "2x4"), ("2x2", "4x2"), ("1x3", "2x2")],
)
def test_a_checkpoint_goes_to_other_numbers_of_ranks(
    saving: str, loading: str, tmp_path: Path
) -> None:
    saved = run_as(save_on, saving, tmp_path)[0]
    for found in run_as(load_on, loading, tmp_path):
        assert same(found, saved)


def run_as(fn: Any, name: str, folder: Path) -> list[Any]:
    ranks = 3 if name == "plain" else torch.Size(map(int, name.split("x"))).numel()
    return run_on_ranks(fn, ranks, str(folder), name)


# ---------------------------------------------------------------- what is refused


def different_replicas(rank: int) -> None:
    import torch_xla

    fsdp(make(seed=rank), mesh=init_mesh((2, 1), HSDP))
    torch_xla.sync()


def test_replicas_with_different_values_are_told() -> None:
    with pytest.raises(ChildError, match=re.escape("inp.weight with checksum")):
        run_on_ranks(different_replicas, 2)
