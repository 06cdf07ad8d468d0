"""A job moves from here to torch's own FSDP, at another number of ranks, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from test.common.moving import train_here, train_plain
from test.common.ranks import ROOT, environment, run_on_ranks
from test.common.shard_maker import FullModel
from xla_fsdp.checkpoint import CheckpointError, MemberRecord, ParamRecord, ShardMetadata
from xla_fsdp.checkpoint.load_step import load_step
from xla_fsdp.checkpoint.reshard import LoadTarget
from xla_fsdp.checkpoint.step_directory import Attempt
from xla_fsdp.checkpoint.storage import open_storage
from xla_fsdp.consolidate_sharded_ckpts import main

STEPS = (20, 35, 50)
PORTABLE = ROOT / ".venv-portable" / "bin" / "python"
"""Of a newer torch, without torch_xla, where ``make test-portable`` has made it."""


def mean(losses: list[list[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*losses, strict=True)]


def go_on_there(folder: Path, load: Path, save: Path, ranks: int) -> list[float]:
    """The losses of processes of torch's ``fully_shard``, which save with DCP."""
    folder.mkdir()
    job = {"ranks": ranks, "first": STEPS[0], "last": STEPS[1], "load": str(load)}
    (folder / "move.json").write_text(json.dumps({**job, "save": str(save)}))
    python = str(PORTABLE if PORTABLE.exists() else sys.executable)
    command = [python, "-m", "test.common.moving", str(folder)]
    children = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    said = [child.communicate(timeout=600)[1].decode() for child in children]
    assert [child.returncode for child in children] == [0] * ranks, said
    return mean([json.loads((folder / f"losses{r}.json").read_text())[1] for r in range(ranks)])


@pytest.mark.parametrize("recipe", ["wrapper", "lean"])
def test_there_and_back(recipe: str, tmp_path: Path) -> None:
    run, there, back, again = (tmp_path / n for n in ("run", "there", "back", "again"))
    losses = mean(run_on_ranks(train_here, 3, recipe, 0, STEPS[0], "", str(run)))
    assert main(["convert", str(run), "--to", "dcp"]) == 0
    losses += go_on_there(tmp_path / "gloo", tmp_path / "run_dcp", there, 2)
    arguments = ["--ckpt_prefix", str(there), "--save_path", str(back), "--to_world_size", "4"]
    assert main(arguments) == 0
    losses += mean(run_on_ranks(train_here, 4, recipe, *STEPS[1:], str(back), str(again)))
    assert losses == pytest.approx(train_plain(STEPS[-1]), abs=1e-6, rel=0)


@pytest.mark.parametrize("change", ["", "value", "shape"])
def test_both_names_of_a_tied_tensor_load_if_they_are_equal(tmp_path: Path, change: str) -> None:
    """torch saves a tensor under each of its names."""
    value = torch.arange(300.0)
    other = value.clone()
    if change == "value":
        other[299] = 0  # in the last rank's part
    FullModel(
        params={"a": value, "b": other[:299] if change == "shape" else other}
    ).save_safetensors(tmp_path, 3)
    arguments = ["--ckpt_prefix", str(tmp_path), "--save_path", str(tmp_path / "run")]
    assert main([*arguments, "--to_world_size", "3"]) == 0
    record = ParamRecord("a", "float32", 128, (MemberRecord("a", (300,)),))
    storage, loaded = open_storage(str(tmp_path / "run")), []
    with pytest.raises(CheckpointError, match="b is tied to a") if change else nullcontext():
        for rank in range(2):
            target = LoadTarget(ShardMetadata(rank, 2, (record,), {"b": "a"}), {})
            loaded.append(load_step(storage, Attempt(0), target).model["a"])
    assert change or torch.equal(torch.cat(loaded)[:300], value)
