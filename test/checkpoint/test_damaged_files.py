"""Damage to safetensors shards: one line for each problem, all at once, nothing written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from test.common.saving import save_step
from test.common.shard_maker import bits, file_of, snapshot, with_optimizer
from xla_fsdp.checkpoint import find_problems, open_shard
from xla_fsdp.checkpoint.files import copying
from xla_fsdp.checkpoint.format.records import VERSION
from xla_fsdp.checkpoint.steps.step_directory import MARKER, FileRecord, Marker
from xla_fsdp.consolidate_sharded_ckpts import main

Damage = Callable[[Path], Any]


def run(directory: Path, output: str = "out/full.pth", *more: str) -> int:
    """Merge what is in a directory."""
    return main(["--ckpt_prefix", str(directory), "--save_path", f"{directory}/{output}", *more])


def edit(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> Damage:
    """Change tensors and metadata of a file in place; fingerprints are made right again."""

    def damage(path: Path) -> None:
        tensors, metadata = load_file(path), read_metadata(path)
        change(tensors, metadata)
        prints = {name: print_of(tensor) for name, tensor in tensors.items()}
        metadata["fingerprints"] = {**prints, **metadata.get("forged", {})}
        save_file(tensors, path, {"xla_fsdp": json.dumps(metadata)})

    return damage


def print_of(tensor: torch.Tensor) -> str:
    """As in ``xla_fsdp.checkpoint.files.checksum``, by another way."""
    import binascii

    return f"crc32:{binascii.crc32(bits({'': tensor})[''][2]):08x}"


def read_metadata(path: Path) -> dict[str, Any]:
    """What a shard file says about itself."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, Any] = json.loads(header["__metadata__"]["xla_fsdp"])
    return metadata


def flip_a_bit(name: str) -> Damage:
    """In the first bytes of a tensor."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        stop = 8 + int.from_bytes(data[:8], "little")
        data[stop + json.loads(data[8:stop])[name]["data_offsets"][0] + 1] ^= 16
        path.write_bytes(data)

    return damage


def truncate(path: Path) -> None:
    """Cut off the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def absurd_header(path: Path) -> None:
    """A header of 2^62 bytes."""
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


def link_to_itself(path: Path) -> None:
    """A symbolic link in a circle."""
    path.unlink()
    path.symlink_to(path)


def fill_pipe(path: Path) -> None:
    """A pipe, on which a careless reader waits for ever."""
    path.unlink()
    os.mkfifo(path)


def rename_parameter(new: str) -> Damage:
    """Another name for the first parameter."""

    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
        (record,) = (each for each in metadata["params"] if each["key"] == "scale")
        record["members"][0]["name"] = new

    return edit(change)


