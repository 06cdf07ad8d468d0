"""Read and write directories of ``torch.distributed.checkpoint`` (DCP), without a process group.

Written names are those of FSDP2's ``get_state_dict`` under ``model`` and ``optim``, so ``dcp.load``
and ``set_state_dict`` load them on any number of ranks; every name of a tied tensor has its own
copy. A directory is read as the shard of the only rank, to be merged or resharded.

Invariants: loading runs no code: of the pickle ``.metadata`` only DCP's own classes are accepted,
no path leads out of the directory, and values are loaded with ``weights_only``. What is read is
verified: items by the CRC-32s of their archives, the metadata against itself and the items. A
tensor is read on demand, but as a unit; writing takes at most ``ITEM`` bytes per thread (or one row
of dim 0, if that is larger).
"""

from __future__ import annotations

import io
import math
import os
import pickle
import shutil
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from xla_fsdp.checkpoint.copying import (
    ChecksumVerifier,
    Progress,
    default_threads,
    find_damage,
)
from xla_fsdp.checkpoint.errors import CheckpointError, dtype_name, raise_if, shown
from xla_fsdp.checkpoint.format import (
    GroupRecord,
    MemberRecord,
    OptimizerState,
    ParamRecord,
    ShardMetadata,
    StateEntry,
    StateKind,
    json_value,
    state_name,
)
from xla_fsdp.checkpoint.full_tensors import FullCheckpoint
from xla_fsdp.checkpoint.model_files import optimizer_content
from xla_fsdp.checkpoint.outputs import Job, WriteOptions, find_url_problems
from xla_fsdp.checkpoint.reshard import shard_of
from xla_fsdp.checkpoint.shard_files import DCP_METADATA, Shard
from xla_fsdp.checkpoint.storage import EXISTS, AtomicFiles, failing, is_url
from xla_fsdp.checkpoint.tensor_source import (
    LocalFile,
    TensorSource,
    TensorSpec,
    bytes_of,
    convert_tensors,
    read_bytes,
)
from xla_fsdp.distributed.shard_layout import LANES

ITEM = 1 << 26  # bytes of a tensor that a thread has in memory while writing

_END_MAGIC = b"PK\x05\x06"  # of the last 22 bytes of a zip archive without a comment


@dataclass(frozen=True)
class DcpJob(Job):
    """Writes a full checkpoint into a new directory, whose parent exists."""

    full: FullCheckpoint
    directory: str
    verifiers: Sequence[ChecksumVerifier] = field(repr=False)

    @property
    def nbytes(self) -> int:
        states = self.full.optimizer.tensors() if self.full.optimizer else {}
        values = [
            *self.full.model.values(),
            *(each for s in states.values() for each in s.values()),
        ]
        return sum(value.spec.nbytes for value in values if isinstance(value, TensorSource))

    def find_problems(self, *, overwrite: bool) -> list[str]:
        path = self.directory.rstrip(os.sep)
        if is_url(path):
            return find_url_problems(path, overwrite=overwrite)
        parent = os.path.dirname(path) or "."
        if os.path.lexists(path) and not (overwrite and os.path.isdir(path)):
            return [f"{path}: {EXISTS}"]
        if not os.path.isdir(parent):
            return [f"{path}: cannot be written, there is no directory {parent}"]
        if not os.access(parent, os.W_OK | os.X_OK):
            return [f"{path}: cannot be written, {parent} may not be changed"]
        free, needed = shutil.disk_usage(parent).free, self.nbytes
        if needed > free:
            return [f"{path}: {needed:,} bytes are needed, and {free:,} are free"]
        return []

    def describe(self) -> Iterator[str]:
        yield f"would write {self.directory} (about {self.nbytes:,} bytes)"

    def write(self, options: WriteOptions) -> None:
        # Written files are not verified even with ``options.verify``: DCP's have no checksums.
        path = self.directory.rstrip(os.sep)
        with AtomicFiles(overwrite=options.overwrite) as files:
            temporary = files.add(path)
            with failing(path):
                _save(self.full, temporary, options)
            raise_if(find_damage(self.verifiers, unread=options.verify))
            files.commit()


