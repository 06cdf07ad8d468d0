"""Safetensors files: what is planned loads elsewhere; others' files are read; damage is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from test.common.shard_maker import bits
from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.files.safetensors_file import (
    DTYPES,
    MAX_HEADER,
    plan_file,
    read_header,
)
from xla_fsdp.checkpoint.files.tensor_source import LocalFile, TensorSpec, bytes_of
from xla_fsdp.checkpoint.format.alike_files import AlikeFile


def every_dtype() -> dict[str, Tensor]:
    """A tensor of every dtype, of odd sizes, and an empty one and a scalar."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2, (3 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensors[f"layer/{name}"] = raw.view(dtype)
    return {"empty": torch.ones(0, 3), "scalar": torch.tensor(2.5), **tensors}


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A file as planned."""
    header = plan_file({n: TensorSpec.of(t) for n, t in tensors.items()}, metadata)
    data = b"".join(bytes(bytes_of(tensors[name])) for name in header.entries)
    path.write_bytes(header.to_bytes() + data)
    assert path.stat().st_size == header.file_size


def read(source: LocalFile) -> dict[str, Tensor]:
    """All tensors of a file."""
    entries = read_header(source, "file").entries
    file = AlikeFile("file", source, entries, {})
    return {each: file[each].load() for each in entries}


def test_what_is_planned_loads_with_the_safetensors_library(tmp_path: Path) -> None:
    tensors = every_dtype()
    write(tmp_path / "f.safetensors", tensors, {"format": "pt", "ü": "ö\n"})
    assert bits(load_file(tmp_path / "f.safetensors")) == bits(tensors)
    source = LocalFile(str(tmp_path / "f.safetensors"))
    assert bits(read(source)) == bits(tensors)
    assert read_header(source, "file").metadata == {"format": "pt", "ü": "ö\n"}


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "f.safetensors", {"a": "b"})
    assert bits(read(LocalFile(str(tmp_path / "f.safetensors")))) == bits(tensors)


def test_a_file_without_tensors_loads_too(tmp_path: Path) -> None:
    write(tmp_path / "f.safetensors", {}, {})
    assert load_file(tmp_path / "f.safetensors") == {}
    assert read(LocalFile(str(tmp_path / "f.safetensors"))) == {}


class CountingFile(LocalFile):
    """Counts the bytes read."""

    count = 0

    def read_into(self, start: int, buffer: memoryview) -> None:
        super().read_into(start, buffer)
        self.count += len(buffer)


def test_only_the_elements_asked_for_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(1000), "b": torch.arange(500).to(torch.int16)}
    write(tmp_path / "f", tensors, {})
    file = CountingFile(str(tmp_path / "f"))
    header = read_header(file, "file")
    assert file.count == header.data_start
    tensor = AlikeFile("f", file, header.entries, {})["b"]
    elements = tensor.elements(7, 300)
    elements.read_into(0, memoryview(found := bytearray(elements.nbytes)))
    assert found == bytes_of(tensors["b"][7:300])
    assert file.count == header.data_start + 293 * 2
    with pytest.raises(ValueError, match="bytes 14 to 1002 are not in 1000"):
        tensor.elements(7, 501)


def test_a_dtype_that_safetensors_has_not_is_refused() -> None:
    specs = {"w": TensorSpec.of(torch.ones(2, dtype=torch.complex128))}
    with pytest.raises(CheckpointError, match=r"^w is complex128, which safetensors does not have"):
        plan_file(specs, {})


def line(**changes: Any) -> dict[str, Any]:
    """A tensor's line in a header, for a file of 8 bytes of data."""
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def file_with(header: Any, data: bytes = bytes(8)) -> bytes:
    """A file with this header, as JSON unless it is bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated, or not a safetensors file: it is shorter than 8 bytes"),
    "absurd header": (
        (1 << 63).to_bytes(8, "little") + bytes(8),
        "header would be 9,223,372,036,854,775,808 bytes long, and at most 100,000,000",
    ),
    "large header": ((MAX_HEADER + 1).to_bytes(8, "little"), "header would be 100,000,001 bytes"),
    "cut header": ((100).to_bytes(8, "little") + b"{}", "truncated: its header ends at byte 108"),
    "no text": (file_with(b"\xff\xfe"), "header: is not UTF-8 text: "),
    "no JSON": (file_with(b"{"), "header: is not JSON: "),
    "deep JSON": (file_with(b"[" * 100_000), "header: is not JSON: "),
    "long number": (file_with(b'{"w":' + b"1" * 5000 + b"}"), "header: is not JSON: "),
    "list": (file_with([]), "header is list, expected dict"),
    "twice": (file_with(b'{"w": 1, "w": 2}'), "header: the name w appears twice"),
    "metadata": (file_with({"__metadata__": {"a": 1}}), "__metadata__ is not a dict of strings"),
    "no line": (file_with({"w": 3}), "header: 'w' is not a dict of dtype, shape and data_offs"),
    "less": (file_with({"w": {"dtype": "F32"}}), "header: 'w' is not a dict of dtype, shape and"),
    "dtype": (file_with({"w": line(dtype="F33")}), "header: 'w': dtype 'F33' is not known"),
    "dtype list": (file_with({"w": line(dtype=[])}), "header: 'w': dtype [] is not known"),
    "negative": (file_with({"w": line(shape=[-2])}), "shape is [-2], expected sizes from 0 on"),
    "fraction": (file_with({"w": line(shape=[2.0])}), "shape is [2.0], expected sizes from 0 on"),
    "bool": (file_with({"w": line(shape=[True])}), "shape is [True], expected sizes from 0 on"),
    "dims": (file_with({"w": line(shape=[1] * 65)}), "expected at most 64 sizes"),
    "absurd size": (file_with({"w": line(shape=[1 << 62, 1 << 62])}), "product is below 2^63"),
    "size": (file_with({"w": line(shape=[3])}), "hold 8 bytes, but F32 of shape [3] takes 12"),
    "backwards": (file_with({"w": line(data_offsets=[8, 0])}), "hold -8 bytes, but F32 of shape"),
    "one offset": (file_with({"w": line(data_offsets=[8])}), "data_offsets are [8], expected two"),
    "hole": (file_with({"w": line(data_offsets=[4, 12])}), "leave a hole before 'w'"),
    "overlap": (file_with({"a": line(), "b": line()}), "data_offsets leave overlap before 'b'"),
    "cut": (file_with({"w": line()}, bytes(7)), "truncated: its tensors end at byte "),
    "more": (file_with({"w": line()}, bytes(9)), "1 bytes follow its last tensor"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        read_header(LocalFile(str(path)), str(path))
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}: ")
    assert "\n" not in problem
    assert len(problem) < 500


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "it is a directory"), (tmp_path / "x", "No such file or dir")):
        with pytest.raises(CheckpointError, match=rf"^{path}: cannot be read: {why}"):
            LocalFile(str(path))


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "f", {"w": torch.arange(4)}, {})
    source = LocalFile(str(tmp_path / "f"))
    header = read_header(source, "f")
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"f: ends at byte \d*: truncated"):
        AlikeFile("f", source, header.entries, {})["w"].load()
