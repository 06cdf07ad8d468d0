"""Merging into files: what is in them, under which names, and that they are whole or absent."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from test.common.shard_maker import FullModel, bits, run, snapshot, with_optimizer
from xla_fsdp.checkpoint.convert.reshard import LoadTarget
from xla_fsdp.checkpoint.files import copying, outputs
from xla_fsdp.checkpoint.files.checksum import checksum
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.files.tensor_source import LocalFile
from xla_fsdp.checkpoint.format import alike_files
from xla_fsdp.checkpoint.format.records import ShardMetadata
from xla_fsdp.checkpoint.steps.load_step import load_step
from xla_fsdp.checkpoint.steps.step_directory import Attempt, latest_step


@pytest.fixture(params=["pth", "safetensors"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with the files of three ranks, of one kind."""
    directory = tmp_path / "run"
    directory.mkdir()
    save(directory, request.param)
    return directory


def save(directory: Path, kind: str, world_size: int = 3) -> FullModel:
    """Write the files of all ranks."""
    model = with_optimizer()
    (model.save if kind == "pth" else model.save_safetensors)(directory, world_size)
    return model


def read_directory(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """All tensors of ``name``'s files, by its index if it has one."""
    index = directory / f"{name}.safetensors.index.json"
    if not index.exists():
        return load_file(directory / f"{name}.safetensors")
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    tensors = {
        n: t for file in set(places.values()) for n, t in load_file(directory / file).items()
    }
    assert tensors.keys() == places.keys()
    return tensors


def states_of(model: FullModel) -> dict[str, torch.Tensor]:
    """What merging must give for the optimizer, under the names in safetensors files."""
    flat = {f"state.{n}.{w}": t for n, own in model.states.items() for w, t in own.items()}
    members = {n: key for key, names in model.groups().items() for n in names}
    steps = {n: model.steps[key] for n, key in members.items()} | {
        "ignored": model.steps["ignored"]
    }
    return {**flat, **{f"state.{name}.step": step for name, step in steps.items()}}


def test_into_one_torch_file(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "full.pth"
    assert run("--ckpt_prefix", shards, "--save_path", out, "--verify") == 0
    model = with_optimizer()
    content = torch.load(out, weights_only=True)
    assert bits(content["model"]) == bits(model.expected())
    for alias, canonical in model.ties.items():
        assert content["model"][alias].data_ptr() == content["model"][canonical].data_ptr()
    state, groups = content["optimizer"]["state"], content["optimizer"]["param_groups"]
    found = {f"state.{n}.{w}": v for n, own in state.items() for w, v in own.items()}
    values = {name: found.pop(name) for name in list(found) if name.endswith(".scale")}
    assert bits(found) == bits(states_of(model))
    assert set(values.values()) == {1.5}
    assert {name.removeprefix("state.").removesuffix(".scale") for name in values} == state.keys()
    names = {*model.params, "ignored"}
    assert [(group["lr"], group["betas"]) for group in groups] == [(0.1, [0.9, 0.99])]
    assert len(groups[0]["params"]) == len(names)
    assert set(groups[0]["params"]) == names
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None  # every record's checksum is right


@pytest.mark.parametrize("size", ["5GB", "1500"])
def test_into_a_directory(shards: Path, tmp_path: Path, size: str) -> None:
    out = tmp_path / "hf"
    assert run("--ckpt_prefix", shards, "--save_path", f"{out}/", "--max_shard_size", size) == 0
    model = with_optimizer()
    stored = {n: t for n, t in model.expected().items() if n not in model.ties}
    assert bits(read_directory(out, "model")) == bits(stored)
    assert bits(read_directory(out, "optimizer")) == bits(states_of(model))
    files = {path.name for path in out.iterdir()}
    if size == "5GB":
        assert files == {"model.safetensors", "optimizer.safetensors"}
        return
    parts = sorted(out.glob("model-*.safetensors"))
    assert [path.name for path in parts] == [
        f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))
    ]
    assert len(parts) > 1
    for path in parts:
        own = load_file(path)
        assert sum(t.nbytes for t in own.values()) <= 1500 or len(own) == 1
    total = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in stored.values())


