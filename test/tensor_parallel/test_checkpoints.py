"""Checkpoints of tensor-parallel models: merged into ordinary ones, loaded onto other meshes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.compare import same
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.tensor_training import Case, make_optimizer, parallelized, sharded, train_steps
from xla_fsdp.checkpoint import CheckpointError, MergeOptions, merge_files, read_shards
from xla_fsdp.consolidate_sharded_ckpts import main

MESH = (("shard", 2), ("tensor", 2))
FLAT = (("flatten_parameters", True),)
QUICK = {"wrapped": Case("Gpt", MESH, sequence=True, shard="wrapped")}
SLOW = {
    "in_place": Case("Llama", MESH, shard="in_place"),
    "flat": Case("Gpt", MESH, shard="wrapped", options=FLAT),
    "hybrid": Case("Llama", (("replica", 2), ("shard", 1), ("tensor", 2)), shard="wrapped"),
    "plain": Case("Gpt", (("shard", 4), ("tensor", 1)), shard="wrapped"),
    "eight": Case("Llama", (("shard", 4), ("tensor", 2)), shard="wrapped"),
}
SAVED = {**QUICK, **SLOW}
LOADED = {
    ("Gpt", 4): Case("Gpt", (("shard", 1), ("tensor", 4)), shard="wrapped"),
    ("Llama", 4): Case("Llama", (("shard", 4), ("tensor", 1)), shard="in_place"),
    ("Llama", 8): Case("Llama", (("shard", 2), ("tensor", 4)), shard="in_place"),
}
STEP, RANDOM = "step_00000001", 1000
SLOW_CASES = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


# ---------------------------------------------------------------- on ranks


def save_all(rank: int, folder: str, names: list[str]) -> dict[str, Any]:
    """Train, save, and load onto a mesh of another shape and onto the same; what was saved, whole,
    whether what was loaded is the same, and the device's random state then."""
    import torch_xla.core.xla_model as xm

    from xla_fsdp import save_checkpoint

    found = {}
    for name, case in ((name, SAVED[name]) for name in names):
        model, optimizer = trained(case)
        xm.set_rng_state(RANDOM + rank)
        save_checkpoint(f"{folder}/{name}", model, optimizer, step=1, extra={"rank": rank})
        saved = everything(model, optimizer)
        others = (LOADED[case.model, case.num_ranks], case)
        loaded = [load(folder, name, each, saved) for each in others]
        same, random = zip(*loaded, strict=True)
        found[name] = {"saved": saved, "same": same, "random": random}
    return found


def trained(case: Case) -> tuple[Any, Any]:
    mesh = case.make_mesh()
    model = sharded(parallelized(case, mesh), case, mesh)
    optimizer = make_optimizer(model.parameters())
    train_steps(model, optimizer, case, mesh, steps=1)
    return model, optimizer


def load(folder: str, name: str, case: Case, saved: dict[str, Any]) -> tuple[bool, int]:
    import torch_xla.core.xla_model as xm

    from xla_fsdp import load_checkpoint

    mesh = case.make_mesh()
    model = sharded(parallelized(case, mesh, seed=4), case, mesh)
    optimizer = make_optimizer(model.parameters())
    load_checkpoint(f"{folder}/{name}", model, optimizer)
    random = xm.get_rng_state()
    return same(everything(model, optimizer), saved), random


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole parameters, and the optimizer's state, by plain names."""
    from xla_fsdp import full_state_dict, optim_state_dict

    state = optim_state_dict(model, optimizer)["state"]
    states = {f"{name}/{what}": t for name, own in state.items() for what, t in own.items()}
    return {**full_state_dict(model), **states}


def load_three(rank: int, folder: str, names: list[str]) -> dict[str, dict[str, Tensor]]:
    """What ranks without tensor parallelism find in directories."""
    from test.common import tensor_models
    from test.common.scenarios import fsdp, make
    from xla_fsdp import load_checkpoint

    found = {}
    for name in names:
        flat = {"flatten_parameters": name == "flat"}
        model = fsdp(make(getattr(tensor_models, SAVED[name].model), 4), **flat)
        optimizer = make_optimizer(model.parameters())
        load_checkpoint(f"{folder}/{name}_on_three", model, optimizer)
        found[name] = everything(model, optimizer)
    return found


