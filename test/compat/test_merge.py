"""Merging what a job's ranks save, at any time after one of them has: complete, and of one save."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.shard_maker import FullModel, bits, every_kind
from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.format.save_numbers import numbered
from xla_fsdp.compat.merge import SavedByJob, consolidate_sharded_model_checkpoints
from xla_fsdp.distributed.cpu_ranks import Run

SUFFIX = "_rank-*-of-*.pth"


def _other_values() -> FullModel:
    model = every_kind()
    model.params = {name: value + 1 for name, value in model.params.items()}
    return model


def _wait(
    folder: Path, then: list[Callable[[], Any]], job: SavedByJob | None = None, patience: float = 60
) -> None:
    """Wait for the shards; each pause runs the next of ``then``, what another rank does then."""
    job = job or SavedByJob(began=time.time())
    job.pause = lambda: then.pop(0)() if then else time.sleep(0.01)
    prefix = str(folder / "mnist")
    job.wait(prefix, SUFFIX, f"{prefix}_consolidated.pth", patience)


def _age(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 3600,) * 2)


def test_waits_until_the_last_rank_has_saved_all(tmp_path: Path) -> None:
    _, late = every_kind().save(tmp_path, 2)
    content = late.read_bytes()
    late.unlink()
    half = len(content) // 2
    done: list[str] = []

    def write(data: bytes) -> None:
        late.write_bytes(data)
        done.append("written")

    _wait(tmp_path, [lambda: write(b""), lambda: write(content[:half]), lambda: write(content)])
    assert len(done) == 3


def test_an_earlier_jobs_file_is_not_mixed_with_this_ones(tmp_path: Path) -> None:
    _, late = _other_values().save(tmp_path, 2)
    _age(late)
    done: list[str] = []

    def save() -> None:
        torch.save(_other_values().shard(1, 2), late)
        done.append("saved")

    _wait(tmp_path, [save])
    assert done


def test_nor_what_was_merged_before(tmp_path: Path) -> None:
    paths = every_kind().save(tmp_path, 2)
    job = SavedByJob(began=time.time())
    _wait(tmp_path, [], job)
    _wait(tmp_path, [], job)  # again, with nothing saved in between
    changed = _other_values()
    changed.whole["more"] = torch.ones(5)  # so that the sizes of files differ
    torch.save(changed.shard(0, 2), paths[0])
    done: list[str] = []

    def save() -> None:
        torch.save(changed.shard(1, 2), paths[1])
        done.append("saved")

    _wait(tmp_path, [save], job)
    assert done


def _save(model: FullModel, path: Path, rank: int, number: int) -> None:
    """As a rank whose saves are numbered."""
    shard = model.shard(rank, 2)
    shard["shard_metadata"]["save_number"] = number
    torch.save(shard, path)


def test_nor_what_this_job_saved_before_and_did_not_merge(tmp_path: Path) -> None:
    paths = every_kind().save(tmp_path, 2)
    _save(_other_values(), paths[0], 0, number=2)
    _save(every_kind(), paths[1], 1, number=1)
    done: list[str] = []

    def save() -> None:
        _save(_other_values(), paths[1], 1, number=2)
        done.append("saved")

    _wait(tmp_path, [save])
    assert done


def test_saves_have_no_numbers_unless_compat_asks_for_them() -> None:
    assert numbered({"rank": 0}) == {"rank": 0}


def test_saves_that_stay_different_are_refused(tmp_path: Path) -> None:
    paths = every_kind().save(tmp_path, 2)
    for rank, path in enumerate(paths):
        _save(every_kind(), path, rank, number=3 - rank)
    with pytest.raises(CheckpointError, match=r"00001-of-00000002.pth.* 2 times, but .* 3 times"):
        _wait(tmp_path, [], patience=0.05)


def test_files_of_an_earlier_job_alone_are_merged_or_refused_at_once(tmp_path: Path) -> None:
    def never() -> None:
        raise AssertionError("waited")

    paths = every_kind().save(tmp_path, 2)
    _age(*paths)
    _wait(tmp_path, [never])
    paths[1].unlink()
    _wait(tmp_path, [never])


def test_a_mixture_that_stays_is_refused(tmp_path: Path) -> None:
    paths = every_kind().save(tmp_path, 2)
    _age(paths[1])
    with pytest.raises(CheckpointError, match=r"rank-00000001-of-00000002.pth: an earlier save's"):
        _wait(tmp_path, [], patience=0.05)


def test_a_rank_that_never_saves_is_left_to_the_merge_to_report(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)[1].unlink()
    _wait(tmp_path, [], patience=0.05)


def test_waiting_ends_with_a_failed_run(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)[1].unlink()

    def work(rank: int) -> None:
        if rank:
            raise ValueError("disk is full")
        consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"), SUFFIX)

    run = Run(2)
    run.start(work, (), enter=lambda rank: None, leave=lambda rank: None)
    assert run.wait(60, for_all=True)
    assert [failure.message for failure in run.failures] == [
        "rank 1 raised ValueError: disk is full"
    ]


def test_merging_again_replaces_the_output(tmp_path: Path) -> None:
    for model in (every_kind(), _other_values()):
        model.save(tmp_path, 2)
        merged, path = consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"), SUFFIX)
        assert path is not None
        assert bits(merged) == bits(torch.load(path, weights_only=True)["model"])
        assert bits(merged) == bits(model.expected())
