"""Steps count only when they are complete: kills, full disks, several hosts, object stores."""

from __future__ import annotations

import errno
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.ranks import run_python
from test.common.saving import (
    JOB,
    Picture,
    damage_of,
    differences,
    on_threads,
    picture,
    place_of,
    read,
    save_step,
)
from xla_fsdp.checkpoint import CheckpointError, storage
from xla_fsdp.checkpoint import save_step as commit
from xla_fsdp.checkpoint.json_values import pack
from xla_fsdp.checkpoint.save_step import Ranks, Save, ShardFile, write_rank_file
from xla_fsdp.checkpoint.step_directory import (
    MARKER,
    Attempt,
    Marker,
    all_attempts,
    complete_attempts,
    latest_step,
    read_marker,
)
from xla_fsdp.checkpoint.storage import open_storage


def steps(directory: str | Path) -> list[int]:
    """The complete steps."""
    return [attempt.step for attempt in complete_attempts(open_storage(directory))]


def folders(directory: Path) -> list[str]:
    """What is in a run's directory, beside the name of the job."""
    return sorted(path.name for path in directory.iterdir() if path.name != "job.json")


@pytest.fixture
def remote() -> Iterator[str]:
    """A directory of an object store in memory."""
    import fsspec

    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


# ---------------------------------------------------------------- kills


