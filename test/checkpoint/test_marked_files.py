"""The files of a step are held against its marker, each other and their checksums, whatever is
read of them: wrong tensors are never loaded without a word."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.saving import Picture, differences, picture, read, save_step
from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.files.checksum import BLOCK
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.files.torch_file import read_torch_file
from xla_fsdp.checkpoint.steps.save_step import Job
from xla_fsdp.checkpoint.steps.step_directory import MARKER
from xla_fsdp.consolidate_sharded_ckpts import main

SUFFIXES = ("safetensors", "pth")


def file_of(step: Path, rank: int, suffix: str) -> Path:
    return step / f"rank-{rank:05d}-of-00002.{suffix}"


def read_all(run: Path, step: int, shown: Picture, world_size: int) -> list[str]:
    """What each rank finds wrong; raises what the first one raises."""
    storage = open_storage(run)
    return [
        what
        for rank in range(world_size)
        for what in differences(
            read(storage, shown, rank, world_size), shown, rank, world_size, step
        )
    ]


# ---------------------------------------------------------------- files of others


def swap(run: Path, suffix: str) -> None:
    """The files of two ranks under each other's names."""
    first, second = (file_of(run / "step_00000006", rank, suffix) for rank in range(2))
    first.rename(run / "x")
    second.rename(first)
    (run / "x").rename(second)


def repeat(run: Path, suffix: str) -> None:
    """One rank's file twice."""
    first, second = (file_of(run / "step_00000006", rank, suffix) for rank in range(2))
    shutil.copy(first, second)


def other_step(run: Path, suffix: str) -> None:
    """A file of the step before."""
    shutil.copy(file_of(run / "step_00000005", 1, suffix), run / "step_00000006")


def other_job(run: Path, suffix: str) -> None:
    """A file of the same step, saved by another job."""
    save_step(run / "other", 6, 2, suffix=suffix, job=Job("other"))
    shutil.copy(file_of(run / "other" / "step_00000006", 1, suffix), run / "step_00000006")


def same_save_again(run: Path, suffix: str) -> None:
    """A file of the same step and job with other values."""
    save_step(run / "other", 6, 2, suffix=suffix, shown=picture(7))
    shutil.copy(file_of(run / "other" / "step_00000006", 1, suffix), run / "step_00000006")


def other_marker(run: Path, suffix: str) -> None:
    """The marker of the step before."""
    shutil.copy(run / "step_00000005" / MARKER, run / "step_00000006")


def renamed_folder(run: Path, suffix: str) -> None:
    """The step before under the name of this one."""
    shutil.rmtree(run / "step_00000006")
    (run / "step_00000005").rename(run / "step_00000006")


MIXES: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "swapped": (swap, r"rank-0000[01]-of-00002.\w+: holds the shard of rank [01] of 2\. Take"),
    "repeated": (repeat, r"rank-00001-of-00002.\w+: holds the shard of rank 0 of 2\. Take it"),
    "other step": (
        other_step,
        r"rank-00001\S*: (belongs to step 5 of job one, but complete.json to step 6 of job one|"
        r"has \d+ bytes, but \d+ were written)",
    ),
    "other job": (
        other_job,
        r"rank-00001\S*: (belongs to step 6 of job other, but complete.json to step 6 of job one|"
        r"has \d+ bytes, but \d+ were written)",
    ),
    "same save again": (
        same_save_again,
        r"rank-00001\S*: is not the file that was written for step 6 of job one, by its digest in",
    ),
    "other marker": (other_marker, r"complete.json: is of step 5, in the folder of another one"),
    "renamed": (renamed_folder, r"complete.json: is of step 5, in the folder of another one"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("mix", "message"), MIXES.values(), ids=MIXES)
