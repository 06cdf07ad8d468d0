"""Read and write files of ``torch.save`` without loading their tensors.

Such a file is a zip archive of *records*: one is a pickle of the content, which refers for each
tensor to another record with its bytes. Files from before torch 1.6 are no archives, and are loaded
with all tensors.

Invariants: no code from a file is run (``weights_only``); a tensor must fit the record that it
refers to. A record's CRC-32 becomes its tensor's checksum.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from xla_fsdp.checkpoint.checksum import whole, written
from xla_fsdp.checkpoint.errors import CheckpointError, prefixed, shown
from xla_fsdp.checkpoint.tensor_source import (
    LocalFile,
    Part,
    TensorBytes,
    TensorSource,
    TensorSpec,
    Zeros,
    convert_tensors,
    read_bytes,
    source_of,
)

ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of the extra field
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_CENTRAL_MAGIC = b"PK\x01\x02"


@dataclass(frozen=True)
class Record:
    """A file in the zip archive: offset of its first byte, size, and CRC-32 (0 if not written)."""

    start: int
    nbytes: int
    crc: int


def read_torch_file(path: str) -> Any:
    """Read the content of a file, with a ``TensorSource`` in place of every tensor.

    Raises:
        CheckpointError: with one line that names the file: it cannot be read, is no torch file, or
            would run code.
    """
    file = LocalFile(path)
    try:
        is_zip = read_bytes(file, 0, min(len(ZIP_MAGIC), file.nbytes)) == ZIP_MAGIC
        records = {record.start: record for record in _records(path, file)} if is_zip else {}
        with FakeTensorMode():
            content = _load(path)
        if not is_zip:
            _check_old(content, file.nbytes)
            return convert_tensors(_load(path), source_of, from_pickle=True)
        to_source = partial(_source, file=file, records=records)
        return convert_tensors(content, to_source, from_pickle=True)
    except CheckpointError as error:
        raise prefixed(error, path) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged file can make torch or zipfile raise anything
        raise CheckpointError(f"{path}: {_why_not_loaded(error)}") from error


def _load(path: str) -> Any:
    with warnings.catch_warnings():
        # torch warns of files with a newer pickle protocol than its default, but reads them.
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        return torch.load(path, map_location="cpu", weights_only=True)


def _why_not_loaded(error: Exception) -> str:
    # torch's own messages are long and advise to load with ``weights_only=False``.
    refused = re.search(r"GLOBAL ([\w.]+)", str(error))
    if isinstance(error, UnpicklingError) and refused:
        return (
            f"refused: it holds a {refused[1]}, and loading that would run code from the file. "
            f"Save only tensors, numbers, strings, lists and dicts (vars(args) in place of args)."
        )
    return "truncated, or not a file written by torch.save or xm.save"


def _check_old(content: Any, file_size: int) -> None:
    """Raise if tensors are larger than the file: loading it allocates whatever size it states."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storages[storage._cdata] = storage.nbytes()
        if tensor.numel() * tensor.dtype.itemsize > size:
            raise CheckpointError(f"a tensor of shape {shown(tuple(tensor.shape))} repeats itself")

    convert_tensors(content, note, from_pickle=True)
    if sum(storages.values()) > file_size:
        raise CheckpointError("truncated: its tensors are larger than the file")


def _records(path: str, file: LocalFile) -> list[Record]:
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        for info in infos:
            stored = info.compress_type == zipfile.ZIP_STORED
            if info.filename.endswith("/data.pkl") and stored and info.CRC:  # 0: not written
                archive.read(info)  # verifies its CRC-32, which torch does not
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise CheckpointError("refused: its records are compressed, as torch.save never does")
    records = []
    for info in infos:
        start = _data_start(file, info)
        if start + info.file_size > file.nbytes:
            raise CheckpointError("truncated, or not a file written by torch.save or xm.save")
        records.append(Record(start, info.file_size, info.CRC))
    # Records are looked up by offset, and an empty one has that of the next.
    return [record for record in records if record.nbytes]


def _source(tensor: Tensor, file: LocalFile, records: Mapping[int, Record]) -> TensorSource:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"it holds a tensor that is {tensor.layout}; only dense ones merge")
    spec = TensorSpec(tensor.dtype, tuple(int(size) for size in tensor.shape))
    if spec.nbytes == 0:
        return TensorSource(spec, Zeros(0))
    # Set by torch.load under FakeTensorMode: https://docs.pytorch.org/docs/stable/notes/serialization.html
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    record = None if start is None else records.get(start)
    first, strides = int(tensor.storage_offset()), tuple(int(step) for step in tensor.stride())
    last = first + sum((n - 1) * step for n, step in zip(spec.shape, strides, strict=True))
    if record is None or (last + 1) * spec.dtype.itemsize > record.nbytes or first < 0:
        raise CheckpointError(
            f"truncated: {spec.dtype} of shape {shown(spec.shape)} is not in the record it names"
        )
    storage = Part(file, record.start, record.nbytes)
    if not tensor.is_contiguous():
        return _strided(file.path, spec, storage, record, first, strides)
    start_byte = first * spec.dtype.itemsize
    fills_record = record.crc and spec.nbytes == record.nbytes
    return TensorSource(
        spec,
        Part(storage, start_byte, spec.nbytes),
        identity=(file.path, record.start + start_byte, spec),
        checksum=written(record.crc) if fills_record else None,
    )


