"""Read and write directories of ``torch.distributed.checkpoint`` (DCP), without a process group.

Written names are those of FSDP2's ``get_state_dict`` under ``model`` and ``optim``, so ``dcp.load``
and ``set_state_dict`` load them on any number of ranks; every name of a tied tensor has its own
copy. A directory is read as the shard of the only rank, to be merged or resharded.

Invariants: loading runs no code: of the pickle ``.metadata`` only DCP's own classes are accepted,
and none of them is called; no path leads out of the directory. What is read is
verified: items by the CRC-32s of their archives, the metadata against itself and the items. A
tensor is read on demand, but as a unit.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import secrets
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from xla_fsdp.checkpoint.convert.reshard import shard_of
from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    checked_shape,
    dtype_name,
    dtype_named,
    item,
    listed,
    prefixed,
    raise_if,
    shown,
    typed,
)
from xla_fsdp.checkpoint.files.copying import CopyTask
from xla_fsdp.checkpoint.files.outputs import Output
from xla_fsdp.checkpoint.files.pickle_values import Global, Keys, Object, read_pickle
from xla_fsdp.checkpoint.files.tensor_source import (
    LocalFile,
    TensorBytes,
    TensorSource,
    TensorSpec,
    convert_tensors,
    read_bytes,
    read_small_file,
)
from xla_fsdp.checkpoint.files.torch_file import Bytes, read_records, read_torch, write_skeleton
from xla_fsdp.checkpoint.format.codec import json_value
from xla_fsdp.checkpoint.format.records import (
    GroupRecord,
    MemberRecord,
    OptimizerState,
    ParamRecord,
    ShardMetadata,
    StateEntry,
    StateKind,
    state_name,
)
from xla_fsdp.checkpoint.format.shard_files import DCP_METADATA, Shard
from xla_fsdp.checkpoint.steps.step_directory import is_step_file
from xla_fsdp.distributed.shard_layout import LANES

ITEM = 1 << 26  # bytes of a part of a tensor, or one row of dim 0, if that is larger

_PRIME = (1 << 127) - 1
_END_MAGIC = b"PK\x05\x06"  # of the last 22 bytes of a zip archive without a comment


@dataclass(frozen=True)
class DcpOutput(Output):
    """A directory, whose parent exists.

    Args:
        path: of the directory, without a slash at its end.
        content: nested dicts and lists, with a ``TensorSource`` in place of each tensor.
        limit: bytes of a file of tensors, after which the next one begins.
    """

    path: str
    content: Mapping[str, Any]
    limit: int
    is_directory = True

    @property
    def nbytes(self) -> int:
        return sum(v.spec.nbytes for _, v in self._leaves() if isinstance(v, TensorSource))

    def irreplaceable(self) -> list[str]:
        if not os.path.isdir(self.path):
            return []
        with os.scandir(self.path) as entries:
            strange = sorted(
                each.name
                for each in entries
                if not each.is_file(follow_symlinks=False) or is_step_file(each.name)
            )
        return [
            f"{self.path}: holds {name}, which is no regular file or belongs to a run, and the "
            f"whole directory would be replaced; choose another save_path"
            for name in strange[:1]
        ]

    def begin(self, temporary: str) -> list[CopyTask]:
        os.makedirs(temporary, exist_ok=True)
        tasks: list[CopyTask] = []
        metadata = Metadata({}, {}, {}, version=CURRENT_DCP_VERSION)
        number = at = 0
        for path, value in self._leaves():
            name = ".".join(map(str, path))
            if name in metadata.planner_data:
                raise CheckpointError(f"{self.path}: two of its values get the name {name}")
            metadata.planner_data[name] = path
            metadata.state_dict_metadata[name], parts = _described(name, value)
            for index, part in parts:
                if at >= self.limit:
                    number, at = number + 1, 0
                file = f"__0_{number}.distcp"
                tasks += write_skeleton(part, os.path.join(temporary, file), at)
                start, at = at, os.path.getsize(os.path.join(temporary, file))
                metadata.storage_data[index] = _StorageInfo(file, start, at - start)
        with open(os.path.join(temporary, DCP_METADATA), "wb") as out:
            pickle.dump(metadata, out)
        return tasks

    def _leaves(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Return every tensor and value with its keys, as DCP divides nested dicts and lists."""
        leaves: list[tuple[tuple[Any, ...], Any]] = []
        traverse_state_dict(
            dict(self.content),
            lambda path, value: leaves.append((path, value)),
            lambda value: isinstance(value, TensorSource),
        )
        return leaves


