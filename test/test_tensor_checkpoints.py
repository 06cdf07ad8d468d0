"""Checkpoints of tensor-parallel models: merged into ordinary ones, loaded onto other meshes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from test.ranks import cached_outcome, run_on_ranks
from test.tensor_training import Case, make_optimizer, parallelized, sharded, train_steps
from xla_fsdp.checkpoint import MergeOptions, merge_files, read_shards
from xla_fsdp.consolidate_sharded_ckpts import main

RANKS = 4
SAVED = {
    "wrapped": Case("Gpt", (("shard", 2), ("tensor", 2)), sequence=True, shard="wrapped"),
    "in_place": Case("Llama", (("shard", 2), ("tensor", 2)), shard="in_place"),
    "flat": Case(
        "Gpt",
        (("shard", 2), ("tensor", 2)),
        shard="wrapped",
        options=(("flatten_parameters", True),),
    ),
    "hybrid": Case("Llama", (("replica", 2), ("shard", 1), ("tensor", 2)), shard="wrapped"),
    "plain": Case("Gpt", (("shard", 4), ("tensor", 1)), shard="wrapped"),
}
LOADED = {
    "Gpt": Case("Gpt", (("shard", 1), ("tensor", 4)), shard="wrapped"),
    "Llama": Case("Llama", (("shard", 4), ("tensor", 1)), shard="in_place"),
}


# ---------------------------------------------------------------- on ranks


def save_all(rank: int, folder: str) -> dict[str, Any]:
    """Train, save, and load onto a mesh of another shape and onto the same; what was saved, whole,
    and whether what was loaded is the same."""
    from xla_fsdp import save_checkpoint

    found = {}
    for name, case in SAVED.items():
        model, optimizer = trained(case)
        save_checkpoint(f"{folder}/{name}", model, optimizer, step=1, extra={"rank": rank})
        saved = everything(model, optimizer)
        others = (LOADED[case.model], case)
        found[name] = {"saved": saved, "same": [load(folder, name, c, saved) for c in others]}
    return found


def trained(case: Case) -> tuple[Any, Any]:
    mesh = case.make_mesh()
    model = sharded(parallelized(case, mesh), case, mesh)
    optimizer = make_optimizer(model.parameters())
    train_steps(model, optimizer, case, mesh, steps=1)
    return model, optimizer


def load(folder: str, name: str, case: Case, saved: dict[str, Any]) -> bool:
    from xla_fsdp import load_checkpoint

    mesh = case.make_mesh()
    model = sharded(parallelized(case, mesh, seed=4), case, mesh)
    optimizer = make_optimizer(model.parameters())
    load_checkpoint(f"{folder}/{name}", model, optimizer)
    return same(everything(model, optimizer), saved)


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole parameters, and the optimizer's state, by plain names."""
    from xla_fsdp import full_state_dict, optim_state_dict

    state = optim_state_dict(model, optimizer)["state"]
    states = {f"{name}/{what}": t for name, own in state.items() for what, t in own.items()}
    return {**full_state_dict(model), **states}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in b)


def load_three(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """What ranks without tensor parallelism find in a directory."""
    from test import tensor_models
    from test.scenarios import fsdp, make
    from xla_fsdp import load_checkpoint

    found = {}
    for name in ("wrapped", "in_place", "flat"):
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


@cached_outcome
def saved() -> list[dict[str, Any]]:
    return run_on_ranks(save_all, RANKS, folder())


@pytest.mark.parametrize("name", SAVED)
def test_any_mesh_loads_what_another_saved(name: str) -> None:
    for each in saved():
        assert each[name]["same"] == [True, True]


@pytest.mark.parametrize("name", SAVED)
def test_shards_merge_into_one_ordinary_checkpoint(name: str, tmp_path: Path) -> None:
    expected = saved()[0][name]["saved"]
    shards = read_shards(f"{folder()}/{name}", "*.pth", None, overwrite=False)
    merge_files(shards, str(tmp_path / "full.pth"), MergeOptions())
    merged = torch.load(tmp_path / "full.pth", weights_only=True)
    states = merged["optimizer"]["state"]
    found = {f"{key}/{what}": t for key, own in states.items() for what, t in own.items()}
    assert same({**merged["model"], **found}, expected)


@cached_outcome
def on_three() -> list[dict[str, Any]]:
    saved()
    for name in ("wrapped", "in_place", "flat"):
        where = (
            "--ckpt_prefix",
            f"{folder()}/{name}",
            "--save_path",
            f"{folder()}/{name}_on_three",
        )
        assert main([*where, "--to_world_size", "3"]) == 0
    return run_on_ranks(load_three, 3, folder())


@pytest.mark.parametrize("name", ["wrapped", "in_place", "flat"])
def test_the_command_cuts_anew_for_ranks_without_tensor_parallelism(name: str) -> None:
    expected = saved()[0][name]["saved"]
    for each in on_three():
        assert same(each[name], expected)
