"""Paths mean the same however they are written, and wherever the process goes afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from test.common.saving import damage_of, save_step
from test.common.shard_maker import bits, with_optimizer
from xla_fsdp.checkpoint import CheckpointError, MergeOptions, open_shard, read_shards
from xla_fsdp.checkpoint.convert.consolidate import plan_merge
from xla_fsdp.checkpoint.convert.reshard_files import plan_reshard
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.consolidate_sharded_ckpts import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which has one other directory."""
    (tmp_path / "here" / "other").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_a_directory_stays_when_the_working_directory_changes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage("run")
    monkeypatch.chdir("other")
    storage.write("x/y", [b"data"])
    assert (here / "run" / "x" / "y").read_bytes() == b"data"
    assert list((here / "other").iterdir()) == []


def test_shards_and_outputs_stay_when_the_working_directory_changes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_optimizer()
    model.save_safetensors(here, 2)
    options = MergeOptions()
    shards = read_shards("mnist", "*.safetensors", "full.pth", overwrite=False)
    one = open_shard(str(Path(shards[0].source).relative_to(here)))
    merge, reshard = (
        plan_merge(shards, "full.pth", options),
        plan_reshard(shards, "new", np.int64(3), step=np.int64(0)),
    )
    monkeypatch.chdir("other")
    merge.run(options.write)
    reshard.run(options.write)
    for _, tensor in one.tensors():
        tensor.load()
    content = torch.load(here / "full.pth", weights_only=True)
    assert bits(content["model"]) == bits(model.expected())
    folder = here / "new" / "step_00000000"
    assert json.loads((folder / "complete.json").read_text())["world_size"] == 3
    assert list((here / "other").iterdir()) == []


def test_a_file_url_is_read_and_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_optimizer().save_safetensors(here / "other", 2)
    for out in ("full.pth", "hf/", "full.safetensors"):
        assert (
            main(["--ckpt_prefix", f"file://{here}/other", "--save_path", f"file://{here}/{out}"])
            == 0
        )
        assert (here / out).exists()
    capsys.readouterr()
    assert main(["--ckpt_prefix", "other", "--save_path", "nope://x.pth"]) == 2
    assert "nope://: Protocol not known: nope" in capsys.readouterr().err
    assert {path.name for path in here.iterdir()} == {"other", "hf", "full.pth"} | {
        f"full{part}.safetensors" for part in ("", ".optimizer")
    }


def test_a_tilde_is_the_home_directory(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for step, suffix in ((3, "safetensors"), (4, "pth")):
        assert save_step("~/run", step, 3, suffix=suffix) == [None] * 3
        assert damage_of("~/run", step) == []
        arguments = ["--ckpt_prefix=~/run", f"--save_path=~/full{step}.pth"]
        assert main(arguments) == 0
        assert (tmp_path / f"full{step}.pth").exists()
    assert main(["inspect", "--ckpt_prefix=~/run"]) == 0
    assert f"in {tmp_path}/run/step_00000004, step 4\n" in capsys.readouterr().out
    assert [path.name for path in here.iterdir()] == ["other"]


def test_a_url_that_pathlib_has_changed_is_refused(here: Path) -> None:
    for use in (open_storage, lambda path: plan_reshard([], path, 1)):
        with pytest.raises(CheckpointError, match="'gs:/bucket/run' is what pathlib makes of a"):
            use(Path("gs://bucket") / "run")
    assert main(["gs:/bucket/run"]) == 2
    for name in ("./gs:/bucket", "c:/run"):
        assert open_storage(name).where == f"{here}/{name}"


def test_an_empty_path_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "is empty; expected one ('.' is the working directory)"
    for use in (open_storage, open_shard, lambda path: plan_reshard([], path, 1)):
        with pytest.raises(CheckpointError) as caught:
            use("")
        assert str(caught.value) == f"the path {message}"
    with_optimizer().save(here, 1)
    assert main(["--ckpt_prefix", ""]) == 2
    assert capsys.readouterr().err == f"consolidate_sharded_ckpts: ckpt_prefix {message}\n"
    assert main(["--ckpt_prefix", "", "--ckpt_suffix", "mnist*", "--save_path", "f.pth"]) == 0
