"""Steps count only when they are complete: kills, full disks, several hosts, object stores."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common import stores
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
from xla_fsdp.checkpoint import CheckpointError, MergeOptions, read_shards
from xla_fsdp.checkpoint.convert import consolidate
from xla_fsdp.checkpoint.convert.consolidate import plan_merge
from xla_fsdp.checkpoint.files import storage
from xla_fsdp.checkpoint.files.json_values import pack
from xla_fsdp.checkpoint.files.remote_storage import RemoteStorage
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.format.shard_files import DEFAULT_SUFFIX
from xla_fsdp.checkpoint.steps import save_step as commit
from xla_fsdp.checkpoint.steps.load_step import load_step
from xla_fsdp.checkpoint.steps.save_step import Job, Ranks, Save, ShardFile, write_rank_file
from xla_fsdp.checkpoint.steps.step_directory import (
    MARKER,
    Attempt,
    Keep,
    Marker,
    all_attempts,
    complete_attempts,
    latest_step,
    owner_of,
    read_marker,
    remove,
)


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
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


# ---------------------------------------------------------------- kills


def kills(directory: Path, count: int, kind: str) -> dict[str, Any]:
    done = run_python(
        "-m", "test.common.kills", str(directory), str(count), "7", kind, timeout=300 + 10 * count
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)
    assert found["problems"] == []
    assert found["kills"] >= count
    # Every child completes one, unless its step is cut short.
    assert found["steps"] >= count // 2
    assert found["cut short"] > 0  # else the kills came at the wrong time
    return found


def test_killed_at_any_moment_the_last_complete_step_is_whole(tmp_path: Path) -> None:
    kills(tmp_path / "run", 20, "one")


def test_two_jobs_in_one_directory_lose_nothing(tmp_path: Path) -> None:
    assert kills(tmp_path / "run", 6, "two")["stopped"] > 0


def test_killed_while_requests_fail(tmp_path: Path) -> None:
    kills(tmp_path / "run", 8, "faulty")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("one", 250),
        ("async", 300),
        ("two", 200),
        ("faulty", 250),
        ("two faulty", 100),
        ("bucket", 50),
    ],
)
def test_killed_many_times(tmp_path: Path, kind: str, count: int) -> None:
    """In half of the rounds of the last four kinds, saves are asynchronous."""
    found = kills(tmp_path / "run", count, kind)
    assert (found["asynchronous"] > 0) == (kind != "one")
    assert (found["stopped"] > 0) == kind.startswith("two")


# ---------------------------------------------------------------- several jobs, or none


def test_ranks_that_disagree_about_the_step_save_nothing(tmp_path: Path) -> None:
    save_step(tmp_path, 1, 2)

    def work(ranks: Ranks, shards: tuple[int, int] = (2, 2), **other: Any) -> None:
        file = ShardFile(ranks.rank, shards[ranks.rank], "safetensors")
        how = {
            "step": 2,
            "keep": Keep(1),
            **{key: values[ranks.rank] for key, values in other.items()},
        }
        save = Save(open_storage(tmp_path), ranks, file, job=JOB, **how)
        save.begin()
        save.start(picture(2).content(2, ranks.rank, 2))
        save.wait()

    first, second = on_threads(2, partial(work, step=(2, 3)))
    assert str(first) == str(second)
    assert "ranks disagree about step: 2 on rank 0; 3 on rank 1" in str(first)
    first, second = on_threads(2, partial(work, keep=(Keep(1), Keep())))
    assert str(first) == str(second)
    assert "ranks disagree about keep_last: 1 on rank 0; None on rank 1" in str(first)
    first, second = on_threads(2, partial(work, shards=(2, 3)))
    assert str(first) == str(second)
    assert "ranks disagree about number of shards: 2 on rank 0; 3 on rank 1" in str(first)
    assert folders(tmp_path) == ["step_00000001"]
    assert damage_of(tmp_path, 1) == []


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_job_stops_where_another_one_saves(tmp_path: Path, remote: str, where: str) -> None:
    run = tmp_path if where == "local" else remote
    save_step(run, 1, 2)
    (line,) = {str(error) for error in save_step(run, 2, 2, job=Job("two"))}
    assert re.fullmatch(
        r"\S+ belongs to job one, which began to save step 1 there. If it has ended, .*", line
    )
    assert steps(run) == [1]
    assert save_step(run, 2, 2, job=Job("two", frozenset(["one"]))) == [None, None]
    assert save_step(run, 3, 2, job=Job("two")) == [None, None]
    (line,) = {str(error) for error in save_step(run, 4, 2, job=Job("one", take_over=True))}
    assert "was taken over by job two: this job, one, must not save there any more" in line
    assert save_step(run, 4, 2, job=Job("three", take_over=True), keep_last=1) == [None, None]
    (line,) = {str(error) for error in save_step(run, 5, 2, job=JOB)}
    assert "was taken over by job three" in line
    assert steps(run) == [4]
    assert damage_of(run, 4) == []


def begun(directory: str | Path, step: int, job: Job, **options: Any) -> Save:
    """A save of one rank, whose file is written when it starts."""
    save = Save(
        open_storage(directory),
        Ranks(0, 1, lambda data: [data]),
        ShardFile(0, 1, "safetensors"),
        step,
        Keep(options.get("keep_last")),
        job,
    )
    save.begin()
    return save


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_job_that_was_taken_over_neither_marks_nor_deletes(
    tmp_path: Path, remote: str, where: str
) -> None:
    run = tmp_path if where == "local" else remote
    assert save_step(run, 1, 1) == [None]
    zombie = begun(run, 2, JOB, keep_last=1)
    assert save_step(run, 2, 1, job=Job("two", frozenset(["one"]))) == [None]
    zombie.start(picture(2).content(2, 0, 1))
    with pytest.raises(
        CheckpointError, match="was taken over by another job while step 2 was saved"
    ):
        zombie.wait()
    assert steps(run) == [1, 2]
    assert damage_of(run, 2) == []


def test_two_jobs_at_the_same_moment_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(tmp_path, 1, Job("a", take_over=True))
    monkeypatch.setattr(commit, "all_attempts", lambda _: [])  # as if they had looked together
    with pytest.raises(CheckpointError, match="was made at the same moment by job a: end one"):
        begun(tmp_path, 1, Job("b", take_over=True))
    del first


@pytest.mark.parametrize("when", ["before the marker", "after it"])
def test_a_file_that_vanishes_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(commit, "LOOK_EVERY", 0.001 if when == "after it" else 60)
    save_step(tmp_path, 1, 2)

    def work(ranks: Ranks) -> None:
        file = ShardFile(ranks.rank, 2, "safetensors")
        save = Save(open_storage(tmp_path), ranks, file, 2, Keep(1), JOB)
        save.begin()
        save.start(picture(2).content(2, ranks.rank, 2))
        other = tmp_path / "step_00000002" / "rank-00001-of-00002.safetensors"
        for _ in range(10_000):
            if (other if when == "before the marker" else other.with_name(MARKER)).exists():
                break
            time.sleep(0.001)
        ranks.all_gather_or_raise([])
        if ranks.rank:
            other.unlink()
        ranks.all_gather_or_raise([])
        save.wait()

    first, second = on_threads(2, work)
    assert str(first) == str(second)
    assert re.search(
        r"rank 0: \S*rank-00001-of-00002.safetensors: \d+ bytes were written, but none are there",
        str(first),
    )
    assert folders(tmp_path) == ["step_00000001"]
    assert damage_of(tmp_path, 1) == []


# ---------------------------------------------------------------- full disks


class Disk:
    """Room for so many bytes; then writes fail as on a full disk, in the middle of a file."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.lock = threading.Lock()

    def open(self, path: Any, mode: str) -> io.BufferedWriter:
        disk = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                with disk.lock:
                    if not disk.room:
                        raise OSError(errno.ENOSPC, "No space left on device")
                    written = super().write(memoryview(data)[: disk.room])
                    disk.room -= written
                    return written

        return io.BufferedWriter(File(path, mode))


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
        file = ShardFile(0, 1, "pth")
        save = Save(open_storage(tmp_path), ranks, file, 1, Keep(), JOB)
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
        place = ShardFile(0, 1, "safetensors")
        save = Save(open_storage(folder(ranks.rank)), ranks, place, 1, Keep(), JOB)
        save.begin()
        own = {"step": 1, "data": torch.full((3,), 1), "more": "x" * 100 * ranks.rank}
        content = replace(picture(1).content(1, 0, 1), values=pack({"extra": own}, "values").json)
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


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_deleting_never_follows_a_link(tmp_path: Path, scheme: str) -> None:
    """A step of another run that is linked here, and files of it that are, stay in that run."""
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    save_step(theirs, 5, 2)
    before = {path.name: path.read_bytes() for path in theirs.glob("step_*/*")}
    save_step(own, 1, 2)
    (own / "step_00000005").symlink_to(theirs / "step_00000005")
    (own / "step_00000001" / "more").symlink_to(theirs / "step_00000005")
    for path in theirs.glob("step_*/rank-*"):
        (own / "step_00000001" / f"{path.name}.link").hardlink_to(path)
    save_step(f"{scheme}{own}", 6, 2, keep_last=1)
    remove(open_storage(f"{scheme}{own}"), Attempt(5))
    assert folders(own) == ["step_00000006"]
    assert {path.name: path.read_bytes() for path in theirs.glob("step_*/*")} == before
    assert steps(theirs) == [5]