def _save(full: FullCheckpoint, path: str, options: WriteOptions) -> None:
    # By id of the meta tensor that DCP plans with; the tensor is held so that its id stays unique.
    sources: dict[int, tuple[TensorSource, Tensor]] = {}

    def empty(source: TensorSource) -> Tensor:
        tensor = torch.empty(source.shape, dtype=source.dtype, device="meta")
        sources[id(tensor)] = (source, tensor)
        return tensor

    content: dict[str, Any] = {"model": dict(full.model)}
    if full.optimizer is not None:
        content["optim"] = optimizer_content(full.optimizer)
    content = convert_tensors(content, empty)
    writer = dcp.FileSystemWriter(path, thread_count=options.threads or default_threads())
    planner = _SavePlanner(sources, options.progress)
    try:
        with warnings.catch_warnings():
            # DCP warns that there is no process group, and of a deprecation in its own code.
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)
    except dcp.CheckpointException as error:  # a BaseException, which nobody else would handle
        first, _ = next(iter(error.failures.values()))
        if isinstance(first, CheckpointError):
            raise first from error
        raise OSError(str(first)) from error


@dataclass(frozen=True)
class _Rows:
    """Some of a tensor's rows (all of them, for a scalar)."""

    source: TensorSource
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.source.shape[1:]) if self.source.shape else ()

    def load(self) -> Tensor:
        row = math.prod(self.source.shape[1:])
        stop = (self.first + self.count) * row
        spec = TensorSpec(self.source.dtype, self.shape)
        return TensorSource(spec, self.source.elements(self.first * row, stop)).load()