def kills(directory: Path, count: int) -> None:
    done = run_python(
        "-m", "test.common.kills", str(directory), str(count), "7", timeout=50 + count
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["kills"] == count
    assert found["steps"] >= count // 2  # every child completes one, unless its step is cut short
    assert found["cut short"] > 0  # else the kills came at the wrong time


def test_killed_at_any_moment_the_last_complete_step_is_whole(tmp_path: Path) -> None:
    kills(tmp_path / "run", 20)


@pytest.mark.slow
def test_killed_many_times(tmp_path: Path) -> None:
    kills(tmp_path / "run", 200)


# ---------------------------------------------------------------- full disks


class Disk:
    """Room for so many bytes; then writes fail as on a full disk, in the middle of a file."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.lock = threading.Lock()

    def open(self, path: Any, mode: str, **options: Any) -> io.FileIO:
        disk = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                with disk.lock:
                    written = super().write(memoryview(data)[: disk.room])
                    disk.room -= written
                if written < len(data):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return written

        return File(path, mode)


def test_a_full_disk_is_said_by_all_ranks_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 1, 2)
    size = sum(path.stat().st_size for path in (tmp_path / "step_00000001").iterdir())
    outcomes = set()
    for room in [*range(0, size + 1200, 1200), size - 1]:
        monkeypatch.setattr(storage, "open", Disk(room).open, raising=False)
        first, second = save_step(tmp_path, 2, 2, keep_last=1)
        monkeypatch.delattr(storage, "open")
        outcomes.add(type(first))
        if first is None:
            assert steps(tmp_path) == [2]
            assert damage_of(tmp_path, 2) == []
            break
        assert str(first) == str(second)
        assert "could not be written: No space left on device" in str(first)
        assert folders(tmp_path) == ["step_00000001"]
        assert damage_of(tmp_path, 1) == []
    assert outcomes == {CheckpointError, type(None)}


def test_what_cannot_be_written_names_file_and_rank(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    errors = save_step(tmp_path / "run", 1, 2)
    assert [str(error) for error in errors] == [
        f"ranks 0, 1: {tmp_path}/run: cannot be listed: Not a directory"
    ] * 2


def test_a_replica_that_differs_is_no_replica(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        file = ShardFile(0, 1, ranks.rank, "pth")
        save = Save(open_storage(tmp_path), ranks, file, 1, None, JOB)
        save.begin()
        save.start(picture(ranks.rank).content(1, 0, 1))
        save.wait()

    first, second = on_threads(2, work)
    assert str(first) == str(second)
    assert "ranks 0 and 1 hold shard 0 of the model, but with different values" in str(first)
    assert latest_step(tmp_path) is None


@pytest.mark.parametrize("shared", [True, False])
def test_replicas_may_differ_in_what_is_not_sharded(tmp_path: Path, shared: bool) -> None:
    def folder(rank: int) -> Path:
        return tmp_path if shared else tmp_path / str(rank)

    def work(ranks: Ranks) -> None:
        place = ShardFile(0, 1, ranks.rank, "safetensors")
        save = Save(open_storage(folder(ranks.rank)), ranks, place, 1, None, JOB)
        save.begin()
        own = {"step": 1, "data": torch.full((3,), 1), "more": "x" * 100 * ranks.rank}
        content = replace(picture(1).content(1, 0, 1), values=pack({"extra": own}, "values"))
        save.start(content)
        save.wait()

    assert on_threads(2, work) == [None, None]
    for rank in range(2):
        loaded = read(open_storage(folder(rank)), picture(1), 0, 1)
        assert differences(loaded, picture(1), 0, 1, 1) == []
        assert len(loaded.values["extra"]["more"]) == (0 if shared else 100 * rank)


# ---------------------------------------------------------------- the directory


def test_what_is_kept(tmp_path: Path) -> None:
    for step in (3, 5, 8):
        assert save_step(tmp_path, step, 2) == [None, None]
    assert steps(tmp_path) == [3, 5, 8]
    (tmp_path / "step_00000006").mkdir()  # cut short
    (tmp_path / "notes").mkdir()
    save_step(tmp_path, 9, 2, keep_last=3)
    assert folders(tmp_path) == ["notes", "step_00000005", "step_00000008", "step_00000009"]
    save_step(tmp_path, 10, 2, keep_last=1)
    assert folders(tmp_path) == ["notes", "step_00000010"]
    assert latest_step(tmp_path) == 10
    assert latest_step(tmp_path / "nothing") is None


def test_a_step_without_marker_does_not_exist(tmp_path: Path) -> None:
    save_step(tmp_path, 1, 2)
    save_step(tmp_path, 2, 2)
    (tmp_path / "step_00000002" / MARKER).unlink()
    assert latest_step(tmp_path) == 1
    save_step(tmp_path, 3, 2)
    assert folders(tmp_path) == ["step_00000001", "step_00000003"]


def test_a_step_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    save_step(tmp_path, 4, 2)
    other = picture(9)
    assert save_step(tmp_path, 4, 3, shown=other) == [None] * 3
    assert folders(tmp_path) == ["step_00000004.1"]
    assert read_marker(open_storage(tmp_path), Attempt(4, 1)).world_size == 3
    assert latest_step(tmp_path) == 4


def test_a_step_that_would_not_be_the_latest_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path, 7, 2)
    errors = save_step(tmp_path, 6, 2)
    assert str(errors[0]) == str(errors[1])
    assert "holds step 7, so step 6 would never be the latest one. Save to another" in str(
        errors[0]
    )
    assert folders(tmp_path) == ["step_00000007"]


EMPTY_MARKER = Marker(step=1, world_size=2, files={}, job="one").to_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[]", "content is list, expected dict"),
        (b'{"format": "xla_fsdp checkpoint", "version": 3}', "version 3, expected"),
        (b'{"format": "xla_fsdp checkpoint", "version": 1, "step": 1}', "files is missing"),
        (EMPTY_MARKER, "the marker lists no files; expected one for each of 2 ranks"),
    ],
)
def test_a_damaged_marker_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    save_step(tmp_path, 1, 2)
    (tmp_path / "step_00000001" / MARKER).write_bytes(content)
    with pytest.raises(CheckpointError, match="step_00000001") as caught:
        read(open_storage(tmp_path), picture(1), 0, 2)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_damage_is_found_when_a_rank_reads(tmp_path: Path) -> None:
    save_step(tmp_path, 1, 2)
    path = tmp_path / "step_00000001" / "rank-00000-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: its checksum is crc32:"):
        read(open_storage(tmp_path), picture(1), 0, 2)
    path.write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match=f"has {len(data) - 8} bytes, but {len(data)} were"):
        read(open_storage(tmp_path), picture(1), 0, 3)


# ---------------------------------------------------------------- hosts and object stores


def test_hosts_that_share_no_files(tmp_path: Path) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    for step in (1, 2, 3):
        assert save_step(hosts, step, 4, keep_last=2) == [None] * 4
    for host, own in zip(hosts, ((0, 1), (2, 3)), strict=True):
        assert steps(host) == [2, 3]
        names = {path.name for path in (host / "step_00000003").glob("rank*")}
        assert names == {f"rank-{rank:05d}-of-00004.safetensors" for rank in own}
    for rank in range(4):
        loaded = read(open_storage(place_of(hosts, rank, 4)), picture(3), rank, 4)
        assert differences(loaded, picture(3), rank, 4, 3) == []
    with pytest.raises(
        CheckpointError, match=r"is not here\. Hosts that do not share a file system"
    ):
        read(open_storage(hosts[0]), picture(3), 0, 1)


def test_hosts_are_marked_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    save_step(hosts, 1, 4)
    monkeypatch.setattr(storage, "open", Disk(9000).open, raising=False)
    errors = save_step(hosts, 2, 4)
    monkeypatch.delattr(storage, "open")
    assert len({str(error) for error in errors}) == 1
    assert [folders(host) for host in hosts] == [["step_00000001"]] * 2


def test_a_step_that_only_some_hosts_have_marked_does_not_count(tmp_path: Path) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    for step in (1, 5):
        save_step(hosts, step, 2)
    (hosts[1] / "step_00000005" / MARKER).unlink()
    assert save_step(hosts, 3, 2) == [None, None]
    assert [folders(host) for host in hosts] == [["step_00000001", "step_00000003"]] * 2
    assert save_step(hosts, 5, 2) == [None, None]
    errors = save_step(hosts, 4, 2)
    assert all("holds step 5, so step 4 would never" in str(error) for error in errors)


def test_an_object_store(remote: str) -> None:
    for step in (1, 2, 3):
        assert save_step(remote, step, 2, keep_last=2) == [None, None]
    assert steps(remote) == [2, 3]
    assert damage_of(remote, 3) == []
    assert len(all_attempts(open_storage(remote))) == 2


def test_what_fails_on_an_object_store_is_no_step(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(remote, 1, 2)
    with monkeypatch.context() as patched:

        def write(*_: Any) -> None:
            raise RuntimeError("quota exceeded")

        patched.setattr(storage.RemoteStorage, "_write", write)
        errors = save_step(remote, 2, 2)
    assert "memory://bucket/run/step_00000002/rank-00000-of-00002.safetensors: could not be" in str(
        errors[1]
    )
    assert "quota exceeded" in str(errors[0])
    assert damage_of(remote, 1) == []


def test_unknown_kinds_of_urls_are_said() -> None:
    with pytest.raises(CheckpointError, match="nosuch://bucket: Protocol not known: nosuch"):
        open_storage("nosuch://bucket")


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    save_step(f"file://{tmp_path}", 1, 2)
    assert damage_of(tmp_path, 1) == []


# ---------------------------------------------------------------- saving while training goes on


def test_a_step_counts_as_soon_as_all_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another word between the ranks: the job may end before anybody waits."""
    monkeypatch.setattr(commit, "LOOK_EVERY", 0.01)
    slow, marked = threading.Event(), threading.Event()

    def work(ranks: Ranks) -> tuple[int | None, int | None]:
        file = ShardFile(ranks.rank, 2, 0, "safetensors")
        save = Save(open_storage(tmp_path), ranks, file, 1, None, JOB)
        save.begin()

        def write(sink: Any, name: str, content: Any) -> Any:
            if ranks.rank == 1:
                slow.wait(60)
            return write_rank_file(sink, name, content)

        save.start(picture(1).content(1, ranks.rank, 2), write)
        before = latest_step(tmp_path)
        ranks.all_gather_or_raise([])  # both have looked
        slow.set()
        if ranks.rank == 0:
            for _ in range(6000):
                if latest_step(tmp_path) is not None:
                    break
                marked.wait(0.01)
        after = latest_step(tmp_path)
        save.wait()
        return before, after

    assert on_threads(2, work)[0] == (None, 1)
    assert damage_of(tmp_path, 1) == []


def test_shards_of_every_dtype(tmp_path: Path) -> None:
    params = {
        "half": torch.randn(70).bfloat16(),
        "fp16": torch.randn(3, 5).half(),
        "double": torch.randn(9).double(),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "none": torch.zeros(0, 3),
    }
    whole = {"int": torch.arange(5), "bool": torch.tensor([True, False]), "empty": torch.zeros(0)}
    shown = Picture(params, whole=whole)
    for suffix in ("safetensors", "pth"):
        assert save_step(tmp_path / suffix, 1, 2, shown=shown, suffix=suffix) == [None, None]
        for rank in range(3):
            loaded = read(open_storage(tmp_path / suffix), shown, rank, 3)
            assert differences(loaded, shown, rank, 3, 1) == []
