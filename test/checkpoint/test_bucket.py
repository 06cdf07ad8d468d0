"""``gs://`` through gcsfs and a real server, on which things go wrong."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from test.common.buckets import BUCKET, URL, Faults, known_bucket
from test.common.ranks import run_python
from test.common.saving import (
    JOB,
    Picture,
    damage_of,
    differences,
    on_threads,
    picture,
    read,
    save_step,
)
from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.files import remote_storage
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.steps import save_step as save_step_module
from xla_fsdp.checkpoint.steps.save_step import Job, Ranks, Save, ShardFile, write_rank_file
from xla_fsdp.checkpoint.steps.step_directory import (
    Attempt,
    Keep,
    all_attempts,
    complete_attempts,
    latest_step,
    tidy,
)
from xla_fsdp.consolidate_sharded_ckpts import main

FAULTS = {
    "errors": {"error": 0.2},
    "lost answers": {"lost": 0.1},
    "cut connections": {"cut": 0.1},
    "short reads": {"short": 0.1},  # of 8 attempts at a read one has to be whole
    "late listings": {"late": 0.3},
    "slow puts": {"slow": 0.05},
    "all": {"error": 0.05, "lost": 0.05, "cut": 0.05, "short": 0.1, "late": 0.1, "slow": 0.01},
}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """A bucket; requests are repeated after short pauses."""
    monkeypatch.setattr(remote_storage.Patience, "__init__", quick)
    with known_bucket() as found:
        yield found


KEEP = Keep()


def quick(self: Any) -> None:
    for name, value in {"attempts": 8, "first": 0.01, "longest": 0.5}.items():
        object.__setattr__(self, name, value)


def set_faults(faults: Faults, **values: Any) -> None:
    for name, value in values.items():
        setattr(faults, name, value)


@pytest.mark.parametrize("what", FAULTS)
def test_what_passes_is_tried_again(faults: Faults, what: str) -> None:
    set_faults(faults, **FAULTS[what])
    for step in (1, 2, 3):
        assert save_step(URL, step, 2, keep_last=1) == [None, None]
        assert faults.late or damage_of(URL, step) == []
    set_faults(faults, **dict.fromkeys(FAULTS["all"], 0.0))
    assert damage_of(URL, 3) == []
    assert [each.step for each in all_attempts(open_storage(URL))][-1] == 3
    injected = {"errors": "error", "lost answers": "lost", "cut connections": "cut"}
    assert faults.done[injected.get(what, "error")] > 0 or what not in injected


def test_nobody_waits_for_a_slow_store_while_training(faults: Faults) -> None:
    assert save_step(URL, 1, 2) == [None, None]
    faults.slow = 0.5

    def work(ranks: Ranks) -> tuple[float, int | None]:
        save = Save(open_storage(URL), ranks, ShardFile(ranks.rank, 2, "safetensors"), 2, KEEP, JOB)
        save.begin()
        began = time.monotonic()
        save.start(picture(2).content(2, ranks.rank, 2), write_rank_file)
        seconds, latest = time.monotonic() - began, latest_step(URL)
        ranks.all_gather_or_raise([])  # both have looked
        save.wait()
        return seconds, latest

    for seconds, latest in on_threads(2, work):
        assert seconds < faults.slow  # not one write
        assert latest == 1
    assert damage_of(URL, 2) == []


def test_what_stays_names_the_object(faults: Faults) -> None:
    save_step(URL, 1, 2)
    faults.always = "step_00000002/rank-00001"
    first, second = save_step(URL, 2, 2)
    assert str(first) == str(second)
    name = f"{URL}/step_00000002/rank-00001-of-00002.safetensors"
    assert f"{name}: could not be written: not now, 503" in str(first)
    faults.always = "step_00000001/rank-00000-of-00002.safetensors"
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00002.safetensors: cannot be read"):
        read(open_storage(URL), picture(1), 0, 2)
    faults.always = "(?!)"
    assert damage_of(URL, 1) == []
    assert latest_step(URL) == 1


def test_large_files_are_written_in_parts(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_storage, "PART", 1 << 18)
    monkeypatch.setattr(remote_storage, "COMPOSED", 4)
    set_faults(faults, together=4, error=0.05)
    storage, data = open_storage(URL), random.Random(1).randbytes(10 * (1 << 18) + 5)
    storage.write("a/large", [data[:7], memoryview(data)[7:]])
    assert faults.most_writes >= 4
    assert storage.sizes("a") == {"large": len(data)}  # no part is left
    into = bytearray(len(data))
    storage.source("a/large").read_into(0, memoryview(into))
    assert into == data

    def chunks() -> Iterator[bytes]:
        yield data
        raise RuntimeError("no more")

    with pytest.raises(CheckpointError, match="a/half: could not be written: no more"):
        storage.write("a/half", chunks())
    assert storage.sizes("a") == {"large": len(data)}


def test_a_body_of_several_megabytes_is_written_without_a_warning(faults: Faults) -> None:
    open_storage(URL).write("a/whole", [bytes(3 << 20)])  # warnings are errors
    assert open_storage(URL).sizes("a") == {"whole": 3 << 20}


def test_one_of_several_creates_a_file(faults: Faults) -> None:
    storage = open_storage(URL)
    faults.lost = 0.5
    assert storage.create("job.json", b"one")
    assert not storage.create("job.json", b"two")
    assert storage.read("job.json") == b"one"


class Trained(Picture):
    """With AdamW's states."""

    def metadata(self, rank: int, world_size: int, optimizer: bool = True) -> Any:
        metadata = super().metadata(rank, world_size, optimizer)
        if (record := metadata.optimizer) is None:
            return metadata
        names = ("exp_avg", "exp_avg_sq")
        states = {key: replace(own, sharded=names) for key, own in record.states.items()}
        return replace(metadata, optimizer=replace(record, states=states))

    def states(self, step: int, rank: int, shards: Any) -> Any:
        states = super().states(step, rank, shards)
        return {key: {**own, "exp_avg_sq": own["exp_avg"] * 2} for key, own in states.items()}


