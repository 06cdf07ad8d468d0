"""Files of all ranks that are laid out alike: planned and read together, and never wrong for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from test.common.shard_maker import FullModel, bits, every_kind, run, with_optimizer
from xla_fsdp.checkpoint import (
    CheckpointError,
    MergeOptions,
    ShardMetadata,
    open_shard,
    plan_reshard,
    read_shards,
)
from xla_fsdp.checkpoint.convert.consolidate import plan_merge
from xla_fsdp.checkpoint.convert.reshard import LoadTarget
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.files.tensor_source import LocalFile, TensorSource
from xla_fsdp.checkpoint.format import alike_files
from xla_fsdp.checkpoint.format.records import VALUES_KEY
from xla_fsdp.checkpoint.format.shard_files import SafetensorsLayout, are_alike
from xla_fsdp.checkpoint.steps.load_step import LoadedStep, load_step
from xla_fsdp.checkpoint.steps.step_directory import Attempt


def small_parameters(count: int) -> FullModel:
    generator = torch.Generator().manual_seed(count)
    shapes = [(3, 7 + i % 50) if i % 2 else (i,) for i in range(count)]
    return FullModel(
        params={f"p{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    )


def written(model: FullModel, folder: Path, ranks: int) -> Path:
    """The folder of a step with the files of that many ranks, as this package writes them."""
    (folder / "one").mkdir()
    model.save_safetensors(folder / "one", 1)
    new = folder / "new"
    assert run("--ckpt_prefix", folder / "one", "--save_path", new, "--to_world_size", ranks) == 0
    return new / "step_00000000"


def shard_files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("rank-*.safetensors"))


def merged(folder: Path, name: str = "full.pth") -> dict[str, Any]:
    path = folder.parent.parent / f"{folder.parent.name}-{folder.name}-{name}"  # outside of a run
    assert run("--ckpt_prefix", folder, "--save_path", path) == 0
    return torch.load(path, weights_only=True)


def damage(folder: Path, rank: int) -> Path:
    """Change a byte of a rank's ``rows``; its file."""
    path = Path(shard_files(folder)[rank])
    file = open_shard(str(path)).file
    assert file is not None
    content = bytearray(path.read_bytes())
    content[file.entries["model/rows"].start] ^= 1
    path.write_bytes(content)
    return path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TensorSource]:
    """All that are made from now on."""
    check, found = TensorSource.__post_init__, []

    def noted(self: TensorSource) -> None:
        found.append(self)
        check(self)

    monkeypatch.setattr(TensorSource, "__post_init__", noted)
    return found


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Of twelve ranks, whose numbers have one digit or two."""
    return written(with_optimizer(), tmp_path, 12)


def test_no_object_is_made_for_each_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[TensorSource]
) -> None:
    count, ranks, read = 200, 16, LocalFile.read_into
    folder = written(small_parameters(count), tmp_path, ranks)
    made.clear()
    reads: list[str] = []

    def noted(self: LocalFile, start: int, buffer: memoryview) -> None:
        reads.append(self.path)
        read(self, start, buffer)

    monkeypatch.setattr(LocalFile, "read_into", noted)
    shards = read_shards(str(folder), "*.pth", f"{tmp_path}/out.pth", overwrite=False)
    assert are_alike(shards)
    plan_merge(shards, f"{tmp_path}/out.pth", MergeOptions()).run(MergeOptions().write)
    found = torch.load(tmp_path / "out.pth", weights_only=True)["model"]
    assert bits(found) == bits(small_parameters(count).expected())
    assert len(made) < count * ranks  # that many with one for each piece
    assert {reads.count(path) for path in shard_files(folder)} <= set(range(10))


def test_whatever_is_in_them_is_merged(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [open_shard(path) for path in shard_files(files)]
    first = shards[0]
    twins = [open_shard(path, like=first) for path in shard_files(files)]
    assert all(twin.layout is first.layout for twin in twins)
    for shard, twin in zip(shards, twins, strict=True):
        assert (shard.metadata, shard.digest) == (twin.metadata, twin.digest)
        assert ShardMetadata.from_dict(dict(shard.metadata)) == ShardMetadata.from_dict(
            twin.metadata
        )
        assert bits({n: t.load() for n, t in shard.tensors()}) == bits(
            {n: t.load() for n, t in twin.tensors()}
        )
    expected = merged(files, "together.pth")
    assert bits(expected["model"]) == bits(with_optimizer().expected())
    monkeypatch.setattr(alike_files, "WINDOW", 200)  # some tensors are large then, others small
    found = merged(files, "mixed.pth")
    assert bits(found["model"]) == bits(expected["model"])
    states = [
        {
            f"{k} {n}": t
            for k, s in each["optimizer"]["state"].items()
            for n, t in s.items()
            if isinstance(t, torch.Tensor)
        }
        for each in (expected, found)
    ]
    assert bits(states[0]) == bits(states[1])


def test_new_shards_are_made_of_them(files: Path) -> None:
    new = files.parent / "newer"
    shards = read_shards(str(files), "*.pth", None, overwrite=False)
    plan_reshard(shards, str(new), 5).run(MergeOptions().write)
    assert bits(merged(new)["model"]) == bits(with_optimizer().expected())


@pytest.mark.parametrize("rank", [0, 3, 11])  # the last one has only padding of it
def test_damage_is_told(files: Path, rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = damage(files, rank), files.parent.parent / "out.pth"
    assert run("--ckpt_prefix", files, "--save_path", out, "--verify") == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "is damaged" in line]
    assert len(lines) == 1
    assert f"{path}: rows is damaged" in lines[0]
    assert not out.exists()


def loaded(folder: Path, rank: int, ranks: int) -> LoadedStep:
    """What a rank of so many reads of the step in ``folder``."""
    shard = open_shard(shard_files(folder)[0])
    own = ShardMetadata.from_dict(dict(shard.metadata))
    sharded = {record.key for record in own.params}
    whole = {key: t.shape for key, t in shard.state_dict.items() if key not in sharded}
    groups = [each.params for each in own.optimizer.groups] if own.optimizer else None
    target = replace(own, rank=rank, world_size=ranks, fingerprints={}, optimizer=None)
    storage = open_storage(str(folder.parent))
    return load_step(storage, Attempt(0), LoadTarget(target, whole, groups))


@pytest.mark.parametrize("ranks", [1, 3, 12])
def test_loading_is_right_by_all_ways(
    files: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everything() -> dict[str, torch.Tensor]:
        parts = [loaded(files, rank, ranks) for rank in range(ranks)]
        found = {f"{r} {name}": t for r, part in enumerate(parts) for name, t in part.model.items()}
        for rank, part in enumerate(parts):
            assert part.optimizer is not None
            for key, states in part.optimizer.tensors().items():
                found |= {f"{rank} {key} {state}": t for state, t in states.items()}
        return found

    expected = everything()
    model = with_optimizer()
    for name, value in model.params.items():
        if f"0 {name}" in expected:
            whole = torch.cat([expected[f"{rank} {name}"].flatten() for rank in range(ranks)])
            assert torch.equal(whole[: value.numel()], value.flatten())
    monkeypatch.setattr(alike_files, "WINDOW", 200)  # some tensors are large then, others small
    assert bits(everything()) == bits(expected)
    monkeypatch.setattr(SafetensorsLayout, "twin", lambda self, file, name: None)
    assert bits(everything()) == bits(expected)
    monkeypatch.undo()
    monkeypatch.setattr(SafetensorsLayout, "twin", lambda self, file, name: None)
    assert bits(everything()) == bits(expected)


def test_loading_makes_no_object_for_each_piece(tmp_path: Path, made: list[TensorSource]) -> None:
    count, ranks = 200, 16
    folder = written(small_parameters(count), tmp_path, ranks)
    made.clear()
    found = loaded(folder, 0, 1).model
    assert len(made) < count * ranks  # that many with one for each piece
    expected = small_parameters(count).params
    assert all(torch.equal(found[n][: t.numel()], t.flatten()) for n, t in expected.items())


def test_a_rank_reads_only_the_files_that_it_needs(files: Path) -> None:
    for path in shard_files(files)[6:]:
        Path(path).unlink()
    need_first = loaded(files, 0, 12)
    assert need_first.model["rows"].numel()
    with pytest.raises(CheckpointError, match=r"rank-00006-of-00012\.safetensors: is not here"):
        loaded(files, 0, 1)


@pytest.mark.parametrize("rank", [0, 3])
def test_damage_is_told_in_loading(files: Path, rank: int) -> None:
    path = damage(files, rank)
    with pytest.raises(CheckpointError, match=f"{path.name}: rows is damaged"):
        loaded(files, 0, 1)


def test_a_header_with_damaged_values_is_told(files: Path) -> None:
    for path in shard_files(files)[:2]:
        with safe_open(path, "pt") as file:
            notes = {**file.metadata(), VALUES_KEY: '{"a": 1}'}
        save_file(load_file(path), path, notes)
    first, second = shard_files(files)[:2]
    content = Path(second).read_bytes()
    at = content.index(rb"{\"a") + 2
    Path(second).write_bytes(content[:at] + b" " + content[at + 1 :])  # no escape of JSON's
    with pytest.raises(CheckpointError, match=f"{Path(second).name}: .*JSON"):
        open_shard(second, like=open_shard(first))


def test_files_that_differ_in_more_are_read_one_by_one(tmp_path: Path) -> None:
    for name, model in (("a", every_kind()), ("b", with_optimizer())):
        (tmp_path / name).mkdir()
        model.save_safetensors(tmp_path / name, 2)
    first, *_ = sorted((tmp_path / "a").iterdir())
    for path in (tmp_path / "b").iterdir():
        like = open_shard(str(first))
        assert open_shard(str(path), like=like).layout is not like.layout


def torch_files(folder: Path, ranks: int) -> list[str]:
    """Files as torch_xla writes them: of small parameters."""
    model = small_parameters(40).params
    paths = []
    for rank in range(ranks):
        shards = {}
        for name, value in model.items():
            length = -(-value.numel() // ranks)
            padded = torch.zeros(ranks * length)
            padded[: value.numel()] = value.flatten()
            shards[f"_fsdp_shard.{name}"] = padded[rank * length :][:length].clone()
        info = {
            f"_fsdp_shard.{name}": {"_orig_name": name, "_orig_size": value.shape}
            for name, value in model.items()
        }
        metadata = {"shard_info": {"": info}, "flatten_info": {}, "buffer_info": {}}
        metadata |= {"rank": rank, "world_size": ranks}
        paths.append(str(folder / f"rank-{rank:03d}.pth"))
        torch.save({"model": shards, "shard_metadata": metadata}, paths[-1])
    return paths


def test_torch_files_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    paths = torch_files(tmp_path / "files", 12)
    first = open_shard(paths[0])
    twins = [open_shard(path, like=first) for path in paths]
    assert are_alike(twins)
    for path, twin in zip(paths, twins, strict=True):
        alone = open_shard(path)
        assert alone.metadata == twin.metadata
        assert list(alone.state_dict) == list(twin.state_dict)
        for (name, one), (_, other) in zip(alone.tensors(), twin.tensors(), strict=True):
            assert (one.spec, one.identity, one.checksum) == (
                other.spec,
                other.identity,
                other.checksum,
            ), name
    found = merged(tmp_path / "files")["model"]
    assert bits(found) == bits(small_parameters(40).expected())


def test_damage_of_torch_files_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(torch_files(tmp_path, 3)[1])
    tensor = open_shard(str(path)).state_dict["_fsdp_shard.p9"]
    content = bytearray(path.read_bytes())
    content[content.index(tensor.load().numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert run("--ckpt_prefix", tmp_path, "--save_path", tmp_path / "out.pth") == 2
    assert f"{path}: _fsdp_shard.p9 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["metadata", "shape", "name", "truncated", "pickle"])
def test_a_torch_file_that_differs_is_read_alone(tmp_path: Path, change: str) -> None:
    paths = torch_files(tmp_path, 3)
    content = torch.load(paths[1], weights_only=True)
    model, metadata = content["model"], content["shard_metadata"]
    if change == "metadata":
        metadata["shard_info"][""]["_fsdp_shard.p9"]["_orig_size"] = torch.Size((9, 1))
    elif change == "shape":
        model["_fsdp_shard.p9"] = model["_fsdp_shard.p9"].view(-1, 1)
    elif change == "name":
        model["_fsdp_shard.p_"] = model.pop("_fsdp_shard.p9")
    torch.save(content, paths[1])
    data = bytearray(Path(paths[1]).read_bytes())
    if change == "pickle":  # a changed byte in it, which its CRC-32 tells
        data[data.index(b"world_size")] ^= 1
    Path(paths[1]).write_bytes(data[:-9] if change == "truncated" else data)
    first = open_shard(paths[0])
    if change in ("truncated", "pickle"):
        with pytest.raises(CheckpointError, match="truncated, or not a file"):
            open_shard(paths[1], like=first)
    else:
        assert open_shard(paths[1], like=first).layout is not first.layout