# ---------------------------------------------------------------- here


@cached_outcome
def folder() -> str:
    """With what was saved, merged, and cut anew for three ranks."""
    kept = tempfile.TemporaryDirectory()
    folder.kept = kept  # type: ignore[attr-defined]
    return kept.name


def others_like(name: str) -> list[str]:
    """The cases of one launch."""
    cases = QUICK if name in QUICK else SLOW
    return [each for each, case in cases.items() if case.num_ranks == SAVED[name].num_ranks]


@cached_outcome
def launched(names: tuple[str, ...]) -> list[dict[str, Any]]:
    return run_on_ranks(save_all, SAVED[names[0]].num_ranks, folder(), list(names), timeout=900)


def saved(name: str) -> list[dict[str, Any]]:
    return [each[name] for each in launched(tuple(others_like(name)))]


@pytest.mark.parametrize("name", [*QUICK, *SLOW_CASES])
def test_any_mesh_loads_what_another_saved(name: str) -> None:
    for each in saved(name):
        assert each["same"] == (True, True)


@pytest.mark.parametrize("name", [*QUICK, *SLOW_CASES])
def test_random_states_are_taken_by_ranks_in_the_same_places_only(name: str) -> None:
    for rank, each in enumerate(saved(name)):
        other, same = each["random"]
        case = SAVED[name]
        places = case.num_ranks // dict(case.mesh).get("replica", 1)
        # Of replicas the states of one are saved.
        replicas = range(rank % places, case.num_ranks, places)
        assert same in [RANDOM + each for each in replicas]
        assert other != same


@pytest.mark.parametrize("name", [*QUICK, *SLOW_CASES])
def test_shards_merge_into_one_ordinary_checkpoint(name: str, tmp_path: Path) -> None:
    expected = saved(name)[0]["saved"]
    shards = read_shards(f"{folder()}/{name}", "*.pth", None, overwrite=False)
    merge_files(shards, str(tmp_path / "full.pth"), MergeOptions())
    merged = torch.load(tmp_path / "full.pth", weights_only=True)
    states = merged["optimizer"]["state"]
    found = {f"{key}/{what}": t for key, own in states.items() for what, t in own.items()}
    assert same({**merged["model"], **found}, expected)


@cached_outcome
def on_three(names: tuple[str, ...]) -> list[dict[str, Any]]:
    for name in names:
        saved(name)
        where = (
            "--ckpt_prefix",
            f"{folder()}/{name}",
            "--save_path",
            f"{folder()}/{name}_on_three",
        )
        assert main([*where, "--to_world_size", "3"]) == 0
    return run_on_ranks(load_three, 3, folder(), list(names), timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_ranks_without_tensor_parallelism_load_what_the_command_cut_anew(name: str) -> None:
    expected = saved(name)[0]["saved"]
    for each in on_three(tuple(SAVED)):
        assert same(each[name], expected)


def test_what_the_command_cuts_anew_merges_into_the_same(tmp_path: Path) -> None:
    """Tensor 2 x shard 2 to three shards without tensor parallelism."""
    expected = saved("wrapped")[0]["saved"]
    where = ("--ckpt_prefix", f"{folder()}/wrapped", "--save_path", str(tmp_path / "three"))
    assert main([*where, "--to_world_size", "3"]) == 0
    shards = read_shards(str(tmp_path / "three"), "*.pth", None, overwrite=False)
    assert [shard.metadata["tensor_parts"] for shard in shards] == [1, 1, 1]
    merge_files(shards, str(tmp_path / "full.pth"), MergeOptions())
    model = torch.load(tmp_path / "full.pth", weights_only=True)["model"]
    assert all(torch.equal(model[name], expected[name]) for name in model)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    saved("wrapped")
    source = Path(folder(), "wrapped", STEP)
    for file in source.glob("rank-*"):
        if "00002-of" not in file.name:
            shutil.copy(file, tmp_path)
    with pytest.raises(CheckpointError, match="missing ranks: 2 of 4"):
        read_shards(f"{tmp_path}/rank", "*.safetensors", None, overwrite=False)