@pytest.mark.parametrize(
    ("count", "block"),
    [(300, 1 << 17), pytest.param(10_000, 1 << 23, marks=pytest.mark.slow)],
)
def test_neighbours_are_read_together(
    faults: Faults, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, block: int
) -> None:
    """Small parameters, with states of an optimizer; by a load, and by a merge."""
    monkeypatch.setattr(remote_storage, "READ", block)
    monkeypatch.setattr(remote_storage, "SMALLEST_READ", 1)
    params = {f"layer.{i}": torch.full((200,), float(i)) for i in range(count)}
    shown = Trained(params)
    assert save_step(URL, 1, 2, shown=shown) == [None, None]
    sizes = open_storage(URL).sizes("step_00000001")

    def check_requests(files: int) -> None:
        reads = {name: n for name, n in faults.reads.items() if name.endswith(".safetensors")}
        assert len(reads) == files
        for name, requests in reads.items():
            blocks = -(-sizes[os.path.basename(name)] // remote_storage.READ)
            assert requests <= 3 * blocks, name
        faults.reads.clear()

    for ranks, files in ((2, 1), (3, 1), (1, 2)):
        loaded = read(open_storage(URL), shown, 0, ranks)
        assert not [e for e in differences(loaded, shown, 0, ranks, 1) if "step" not in e][:5]
        check_requests(files)
    assert run_main("--ckpt_prefix", URL, "--save_path", str(tmp_path / "full.safetensors")) == 0
    check_requests(2)
    assert torch.equal(load_file(tmp_path / "full.safetensors")["layer.7"], params["layer.7"])


def test_slashes_at_the_end_change_nothing(
    faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        assert save_step(f"{URL}//", step, 1, keep_last=1) == [None]
    for url in (URL, f"{URL}/", f"{URL}//"):
        assert [each.step for each in all_attempts(open_storage(url))] == [2]
        assert run_main("list", "--ckpt_prefix", url) == 0
        assert "step_00000002  complete" in capsys.readouterr().out
    assert run_main("--ckpt_prefix", f"{URL}//", "--save_path", f"{URL}-hf//") == 0
    assert open_storage(f"{URL}-hf").find("model.safetensors")
    with pytest.raises(CheckpointError, match="run#2: GCSFileSystem does not take '#' there"):
        open_storage(f"{URL}#2")
    assert open_storage(f"{URL}#2/run").names() == []
    with pytest.raises(CheckpointError, match="gs://: names no bucket"):
        open_storage("gs://")


def test_one_listing_tells_what_to_delete(faults: Faults) -> None:
    """While training goes on, however many steps are kept."""
    counts = []
    for step in range(1, 12):
        before = faults.listings
        save_step(URL, step, 1, keep_last=None)
        counts.append(faults.listings - before)
    assert counts[-1] == counts[-6]  # however many steps are kept
    assert len(complete_attempts(open_storage(URL))) == 11
    before = faults.listings
    assert tidy(open_storage(URL), Attempt(11), Keep(), JOB.token, ()) == []
    assert faults.listings - before == 1


def test_older_steps_are_deleted_while_training_goes_on(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(URL, 1, 1)
    go_on = threading.Event()

    def late(*args: Any) -> list[str]:
        assert go_on.wait(60)
        return tidy(*args)

    monkeypatch.setattr(save_step_module, "tidy", late)
    ranks, file = Ranks(0, 1, lambda data: [data]), ShardFile(0, 1, "safetensors")
    save = Save(open_storage(URL), ranks, file, 2, Keep(1), JOB)
    save.begin()
    save.start(picture(2).content(2, 0, 1))
    save.wait()
    assert [each.step for each in all_attempts(open_storage(URL))] == [1, 2]
    go_on.set()
    save.finish()
    assert [each.step for each in all_attempts(open_storage(URL))] == [2]


def run_main(*arguments: str) -> int:
    return main(list(arguments))


def test_the_command_reads_and_writes_urls(
    faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.error = 0.05
    for step in (1, 2):
        save_step(URL, step, 2)
    assert run_main("inspect", "--ckpt_prefix", URL, "--verify") == 0
    said = capsys.readouterr()
    assert "step_00000002" in said.out
    assert "0 have no checksum" in said.out
    out = f"gs://{BUCKET}/out"
    assert run_main("--ckpt_prefix", URL, "--save_path", f"{out}/m.safetensors", "--verify") == 0
    assert run_main("--ckpt_prefix", URL, "--save_path", f"{out}/m.safetensors") == 2
    assert "m.safetensors: exists already" in capsys.readouterr().err
    assert run_main("--ckpt_prefix", URL, "--save_path", str(tmp_path / "local.safetensors")) == 0
    assert run_main("--ckpt_prefix", f"{URL}/step_00000001", "--save_path", f"{out}/one.pth") == 0
    assert run_main("--ckpt_prefix", URL, "--save_path", f"{out}/hf/") == 0
    assert run_main("--ckpt_prefix", URL, "--save_path", f"{out}/dcp", "--format", "dcp") == 0
    assert run_main("--ckpt_prefix", URL, "--save_path", f"{out}/run", "--to_world_size", "3") == 0
    storage = open_storage(out)
    expected = load_file(tmp_path / "local.safetensors")
    for name in ("m.safetensors", "hf/model.safetensors"):
        (tmp_path / "copy").write_bytes(storage.read(name))
        found = load_file(tmp_path / "copy")
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
    (tmp_path / "one.pth").write_bytes(storage.read("one.pth"))
    model = torch.load(tmp_path / "one.pth", weights_only=True)["model"]
    assert torch.equal(model["scale"], torch.tensor(0.5))
    assert storage.find("dcp/.metadata")
    assert damage_of(f"{out}/run", 2) == []


def test_steps_are_listed_in_a_table(faults: Faults, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 20):
        save_step(URL, step, 2)
    storage = open_storage(URL)
    storage.put(
        "step_00000020/metrics.json", b'{"loss": 0.5, "odd": [1], "huge": 1%s}' % (b"0" * 400)
    )
    storage.put("step_00000030/job.json", b"{}")
    save_step(f"{URL}/odd", 1, 1, job=Job("\x1b]0;" + "x" * 5000))
    for typo in (f"{URL}/step_00000009", f"{URL}x/step_00000009"):
        assert run_main("list", "--ckpt_prefix", typo) == 2
        said = capsys.readouterr()
        assert said.err.endswith(f"{typo}: there is no such directory, or nothing is in it\n")
        assert (said.out, len(said.err.splitlines())) == ("", 1)
        assert run_main("inspect", "--ckpt_prefix", typo) == 2
        said = capsys.readouterr()
        assert f"there is no directory {typo}" in said.err
        known = f"; complete in {URL}: step_00000001, step_00000020\n"
        assert said.err.endswith(known) == ("x" not in typo)
    assert run_main("list", "--ckpt_prefix", f"{URL}/odd") == 0
    head, line = capsys.readouterr().out.splitlines()
    assert line.split()[-1].startswith(r"\x1b]0;xxx")
    assert len(line) < 200
    assert run_main("list", "--ckpt_prefix", URL) == 0
    head, first, second, third = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "folder", "state", "ranks", "files", "bytes", "job", "metrics"]
    assert first.split()[:5] == ["1", "step_00000001", "complete", "2", "2"]
    assert second.split()[-2:] == ["one", "loss=0.5"]
    assert third.split()[:3] == ["30", "step_00000030", "incomplete"]
    name = "step_00000020/rank-00001-of-00002.safetensors"
    storage.put(name, storage.read(name)[:-1] + b"x")
    assert run_main("list", "--ckpt_prefix", URL, "--verify") == 2
    said = capsys.readouterr()
    states = [line.split()[2] for line in said.out.splitlines()]
    assert states == ["state", "verified", "damaged", "incomplete"]
    assert f"{URL}/{name}" in said.err


def test_steps_are_listed_and_verified_without_torch_xla(faults: Faults) -> None:
    save_step(URL, 1, 2)
    commands = [[each, "--ckpt_prefix", URL, "--verify"] for each in ("list", "inspect")]
    done = run_python(
        "-c",
        "import sys; sys.modules['torch_xla'] = None\n"
        "from xla_fsdp.consolidate_sharded_ckpts import main\n"
        f"sys.exit(max(main(each) for each in {commands}))",
    )
    assert done.returncode == 0, done.stderr
    assert "step_00000001  verified" in done.stdout
    assert re.search(r"verified \d+ tensors; 0 have no checksum", done.stdout)


def test_the_command_reads_torch_files_at_urls(
    faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_step(URL, 1, 2, suffix="pth")
    assert damage_of(URL, 1) == []
    prefix = f"{URL}/step_00000001/rank-"
    save = ["--save_path", str(tmp_path / "m.pth")]
    assert run_main("--ckpt_prefix", prefix, "--ckpt_suffix", "*.pth", *save) == 0
    assert torch.load(tmp_path / "m.pth", weights_only=True)["model"]["scale"] == 0.5
    assert run_main("--ckpt_prefix", f"{URL}/nothing", *save) == 2
    assert "no shard file matches" in capsys.readouterr().err