def test_what_is_mounted_is_left_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount needs rights that a test has not, so Python is told that there is one."""
    save_step(tmp_path, 1, 2)
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("step_00000001"))
    with pytest.warns(UserWarning, match="is mounted at .*step_00000001 is not this run's"):
        save_step(tmp_path, 2, 2, keep_last=1)
    assert steps(tmp_path) == [1, 2]


def test_a_step_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    save_step(tmp_path, 4, 2)
    other = picture(9)
    assert save_step(tmp_path, 4, 3, shown=other) == [None] * 3
    assert folders(tmp_path) == ["step_00000004.1"]
    assert read_marker(open_storage(tmp_path), Attempt(4, 1).folder).world_size == 3
    assert latest_step(tmp_path) == 4


def test_a_step_that_would_not_be_the_latest_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path, 7, 2)
    errors = save_step(tmp_path, 6, 2)
    assert str(errors[0]) == str(errors[1])
    assert "holds step 7, so step 6 would never be the latest one. Save to another" in str(
        errors[0]
    )
    assert folders(tmp_path) == ["step_00000007"]


def test_a_step_that_goes_while_it_is_read_is_told(tmp_path: Path) -> None:
    save_step(tmp_path, 4, 2)
    at = open_storage(tmp_path)
    remove(at, Attempt(4))
    with pytest.raises(CheckpointError, match="step_00000004: was deleted while it was read"):
        load_step(at, Attempt(4), picture(4).target(0, 2))


def test_a_step_that_goes_while_it_is_merged_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = re.compile(r"rank-0000[01].*: was deleted while it was read, as a job that saves there")
    save_step(tmp_path, 4, 2)
    shards = read_shards(str(tmp_path), DEFAULT_SUFFIX, None, overwrite=False)
    job = plan_merge(shards, str(tmp_path / "full.pth"), MergeOptions())
    paths = [shard.source for shard in shards]
    remove(open_storage(tmp_path), Attempt(4))
    with pytest.raises(CheckpointError, match=gone):
        job.run(MergeOptions().write)
    monkeypatch.setattr(consolidate, "find_files", lambda *_: paths)  # before the step went
    with pytest.raises(CheckpointError, match=gone) as raised:
        read_shards(str(tmp_path), DEFAULT_SUFFIX, None, overwrite=False)
    assert all(gone.search(line) for line in raised.value.problems)


EMPTY_MARKER = Marker(step=1, world_size=2, files={}, job="one").to_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[]", "content is list, expected dict"),
        (b'{"format": "xla_fsdp checkpoint", "version": 3}', "version 3, expected"),
        (b'{"format": "xla_fsdp checkpoint", "version": 1, "step": 1}', "world_size is missing"),
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
        names = {path.name for path in (host / "step_00000003").glob("rank*s")}
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


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_an_object_store(remote: str, end: str) -> None:
    for step in (1, 2, 3):
        assert save_step(f"{remote}{end}", step, 2, keep_last=2) == [None, None]
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

        patched.setattr(RemoteStorage, "_write", write)
        errors = save_step(remote, 2, 2)
    assert "memory://bucket/run/step_00000002/rank-00000-of-00002.safetensors: could not be" in str(
        errors[1]
    )
    assert "quota exceeded" in str(errors[0])
    assert damage_of(remote, 1) == []


def test_a_file_that_is_still_being_written_is_no_file_yet(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, a file is there from the moment it is opened on."""
    monkeypatch.setattr(commit, "LOOK_EVERY", 0.001)

    def work(ranks: Ranks) -> tuple[list[str], int | None]:
        storage = open_storage(remote)
        save = Save(storage, ranks, ShardFile(ranks.rank, 2, "safetensors"), 1, Keep(), JOB)
        save.begin()
        go_on = threading.Event()

        def write(sink: Any, name: str, content: Any) -> Any:
            return write_rank_file(Slow(sink, go_on) if ranks.rank else sink, name, content)

        save.start(picture(1).content(1, ranks.rank, 2), write)
        for _ in range(20_000):
            if len(storage.names("step_00000001")) == 4:  # job.json, two files, an announcement
                break
            time.sleep(0.001)
        time.sleep(0.05)
        names = storage.names("step_00000001")
        before = latest_step(remote)
        ranks.all_gather_or_raise([])
        go_on.set()
        save.wait()
        return names, before

    own = [f"rank-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    expected = sorted(["job.json", "rank-00000-of-00002.json", *own])
    assert on_threads(2, work) == [(expected, None)] * 2
    assert damage_of(remote, 1) == []


class Slow:
    """A storage whose files are written in two halves."""

    def __init__(self, storage: Any, go_on: threading.Event) -> None:
        self._storage, self._go_on = storage, go_on

    def write(self, name: str, chunks: Any) -> None:
        def slow() -> Iterator[Any]:
            for chunk in chunks:
                yield chunk
                self._go_on.wait(60)

        self._storage.write(name, slow())


@pytest.mark.parametrize("protocol", ["memory", "buffered"])
def test_what_an_exception_interrupts_is_not_uploaded(protocol: str) -> None:
    import fsspec

    stores.register()
    storage = open_storage(f"{protocol}://bucket/run")

    def chunks() -> Iterator[bytes]:
        yield b"half of it"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.write("folder/file", chunks())
    gc.collect()  # a destructor might close it
    assert storage.names("folder") == []
    storage.write("folder/file", [b"all of ", b"it"])
    assert storage.read("folder/file") == b"all of it"
    fsspec.filesystem(protocol).store.clear()


def test_unknown_kinds_of_urls_are_said() -> None:
    for url in ("nosuch://bucket", "nosuch://"):
        with pytest.raises(CheckpointError, match=r"nosuch://.*: Protocol not known: nosuch"):
            open_storage(url)
    for name in ("q*", "what?x=1", "run[1]"):
        with pytest.raises(CheckpointError, match=r"memory://a/.*: MemoryFileSystem does not take"):
            open_storage(f"memory://a/{name}/run")


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
        file = ShardFile(ranks.rank, 2, "safetensors")
        save = Save(open_storage(tmp_path), ranks, file, 1, Keep(), JOB)
        save.begin()

        def write(sink: Any, name: str, content: Any) -> Any:
            if ranks.rank == 1:
                slow.wait(60)
            return write_rank_file(sink, name, content)

        save.start(picture(1).content(1, ranks.rank, 2), write)
        before = latest_step(tmp_path)
        names = {thread.name for thread in threading.enumerate()}
        assert f"saving step 1 in {tmp_path}" in names  # rank 1's is held up
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


def test_a_fork_has_no_part_in_a_save(tmp_path: Path) -> None:
    """Though it inherits what is to be done at the end of the process."""
    save = begun(tmp_path, 1, JOB)
    save.give_up(RuntimeError("no room"))
    child = os.fork()
    if not child:
        save._end_process_if_lost()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(CheckpointError, match="RuntimeError: no room"):
        save.wait()


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


def test_a_damaged_owner_says_what_to_do(tmp_path: Path) -> None:
    save_step(tmp_path, 1, 2)
    for content in (b"", b"{"):
        (tmp_path / "job.json").write_bytes(content)
        [error, _] = save_step(tmp_path, 2, 2)
        assert "pass take_over=True, or delete this file" in str(error)
        assert owner_of(open_storage(tmp_path)) is None
        assert save_step(tmp_path, 2, 2, job=replace(JOB, take_over=True)) == [None, None]


def test_what_describes_others_is_a_small_regular_file(tmp_path: Path) -> None:
    save_step(tmp_path, 1, 2)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 36)
    for bad, text in (
        (fifo, "no regular file"),
        (Path("/dev/zero"), "no regular file"),
        (tmp_path / "huge", "68,719,476,736 bytes"),
        (tmp_path, "a directory"),
    ):
        for name in ("job.json", "step_00000001/complete.json", "step_00000001/metrics.json"):
            path = tmp_path / name
            kept = path.read_bytes() if path.exists() else None
            path.unlink(missing_ok=True)
            path.symlink_to(bad)
            for scheme in ("", "local://"):
                with pytest.raises(CheckpointError, match=f"{path.name}: .*({text}|no regular)"):
                    open_storage(f"{scheme}{tmp_path}").find(name)
            path.unlink()
            if kept is not None:
                path.write_bytes(kept)
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        open_storage(tmp_path).find("x" * 5000)
    assert open_storage(tmp_path).find("none") is None


