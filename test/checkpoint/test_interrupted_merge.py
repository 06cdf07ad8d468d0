"""A merge that ends early leaves nothing: at once if it can, else the next one removes it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test.common.ranks import run_warm
from test.common.saving import save_step
from test.common.shard_maker import with_optimizer
from xla_fsdp.checkpoint.files import copying
from xla_fsdp.checkpoint.files.storage import AtomicFiles, remove_abandoned
from xla_fsdp.consolidate_sharded_ckpts import main

OUTPUTS = {"pth": ["full.pth"], "directory": ["hf/"], "dcp": ["dcp", "--format", "dcp"]}


def arguments(folder: Path, output: list[str]) -> list[str]:
    """Of a merge of the shards in a folder into ``folder/out``."""
    return ["--ckpt_prefix", str(folder), "--save_path", f"{folder}/out/{output[0]}", *output[1:]]


def left_in(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    with_optimizer().save_safetensors(tmp_path, 2)
    (tmp_path / "out").mkdir()
    return tmp_path


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal, not ignored: nohup and shells that run in the background have theirs ignored."""
    number = request.param
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)
    yield number
    signal.signal(number, before)


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_a_signal_ends_with_one_line_and_leaves_nothing(
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    output: list[str],
) -> None:
    before = signal.getsignal(number)
    first = threading.Lock()

    def interrupt(*_: Any) -> int:
        if first.acquire(blocking=False):  # of several threads, one sends a signal
            time.sleep(0.2)  # until all of them have begun
            os.kill(os.getpid(), number)
        time.sleep(0.02)
        return 1000

    monkeypatch.setattr(copying.os, "pwrite", interrupt)
    assert main(arguments(shards, output)) == 128 + number
    assert capsys.readouterr().err == (
        f"consolidate_sharded_ckpts: interrupted by {number.name}: what it had written is removed\n"
    )
    assert left_in(shards / "out") == []
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_what_a_killed_merge_leaves_is_removed_by_the_next(shards: Path, output: list[str]) -> None:
    (shards / "out" / ".notes.tmp").write_text("not ours")
    killed = run_warm("-m", "test.common.killed_merge", *arguments(shards, output))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any(".xla_fsdp.tmp" in name for name in left_in(shards / "out"))
    assert main(arguments(shards, ["other.pth" if output[0] != "hf/" else "hf/"])) == 0
    assert not any(".xla_fsdp.tmp" in name for name in left_in(shards / "out"))
    assert ".notes.tmp" in left_in(shards / "out")


@pytest.mark.parametrize("remote", ["input", "output"])
def test_what_a_killed_merge_has_copied_is_removed_by_the_next(
    shards: Path, monkeypatch: pytest.MonkeyPatch, remote: str
) -> None:
    """Torch files at URLs, and files on their way to a URL, are on this machine for a time."""
    folder, out = shards / "temporary", shards / "out" / "full.pth"
    folder.mkdir()
    save_step(shards / "run", 1, 2, suffix="pth")
    of_url = {remote: "local://"}
    merge = ["--ckpt_prefix", f"{of_url.get('input', '')}{shards}/run"]
    merge += ["--save_path", f"{of_url.get('output', '')}{out}"]
    code = f"""
import runpy, sys, tempfile
tempfile.tempdir, sys.argv = {str(folder)!r}, {["", *merge]!r}
runpy.run_module("test.common.killed_merge", run_name="__main__")
"""
    killed = run_warm("-c", code)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(list(folder.iterdir())) > 0
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert main(merge) == 0
    gc.collect()
    assert left_in(folder) == []
    assert left_in(shards / "out") == ["full.pth"]


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    with AtomicFiles(overwrite=False) as files:
        first, second, third = (Path(files.add(str(tmp_path / name))) for name in "abc")
        first.touch()
        second.touch()
        third.mkdir()
        remove_abandoned(str(tmp_path))
        assert all(path.exists() for path in (first, second, third))
        files.commit()
    assert left_in(tmp_path) == ["a", "b", "c"]
    with AtomicFiles(overwrite=False) as files:
        Path(files.add(str(tmp_path / "d"))).touch()
    assert left_in(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("size", [10, 600])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_a_file_that_may_not_grow_leaves_nothing(
    shards: Path, capsys: pytest.CaptureFixture[str], output: list[str], size: int
) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        code = main(arguments(shards, output))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("could not be written: File too large")
    assert left_in(shards / "out") == []
