"""Checkpoints that earlier versions wrote give what they were made of: merged, and loaded on as
many ranks as saved them and on others (``test/data/checkpoints``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from test.common.ranks import cached_outcome, run_on_ranks
from test.common.write_old_checkpoints import (
    CASES,
    CHECKPOINTS,
    EXTRA,
    FLAT,
    make,
    nested,
    shard_file,
)
from xla_fsdp import consolidate_sharded_model_checkpoints
from xla_fsdp.consolidate_sharded_ckpts import main

NAMES = sorted(each.name for each in CHECKPOINTS.iterdir() if each.is_dir())
NUM_RANKS = (2, 3)


def prefix(name: str) -> str:
    """What the paths of the files of a checkpoint start with."""
    part = "run" if CASES[name].saved == "run" else "shards/rank-"
    return str(CHECKPOINTS / name / part)


def expected(name: str) -> dict[str, Tensor]:
    """What the job that saved it held."""
    return load_file(CHECKPOINTS / name / "expected.safetensors")


def named(model: Mapping[str, Tensor], states: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Under the names that ``expected`` has."""
    found = {f"model/{name}": value for name, value in model.items()}
    for name, own in (states or {}).items():
        found |= {f"optim/{name}/{state}": value for state, value in own.items()}
    return found


def differences(found: Mapping[str, Tensor], name: str) -> list[str]:
    """Names of tensors that are not there, not expected, or of another type, shape or value."""
    wanted = expected(name)
    return sorted(
        key
        for key in {*found, *wanted}
        if key not in found or key not in wanted or not same(found[key], wanted[key])
    )


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one type, shape and value."""
    return first.dtype == second.dtype and torch.equal(first.cpu(), second)


def test_every_case_is_there() -> None:
    assert sorted(CASES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_command_merges_all(name: str, tmp_path: Path) -> None:
    full = tmp_path / "full.pth"
    assert main(["--ckpt_prefix", prefix(name), "--save_path", str(full), "--verify"]) == 0
    merged = torch.load(full, weights_only=True)
    assert not differences(named(merged["model"], merged.get("optimizer", {}).get("state")), name)


@pytest.mark.parametrize("name", NAMES)
def test_the_library_merges_the_model(name: str) -> None:
    model, path = consolidate_sharded_model_checkpoints(prefix(name), save_model=False)
    assert path is None
    states = {key: value for key, value in expected(name).items() if key.startswith("optim/")}
    assert not differences({**named(model, None), **states}, name)


# ---------------------------------------------------------------- loading


def load_all(rank: int, num_ranks: int) -> dict[str, list[str]]:
    """What is wrong after loading each of the checkpoints."""
    return {name: _load(rank, num_ranks, name) for name in NAMES}


def _load(rank: int, num_ranks: int, name: str) -> list[str]:
    """Wrapped as it was saved where the number of ranks is the same, and otherwise elsewhere."""
    from xla_fsdp import full_state_dict, load_checkpoint, optim_state_dict

    case = CASES[name]
    as_saved = case.num_ranks == num_ranks
    others = FLAT if case.shard is nested else nested
    model = (case.shard if as_saved else others)(make(seed=11))
    if case.optimizer is None:
        return differences(_loaded_state(model, rank, name, as_saved=as_saved), name)
    optimizer = case.optimizer(model.parameters())
    found = load_checkpoint(CHECKPOINTS / name / "run", model, optimizer)
    states = optim_state_dict(model, optimizer)["state"]
    wrong = differences(named(full_state_dict(model), states), name)
    extra = found["extra"]
    kept = extra["noise"].tolist() == EXTRA["noise"].tolist() and all(
        extra[key] == EXTRA[key] for key in ("epoch", "names")
    )
    return wrong if kept else [*wrong, "extra"]


def _loaded_state(model: Any, rank: int, name: str, *, as_saved: bool) -> dict[str, Tensor]:
    """Of a model that was loaded from shards, or from what they merge to."""
    from xla_fsdp import full_state_dict

    if as_saved and CASES[name].shards_fit:
        path = shard_file(CHECKPOINTS / name, rank, CASES[name].num_ranks)
        state = torch.load(path, weights_only=True)["model"]
    else:
        state, _ = consolidate_sharded_model_checkpoints(prefix(name), save_model=False)
    model.load_state_dict(state)
    full = full_state_dict(model)
    # Not in torch_xla's files is the second name of a tied weight; the model has it.
    if "model/right.weight" not in expected(name) and torch.equal(
        full["right.weight"], full["left.weight"]
    ):
        del full["right.weight"]
    return named(full, None)


@cached_outcome
def loaded(num_ranks: int) -> list[dict[str, list[str]]]:
    return run_on_ranks(load_all, num_ranks, num_ranks)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_load(name: str, num_ranks: int) -> None:
    assert [found[name] for found in loaded(num_ranks)] == [[]] * num_ranks
