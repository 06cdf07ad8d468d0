"""Read and plan the headers of safetensors files: the byte range of each tensor.

``safetensors.safe_open`` does not suffice: it gives no byte ranges, which are needed to read from
an object store, to copy in chunks by several threads, to slice shards and to verify checksums. It
maps files into memory, so that a file that shrinks crashes the process, and its errors do not name
what is wrong with a file.

Invariants: the tensors in a header that was read fill the rest of the file exactly; ``MAX_HEADER``
and the size of the file bound all allocations. ``safetensors.torch.load_file`` loads every file
planned here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    checked_shape,
    dtype_name,
    failing,
    naming,
    raise_if,
    refuse_repeated,
    shown,
    typed,
)
from xla_fsdp.checkpoint.files.checksum import digest
from xla_fsdp.checkpoint.files.tensor_source import (
    ByteSource,
    TensorSpec,
    read_bytes,
)
from xla_fsdp.checkpoint.format.records import ShardMetadata

METADATA_KEY = "xla_fsdp"  # key in the header's metadata of the ``ShardMetadata``, as JSON
RESERVED = "__metadata__"  # key in the header of the metadata, among the names of tensors
OWN_METADATA = ("format", METADATA_KEY)

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its spec, and the offset of its first byte in the file."""

    spec: TensorSpec
    start: int

    @property
    def stop(self) -> int:
        """The offset after its last byte."""
        return self.start + self.spec.nbytes


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Args:
        entries: by name, in the order of their bytes in the file.
        metadata: strings by string.
        data_start: length of the header, which is the offset of the first tensor.
        digest: of the header's bytes, if it was read from a file.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    digest: str | None = None

    @property
    def file_size(self) -> int:
        """Number of bytes of header and tensors."""
        return max((entry.stop for entry in self.entries.values()), default=self.data_start)

    def to_bytes(self) -> bytes:
        """Return the first ``data_start`` bytes of the file."""
        return _encoded(self.metadata, {name: e.spec for name, e in self.entries.items()})


def plan_file(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> Header:
    """Return the header of a file that holds these tensors."""
    problems = [
        f"{name} is {dtype_name(spec.dtype)}, which safetensors does not have; "
        f"write a .pth file instead"
        for name, spec in tensors.items()
        if spec.dtype not in _NAMES
    ]
    if RESERVED in tensors:
        problems.append(
            f"a tensor has the name {RESERVED}, which safetensors has for something else; rename "
            f"it, or write a .pth file instead"
        )
    raise_if(problems)
    # The widest dtype first, so that every tensor is aligned; otherwise in the given order.
    ordered = dict(sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize))
    start = data_start = len(_encoded(dict(metadata), ordered))
    if data_start - 8 > MAX_HEADER:
        raise CheckpointError(
            f"the header would be {data_start:,} bytes long; safetensors allows {MAX_HEADER:,}"
        )
    entries = {}
    for name, spec in ordered.items():
        entries[name] = Entry(spec, start)
        start += spec.nbytes
    return Header(entries, dict(metadata), data_start)


def read_header(source: ByteSource, name: str) -> Header:
    """Read the header of a safetensors file; ``name`` is the file's, for messages."""
    with naming(name):
        data = header_bytes(source)
        with failing("header", "is not UTF-8 text", UnicodeDecodeError):
            text = data[8:].decode()
        lines = _json_dict(text, "header")
        metadata = _metadata(lines.pop(RESERVED, {}))
        entries = {name: _entry(line, name, len(data)) for name, line in lines.items()}
        in_file_order = sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].stop))
        header = Header(dict(in_file_order), metadata, len(data), digest(data))
        _check_filled(header, source.nbytes)
        return header


def shard_metadata_of(header: Header) -> dict[str, Any]:
    """Return the dict for ``ShardMetadata.from_dict`` from a shard file's header."""
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        raise CheckpointError(
            f"not a shard file: its header's metadata has no {METADATA_KEY!r}. Narrow ckpt_prefix "
            f"or ckpt_suffix if it does not belong here."
        )
    return _json_dict(text, f"metadata {METADATA_KEY!r}")


def shard_file_metadata(metadata: ShardMetadata, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata for a shard file's header.

    Raises:
        ValueError: if ``extra`` has one of the format's own keys.
    """
    own = {"format": "pt", METADATA_KEY: json.dumps(metadata.to_dict(), separators=(",", ":"))}
    if both := own.keys() & extra.keys():
        raise ValueError(f"extra metadata may not be called {sorted(both)}: these are the format's")
    return {**own, **extra}


def _encoded(metadata: dict[str, str], specs: Mapping[str, TensorSpec]) -> bytes:
    lines: dict[str, Any] = {RESERVED: metadata} if metadata else {}
    start = 0
    for name, spec in specs.items():
        stop = start + spec.nbytes
        lines[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(lines, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---------------------------------------------------------------- reading


def header_bytes(source: ByteSource) -> bytes:
    """Return the header of a file, with the length before it."""
    if source.nbytes < 8:
        raise CheckpointError("truncated, or not a safetensors file: it is shorter than 8 bytes")
    head = read_bytes(source, 0, 8)
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"not a safetensors file: its header would be {length:,} bytes long, and at most "
            f"{MAX_HEADER:,} are allowed"
        )
    if 8 + length > source.nbytes:
        raise CheckpointError(
            f"truncated: its header ends at byte {8 + length:,} of {source.nbytes:,}"
        )
    return head + read_bytes(source, 8, length)


def _json_dict(text: str, where: str) -> dict[str, Any]:
    # Wrong syntax, numbers of more digits than Python converts, or too deep nesting.
    with failing(where, "is not JSON", (ValueError, RecursionError)), naming(where):
        return typed(json.loads(text, object_pairs_hook=_without_repetition), dict, where)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        refuse_repeated("the name", (name for name, _ in pairs))
    return made


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise CheckpointError("header: __metadata__ is not a dict of strings")
    return value


def _entry(line: Any, name: str, data_start: int) -> Entry:
    where = f"header: {shown(name)}"
    if not isinstance(line, dict) or line.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not a dict of dtype, shape and data_offsets")
    dtype, shape, offsets = line["dtype"], line["shape"], line["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where}: dtype {shown(dtype)} is not known; expected one of {', '.join(DTYPES)}"
        )
    two = isinstance(offsets, list) and len(offsets) == 2
    if not two or not all(type(n) is int and 0 <= n < 1 << 63 for n in offsets):
        raise CheckpointError(f"{where}: data_offsets are {shown(offsets)}, expected two offsets")
    spec = TensorSpec(DTYPES[dtype], checked_shape(shape, f"{where}: shape"))
    if offsets[1] - offsets[0] != spec.nbytes:
        raise CheckpointError(
            f"{where}: data_offsets {offsets} hold {offsets[1] - offsets[0]:,} bytes, but "
            f"{dtype} of shape {shown(shape)} takes {shown(spec.nbytes)}"
        )
    return Entry(spec, data_start + offsets[0])


def _check_filled(header: Header, file_size: int) -> None:
    at = header.data_start
    for name, entry in header.entries.items():
        if entry.start != at:
            what = "overlap" if entry.start < at else "a hole"
            raise CheckpointError(f"header: data_offsets leave {what} before {shown(name)}")
        at = entry.stop
    if at > file_size:
        raise CheckpointError(
            f"truncated: its tensors end at byte {at:,}, but the file has {file_size:,}"
        )
    if at < file_size:
        raise CheckpointError(f"{file_size - at:,} bytes follow its last tensor: not as written")
