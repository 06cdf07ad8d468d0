"""Read and write files of ``torch.save`` without loading their tensors.

Such a file is a zip archive of *records*: one is a pickle of the content, which refers for each
tensor to another record with its bytes. Files in the format from before torch 1.6 are refused.

Invariants: no code from a file is run, and nothing is allocated because a file says so; a tensor
must fit the record that it refers to. A record's CRC-32 becomes its tensor's checksum.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.serialization import MAGIC_NUMBER, skip_data

from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    checked_shape,
    dtype_named,
    failing,
    naming,
    shown,
    typed,
)
from xla_fsdp.checkpoint.files.checksum import written
from xla_fsdp.checkpoint.files.copying import CopyTask
from xla_fsdp.checkpoint.files.pickle_values import Global, Object, convert_plain, read_pickle
from xla_fsdp.checkpoint.files.tensor_source import (
    ByteSource,
    LocalFile,
    Part,
    TensorBytes,
    TensorSource,
    TensorSpec,
    Zeros,
    bytes_of,
    read_bytes,
)

OLD_MAGIC = pickle.dumps(MAGIC_NUMBER, 2)
OLD = (
    "is in torch's format from before 1.6, which is not read: save it anew by "
    "torch.save(torch.load(path, map_location='cpu'), path)"
)
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of the extra field
_DESCRIPTOR_MAGIC = b"PK\x07\x08"

UNREADABLE = "truncated, or not a file written by torch.save or xm.save"
ADVICE = ". Save only tensors, numbers, strings, lists and dicts (vars(args) in place of args)."
MAX_WRAPPED = 8  # of a parameter in a subclass in ...

_STORAGE = re.compile(r"torch\.(?:\w+\.)*(\w*Storage)")
_STORAGES = {
    **{name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()},
    "UntypedStorage": torch.uint8,
}

# The functions that make dense tensors: storage, offset, shape, strides, and further arguments, of
# which the one at this place (a dict) says whether values are conjugated or negated.
_DENSE = {
    "torch._utils._rebuild_tensor": 0,
    "torch._utils._rebuild_tensor_v2": 2,
    "torch._utils._rebuild_tensor_v3": 3,
}
_TENSOR = re.compile(r"torch\._(utils|tensor)\._rebuild_\w+")
_BYTES = ("_codecs.encode", "builtins.bytearray")
_KNOWN = re.compile(
    rf"{_TENSOR.pattern}|{_STORAGE.pattern}|_codecs\.encode|builtins\.(bytearray|complex|set)"
    r"|collections\.(Counter|OrderedDict)|torch\.(Size|Tensor|device|nn\.parameter\.Parameter)"
    r"|torch\.per_(channel|tensor)_affine|torch\.serialization\._get_layout"
)


@dataclass(frozen=True)
class Record:
    """A file in the zip archive: the offset of its first byte, its size, its CRC-32 (0 if not
    written), and the offset of that in the directory."""

    start: int
    nbytes: int
    crc: int
    crc_at: int


def read_torch_file(path: str) -> Any:
    """Read the content of a file, with a ``TensorSource`` in place of every tensor.

    Every container is in one place only, and its depth is bounded; sets are copied as they are.
    """
    source = LocalFile(path)
    with failing(path, "cannot be read", OSError), naming(path), open(path, "rb") as file:
        return read_torch(file, source)


def read_torch(file: BinaryIO, source: LocalFile | Bytes) -> Any:
    """Read a file of ``torch.save`` as ``read_torch_file`` does.

    Args:
        file: at its beginning.
        source: the same bytes.

    Raises:
        CheckpointError: with a line without the file's name.
        OSError: if it cannot be read.
    """
    try:
        if file.read(len(OLD_MAGIC)) == OLD_MAGIC:
            raise CheckpointError(OLD)
        return _from_archive(file, source)
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make pickle or zipfile raise anything
        raise CheckpointError(UNREADABLE) from error


class Bytes:
    """Bytes in memory as a source."""

    def __init__(self, data: bytes) -> None:
        self.path, self.nbytes = "", len(data)
        self._data = data

    def read_into(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self._data[start : start + len(buffer)]


# ---------------------------------------------------------------- archives


def _from_archive(file: BinaryIO, source: LocalFile | Bytes) -> Any:
    with zipfile.ZipFile(file) as archive:
        records = read_records(archive, source.nbytes)
    names = [name for name in records if name.endswith("/data.pkl")]
    if len(names) != 1:
        raise CheckpointError(UNREADABLE)
    folder = names[0].removesuffix("data.pkl")
    order = records.get(f"{folder}byteorder")
    if order is not None and _content(source, order) != b"little":
        raise CheckpointError("was saved by a big-endian machine, which is not read")
    data = _content(source, records[names[0]])

    def storage(persistent_id: Any) -> _Storage:
        key, dtype = _key_and_dtype(persistent_id)
        record = records.get(f"{folder}data/{key}")
        if record is None:
            raise CheckpointError(f"truncated: it has no record {shown(key)}")
        return _Storage(source, record, dtype)

    def convert(value: Any) -> Any:
        if not (isinstance(value, Object) and _TENSOR.fullmatch(value.name)):
            return _other_value(value)
        if id(value) not in tensors:
            tensors[id(value)] = _tensor(value)
        return tensors[id(value)]

    tensors: dict[int, TensorSource] = {}  # by id of the object in the pickle
    value = read_pickle(io.BytesIO(data), is_known, storage, ADVICE)
    return convert_plain(value, len(data), convert)


def read_records(archive: zipfile.ZipFile, file_size: int) -> dict[str, Record]:
    """Return the records of an archive by name."""
    infos = archive.infolist()
    if any(i.compress_type != zipfile.ZIP_STORED or i.flag_bits & 1 for i in infos):
        raise CheckpointError("refused: its records are compressed, as torch.save never does")
    # By section 4.3 of https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
    fields, at = [], archive.start_dir
    for info in infos:
        fields.append(at + 16)
        name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        at += 46 + len(name) + len(info.extra) + len(info.comment)
    file: Any = archive.fp
    records: dict[str, Record] = {}
    end = 0
    for info, field in sorted(zip(infos, fields, strict=True), key=lambda e: e[0].header_offset):
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER.size)
        start = info.header_offset + len(header) + sum(_LOCAL_HEADER.unpack(header))
        sound = info.header_offset >= end and info.filename not in records
        end = start + info.file_size
        if not sound or info.file_size != info.compress_size or end > file_size:
            raise CheckpointError(UNREADABLE)
        records[info.filename] = Record(start, info.file_size, info.CRC, field)
    return records


def _content(source: ByteSource, record: Record) -> bytes:
    data = read_bytes(source, record.start, record.nbytes)
    if record.crc not in (0, zlib.crc32(data)):  # 0 if torch.save did not compute one
        raise CheckpointError(UNREADABLE)
    return data


class Archive:
    """The description of an archive (its pickle and its directory), with which those of others are
    compared that were written alike, by another rank.

    Args:
        path: of a file that ``read_torch_file`` has read.
        rank: pattern that is once in its pickle; the group is the byte with the rank.

    Raises:
        ValueError: if it is no such archive.
    """

    def __init__(self, path: str, rank: re.Pattern[bytes]) -> None:
        with zipfile.ZipFile(path) as archive:
            self._nbytes, directory = os.path.getsize(path), archive.start_dir
            records = read_records(archive, self._nbytes)
        [name] = [name for name in records if name.endswith("/data.pkl")]
        self._pickle, self._rank = records[name], rank
        self._directory = directory, self._nbytes - directory
        self._crcs = {each.start: each.crc_at - directory for each in records.values()}
        self._folder = len(name.partition("/")[0])
        self._fixed = self._divided(LocalFile(path))[0]

    def twin(self, path: str) -> tuple[int, dict[int, int]]:
        """Return the rank in another archive, and the CRC-32s of its records by their offsets;
        raise ValueError if anything else than these and the tensors is not as in this one."""
        file = LocalFile(path)
        fixed, rank, crcs = self._divided(file)
        if fixed != self._fixed or file.nbytes != self._nbytes:
            raise ValueError(path)
        return rank, crcs

    def _divided(self, file: LocalFile) -> tuple[list[bytes], int, dict[int, int]]:
        """Return the description without what may differ; the rank; and the CRC-32s."""
        directory = bytearray(read_bytes(file, *self._directory))
        crcs = {
            start: int.from_bytes(directory[at : at + 4], "little")
            for start, at in self._crcs.items()
        }
        data = _content(file, replace(self._pickle, crc=crcs[self._pickle.start]))
        [match] = self._rank.finditer(data)
        # Torch takes the name of the folder that all records are in, 30 bytes after the CRC-32,
        # from that of the file.
        for at in self._crcs.values():
            directory[at : at + 4] = bytes(4)
            directory[at + 30 : at + 30 + self._folder] = bytes(self._folder)
        parts = [data[: match.start(1)], data[match.end(1) :], bytes(directory)]
        return parts, match[1][0], crcs


# ---------------------------------------------------------------- content


@dataclass(frozen=True)
class _Storage:
    """The memory of tensors: a record of a file, and its dtype (uint8 if it has none)."""

    file: LocalFile | Bytes
    record: Record
    dtype: torch.dtype

    def part(self, start: int, nbytes: int) -> Part:
        """Return bytes of the record from ``start`` on."""
        return Part(self.file, self.record.start + start, nbytes)


def _key_and_dtype(persistent_id: Any) -> tuple[str, torch.dtype]:
    """Return the name and the dtype of the storage ("storage", type, key, device, number of
    elements)."""
    if isinstance(persistent_id, tuple) and len(persistent_id) == 5:
        what, kind, key, _, _ = persistent_id
        name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else ""
        if what == "storage" and isinstance(key, str) and name in _STORAGES:
            return key, _STORAGES[name]
        if isinstance(kind, Global):
            raise CheckpointError(f"it holds a {shown(kind)}; only dense tensors merge")
    raise CheckpointError(UNREADABLE)


def _tensor(value: Object, depth: int = 0) -> TensorSource:
    name, args = value.name, value.args
    if depth > MAX_WRAPPED:
        raise CheckpointError(UNREADABLE)
    if name == "torch._tensor._rebuild_from_type_v2":
        return _tensor(Object(args[0].name, args[2]), depth + 1)
    if name == "torch._utils._rebuild_device_tensor_from_cpu_tensor":
        return _tensor(args[0], depth + 1).cast(_dtype(args[1].name))
    if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
        return _tensor(args[0], depth + 1)
    if name not in _DENSE:
        raise CheckpointError(f"it holds a tensor of {name}; only dense ones merge")
    storage, first, shape, strides, *more = args
    at = _DENSE[name]  # of the optional argument with bits that change the values
    if any((more[at:] or [None])[0] or ()):
        raise CheckpointError("it holds a conjugated or negated view; save a copy of it")
    dtype = _dtype(more[2].name) if name.endswith("_v3") else storage.dtype
    spec = TensorSpec(dtype, checked_shape(shape, "a tensor's shape"))
    if spec.nbytes == 0:
        return TensorSource(spec, Zeros(0))
    return _source(spec, storage, typed(first, int, "an offset"), strides)


def _source(
    spec: TensorSpec, storage: _Storage, first: int, strides: Sequence[int]
) -> TensorSource:
    record, start = storage.record, first * spec.dtype.itemsize
    # Without memory; raises for strides that no tensor has.
    laid_out = torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device="meta")
    if first < 0 or start + laid_out.untyped_storage().nbytes() > record.nbytes:
        raise CheckpointError(
            f"truncated: {spec.dtype} of shape {shown(spec.shape)} is not in the record it names"
        )
    if not laid_out.is_contiguous():
        return _strided(spec, storage, first, strides)
    fills_record = record.crc and spec.nbytes == record.nbytes
    return TensorSource(
        spec,
        storage.part(start, spec.nbytes),
        identity=(storage.file.path, record.start + start, spec),
        checksum=written(record.crc) if fills_record else None,
    )


def _strided(
    spec: TensorSpec, storage: _Storage, first: int, strides: Sequence[int]
) -> TensorSource:
    """Return a tensor that is not contiguous; every read loads its record."""
    name, record = storage.file.path, storage.record
    if spec.nbytes > record.nbytes:  # expanded, with which a small file could state any size
        raise CheckpointError(f"a tensor of shape {shown(spec.shape)} repeats its elements")
    numel = record.nbytes // spec.dtype.itemsize
    flat = TensorSpec(spec.dtype, (numel,))

    def load() -> Tensor:
        whole = TensorSource(flat, storage.part(0, flat.nbytes)).load()
        is_whole = record.crc and flat.nbytes == record.nbytes
        if is_whole and (crc := zlib.crc32(bytes_of(whole))) != record.crc:
            raise CheckpointError(
                f"{name}: is damaged: the checksum of a tensor is {written(crc)}, but was "
                f"{written(record.crc)} when it was saved"
            )
        return whole.as_strided(spec.shape, strides, first)

    data = TensorBytes(spec.nbytes, load, remember=False)
    return TensorSource(spec, data, identity=(name, record.start, spec, first, strides))


def _other_value(value: Any) -> Any:
    if isinstance(value, Global):
        return _dtype(value.name)
    if isinstance(value, Object):
        args = value.args
        if value.name == "torch.Size":
            return torch.Size(checked_shape(args[0], "a torch.Size"))
        if value.name == "torch.device":
            return torch.device(*args)
        if value.name == "builtins.complex":
            return complex(*(typed(each, float, "a part of a complex number") for each in args))
        if value.name in _BYTES:
            return _bytes_of(value)
    raise CheckpointError(f"it holds {shown(value)}, which is no plain value")


def _bytes_of(value: Object) -> bytes:
    """Return the bytes that an object is made of: text and its encoding, or other bytes."""
    first, *encoding = value.args or (b"",)
    if value.name == "builtins.bytearray" and isinstance(first, Object) and first.args:
        first, *encoding = first.args
    if isinstance(first, str) and encoding in (["latin1"], ["latin-1"]):
        return first.encode("latin-1")
    if isinstance(first, bytes) and not encoding:
        return first
    raise CheckpointError(f"it holds {value!r} of {shown(first)}, expected bytes")


def _dtype(name: str) -> torch.dtype:
    return dtype_named(name.removeprefix("torch."))


def is_known(name: str) -> bool:
    """Return whether a class, function or dtype is one that files of tensors name."""
    return bool(_KNOWN.fullmatch(name)) or isinstance(
        getattr(torch, name.removeprefix("torch."), None), torch.dtype
    )


# ---------------------------------------------------------------- writing


def write_skeleton(content: Any, path: str, at: int = 0) -> list[CopyTask]:
    """Write an archive with room for the bytes of its tensors; return what to copy into it: every
    tensor that is not empty.

    Args:
        content: with a ``TensorSource`` in place of each tensor; names of the same object become
            names of one tensor.
        path: of the file to create.
        at: size of the file, if it exists, after which the archive begins.
    """
    sources: list[TensorSource] = []

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, TensorSource):
                return NotImplemented
            sources.append(value)
            return _without_data(value.spec)

    with open(path, "r+b" if at else "w+b") as file:
        file.seek(at)
        # FakeTensorMode would do as well, but to import it takes 2 s.
        # Not by path, as the names of records begin with the file's, which is a temporary one.
        with skip_data():
            torch.save(content, file, pickle_module=SimpleNamespace(__name__="", Pickler=Pickler))
        with zipfile.ZipFile(file) as archive:
            records = read_records(archive, os.path.getsize(path))
        by_number = {name.partition("/data/")[2]: record for name, record in records.items()}
        tasks = []
        for i, source in enumerate(sources):  # torch numbers tensors as it meets them
            record, size = by_number[str(i)], source.spec.nbytes
            end = record.start + record.nbytes
            file.seek(end)  # where the CRC-32 is, too, but not of an empty record
            if record.nbytes != size or (size and file.read(4) != _DESCRIPTOR_MAGIC):
                raise RuntimeError(
                    f"torch.save left {record.nbytes} bytes for {source.spec}, expected {size} "
                    f"and {_DESCRIPTOR_MAGIC!r}: it lays files out in another way than torch 2.9's"
                )
            if size:
                tasks.append(CopyTask(source, path, record.start, (record.crc_at, end + 4)))
    return tasks


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