def _strided(
    name: str, spec: TensorSpec, storage: Part, record: Record, first: int, strides: Sequence[int]
) -> TensorSource:
    """Return a tensor that is not contiguous; every read loads its record."""
    if spec.nbytes > record.nbytes:  # expanded, with which a small file could state any size
        raise CheckpointError(f"a tensor of shape {shown(spec.shape)} repeats its elements")
    numel = record.nbytes // spec.dtype.itemsize
    flat = TensorSource(
        TensorSpec(spec.dtype, (numel,)), Part(storage, 0, numel * spec.dtype.itemsize)
    )

    def load() -> Tensor:
        return flat.load().as_strided(spec.shape, strides, first)

    data = TensorBytes(spec.nbytes, load, remember=False)
    return TensorSource(spec, data, identity=(name, record.start, spec, first, strides))


# ---------------------------------------------------------------- writing


def write_skeleton(content: Any, path: str) -> list[tuple[TensorSource, int]]:
    """Write a file with room for the bytes of its tensors, but without these bytes.

    Args:
        content: with a ``TensorSource`` in place of each tensor; names of the same object become
            names of one tensor.
        path: of the file to create.

    Returns:
        Every tensor that is not empty, and the offset of its bytes in the file.
    """
    sources: list[TensorSource] = []

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, TensorSource):
                return NotImplemented
            sources.append(value)
            return _without_data(value.spec)

    # FakeTensorMode would do as well, but to import it takes 2 s.
    with skip_data():
        torch.save(content, path, pickle_module=SimpleNamespace(__name__="", Pickler=Pickler))
    file = LocalFile(path)
    with zipfile.ZipFile(path) as archive:
        names = {info.filename.partition("/data/")[2]: info for info in archive.infolist()}
    offsets = []
    for i, source in enumerate(sources):  # torch numbers tensors as it meets them
        info = names[str(i)]
        if info.file_size != source.spec.nbytes:
            raise RuntimeError(
                f"torch.save left {info.file_size} bytes for {source.spec}, expected "
                f"{source.spec.nbytes}: it lays files out in another way than that of torch 2.9"
            )
        if source.spec.nbytes:
            offsets.append((source, _data_start(file, info)))
    return offsets


def _without_data(spec: TensorSpec) -> tuple[Any, ...]:
    """Return what ``Tensor.__reduce__`` does for a tensor on the CPU, without its storage."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    data = torch.UntypedStorage(spec.nbytes, device="meta")
    data._fake_device = torch.device("cpu")
    where: tuple[Any, ...] = (0, tuple(spec.shape), tensor.stride(), False, OrderedDict())
    if spec.dtype not in torch.storage._dtype_to_storage_type_map():
        return torch._utils._rebuild_tensor_v3, (data, *where, spec.dtype)
    typed = torch.storage.TypedStorage(wrap_storage=data, dtype=spec.dtype, _internal=True)
    typed._fake_device = data._fake_device
    return torch._utils._rebuild_tensor_v2, (typed, *where)


def write_crcs(path: str, crcs: Mapping[int, Sequence[int]]) -> None:
    """Write the CRC-32 of records into an archive.

    Args:
        path: of a file from ``write_skeleton``, with the bytes of its tensors.
        crcs: of each block, by the offset of the record's first byte.
    """
    with zipfile.ZipFile(path) as archive:
        infos, at = archive.infolist(), archive.start_dir
    file = LocalFile(path)
    with open(path, "r+b") as output:
        for info in infos:
            start = _data_start(file, info)
            if info.file_size and start in crcs:
                packed = struct.pack("<I", whole(crcs[start], info.file_size))
                # Offsets of the field "crc-32" in both structures, by section 4.3 of
                # https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
                _write_field(output, _CENTRAL_MAGIC, at, 16, packed)
                _write_field(output, _DESCRIPTOR_MAGIC, start + info.file_size, 4, packed)
            output.seek(at + 28)  # the lengths of name, extra field and comment
            at += 46 + sum(struct.unpack("<HHH", output.read(6)))


def _write_field(output: Any, magic: bytes, at: int, distance: int, data: bytes) -> None:
    """Write ``data`` at offset ``distance`` of the structure at ``at``, which begins with
    ``magic``."""
    output.seek(at)
    found = output.read(4)
    if found != magic:
        raise RuntimeError(
            f"torch.save wrote {found!r} where {magic!r} was expected: it lays files out in "
            f"another way than that of torch 2.9"
        )
    output.seek(at + distance)
    output.write(data)


def _data_start(file: LocalFile, info: zipfile.ZipInfo) -> int:
    header = read_bytes(file, info.header_offset, _LOCAL_HEADER.size)
    return info.header_offset + len(header) + sum(_LOCAL_HEADER.unpack(header))