class _SavePlanner(dcp.DefaultSavePlanner):
    """Divides tensors into items of about ``ITEM`` bytes; reads each when DCP writes it."""

    def __init__(
        self, sources: Mapping[int, tuple[TensorSource, Tensor]], progress: Progress
    ) -> None:
        super().__init__()
        self._sources = sources
        self._progress = progress
        self._rows: dict[MetadataIndex, _Rows] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._parts(item)]
        self.plan = SavePlan(items, plan.storage_data, plan.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        rows = self._rows.get(write_item.index)
        if rows is None:
            return super().resolve_data(write_item)
        tensor = rows.load()
        self._progress(tensor.nbytes)
        return tensor

    def _parts(self, item: WriteItem) -> Iterator[WriteItem]:
        known = self._sources.get(id(self.state_dict[item.index.fqn]))
        if known is None:
            yield item
            return
        source, _ = known
        properties = TensorProperties(dtype=source.dtype)
        for rows in _cut(source):
            offsets = (rows.first,) + (0,) * (len(source.shape) - 1) if source.shape else ()
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(rows.shape))
            index = MetadataIndex(item.index.fqn, chunk.offsets)
            self._rows[index] = rows
            data = TensorWriteData(chunk, properties, torch.Size(source.shape))
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _cut(source: TensorSource) -> Iterator[_Rows]:
    if source.spec.nbytes <= ITEM:
        yield _Rows(source, 0, source.shape[0] if source.shape else 1)
        return
    rows = source.shape[0]
    step = max(1, ITEM * rows // source.spec.nbytes)
    for first in range(0, rows, step):
        yield _Rows(source, first, min(step, rows - first))


# ---------------------------------------------------------------- reading


_CLASSES = {  # in DCP's metadata, beside dtypes
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "Path"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
} | {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}


def import_dcp(directory: str) -> Shard:
    """Return a DCP directory as the shard of a single rank.

    Args:
        directory: saved from ``{"model": ..., "optim": ...}`` with FSDP2's ``get_state_dict``, or
            from a model's state dict alone.

    Raises:
        CheckpointError: with every problem found.
    """
    reader = _Reader(directory)
    entries = dict(_entries(reader))
    model = {name: source for (kind, name, _), source in entries.items() if kind == "model"}
    if not model:
        raise CheckpointError(
            f"{directory}: holds no model; expected names that begin with 'model.', found "
            f"{shown(sorted(reader.metadata.state_dict_metadata)[:5])}"
        )
    optimizer = _Optimizer(reader, entries)
    return _shard(directory, model, optimizer)


Name = tuple[str, str, str]  # ("model", name, "") or ("optim", parameter, state)


def _entries(reader: _Reader) -> Iterator[tuple[Name, TensorSource]]:
    for entry, where in reader.metadata.state_dict_metadata.items():
        name = _name(reader.path_of(entry))
        if isinstance(where, TensorStorageMetadata) and name is not None:
            yield name, reader.source(entry, where)


def _name(path: tuple[Any, ...]) -> Name | None:
    if path[0] == "model" and len(path) == 2:
        return "model", str(path[1]), ""
    if path[:2] == ("optim", "state") and len(path) == 4:
        return "optim", str(path[2]), str(path[3])
    if path[0] == "optim" and len(path) == 2 and str(path[1]).startswith("state."):
        # Of flatten_optimizer_state_dict=True: the name of a state has no dots, a parameter's may.
        parameter, _, state = str(path[1]).removeprefix("state.").rpartition(".")
        return "optim", parameter, state
    return None if len(path) > 1 else ("model", str(path[0]), "")


class _Optimizer:
    """The optimizer in a DCP directory: sources of its tensors, and its groups and values."""

    def __init__(self, reader: _Reader, entries: Mapping[Name, TensorSource]) -> None:
        self.tensors = {
            (name, state): source
            for (kind, name, state), source in entries.items()
            if kind == "optim"
        }
        self.groups: dict[int, dict[str, Any]] = defaultdict(dict)
        self.values: dict[str, dict[str, Any]] = defaultdict(dict)
        for entry, where in reader.metadata.state_dict_metadata.items():
            path = reader.path_of(entry)
            if not isinstance(where, BytesStorageMetadata) or path[0] != "optim":
                continue
            if path[1:2] == ("param_groups",) and len(path) == 4:
                self.groups[path[2]][path[3]] = reader.value(entry)
            elif (name := _name(path)) is not None and name[0] == "optim":
                self.values[name[1]][name[2]] = reader.value(entry)

    def state(self, records: Mapping[str, ParamRecord]) -> OptimizerState | None:
        """Return the optimizer's state; tensors of their parameter's shape have kind ``SHARD``.

        Args:
            records: of the parameters, by name.
        """
        if not self.tensors and not self.groups:
            return None
        states: dict[str, dict[str, StateEntry]] = defaultdict(dict)
        for (name, state), source in self.tensors.items():
            record = records.get(name)
            if record is not None and source.shape == record.members[0].shape:
                shard = shard_of(record, [source], 0, 1)
                states[name][state] = StateEntry(StateKind.SHARD, shard)
            else:
                states[name][state] = StateEntry(StateKind.DEVICE, source)
        for name, entries in states.items():
            values = json_value(self.values.get(name, {}), f"optim.{name}")
            entries |= {
                state: StateEntry(StateKind.VALUE, value) for state, value in values.items()
            }
        groups = tuple(self._group(i) for i in sorted(self.groups))
        return OptimizerState(groups or (GroupRecord(tuple(states), {}),), dict(states))

    def _group(self, index: int) -> GroupRecord:
        options = dict(self.groups[index])
        params = options.pop("params", [])
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            raise CheckpointError(f"optim.param_groups.{index}.params is not a list of names")
        return GroupRecord(tuple(params), json_value(options, f"optim.param_groups.{index}"))


def _shard(directory: str, model: Mapping[str, TensorSource], optimizer: _Optimizer) -> Shard:
    trained = {name for name, _ in optimizer.tensors} & model.keys()
    params = trained or {name for name, t in model.items() if t.dtype.is_floating_point}
    records = {
        name: ParamRecord(name, dtype_name(t.dtype), LANES, (MemberRecord(name, t.shape),))
        for name, t in model.items()
        if name in params
    }
    state = optimizer.state(records)
    record = None if state is None else state.record()
    states = {} if state is None else state.tensors()
    return Shard(
        directory,
        {n: shard_of(records[n], [t], 0, 1) if n in params else t for n, t in model.items()},
        ShardMetadata(0, 1, tuple(records.values()), optimizer=record).to_dict(),
        {state_name(name, what): t for name, each in states.items() for what, t in each.items()},
    )


class _Reader:
    """Reads the items of a DCP directory: each is a zip archive of ``torch.save``, whose CRC-32s
    are verified."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.metadata = _checked_metadata(directory)
        self._lock = Lock()
        self._last: tuple[str, Tensor] | None = None

    def path_of(self, entry: str) -> tuple[Any, ...]:
        """Return the nested keys of an entry in the saved state dict."""
        known = self.metadata.planner_data
        path = known.get(entry) if isinstance(known, Mapping) else None
        return path if isinstance(path, tuple) and path else tuple(entry.split(".", 1))

    def source(self, entry: str, where: TensorStorageMetadata) -> TensorSource:
        spec = TensorSpec(where.properties.dtype, tuple(where.size))
        data = _Entry(self, entry, spec, where.chunks)
        return TensorSource(spec, data, identity=(self.directory, entry))

    def tensor(
        self, entry: str, spec: TensorSpec, chunks: Sequence[ChunkStorageMetadata]
    ) -> Tensor:
        """Read a tensor; the last one stays in memory, as it is copied chunk by chunk."""
        with self._lock:
            if self._last is None or self._last[0] != entry:
                self._last = None
                self._last = entry, self._assembled(entry, spec, chunks)
            return self._last[1]

    def value(self, entry: str) -> Any:
        return self._item(MetadataIndex(entry))

    def _assembled(
        self, entry: str, spec: TensorSpec, chunks: Sequence[ChunkStorageMetadata]
    ) -> Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        for chunk in chunks:
            part = self._item(MetadataIndex(entry, chunk.offsets))
            expected = TensorSpec(spec.dtype, tuple(chunk.sizes))
            if not isinstance(part, Tensor) or TensorSpec.of(part) != expected:
                found = TensorSpec.of(part) if isinstance(part, Tensor) else type(part).__name__
                raise CheckpointError(
                    f"{self.directory}: {entry} is {found} in its file, but {expected} in "
                    f"{DCP_METADATA}"
                )
            ends = zip(chunk.offsets, chunk.sizes, strict=True)
            tensor[tuple(slice(start, start + size) for start, size in ends)] = part
        return tensor

    def _item(self, index: MetadataIndex) -> Any:
        info = self.metadata.storage_data[index]
        file = LocalFile(os.path.join(self.directory, info.relative_path))
        try:
            return _loaded(read_bytes(file, info.offset, info.length))
        except Exception as error:  # a damaged file can make torch or zipfile raise anything
            raise CheckpointError(
                f"{self.directory}: {index.fqn} cannot be read: its file is damaged, or not DCP's "
                f"({info.relative_path}, bytes {info.offset:,} to {info.offset + info.length:,})"
            ) from error


def _loaded(item: bytes) -> Any:
    """Load one item without running code; raise if it is not exactly an undamaged archive."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointError("its records are compressed, as torch.save never does")
        if min(record.header_offset for record in records) or item[-22:-18] != _END_MAGIC:
            raise CheckpointError("it does not begin and end with its archive")
        if damaged := archive.testzip():
            raise CheckpointError(f"{damaged} has another CRC-32")
    return torch.load(io.BytesIO(item), map_location="cpu", weights_only=True)


@dataclass(frozen=True)
class _Entry:
    reader: _Reader
    entry: str
    spec: TensorSpec
    chunks: Sequence[ChunkStorageMetadata]

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def read_into(self, start: int, buffer: memoryview) -> None:
        data = bytes_of(self.reader.tensor(self.entry, self.spec, self.chunks))
        buffer[:] = data[start : start + len(buffer)]


class _Unpickler(pickle._Unpickler):
    """Unpickles only the classes of DCP's metadata.

    Based on the unpickler written in Python: the one written in C allocates room for as many
    objects as one instruction of a damaged file states, up to 64 GB.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _CLASSES:
            raise CheckpointError(
                f"refused: it holds a {module}.{name}, and loading that would run code from the "
                f"file"
            )
        return super().find_class(module, name)


def _checked_metadata(directory: str) -> Metadata:
    path = os.path.join(directory, DCP_METADATA)
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
        problems = list(_problems(metadata, directory))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can make Python raise anything
        raise CheckpointError(f"{path}: truncated, or not DCP's metadata") from error
    raise_if([f"{path}: {problem}" for problem in problems])
    return metadata


def _problems(metadata: Any, directory: str) -> Iterator[str]:
    """Yield a line for each contradiction of the metadata to itself or to the files."""
    if not isinstance(metadata, Metadata):
        yield f"holds a {type(metadata).__name__}, expected DCP's Metadata"
        return
    yield from _storage_problems(metadata, directory)
    expected: set[MetadataIndex] = set()
    for name, where in metadata.state_dict_metadata.items():
        if not isinstance(where, TensorStorageMetadata):
            expected.add(MetadataIndex(name))
            continue
        expected |= {MetadataIndex(name, chunk.offsets) for chunk in where.chunks}
        if not _tile(tuple(where.size), where.chunks):
            yield f"the parts of {name} of shape {shown(tuple(where.size))} do not fill it exactly"
    for index in expected ^ set(metadata.storage_data):
        missing = "no item" if index in expected else "an item that belongs to no entry"
        yield f"{shown(index.fqn)} at {index.offset} has {missing} in the files"
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    for name, path in paths.items():
        if isinstance(path, tuple) and ".".join(map(str, path)) != name:
            yield f"the entry {shown(name)} comes from {shown(path)}, which is another name"


def _storage_problems(metadata: Metadata, directory: str) -> Iterator[str]:
    """Yield a line for paths out of the directory, missing bytes, sizes beyond the files', and
    items that overlap."""
    room: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = {}
    items: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if name != os.path.basename(name) or name in ("", ".", ".."):
            yield f"{index.fqn} is in {name!r}, which is not the name of a file in the directory"
            continue
        if getattr(info, "transform_descriptors", None):
            yield f"{index.fqn} was written with {info.transform_descriptors}, which is not read"
        if name not in sizes:
            file = os.path.join(directory, name)
            sizes[name] = os.path.getsize(file) if os.path.isfile(file) else -1
            if sizes[name] < 0:
                yield f"the file {name} is missing"
        if 0 <= sizes[name] < info.offset + info.length or min(info.offset, info.length) < 0:
            yield f"{index.fqn} is not in {name}, which has {sizes[name]:,} bytes: truncated"
        room[index.fqn] += info.length
        items[name].append((info.offset, info.offset + info.length, index.fqn))
    for name, where in metadata.state_dict_metadata.items():
        if isinstance(where, TensorStorageMetadata):
            nbytes = TensorSpec(where.properties.dtype, tuple(where.size)).nbytes
            if nbytes > room[name] or min(where.size, default=0) < 0:
                yield f"{name} of shape {shown(tuple(where.size))} is larger than what is saved"
    for name, ranges in items.items():
        for (_, stop, first), (start, _, second) in pairwise(sorted(ranges)):
            if start < stop:
                yield f"{first} and {second} have the same bytes of {name}"


def _tile(shape: tuple[int, ...], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether the chunks fill a tensor, and no two overlap."""
    boxes = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
    for start, size in boxes:
        if not len(start) == len(size) == len(shape) or min((*start, *size), default=0) < 0:
            return False
        if any(a + n > limit for a, n, limit in zip(start, size, shape, strict=True)):
            return False
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    full = [(start, size) for start, size in boxes if math.prod(size)]
    return not any(_overlap(box, other) for i, box in enumerate(full) for other in _near(full, i))


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def _near(boxes: Sequence[Box], index: int) -> Iterator[Box]:
    """Yield the boxes after this one, in order of their offsets, that begin within its dim 0."""
    start, size = boxes[index]
    for other in boxes[index + 1 :]:
        if start and other[0][0] >= start[0] + size[0]:
            return
        yield other


def _overlap(first: Box, second: Box) -> bool:
    dims = zip(*first, *second, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in dims)