def test_a_safetensors_file_names_ties_and_fingerprints(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "full.safetensors"
    assert run("--ckpt_prefix", shards, "--save_path", out) == 0
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    assert metadata["format"] == "pt"
    assert {a: metadata[a] for a in with_optimizer().ties} == with_optimizer().ties
    prints = {n: checksum(data) for n, (_, _, data) in bits(tensors).items()}
    assert json.loads(metadata["xla_fsdp_fingerprints"]) == prints
    assert (tmp_path / "full.optimizer.safetensors").exists()


def test_ties_can_be_copied(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "full.safetensors"
    assert run("--ckpt_prefix", shards, "--save_path", out, "--copy_ties", "--model_only") == 0
    assert bits(load_file(out)) == bits(with_optimizer().expected())
    assert not (tmp_path / "full.optimizer.safetensors").exists()


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_another_dtype(shards: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"full{ending}"
    assert run("--ckpt_prefix", shards, "--save_path", out, "--dtype", "bf16", "--copy_ties") == 0
    found = torch.load(out, weights_only=True)["model"] if ending == ".pth" else load_file(out)
    expected = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in with_optimizer().expected().items()
    }
    assert bits(found) == bits(expected)


def test_chunks_join_to_the_same_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK", 16)
    save(tmp_path, "safetensors")
    out = tmp_path / "full_consolidated.pth"
    assert run("--ckpt_prefix", tmp_path, "--save_path", out, "--dtype", "fp64", "--verify") == 0
    content = torch.load(out, weights_only=True)
    expected = with_optimizer().expected()
    assert bits(content["model"]) == bits(
        {n: v.double() if v.is_floating_point() else v for n, v in expected.items()}
    )
    assert torch.equal(
        content["optimizer"]["state"]["rows"]["m"], with_optimizer().states["rows"]["m"]
    )


@pytest.mark.parametrize("output", ["full.pth", "hf/", "new"])
def test_nothing_larger_than_a_chunk_is_read(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    sizes: set[int] = set()
    read = LocalFile.read_into

    def counting(self: LocalFile, start: int, buffer: memoryview) -> None:
        if in_copy:
            sizes.add(len(buffer))
        read(self, start, buffer)

    in_copy: list[bool] = []
    copy = copying.copy

    def copy_only(*args: Any, **kwargs: Any) -> Any:
        in_copy.append(True)
        try:
            return copy(*args, **kwargs)
        finally:
            in_copy.pop()

    monkeypatch.setattr(copying, "CHUNK", 64)
    monkeypatch.setattr(alike_files, "WINDOW", 64)
    monkeypatch.setattr(LocalFile, "read_into", counting)
    monkeypatch.setattr(outputs, "copy", copy_only)
    more = ["--to_world_size", 2] if output == "new" else []
    assert run("--ckpt_prefix", shards, "--save_path", f"{tmp_path}/{output}", *more) == 0
    assert max(sizes) == 64


def test_a_file_of_the_first_version_is_merged(tmp_path: Path) -> None:
    model = with_optimizer()
    for path in model.save(tmp_path, 2):
        content = torch.load(path, weights_only=True)
        metadata = content["shard_metadata"]
        for key in ("groups", "global_rank", "optimizer", "fingerprints"):
            del metadata[key]
        torch.save({**content, "shard_metadata": {**metadata, "version": 1}}, path)
    assert run("--ckpt_prefix", tmp_path, "--save_path", tmp_path / "full.pth") == 0
    content = torch.load(tmp_path / "full.pth", weights_only=True)
    assert content.keys() == {"model"}
    assert bits(content["model"]) == bits(model.expected())


def test_names_can_be_changed(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "full.pth"
    rules = ["--key_map", "layer.=block.0.", "--key_map", "bn.="]
    assert run("--ckpt_prefix", shards, "--save_path", out, *rules) == 0
    content = torch.load(out, weights_only=True)
    expected = {
        (f"block.0.{n.removeprefix('layer.')}" if n.startswith("layer.") else n.removeprefix("bn."))
        for n in with_optimizer().expected()
    }
    assert content["model"].keys() == expected
    assert "block.0.weight" in content["optimizer"]["state"]
    assert "block.0.weight" in content["optimizer"]["param_groups"][0]["params"]


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_part_can_be_merged(shards: Path, tmp_path: Path, ending: str) -> None:
    """By names after renaming; the first of the tied names that is left has the tensor."""
    out, model = tmp_path / f"full{ending}", with_optimizer()
    rules = ["--key_map", "layer.=block.", "--only", "block.", "--only", "head.", "--verify"]
    assert run("--ckpt_prefix", shards, "--save_path", out, *rules) == 0
    new = {n: n.replace("layer.", "block.") for n in model.expected()}
    expected = {new[n]: t for n, t in model.expected().items() if new[n][:5] in ("block", "head.")}
    assert {"head.weight", "block.weight"} <= expected.keys()
    trained = {n for n in expected if n != "head.weight"} | {"head.weight"}
    if ending == ".safetensors":
        assert bits(load_file(out)) == bits(expected)
        states = load_file(tmp_path / "full.optimizer.safetensors")
        assert {n.split(".", 1)[1].rpartition(".")[0] for n in states} <= trained
        return
    content = torch.load(out, weights_only=True)
    assert bits(content["model"]) == bits(expected)
    state = content["optimizer"]["state"]
    assert {"head.weight", "block.weight"} <= state.keys() <= trained
    assert bits({"m": state["head.weight"]["m"]}) == bits({"m": model.states["embed.weight"]["m"]})
    assert {*content["optimizer"]["param_groups"][0]["params"]} <= trained


def test_a_name_that_safetensors_reserves_is_refused(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = ["--key_map", "layer.weight=__metadata__"]
    for out in ("full.safetensors", "hf/"):
        assert run("--ckpt_prefix", shards, "--save_path", f"{tmp_path}/{out}", *rule) == 2
        assert "a tensor has the name __metadata__, which" in capsys.readouterr().err
        assert not (tmp_path / out).exists()
    assert run("--ckpt_prefix", shards, "--save_path", tmp_path / "full.pth", *rule) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "only: 'nothing' fits no name of the model"),
        (["--to_world_size", "2", "--only", "a"], "--only cannot be combined with --to_world"),
        (["--key_map", "layer.=embed."], "key_map: 2 names become 'embed.weight'"),
        (["--key_map", "nothing=x"], "key_map: nothing=x fits no name of the model"),
        (["--key_map", "scale="], "key_map: a name becomes empty"),
        (["--key_map", "scale"], "--key_map 'scale' must be OLD=NEW"),
        (["--max_shard_size", "5 parsecs"], "--max_shard_size '5 parsecs' must be a size such as"),
        (["--max_shard_size", "0"], "--max_shard_size '0' must be a size such as"),
        (["--threads", "0"], "--threads 0 must be at least 1"),
        (["--step", "3"], "--step has a meaning only together with --to_world_size"),
        (["--to_world_size", "2", "--dtype", "bf16"], "--dtype cannot be combined with --to_world"),
        (["--to_world_size", "2", "--step", "-1"], "--step -1 must be from 0 to 10^15"),
        (["--to_world_size", "0"], "--to_world_size 0 must be from 1 to 1,000,000"),
    ],
)
def test_impossible_wishes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    save(tmp_path, "safetensors", 1)
    before = snapshot(tmp_path)
    assert run("--ckpt_prefix", tmp_path, "--save_path", tmp_path / "x.pth", *arguments) == 2
    assert capsys.readouterr().err.startswith(f"consolidate_sharded_ckpts: {message}")
    assert snapshot(tmp_path) == before


def test_other_files_of_a_directory_stay(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert run("--ckpt_prefix", shards, "--save_path", out) == 0
    before = snapshot(out)
    assert before.keys() == {"config.json", "model.safetensors", "optimizer.safetensors"}
    assert run("--ckpt_prefix", shards, "--save_path", out) == 2
    assert snapshot(out) == before
    assert run("--ckpt_prefix", shards, "--save_path", out, "--overwrite") == 0
    assert snapshot(out) == before


def test_files_of_another_merge_do_not_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, out = tmp_path / "run", tmp_path / "hf"
    shards.mkdir()
    save(shards, "safetensors", 1)
    merge = ("--ckpt_prefix", shards, "--save_path")
    before: dict[str, bytes] = {}
    for options in ([], ["--max_shard_size", "1500"], ["--max_shard_size", "2500"], []):
        options = [*options, "--model_only"] if before else options
        assert run(*merge, f"{out}/", *options) == (2 if before else 0)
        said = capsys.readouterr().err
        assert snapshot(out) == before or not before
        assert not before or "is of another merge, but" in said or "exists already" in said
        assert run(*merge, f"{out}/", *options, "--overwrite") == 0
        fresh = tmp_path / "fresh"
        assert run(*merge, f"{fresh}/", *options) == 0
        before = snapshot(out)
        assert before == snapshot(fresh)
        shutil.rmtree(fresh)
    one = tmp_path / "m.safetensors"
    assert run(*merge, one) == 0
    one.unlink()
    assert run(*merge, one, "--model_only") == 2
    assert run(*merge, one, "--model_only", "--overwrite", "--dry_run") == 0
    assert f"would remove {tmp_path}/m.optimizer.safetensors" in capsys.readouterr().out
    assert run(*merge, one, "--model_only", "--overwrite") == 0
    assert [path.name for path in tmp_path.glob("m.*")] == ["m.safetensors"]


def test_a_dry_run_writes_nothing(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hf"
    assert run("--ckpt_prefix", shards, "--save_path", f"{out}/", "--dry_run") == 0
    assert not out.exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"would write {out}/model.safetensors (about ")
    assert lines[2].startswith(f"would write {out}/optimizer.safetensors (about ")
    assert len(lines) == 3


def test_inspect_lists_everything(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(shards)
    assert run("inspect", "--ckpt_prefix", shards, "--verify") == 0
    out = capsys.readouterr().out
    for text in (
        "rank 2 of 3: ",
        "sharded  embed.weight  float32 [37, 11]\n",
        "sharded  layer.bias  float32 [7] in layer.flat_param_0\n",
        "whole    bn.num_batches_tracked  int64 []\n",
        "tied     head.weight = embed.weight\n",
        "state    rows: m, v, step (whole), scale\n",
        "group    0: 7 parameters, {'lr': 0.1, 'betas': [0.9, 0.99]}\n",
    ):
        assert text in out
    assert snapshot(shards) == before


def test_inspect_reports_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "safetensors")
    paths = sorted(tmp_path.iterdir())
    paths[2].unlink()
    data = bytearray(paths[1].read_bytes())
    data[-3] ^= 1
    paths[1].write_bytes(data)
    assert run("inspect", "--ckpt_prefix", tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run("inspect", "--ckpt_prefix", tmp_path, "--verify") == 2
    out, err = capsys.readouterr()
    assert "missing ranks: 2 of 3" in err
    assert f"{paths[1]}: " in err
    assert "is damaged: its checksum is crc32:" in err
    assert err.count("\n") == 2
    assert "rank 0 of 3: " in out


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_resharding(shards: Path, tmp_path: Path, world_size: int) -> None:
    out = tmp_path / "new"
    assert run("--ckpt_prefix", shards, "--save_path", out, "--to_world_size", world_size) == 0
    assert latest_step(out) == 0
    model = with_optimizer()
    steps = dict.fromkeys([*model.params, "ignored"], torch.tensor(3.0))
    one_each = replace(model, flat={}, steps=steps)  # a key per parameter
    for rank in range(world_size):
        path = out / "step_00000000" / f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
        found = bits(load_file(path))
        expected = one_each.shard(rank, world_size)
        params = {k: v for k, v in expected["model"].items() if k not in model.ties}
        states = {
            f"optim/{k}/{w}": v
            for k, s in expected["optimizer"]["state"].items()
            for w, v in s.items()
        }
        wanted = {**{f"model/{key}": value for key, value in params.items()}, **states}
        for value in wanted.values():
            value[value == 77] = 0  # padding
        assert found == bits(wanted)
    assert run("inspect", "--ckpt_prefix", out, "--verify") == 0
    merged = tmp_path / "full.pth"
    assert run("--ckpt_prefix", out, "--save_path", merged) == 0
    assert bits(torch.load(merged, weights_only=True)["model"]) == bits(model.expected())


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_resharded_can_be_loaded(shards: Path, tmp_path: Path, ranks: int) -> None:
    new = tmp_path / "new"
    arguments = ["--ckpt_prefix", shards, "--save_path", new, "--to_world_size", 2, "--step", 7]
    assert run(*arguments) == 0
    assert latest_step(new) == 7
    model = with_optimizer()
    for rank in range(ranks):
        saved = model.shard(rank, ranks)
        metadata = ShardMetadata.from_dict(saved["shard_metadata"])
        assert metadata.optimizer is not None
        whole = {name: tuple(value.shape) for name, value in model.whole.items()}
        groups = [group.params for group in metadata.optimizer.groups]
        loaded = load_step(open_storage(new), Attempt(7), LoadTarget(metadata, whole, groups))
        expected = {k: v for k, v in saved["model"].items() if k not in model.ties}
        for key, value in expected.items():
            value[value == 77] = 0  # padding
            assert torch.equal(loaded.model[key].view(value.shape), value), key
        for key, states in saved["optimizer"]["state"].items():
            for what, value in states.items():
                value[value == 77] = 0
                assert torch.equal(
                    loaded.optimizer.states[key][what].value.view(value.shape), value
                ), key


def test_a_progress_bar_is_drawn_on_a_terminal(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run("--ckpt_prefix", shards, "--save_path", tmp_path / "full.pth") == 0
    assert "copying: 100%" in capsys.readouterr().err
