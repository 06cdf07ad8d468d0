"""Files of full models, as ``init_from_checkpoint`` reads them: whoever wrote them, verified."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from test.common.saving import save_step
from test.common.shard_maker import bits, with_optimizer
from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.convert.read_model import open_model
from xla_fsdp.checkpoint.files.tensor_source import TensorSource
from xla_fsdp.consolidate_sharded_ckpts import main

FORMS = ["full.safetensors", "full.pth", "hf/", "parts/", "bins"]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """What consolidation writes, with optimizer state, in all its forms of model files; and torch
    files with an index, beside a trainer's other files."""
    folder = tmp_path_factory.mktemp("merged")
    model = with_optimizer()
    model.save(folder, 2)
    for form in FORMS[:-1]:
        arguments = ["--ckpt_prefix", str(folder / "mnist"), "--save_path", f"{folder}/{form}"]
        more = {"parts/": ["--max_shard_size", "1KB"], "full.pth": ["--model_only"]}
        assert main([*arguments, *more.get(form, [])]) == 0
    expected = model.expected()
    bins = folder / "bins"
    bins.mkdir()
    for i, (name, value) in enumerate(expected.items()):
        # Also tensors whose elements are not in order in their records.
        turned = value.mT.contiguous().mT if value.dim() > 1 else value
        torch.save({name: turned}, bins / f"{i}.bin")
    weight_map = {name: f"{i}.bin" for i, name in enumerate(expected)}
    (bins / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for other in ("training_args.bin", "optimizer.pt"):
        torch.save({"lr": 1}, bins / other)
    return folder, expected


def tensor_bytes(path: Path) -> Iterator[int]:
    """Where the bytes of tensors are in a file."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        yield from range(int.from_bytes(data[:8], "little") + 8, len(data))
        return
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if "/data/" in info.filename:
                lengths = data[info.header_offset + 26 : info.header_offset + 30]
                skipped = int.from_bytes(lengths[:2], "little") + int.from_bytes(
                    lengths[2:], "little"
                )
                start = info.header_offset + 30 + skipped
                yield from range(start, start + info.file_size)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_merged_is_read_and_verified(
    merged: tuple[Path, dict[str, Tensor]], tmp_path: Path, form: str
) -> None:
    folder, expected = merged
    found = {name: tensor.load() for name, tensor in open_model(folder / form).items()}
    aliases = with_optimizer().ties  # which a safetensors file has once
    assert expected.keys() - found.keys() <= aliases.keys()
    assert bits(found) == bits({name: expected[name] for name in found})
    # A flipped bit anywhere in a tensor, and other bytes in place of all tensors, are found.
    own = tmp_path / form
    if (folder / form).is_dir():
        shutil.copytree(folder / form, own)
    else:
        shutil.copy(folder / form, own)
    for path in sorted(own.iterdir()) if own.is_dir() else [own]:
        beside = path.name.startswith(("optimizer", "training_args")) or path.suffix == ".json"
        places = [] if beside else list(tensor_bytes(path))
        sound = path.read_bytes()
        for damage in [[at] for at in places[:: max(1, len(places) // 7)]] + [places] * bool(
            places
        ):
            damaged = bytearray(sound)
            for at in damage:
                damaged[at] = damaged[at] ^ (1 << at % 8) if len(damage) == 1 else 0x5A
            path.write_bytes(damaged)
            tensors = open_model(own).values()
            with pytest.raises(CheckpointError, match="damaged"):
                list(map(TensorSource.load, tensors))
        path.write_bytes(sound)


def test_files_that_do_not_belong_together(
    merged: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, expected = merged
    one = next(iter(expected))
    for name in ("a.bin", "b.bin"):
        torch.save(expected, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds 'a\.bin', 'b\.bin' and nothing;"):
        open_model(tmp_path)
    index = tmp_path / "m.bin.index.json"
    index.write_text(json.dumps({"weight_map": {one: "a.bin", "other": "b.bin"}}))
    with pytest.raises(CheckpointError, match=r"b\.bin: has .* which another file of .* has"):
        open_model(tmp_path)
    for bad, text in ((Path("/dev/zero"), "no regular file"), (tmp_path, "a directory")):
        index.unlink()
        index.symlink_to(bad)
        with pytest.raises(CheckpointError, match=rf"m\.bin\.index\.json: .* {text}"):
            open_model(index)
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="are merged first: consolidate_sharded_ckpts"):
        open_model(tmp_path / "run")
    save_step(tmp_path / "steps", 1, 1)
    (shard,) = tmp_path.glob("steps/*/*.safetensors")
    for path in (shard, folder / "mnist_rank-00000000-of-00000002.pth"):
        with pytest.raises(CheckpointError, match=r"is one rank's shard, .* Merge those of all"):
            open_model(path)
    file = tmp_path / "full.safetensors"
    data = (folder / "full.safetensors").read_bytes()
    file.write_bytes(data.replace(b"crc32:", b"crc31:"))
    with pytest.raises(CheckpointError, match="are no checksums: its header is damaged"):
        open_model(file)