def test_files_that_do_not_belong_together(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mix: Callable[[Path, str], None],
    message: str,
    suffix: str,
) -> None:
    run = tmp_path / "run"
    for step in (5, 6):
        assert save_step(run, step, 2, suffix=suffix) == [None, None]
    mix(run, suffix)
    for world_size in (2, 3):
        with pytest.raises(CheckpointError, match=message):
            read_all(run, 6, picture(6), world_size)
    full = tmp_path / "full.pth"
    assert main(["--ckpt_prefix", str(run), "--save_path", str(full)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not full.exists()
    assert main(["inspect", "--ckpt_prefix", str(run), "--verify"]) == 2
    assert re.search(message, capsys.readouterr().err)


# ---------------------------------------------------------------- damage in blocks


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damage_is_found_in_every_block_by_whoever_reads_it(tmp_path: Path, suffix: str) -> None:
    numel = 5 * BLOCK // 4  # shards of 2.5 blocks on 2 ranks
    shown = Picture({"big": torch.arange(numel, dtype=torch.float32), "small": torch.ones(3)})
    save_step(tmp_path, 1, 2, shown=shown, suffix=suffix)
    for world_size in (1, 2, 3, 7):
        assert read_all(tmp_path, 1, shown, world_size) == []
    path = file_of(tmp_path / "step_00000001", 0, suffix)
    data = path.read_bytes()
    shard = shown.shard("big", 0, 2).numpy().tobytes()
    start = data.index(shard)
    for at in (0, BLOCK - 1, BLOCK, 2 * BLOCK, len(shard) - 1):
        with path.open("r+b") as file:
            file.seek(start + at)
            file.write(bytes([data[start + at] ^ 1]))
        for world_size in (1, 2, 3, 7):
            with pytest.raises(CheckpointError, match=r"big is damaged: its checksum is crc32:\w+"):
                read_all(tmp_path, 1, shown, world_size)
        path.write_bytes(data)
    assert read_all(tmp_path, 1, shown, 3) == []


def test_a_rank_that_does_not_need_a_damaged_block_goes_on(tmp_path: Path) -> None:
    numel = 5 * BLOCK // 4
    shown = Picture({"big": torch.arange(numel, dtype=torch.float32)})
    save_step(tmp_path, 1, 2, shown=shown)
    path = file_of(tmp_path / "step_00000001", 1, "safetensors")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1  # in the last of the optimizer's or the model's tensors
    path.write_bytes(data)
    storage = open_storage(tmp_path)
    outcomes = []
    for rank in range(5):
        try:
            outcomes.append(differences(read(storage, shown, rank, 5), shown, rank, 5, 1))
        except CheckpointError:
            outcomes.append("refused")
    assert outcomes[:3] == [[], [], []]
    assert outcomes[-1] == "refused"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damage_in_extra_is_found(tmp_path: Path, suffix: str) -> None:
    extra = torch.full((3,), 1).numpy().tobytes()  # as ``picture(1)`` has it
    save_step(tmp_path, 1, 2, suffix=suffix)
    path = file_of(tmp_path / "step_00000001", 0, suffix)
    data = path.read_bytes()
    assert data.count(extra) == 1
    path.write_bytes(data.replace(extra, extra[:8] + bytes([2]) + extra[9:]))
    for world_size in (2, 3):
        with pytest.raises(CheckpointError, match="values/0 is damaged"):
            read_all(tmp_path, 1, picture(1), world_size)


def test_a_torch_file_without_crcs_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5.0)}, tmp_path / "f.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_torch_file(str(tmp_path / "f.pth"))["a"].load().tolist() == [0, 1, 2, 3, 4]


def mutated_reads(run: Path, suffix: str, count: int, seed: int) -> dict[str, int]:
    """Change a few bytes of the files of a step, and read; what came of it."""
    shown, found = picture(1), {"refused": 0, "right": 0, "wrong": 0}
    save_step(run, 1, 2, shown=shown, suffix=suffix)
    paths = [*run.glob("*/rank*." + suffix), *run.glob("*/" + MARKER)]
    sound = {path: path.read_bytes() for path in paths}
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice(paths)
        data = bytearray(sound[path])
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            data[at] ^= 1 << chance.randrange(8)
        if chance.random() < 0.1:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            wrong: Any = read_all(run, 1, shown, chance.choice((1, 2, 3)))
            found["wrong" if wrong else "right"] += 1
        except CheckpointError:
            found["refused"] += 1
        path.write_bytes(sound[path])
    return found


@pytest.mark.parametrize("count", [pytest.param(150), pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_mutated_read_is_wrong(tmp_path: Path, suffix: str, count: int) -> None:
    found = mutated_reads(tmp_path, suffix, count, seed=3)
    print(found)
    assert found["wrong"] == 0
    assert found["refused"] > count // 2
