"""A job moves from here to torch's own FSDP, at another number of ranks, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.moving import Job, train_here, train_plain
from test.common.ranks import ROOT, environment, run_on_ranks, run_warm, skip_without_torch_xla
from test.common.shard_maker import FullModel
from xla_fsdp.checkpoint import CheckpointError, MemberRecord, ParamRecord, ShardMetadata
from xla_fsdp.checkpoint.convert.reshard import LoadTarget
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.steps.load_step import load_step
from xla_fsdp.checkpoint.steps.step_directory import Attempt
from xla_fsdp.consolidate_sharded_ckpts import main

STEPS = (20, 35, 50)
PORTABLE = ROOT / ".venv-portable" / "bin" / "python"
"""Of a newer torch, without torch_xla, where ``make test-portable`` has made it."""


def mean(losses: list[list[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*losses, strict=True)]


def go_on_there(
    job: Job, folder: Path, load: Path, save: Path, ranks: int, first: int = STEPS[0]
) -> list[float]:
    """The losses of processes of torch's ``fully_shard``, which save with DCP; without the
    optimizer's state if they begin at step 0."""
    folder.mkdir()
    move = {"ranks": ranks, "first": first, "last": STEPS[1], "load": str(load), "save": str(save)}
    (folder / "move.json").write_text(
        json.dumps({**move, "job": asdict(job), "optimizer": bool(first)})
    )
    package = "transformers" if job.model == "llama" else "torch"
    there = any(PORTABLE.parents[1].glob(f"lib/python3.*/site-packages/{package}"))
    python = str(PORTABLE if there else sys.executable)
    command = [python, "-m", "test.common.moving", str(folder)]
    children = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    said = [child.communicate(timeout=600)[1].decode() for child in children]
    assert [child.returncode for child in children] == [0] * ranks, said
    return mean([json.loads((folder / f"losses{r}.json").read_text())[1] for r in range(ranks)])


def merged(run: Path, file: Path) -> dict[str, Any]:
    """Model and optimizer's state of a run or of a directory of DCP."""
    assert main(["--ckpt_prefix", str(run), "--save_path", str(file)]) == 0
    content = torch.load(file, weights_only=True)
    states = content["optimizer"]["state"].items()
    found = {f"{name} {what}": v for name, state in states for what, v in state.items()}
    return {**content["model"], **found}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


JOBS = [
    Job("wrapper"),
    Job("lean"),
    pytest.param(Job("fully_shard"), marks=pytest.mark.slow),
    pytest.param(Job("streamed"), marks=pytest.mark.slow),
    pytest.param(Job("streamed", "llama"), marks=pytest.mark.slow),
    pytest.param(Job("streamed", "llama", "bfloat16"), marks=pytest.mark.slow),
    pytest.param(Job("wrapper", "llama"), marks=pytest.mark.slow),
    pytest.param(Job("lean", "llama"), marks=pytest.mark.slow),
    pytest.param(Job("wrapper", compute="bfloat16"), marks=pytest.mark.slow),
    pytest.param(Job("lean", compute="bfloat16"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.recipe}-{job.model}-{job.compute}")
def test_there_and_back(job: Job, tmp_path: Path) -> None:
    if job.model == "llama":
        pytest.importorskip("transformers", reason="a model of transformers")
    run, there, back, again = (tmp_path / n for n in ("run", "there", "back", "again"))
    losses = mean(run_on_ranks(train_here, 3, job, 0, STEPS[0], "", str(run)))
    assert main(["convert", str(run), "--to", "dcp"]) == 0
    losses += go_on_there(job, tmp_path / "gloo", tmp_path / "run_dcp", there, 2)
    arrived = merged(tmp_path / "gloo" / "arrived", tmp_path / "arrived.pth")
    assert same(arrived, merged(run, tmp_path / "run.pth"))
    arguments = ["--ckpt_prefix", str(there), "--save_path", str(back), "--to_world_size", "4"]
    assert main(arguments) == 0
    assert same(merged(back, tmp_path / "back.pth"), merged(there, tmp_path / "there.pth"))
    losses += mean(run_on_ranks(train_here, 4, job, *STEPS[1:], str(back), str(again)))
    # In bf16, XLA and torch round intermediate results at different places.
    near = 1e-6 if job.compute == "float32" else 0.02
    assert losses == pytest.approx(train_plain(job, STEPS[-1]), abs=near, rel=0)


def test_shards_of_torch_xla_go_on_there(tmp_path: Path) -> None:
    """They hold a model, and name a tied weight once."""
    skip_without_torch_xla()
    job, files = Job("wrapper"), tmp_path / "model"
    child = run_warm("-m", "test.common.upstream_writer", str(files), "moving")
    assert child.returncode == 0, child.stderr
    arguments = ["convert", f"{files}/epoch0", "--ckpt_suffix", "_rank-*.pth", "--to", "dcp"]
    assert main([*arguments, "--save_path", str(tmp_path / "dcp")]) == 0
    losses = go_on_there(job, tmp_path / "gloo", tmp_path / "dcp", tmp_path / "there", 2, first=0)
    assert losses == pytest.approx(train_plain(job, STEPS[1]), abs=1e-6, rel=0)


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
