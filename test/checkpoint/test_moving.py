"""A job moves from here to torch's own FSDP, at another number of ranks, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from test.common.moving import train_here, train_plain
from test.common.ranks import ROOT, environment, run_on_ranks
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
