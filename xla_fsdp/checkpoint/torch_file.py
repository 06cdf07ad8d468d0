"""Files of ``torch.save``, read and written without their tensors in memory.

Such a file is a zip archive of *records*: one is a pickle of the content, in which a tensor is a
reference to a record with its bytes. Files from before torch 1.6 are no archives: they are loaded
whole.

Invariants: no code of a file's is ever run (``weights_only``); what a pickle claims is believed
only where a record of that size is there. A record's CRC-32 is handed on as its tensor's checksum.
"""

from __future__ import annotations

import re
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from xla_fsdp.checkpoint.checksum import written
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
    """Bytes in an archive: where they begin, how many there are, their CRC-32 (0: not written)."""

    start: int
    nbytes: int
    crc: int


def read_torch_file(path: str) -> Any:
    """Read the content of a file, with a ``TensorSource`` in place of every tensor.

    Raises:
        CheckpointError: one line that names the file: it cannot be read, is no torch file, or
            would have to run code.
    """
    file = LocalFile(path)
    try:
        is_zip = _is_zip(file)
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
    # Whatever a damaged pickle or archive makes torch or zipfile raise.
    except Exception as error:
        raise CheckpointError(f"{path}: {_why_not_loaded(error)}") from error


def _load(path: str) -> Any:
    with warnings.catch_warnings():
        # A file saved with a newer pickle protocol than torch's default is fine.
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        return torch.load(path, map_location="cpu", weights_only=True)


def _why_not_loaded(error: Exception) -> str:
    # torch's own messages run over many lines and advise to load with ``weights_only=False``.
    refused = re.search(r"GLOBAL ([\w.]+)", str(error))
    if isinstance(error, UnpicklingError) and refused:
        return (
            f"refused: it holds a {refused[1]}, and loading that would run code from the file. "
            f"Save only tensors, numbers, strings, lists and dicts (vars(args) in place of args)."
        )
    return "truncated, or not a file written by torch.save or xm.save"


def _is_zip(file: LocalFile) -> bool:
    return read_bytes(file, 0, min(len(ZIP_MAGIC), file.nbytes)) == ZIP_MAGIC


def _check_old(content: Any, file_size: int) -> None:
    """Refuse a file without records, in which room for tensors is made on the pickle's word."""
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
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise CheckpointError("refused: its records are compressed, as torch.save never does")
    records = []
    for info in infos:
        start = _data_start(file, info)
        if start + info.file_size > file.nbytes:
            raise CheckpointError("truncated, or not a file written by torch.save or xm.save")
        records.append(Record(start, info.file_size, info.CRC))
    # Empty records lie where the next one begins, and nobody looks for them.
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
    own = record.crc and spec.nbytes == record.nbytes
    return TensorSource(
        spec,
        Part(storage, start_byte, spec.nbytes),
        identity=(file.path, record.start + start_byte, spec),
        checksum=written(record.crc) if own else None,
    )


def _strided(
    name: str, spec: TensorSpec, storage: Part, record: Record, first: int, strides: Sequence[int]
) -> TensorSource:
    """Return a tensor whose elements are not in order: it is loaded whole for every read."""
    if spec.nbytes > record.nbytes:  # an expanded one: its few bytes may claim any size
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
    """Write a whole file but for the bytes of its tensors, for which room is left.

    Args:
        content: plain values with ``TensorSource`` in place of tensors; the same object twice is
            one tensor twice.
        path: of the file, which is created.

    Returns:
        Every tensor that has bytes, and where in the file these belong.
    """
    fakes: dict[int, tuple[TensorSource, Tensor]] = {}

    def fake(source: TensorSource) -> Tensor:
        made = torch.empty(source.shape, dtype=source.dtype)
        return fakes.setdefault(id(source), (source, made))[1]

    with FakeTensorMode(), skip_data(materialize_fake_tensors=True):
        torch.save(convert_tensors(content, fake), path)
    file = LocalFile(path)
    with zipfile.ZipFile(path) as archive:
        names = {info.filename.partition("/data/")[2]: info for info in archive.infolist()}
    places = []
    for i, (source, _) in enumerate(fakes.values()):  # torch numbers tensors as it meets them
        info = names[str(i)]
        if info.file_size != source.spec.nbytes:
            raise RuntimeError(
                f"torch.save left {info.file_size} bytes for {source.spec}, expected "
                f"{source.spec.nbytes}: it lays files out in another way than that of torch 2.9"
            )
        if source.spec.nbytes:
            places.append((source, _data_start(file, info)))
    return places


def write_crcs(path: str, crcs: Mapping[int, int]) -> None:
    """Put the CRC-32 of records into an archive.

    Args:
        path: of a file that ``write_skeleton`` began and that is complete now.
        crcs: by the offset of the record's first byte.
    """
    with zipfile.ZipFile(path) as archive:
        infos, at = archive.infolist(), archive.start_dir
    file = LocalFile(path)
    with open(path, "r+b") as output:
        for info in infos:
            start = _data_start(file, info)
            if info.file_size and start in crcs:
                packed = struct.pack("<I", crcs[start])
                _put_behind(output, _CENTRAL_MAGIC, at, 16, packed)
                _put_behind(output, _DESCRIPTOR_MAGIC, start + info.file_size, 4, packed)
            output.seek(at + 28)
            at += 46 + sum(struct.unpack("<HHH", output.read(6)))


def _put_behind(output: Any, magic: bytes, at: int, distance: int, data: bytes) -> None:
    """Write ``data`` at ``distance`` behind a structure that begins with ``magic``."""
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