def test_what_only_has_the_name_of_a_step_is_left_alone(tmp_path: Path) -> None:
    save_step(tmp_path, 1, 2)
    (tmp_path / "step_00000007").write_text("no folder")
    os.mkfifo(tmp_path / "step_00000008")
    (tmp_path / "step_00000009").symlink_to(tmp_path / "step_00000007")
    assert save_step(tmp_path, 2, 2, keep_last=1) == [None, None]
    assert damage_of(tmp_path, 2) == []
    assert folders(tmp_path) == [f"step_0000000{number}" for number in (2, 7, 8, 9)]


def test_what_a_killed_save_has_left_goes(tmp_path: Path) -> None:
    save_step(tmp_path, 1, 2)
    left = [
        ".job.json.0123abcd.xla_fsdp.tmp",
        "step_00000001/.x.0123abcd.xla_fsdp.tmp",
        ".job.json.0123abce.xla_fsdp.tmp.new",
    ]
    for name in left:
        (tmp_path / name).write_bytes(b"")
    with storage.AtomicFiles(overwrite=True) as files:
        alive = Path(files.add(str(tmp_path / "alive"))).parent
        save_step(tmp_path, 2, 2)
        assert [name for name in left if (tmp_path / name).exists()] == []
        assert alive.exists()


def test_a_thread_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> list[str]:
        raise AttributeError("of no storage")

    monkeypatch.setattr(commit, "tidy", fail)
    with pytest.warns(UserWarning, match="AttributeError: of no storage"):
        save_step(tmp_path, 1, 2)