def _described(name: str, value: Any) -> tuple[Any, list[tuple[MetadataIndex, Any]]]:
    """Return DCP's description of an entry, and its items: parts of a tensor of about ``ITEM``
    bytes, as whoever reads one has it in memory."""
    if not isinstance(value, TensorSource):
        return BytesStorageMetadata(), [(MetadataIndex(name), value)]
    entry = TensorStorageMetadata(TensorProperties(value.dtype), torch.Size(value.shape), [])
    rows, *more = value.shape or (1,)
    row = math.prod(more)
    step = max(1, rows if value.spec.nbytes <= ITEM else ITEM * rows // value.spec.nbytes)
    items: list[tuple[MetadataIndex, Any]] = []
    for first in range(0, max(rows, 1), step):
        count = min(step, rows - first)
        offsets = (first, *[0] * len(more))[: len(value.shape)]
        shape = (count, *more)[: len(value.shape)]
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
        data = value.elements(first * row, (first + count) * row)
        part = TensorSource(TensorSpec(value.dtype, shape), data)
        items.append((MetadataIndex(name, offsets, len(items)), part))
    return entry, items


# ---------------------------------------------------------------- reading


_METADATA = "torch.distributed.checkpoint.metadata."
_KNOWN = {  # in DCP's metadata, beside dtypes
    "torch.Size",
    "torch.serialization._get_layout",
    *(
        f"pathlib.{inside}{pure}{system}Path"  # where Python 3.13 and the others have them
        for inside in ("", "_local.")
        for pure in ("", "Pure")
        for system in ("", "Posix", "Windows")
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    _METADATA + "BytesStorageMetadata",
    _METADATA + "ChunkStorageMetadata",
    _METADATA + "Metadata",
    _METADATA + "MetadataIndex",
    _METADATA + "StorageMeta",
    _METADATA + "TensorProperties",
    _METADATA + "TensorStorageMetadata",
    _METADATA + "_MEM_FORMAT_ENCODING",
}
MAX_METADATA = 1 << 31  # bytes of ``.metadata``
MAX_PATH = 64  # nested keys of an entry

Index = tuple[str, tuple[int, ...] | None]
"""Name of an entry and, of a tensor, the offsets of one of its parts."""


class _Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Tensor(NamedTuple):
    """A tensor, and the parts in which it is saved."""

    spec: TensorSpec
    chunks: tuple[_Box, ...]


class _Item(NamedTuple):
    """Where a part of a tensor, or a value, is: bytes of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Metadata:
    """The content of ``.metadata``.

    Args:
        tensors: by name.
        values: names of all else.
        items: of every part of every tensor, and of every value.
        paths: keys of each entry in the nested dicts that were saved, by name.
    """

    tensors: dict[str, _Tensor]
    values: set[str]
    items: dict[Index, _Item]
    paths: dict[str, tuple[Any, ...]]


def import_dcp(directory: str) -> Shard:
    """Return a DCP directory as the shard of a single rank.

    Args:
        directory: saved from ``{"model": ..., "optim": ...}`` with FSDP2's ``get_state_dict``, or
            from a model's state dict alone.

    Raises:
        CheckpointError: with every problem found.
    """
    try:
        return _imported(directory)
    except CheckpointError as error:
        raise prefixed(error, directory) from error


def _imported(directory: str) -> Shard:
    reader = _Reader(directory)
    entries = dict(_entries(reader))
    of_optimizer, beside = reader, _optimizer_beside(directory)
    if beside is not None and not any(kind == OPTIM for kind, _, _ in entries):
        of_optimizer = _Reader(beside)
        entries |= {n: t for n, t in _entries(of_optimizer) if n[0] == OPTIM}
    model = {name: source for (kind, name, _), source in entries.items() if kind == "model"}
    if not model:
        raise CheckpointError(
            f"holds no model; expected names that begin with 'model.' (of accelerate, give the "
            f"directory pytorch_model_fsdp_0, not optimizer_0), found "
            f"{listed(map(shown, sorted(reader.metadata.tensors)), len(reader.metadata.tensors))}"
        )
    shard = _shard(directory, model, _Optimizer(of_optimizer, entries))
    return replace(shard, left_behind=_left_behind({reader, of_optimizer}))


def _optimizer_beside(directory: str) -> str | None:
    """Return the directory that accelerate writes for the optimizer beside that of a model."""
    above, name = os.path.split(directory.rstrip(os.sep))
    match = _ACCELERATE.fullmatch(name)
    beside = os.path.join(above, f"optimizer_{match[1]}") if match else ""
    return beside if os.path.exists(os.path.join(beside, DCP_METADATA)) else None


_ACCELERATE = re.compile(r"pytorch_model_fsdp_(\d+)")


def _left_behind(readers: Iterable[_Reader]) -> tuple[str, ...]:
    """Return all entries that are not read; those beside model and optimizer by their first key."""
    left = []
    for reader in readers:
        for entry in (*reader.metadata.tensors, *reader.metadata.values):
            path = reader.path_of(entry)
            is_model = path[0] == MODEL
            if (is_model and entry in reader.metadata.values) or not (_name(path) or _option(path)):
                left.append(entry if is_model or path[0] == OPTIM else path[0])
    return tuple(shown(key)[1:-1] for key in dict.fromkeys(left))


MODEL, OPTIM, APP = "model", "optim", "app"
NAMES = {  # of others: of Lightning, and of torchtitan and accelerate
    "state_dict": MODEL,
    "optimizer": OPTIM,
    "optimizer_0": OPTIM,
}

Name = tuple[str, str, str]  # ("model", name, "") or ("optim", parameter, state)


def _entries(reader: _Reader) -> Iterator[tuple[Name, TensorSource]]:
    found: dict[Name, str] = {}
    for entry, tensor in reader.metadata.tensors.items():
        name = _name(reader.path_of(entry))
        if name is not None:
            if (other := found.setdefault(name, entry)) != entry:
                raise CheckpointError(f"{shown(entry)} and {shown(other)} are one tensor's names")
            yield name, reader.source(entry, tensor)


def _inner(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the keys of an entry as those of ``{"model": ..., "optim": ...}``: torch's tutorial
    has another dict around these, and others have other names."""
    if path[0] == APP and len(path) > 1:
        path = path[1:]
    return (NAMES.get(path[0], path[0]), *path[1:]) if len(path) > 1 else path


def _name(path: tuple[Any, ...]) -> Name | None:
    if path[0] == MODEL and len(path) == 2:
        return MODEL, str(path[1]), ""
    if (of := _of_optimizer(path, "state")) is not None:
        return OPTIM, str(of[0]), str(of[1])
    return None


def _option(path: tuple[Any, ...]) -> tuple[Any, str] | None:
    """Return the number of a group, or of flatten_optimizer_state_dict=True the name of a
    parameter, and an option of it, if that is what an entry is."""
    return _of_optimizer(path, "param_groups")


def _of_optimizer(path: tuple[Any, ...], what: str) -> tuple[Any, str] | None:
    if path[:2] == (OPTIM, what) and len(path) == 4:
        return path[2], path[3]
    if path[0] == OPTIM and len(path) == 2 and str(path[1]).startswith(f"{what}."):
        # The name of a state or an option has no dots, a parameter's may.
        name, _, last = str(path[1]).removeprefix(f"{what}.").rpartition(".")
        return name, last
    return None


class _Optimizer:
    """The optimizer in a DCP directory: sources of its tensors, and its groups and values."""

    def __init__(self, reader: _Reader, entries: Mapping[Name, TensorSource]) -> None:
        self.tensors = {
            (name, state): source
            for (kind, name, state), source in entries.items()
            if kind == OPTIM
        }
        self.groups: dict[int, dict[str, Any]] = defaultdict(dict)
        self.values: dict[str, dict[str, Any]] = defaultdict(dict)
        self._options: dict[str, dict[str, Any]] = defaultdict(dict)
        for entry in (*reader.metadata.tensors, *reader.metadata.values):
            path = reader.path_of(entry)
            if (option := _option(path)) is not None:
                typed(option[0], int if len(path) == 4 else str, f"the group in {shown(entry)}")
                of = self.groups if len(path) == 4 else self._options
                of[option[0]][option[1]] = reader.value(entry)
            elif (name := _name(path)) and name[0] == OPTIM and entry in reader.metadata.values:
                self.values[name[1]][name[2]] = reader.value(entry)
        for parameter, options in self._options.items():  # those of equal options were one group
            own = {**options, "params": 0}
            alike = (g for g in self.groups.values() if {**g, "params": 0} == own)
            group = next(alike, None) or {**options, "params": []}
            if not group["params"]:
                self.groups[len(self.groups)] = group
            group["params"].append(parameter)

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
            raise CheckpointError(
                f"optim.param_groups.{index}.params holds no names; save get_optimizer_state_dict("
                f"model, optimizer) of torch.distributed.checkpoint.state_dict, or the model alone"
            )
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
        verified=True,
    )


class _Reader:
    """Reads the items of a DCP directory: each is a zip archive of ``torch.save``, whose CRC-32s
    are verified."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.metadata = _checked_metadata(directory)
        self._paths = {
            e: _inner(self._keys(e)) for e in (*self.metadata.tensors, *self.metadata.values)
        }
        if not any(path[0] == MODEL and len(path) > 1 for path in self._paths.values()):
            # A model by itself, with other things beside its tensors.
            self._paths = {e: p if len(p) > 1 else (MODEL, *p) for e, p in self._paths.items()}
        self._lock = Lock()
        self._last: tuple[str, Tensor] | None = None

    def path_of(self, entry: str) -> tuple[Any, ...]:
        """Return the nested keys of an entry, as in ``{"model": ..., "optim": ...}``."""
        return self._paths[entry]

    def _keys(self, entry: str) -> tuple[Any, ...]:
        return self.metadata.paths.get(entry) or tuple(entry.split(".", 1))

    def source(self, entry: str, tensor: _Tensor) -> TensorSource:
        make = partial(self.tensor, entry, tensor)  # which verifies what it reads
        data = TensorBytes(tensor.spec.nbytes, make, remember=False)
        return TensorSource(tensor.spec, data, identity=(self.directory, entry))

    def tensor(self, entry: str, tensor: _Tensor) -> Tensor:
        """Read a tensor; the last one stays in memory, as it is copied chunk by chunk."""
        with self._lock:
            if self._last is None or self._last[0] != entry:
                self._last = None
                self._last = entry, self._assembled(entry, tensor)
            return self._last[1]

    def value(self, entry: str) -> Any:
        """Return a value, with numbers in place of tensors of one element, as a learning rate may
        be one."""
        tensor = self.metadata.tensors.get(entry)
        found = self._item((entry, None)) if tensor is None else self.source(entry, tensor)
        return convert_tensors(found, lambda s: s.load().item() if math.prod(s.shape) == 1 else s)

    def part(self, entry: str, tensor: _Tensor, chunk: _Box) -> TensorSource:
        """Return a part of a tensor, in memory."""
        part = self._item((entry, chunk.offsets))
        expected = TensorSpec(tensor.spec.dtype, chunk.sizes)
        if not isinstance(part, TensorSource) or part.spec != expected:
            found = part.spec if isinstance(part, TensorSource) else type(part).__name__
            raise CheckpointError(
                f"{self.directory}: {entry} is {found} in its file, but {expected} in "
                f"{DCP_METADATA}"
            )
        return part

    def _assembled(self, entry: str, tensor: _Tensor) -> Tensor:
        whole = torch.empty(tensor.spec.shape, dtype=tensor.spec.dtype)
        for chunk in tensor.chunks:
            ends = zip(chunk.offsets, chunk.sizes, strict=True)
            at = tuple(slice(start, start + size) for start, size in ends)
            whole[at] = self.part(entry, tensor, chunk).load()
        return whole

    def _item(self, index: Index) -> Any:
        item = self.metadata.items[index]
        file = LocalFile(os.path.join(self.directory, item.file))
        try:
            return _loaded(read_bytes(file, item.offset, item.length))
        except MemoryError:
            raise
        except Exception as error:  # a damaged file can make zipfile raise anything
            raise CheckpointError(
                f"{self.directory}: {index[0]} cannot be read: its file is damaged, or not DCP's "
                f"({item.file}, bytes {item.offset:,} to {item.offset + item.length:,}: {error})"
            ) from error


def _loaded(item: bytes) -> Any:
    """Return the content of one item; raise if it is not exactly an undamaged archive."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        read_records(archive, len(item))  # so that no two overlap, before all are read
        if min(info.header_offset for info in archive.infolist()) or item[-22:-18] != _END_MAGIC:
            raise CheckpointError("it does not begin and end with its archive")
        if damaged := archive.testzip():
            raise CheckpointError(f"{damaged} has another CRC-32")
    return read_torch(io.BytesIO(item), Bytes(item))


# ---------------------------------------------------------------- .metadata


def _checked_metadata(directory: str) -> _Metadata:
    path = os.path.join(directory, DCP_METADATA)
    try:
        data = io.BytesIO(read_small_file(path, MAX_METADATA))
        metadata = _metadata(read_pickle(data, lambda name: name in _KNOWN or _is_dtype(name)))
        raise_if(list(_problems(metadata, directory)))
    except CheckpointError as error:
        raise prefixed(error, path) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can make Python raise anything
        raise CheckpointError(f"{path}: truncated, or not DCP's metadata") from error
    return metadata


def _is_dtype(name: str) -> bool:
    module, _, dtype = name.rpartition(".")
    return module == "torch" and isinstance(getattr(torch, dtype, None), torch.dtype)


def _metadata(value: Any) -> _Metadata:
    """Return what the pickle of a ``Metadata`` states; raise ``CheckpointError`` if it is none."""
    if not isinstance(value, Object) or value.name != f"{_METADATA}Metadata":
        found = repr(value) if isinstance(value, Object) else f"a {type(value).__name__}"
        raise CheckpointError(f"holds {found}, expected DCP's Metadata")
    content = _state(value)
    items: dict[Index, _Item] = {}
    keys = Keys()
    for index, info in item(content, "storage_data", dict, "").items():
        key = _index(index)
        keys.count(key, hash(key))
        if key in items:
            raise CheckpointError(f"{shown(key[0])} at {key[1]} has two items")
        items[key] = _item(info, f"the item of {shown(key[0])}")
    tensors: dict[str, _Tensor] = {}
    values: set[str] = set()
    room = len(items)  # as lists of parts may be shared
    for name, entry in item(content, "state_dict_metadata", dict, "").items():
        where = f"the entry {shown(typed(name, str, 'a name'))}"
        if isinstance(entry, Object) and entry.name == f"{_METADATA}BytesStorageMetadata":
            values.add(name)
            continue
        fields = _state(entry)
        chunks = item(fields, "chunks", list, where)
        room -= len(chunks)
        if room < 0:
            raise CheckpointError(f"its tensors have more parts than the {len(items):,} items")
        spec = TensorSpec(_dtype(fields["properties"]), _shape(fields["size"], where))
        tensors[name] = _Tensor(spec, tuple(_box(chunk, where) for chunk in chunks))
        for chunk in tensors[name].chunks:
            keys.count((name, chunk.offsets), hash((name, chunk.offsets)))
    paths = dict(_paths(item(content, "planner_data", object, ""), {*tensors, *values}))
    return _Metadata(tensors, values, items, paths)


def _state(value: Any) -> dict[str, Any]:
    """Return the attributes of an object."""
    return typed(typed(value, Object, "an entry").state, dict, f"the content of {value!r}")


def _index(value: Any) -> Index:
    fields = _state(value)
    name, offset = item(fields, "fqn", str, "an item"), fields.get("offset")
    return name, None if offset is None else _shape(offset, f"the offset of {shown(name)}")


def _item(value: Any, where: str) -> _Item:
    fields = _state(value)
    if fields.get("transform_descriptors"):
        raise CheckpointError(
            f"{where} was written with {shown(fields['transform_descriptors'])}, which is not read"
        )
    return _Item(
        item(fields, "relative_path", str, where),
        item(fields, "offset", int, where),
        item(fields, "length", int, where),
    )


def _box(value: Any, where: str) -> _Box:
    fields = _state(value)
    return _Box(_shape(fields["offsets"], where), _shape(fields["sizes"], where))


def _shape(value: Any, where: str) -> tuple[int, ...]:
    if isinstance(value, Object) and value.name == "torch.Size" and value.args:
        value = value.args[0]
    return checked_shape(value, where)


def _dtype(properties: Any) -> torch.dtype:
    # Its ``__getstate__`` returns a tuple that begins with the dtype.
    dtype = typed(typed(properties, Object, "properties").state, tuple, "properties")[0]
    return dtype_named(typed(dtype, Global, "a dtype").name.removeprefix("torch."))


def _paths(planner_data: Any, names: Collection[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield every name of an entry and its keys; nothing if a planner without nested dicts wrote
    them."""
    if planner_data is None:
        return
    paths = typed(planner_data, dict, "planner_data")
    if missing := [name for name in names if name not in paths]:
        raise CheckpointError(f"planner_data lacks {listed(map(shown, missing), len(missing))}")
    for name, path in paths.items():
        keys = path[:MAX_PATH] if isinstance(path, tuple) else ()
        sound = keys and len(keys) == len(path) and all(type(key) in (str, int) for key in keys)
        # Lengths first: a long key may be in many paths.
        lengths = (len(key) if isinstance(key, str) else len(str(key)) for key in keys)
        sound = sound and isinstance(name, str) and sum(lengths) + len(path) - 1 == len(name)
        if not sound or ".".join(map(str, path)) != name:
            raise CheckpointError(
                f"the entry {shown(name)} comes from {shown(path)}, which is another name"
            )
        yield name, path


def _problems(metadata: _Metadata, directory: str) -> Iterator[str]:
    """Yield a line for each contradiction of the metadata to itself or to the files."""
    yield from _storage_problems(metadata, directory)
    expected: set[Index] = {(name, None) for name in metadata.values}
    for name, tensor in metadata.tensors.items():
        expected |= {(name, chunk.offsets) for chunk in tensor.chunks}
        if not _tile(tensor.spec.shape, tensor.chunks):
            yield f"the parts of {name} of shape {shown(tensor.spec.shape)} do not fill it exactly"
    for index in expected ^ metadata.items.keys():
        missing = "no item" if index in expected else "an item that belongs to no entry"
        yield f"{shown(index[0])} at {index[1]} has {missing} in the files"


def _storage_problems(metadata: _Metadata, directory: str) -> Iterator[str]:
    """Yield a line for paths out of the directory, missing bytes, sizes beyond the files', and
    items that overlap."""
    room: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = {}
    items: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for (entry, _), (name, offset, length) in metadata.items.items():
        if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            yield f"{entry} is in {shown(name)}, which is not the name of a file in the directory"
            continue
        if name not in sizes:
            file = os.path.join(directory, name)
            sizes[name] = os.path.getsize(file) if os.path.isfile(file) else -1
            if sizes[name] < 0:
                yield f"the file {name} is missing"
        if 0 <= sizes[name] < offset + length or min(offset, length) < 0:
            yield f"{entry} is not in {name}, which has {sizes[name]:,} bytes: truncated"
        room[entry] += length
        items[name].append((offset, offset + length, entry))
    for name, tensor in metadata.tensors.items():
        if tensor.spec.nbytes > room[name]:
            yield f"{name} of shape {shown(tensor.spec.shape)} is larger than what is saved"
    for name, ranges in items.items():
        for (_, stop, first), (start, _, second) in pairwise(sorted(ranges)):
            if start < stop:
                yield f"{first} and {second} have the same bytes of {name}"


def _tile(shape: tuple[int, ...], chunks: Sequence[_Box]) -> bool:
    """Return whether the chunks fill a tensor, and no two overlap.

    The sum of x^i y^j ... over all elements (i, j, ...) of the chunks is that of the tensor as a
    polynomial if, and only if, they do. It is compared at one random point modulo a prime, so that
    the time is linear in the number of chunks; two different ones are equal there once in 2^60.
    """
    for start, size in chunks:
        if not len(start) == len(size) == len(shape):
            return False
        if any(a + n > limit for a, n, limit in zip(start, size, shape, strict=True)):
            return False
    point = [secrets.randbelow(_PRIME - 2) + 2 for _ in shape]
    power = lru_cache(partial(pow, mod=_PRIME))

    def total(box: _Box) -> int:
        """Return the sum over a box, times (x - 1) (y - 1) ..."""
        product = 1
        for x, start, size in zip(point, *box, strict=True):
            product = product * (power(x, start + size) - power(x, start)) % _PRIME
        return product

    return sum(map(total, chunks)) % _PRIME == total(_Box((0,) * len(shape), shape))