DAMAGES: dict[str, tuple[Damage, list[str]]] = {
    "missing": (Path.unlink, ["missing ranks: 1 of 3"]),
    "truncated": (truncate, ["BAD: truncated: its tensors end at byte", "missing ranks: 1 of 3"]),
    "absurd header": (absurd_header, ["BAD: not a safetensors file: its header would", "missing"]),
    "empty": (lambda p: p.write_bytes(b""), ["BAD: truncated, or not a safetensors", "missing"]),
    "circle": (link_to_itself, ["BAD: cannot be read: Too many levels of symbolic", "missing"]),
    "pipe": (fill_pipe, ["BAD: cannot be read: it is no regular file", "missing ranks: 1 of 3"]),
    "foreign": (
        lambda p: save_file({"w": torch.ones(2)}, p),
        ["BAD: not a shard file: its header's metadata has no 'xla_fsdp'", "missing ranks"],
    ),
    "flipped bit": (
        flip_a_bit("model/embed.weight"),
        [r"BAD: embed\.weight is damaged: its checksum is crc32:\w+, but was crc32:\w+ when it"],
    ),
    "flipped bit of the optimizer": (
        flip_a_bit("optim/rows/v"),
        ["BAD: optim/rows/v is damaged: its checksum is crc32:"],
    ),
    "forged fingerprint": (
        edit(lambda t, m: m.update(forged={"model/rows": "crc32:00000000"})),
        [r"BAD: rows is damaged: its checksum is crc32:\w+, but was crc32:00000000 when"],
    ),
    "duplicate": (
        edit(lambda t, m: m.update(rank=0)),
        ["rank 0 of 3 is there 2 times", "missing ranks: 1 of 3"],
    ),
    "mixed worlds": (edit(lambda t, m: m.update(world_size=2)), ["mixed world sizes: 3 in"]),
    "newer version": (
        edit(lambda t, m: m.update(version=VERSION + 1)),
        [f"BAD: format version {VERSION + 1} is not known", "missing ranks"],
    ),
    "wrong dtype": (
        edit(lambda t, m: t.update({"model/half": torch.ones(128)})),
        [r"BAD: the shard of half is float32 of shape \(128,\), expected bfloat16"],
    ),
    "wrong length": (
        edit(lambda t, m: t.update({"model/half": torch.ones(3).bfloat16()})),
        [r"BAD: the shard of half is bfloat16 of shape \(3,\), expected bfloat16 of shape \(128"],
    ),
    "no tensor": (
        edit(lambda t, m: t.pop("model/half")),
        [r"BAD: the shard of half is missing, expected bfloat16 of shape \(128"],
    ),
    "tied": (
        edit(lambda t, m: t.update({"model/head.weight": torch.zeros(256)})),
        [
            r"BAD: head\.weight is float32 of shape \(256,\), expected nothing of this name, as in",
            r"BAD: head\.weight and embed\.weight are tied, but their shards differ",
        ],
    ),
    "state missing": (
        edit(lambda t, m: t.pop("optim/scale/m")),
        ["BAD: optimizer state m of scale is missing, expected float32 of shape"],
    ),
    "state of another length": (
        edit(lambda t, m: t.update({"optim/scale/m": torch.ones(5)})),
        [
            r"BAD: optimizer state m of scale is float32 of shape \(5,\), expected float32 of "
            r"shape \(128,\)"
        ],
    ),
    "state of another dtype": (
        edit(lambda t, m: t.update({"optim/scale/m": torch.ones(128).double()})),
        [r"BAD: optimizer state m of scale is float64 of shape \(128,\), expected float32"],
    ),
    "another step": (
        edit(lambda t, m: t.update({"optim/scale/step": torch.tensor(4.0)})),
        [r"BAD: optimizer state step of scale differs from that in \S*, so there is no full one"],
    ),
    "unlisted state": (
        edit(lambda t, m: t.update({"optim/scale/x": torch.ones(1)})),
        ["BAD: optim/scale/x is float32 of shape .*, expected nothing of this name"],
    ),
    "other metadata": (
        rename_parameter("other"),
        [r"BAD: shard_metadata differs from that of \S* at params\.1\.members\.0\.name"],
    ),
    "metadata is a list": (
        edit(lambda t, m: m.update(params=3)),
        ["BAD: params is int, expected list", "missing ranks"],
    ),
}


@pytest.mark.parametrize(("damage", "lines"), DAMAGES.values(), ids=DAMAGES)
def test_one_bad_file_of_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, lines: list[str]
) -> None:
    bad = with_optimizer().save_safetensors(tmp_path, 3)[1]
    damage(bad)
    (tmp_path / "out").mkdir()
    existing = tmp_path / "out" / "full.pth"
    existing.write_bytes(b"older")
    assert run(tmp_path, "out/full.pth", "--overwrite") == 2
    found = capsys.readouterr().err.splitlines()
    assert len(found) == len(lines), found
    for line, expected in zip(found, lines, strict=True):
        pattern = "consolidate_sharded_ckpts: " + expected.replace("BAD", re.escape(str(bad)))
        assert re.match(pattern, line), line
    assert snapshot(tmp_path / "out") == {"full.pth": b"older"}


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a..b", ".hidden", "end.", "new\nline", ""]
)
def test_names_that_could_be_paths_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for path in with_optimizer().save_safetensors(tmp_path, 2):
        rename_parameter(name)(path)
    (tmp_path / "out").mkdir()
    assert run(tmp_path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f": {name!r} is not the name of a tensor of a model that can be saved" in lines[0]
    assert snapshot(tmp_path / "out") == {}


def test_all_problems_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = with_optimizer().save_safetensors(tmp_path, 4)
    truncate(paths[0])
    edit(lambda t, m: t.pop("model/half"))(paths[2])
    edit(lambda t, m: t.update({"optim/scale/m": torch.ones(5)}))(paths[3])
    assert run(tmp_path, "nowhere/full.pth") == 2
    err = capsys.readouterr().err
    for text in ("truncated", "missing ranks: 0", "half is missing", "state m of", "no directory"):
        assert err.count(text) == 1, text
    assert len(err.splitlines()) == 5


def test_damage_in_several_files_is_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in with_optimizer().save_safetensors(tmp_path, 2):
        flip_a_bit("model/embed.weight")(path)
    (tmp_path / "out").mkdir()
    assert run(tmp_path, "out/") == 2
    assert capsys.readouterr().err.count("is damaged") == 2
    assert list((tmp_path / "out").iterdir()) == []


def test_damage_in_what_is_not_needed_is_found_by_verifying(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_optimizer().save_safetensors(tmp_path, 3)[2]
    flip_a_bit("model/scale")(path)  # padding: one element lies on rank 0
    assert run(tmp_path, "a_consolidated.pth") == 0
    assert run(tmp_path, "b_consolidated.pth", "--verify") == 2
    assert f"{path}: scale is damaged" in capsys.readouterr().err
    assert not (tmp_path / "b_consolidated.pth").exists()


def test_a_flipped_bit_in_a_torch_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_optimizer()
    path = model.save(tmp_path, 2)[1]
    data = bytearray(path.read_bytes())
    shard = bits(model.shard(1, 2)["model"])["embed.weight"][2]
    data[data.index(shard) + 5] ^= 1
    path.write_bytes(data)
    assert run(tmp_path, "full.pth") == 2
    err = capsys.readouterr().err
    assert f"{path}: embed.weight is damaged: its checksum is crc32:" in err
    assert not (tmp_path / "full.pth").exists()


def test_optimizer_state_that_cannot_be_merged_can_be_left_out(tmp_path: Path) -> None:
    path = with_optimizer().save_safetensors(tmp_path, 2)[1]
    edit(lambda t, m: t.update({"optim/scale/step": torch.tensor(4.0)}))(path)
    assert run(tmp_path, "full.pth") == 2
    assert run(tmp_path, "full.pth", "--model_only") == 0
    assert torch.load(tmp_path / "full.pth", weights_only=True).keys() == {"model"}


def test_replicas_of_sharding_groups_count_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_optimizer()
    for replica in range(2):
        for rank, path in enumerate(model.save_safetensors(tmp_path, 2)):
            group = {"groups": [[0, 1], [2, 3]], "global_rank": 2 * replica + rank}
            edit(lambda t, m, group=group: m.update(group))(path)  # type: ignore[misc]
            path.rename(file_of(tmp_path, 2 * replica + rank, 4).with_suffix(".safetensors"))
    assert run(tmp_path, "full.pth") == 0
    content = torch.load(tmp_path / "full.pth", weights_only=True)
    assert bits(content["model"]) == bits(model.expected())
    (tmp_path / "full.pth").unlink()
    changed = file_of(tmp_path, 3, 4).with_suffix(".safetensors")
    edit(lambda t, m: t["model/scale"].add_(1))(changed)
    capsys.readouterr()
    assert run(tmp_path, "full.pth") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"{changed}: model/scale differs from that in its replica \S*00001-of", line)
    problems = find_problems([open_shard(str(each)) for each in sorted(tmp_path.iterdir())])
    assert len(problems) == 1


def test_a_directory_without_a_complete_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "step_00000003").mkdir(parents=True)
    with_optimizer().save_safetensors(tmp_path / "run" / "step_00000003", 1)
    assert main(["--ckpt_prefix", str(tmp_path / "run"), "--save_path", "x.pth"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("run: holds no complete step and no shard file")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../etc/passwd", "'../../etc/passwd' is not the name of a file in its directory"),
        ("rank-00000-of-00001.safetensors", "cannot be read: No such file or directory"),
    ],
)
def test_a_marker_that_lists_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    folder = tmp_path / "run" / "step_00000003"
    folder.mkdir(parents=True)
    (folder / MARKER).write_bytes(Marker(3, 1, {name: FileRecord(5, "")}, "job").to_bytes())
    assert main(["--ckpt_prefix", str(tmp_path / "run"), "--save_path", "x.pth"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(message)


# ---------------------------------------------------------------- what cannot be written


def test_an_output_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_optimizer().save_safetensors(tmp_path, 1)
    (tmp_path / "file").write_text("")
    for output in ("file/full.pth", "file/hf/", "no/full.pth"):
        assert run(tmp_path, output) == 2
        assert "cannot be written, there is no directory" in capsys.readouterr().err
    assert main(["--ckpt_prefix", str(tmp_path), "--save_path", "/proc/full.pth"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_only_regular_files_are_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_optimizer().save_safetensors(tmp_path, 1)
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    (tmp_path / "full.pth").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "of_links").mkdir()
    (tmp_path / "of_links" / "model.safetensors").symlink_to(target)
    for what in ("full.pth", "fifo", "of_links"):
        for format_ in ("pth", "safetensors", "dcp"):
            if (what, format_) != ("of_links", "pth"):
                assert run(tmp_path, what, "--overwrite", "--format", format_) == 2
    said = capsys.readouterr().err
    assert "full.pth: is a symbolic link, which is never replaced" in said
    assert "fifo: is a device or a pipe, which is never replaced" in said
    assert "of_links/model.safetensors: is a symbolic link, which" in said
    assert "of_links: holds model.safetensors, which is no regular file" in said
    assert target.read_bytes() == b"mine"
    assert (tmp_path / "full.pth").is_symlink()
    assert (tmp_path / "fifo").is_fifo()


def test_no_file_of_a_run_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save_step(tmp_path / "run", step, 2)
    before = snapshot(tmp_path)
    names = ["complete.json", "job.json", "rank-00001-of-00002.json"]
    own = [f"step_0000000{step}/{name}" for step in (1, 2) for name in names]
    own += ["job.json", "step_00000001/rank-00000-of-00002.safetensors"]
    for path in own:
        assert run(tmp_path / "run", path, "--overwrite") == 2
        assert "has the name of a file of a run or a step" in capsys.readouterr().err
    for path in (".", "step_00000001", "step_00000002"):
        assert run(tmp_path / "run", path, "--overwrite", "--format", "dcp") == 2
        said = capsys.readouterr().err
        assert "would be replaced" in said or "is in the directory of the run" in said
    assert run(tmp_path / "run", ".", "--overwrite", "--to_world_size", "2") == 2
    assert "is in the directory of the run" in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_a_shard_is_not_overwritten_through_a_link(tmp_path: Path) -> None:
    path = with_optimizer().save_safetensors(tmp_path, 1)[0]
    before = path.read_bytes()
    (tmp_path / "full.safetensors.link").symlink_to(path)
    assert run(tmp_path, "full.safetensors.link", "--overwrite") == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize("output", ["out/full.pth", "out/full.safetensors", "out/", "out/d/"])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    output: str,
) -> None:
    with_optimizer().save_safetensors(tmp_path, 2)
    (tmp_path / "out").mkdir()

    def no_space(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copying.os, "pwrite", no_space)
    assert run(tmp_path, output) == 2
    assert "could not be written: No space left on device" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_optimizer().save_safetensors(tmp_path, 2)

    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying.os, "pwrite", interrupt)
    before = snapshot(tmp_path)
    assert run(tmp_path, "full.pth") == 130
    assert snapshot(tmp_path) == before


def test_too_little_room_is_found_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from xla_fsdp.checkpoint.files import outputs

    with_optimizer().save_safetensors(tmp_path, 2)
    before = snapshot(tmp_path)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(outputs.shutil, "disk_usage", lambda _: usage)
    assert run(tmp_path, "full.pth") == 2
    assert re.search(r"[\d,]+ bytes are needed, and 1,000 are free", capsys.readouterr().err)
    assert snapshot(tmp_path) == before
