"""Read directories of ``torch.distributed.checkpoint`` (DCP), without a process group: as the shard
of the only rank, to be merged or resharded.

Invariants: loading runs no code: of the pickle ``.metadata`` only DCP's own classes are accepted,
and none of them is called; no path leads out of the directory. What is read is
verified: items by the CRC-32s of their archives, the metadata against itself and the items. A
tensor is read on demand, but as a unit.
"""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xla_fsdp.checkpoint.convert.reshard import is_number, shard_of
from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    checked_shape,
    dtype_name,
    dtype_named,
    item,
    listed,
    naming,
    raise_if,
    shown,
    typed,
)
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
from xla_fsdp.checkpoint.files.torch_file import (
    Bytes,
    is_known,
    read_records,
    read_torch,
)
from xla_fsdp.checkpoint.format.codec import json_value
from xla_fsdp.checkpoint.format.records import (
    UNSHARDED,
    GroupRecord,
    MemberRecord,
    OptimizerState,
    ParamRecord,
    ShardMetadata,
    StateEntry,
    StateKind,
    model_name,
)
from xla_fsdp.checkpoint.format.shard_files import DCP_METADATA, Shard
from xla_fsdp.distributed.shard_layout import LANES

_END_MAGIC = b"PK\x05\x06"  # of the last 22 bytes of a zip archive without a comment


_METADATA = "torch.distributed.checkpoint.metadata."
_KNOWN = re.compile(  # beside what tensors are made of; Python 3.13 has paths in _local
    r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path"
    r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo|metadata\.\w+)"
)
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
    """Return a DCP directory, saved from ``{"model": ..., "optim": ...}`` with FSDP2's
    ``get_state_dict`` or from a model's state dict alone, as the shard of a single rank."""
    with naming(directory):
        reader = of_optimizer = _Reader(directory)
        entries, beside = reader.sources(), _optimizer_beside(directory)
        if beside is not None and not any(path[0] == OPTIM for path in entries):
            of_optimizer = _Reader(beside)
            entries |= {p: t for p, t in of_optimizer.sources().items() if p[0] == OPTIM}
        model = {path[1]: source for path, source in entries.items() if path[0] == MODEL}
        if not model:
            names = sorted(reader.metadata.tensors)
            raise CheckpointError(
                f"holds no model; expected names that begin with 'model.' (of accelerate, give "
                f"the directory pytorch_model_fsdp_0, not optimizer_0), found "
                f"{listed(map(shown, names), len(names))}"
            )
        left = [name for each in {reader, of_optimizer} for name in each.left_behind()]
        states = {path[2:]: t for path, t in entries.items() if path[0] == OPTIM}
        shard = _shard(directory, model, of_optimizer, states)
        return replace(shard, left_behind=tuple(dict.fromkeys(left)))


def _optimizer_beside(directory: str) -> str | None:
    """Return the directory that accelerate writes for the optimizer beside that of a model."""
    above, name = os.path.split(directory.rstrip(os.sep))
    match = re.fullmatch(r"pytorch_model_fsdp_(\d+)", name)
    beside = os.path.join(above, f"optimizer_{match[1]}") if match else ""
    return beside if os.path.exists(os.path.join(beside, DCP_METADATA)) else None


MODEL, OPTIM, APP = "model", "optim", "app"
STATE, GROUPS = (OPTIM, "state"), (OPTIM, "param_groups")
NAMES = {  # of others: of Lightning, and of torchtitan and accelerate
    "state_dict": MODEL,
    "optimizer": OPTIM,
    "optimizer_0": OPTIM,
}

Path = tuple[Any, ...]
"""Keys of an entry in nested dicts: ``("model", name)``, ``("optim", "state", parameter, state)``,
or ``("optim", "param_groups", index of a group or name of a parameter, option)``."""


def _path(keys: Path) -> Path:
    """Return the keys of an entry as those of ``{"model": ..., "optim": ...}``: torch's tutorial
    has another dict around these, others have other names, and an optimizer may be flat."""
    if keys[0] == APP and len(keys) > 1:
        keys = keys[1:]
    if len(keys) == 1:
        return keys
    keys = (NAMES.get(keys[0], keys[0]), *keys[1:])
    if keys[0] == OPTIM and len(keys) == 2:
        what, _, of = str(keys[1]).partition(".")
        # The name of a state or an option has no dots, a parameter's may.
        name, _, last = of.rpartition(".")
        keys = (OPTIM, what, name, last)
    return keys if keys[:2] == GROUPS else tuple(map(str, keys))


def _is_read(path: Path, is_tensor: bool) -> bool:
    of_optimizer = path[:2] in (STATE, GROUPS) and len(path) == 4
    return of_optimizer or (path[0] == MODEL and len(path) == 2 and is_tensor)


def _shard(
    directory: str,
    model: Mapping[str, TensorSource],
    reader: _Reader,
    states: Mapping[Path, TensorSource],
) -> Shard:
    """Return the shard of a model, and of the optimizer of ``reader`` with tensors ``states``."""
    trained = {name for name, _ in states} & model.keys()
    params = trained or {name for name, t in model.items() if t.dtype.is_floating_point}
    records = {
        name: ParamRecord(name, dtype_name(t.dtype), LANES, (MemberRecord(name, t.shape),))
        for name, t in model.items()
        if name in params
    }
    state = _optimizer_state(reader, states, records)
    record = None if state is None else state.record()
    content = {
        model_name(n): shard_of(records[n], [t], 0, 1) if n in params else t
        for n, t in model.items()
    }
    content |= {} if state is None else state.named_tensors()
    metadata = ShardMetadata(0, 1, tuple(records.values()), optimizer=record).to_dict()
    return Shard(directory, content, metadata, verified=True)


def _optimizer_state(
    reader: _Reader, tensors: Mapping[Path, TensorSource], records: Mapping[str, ParamRecord]
) -> OptimizerState | None:
    """Return the optimizer's state: tensors of their parameter's shape have kind ``SHARD``, of
    others that are no numbers the names begin with ``UNSHARDED``."""
    shapes = {name: record.members[0].shape for name, record in records.items()}
    # A scalar parameter has a state of its shape, and a count of steps of that shape, too.
    of_all = {"step"} | {
        state
        for (name, state), source in tensors.items()
        if is_number(source.spec) and source.shape != shapes.get(name)
    }
    states: dict[str, dict[str, StateEntry]] = defaultdict(dict)
    for (name, state), source in tensors.items():
        if is_number(source.spec) and (state in of_all or name not in shapes):
            states[name][state] = StateEntry(StateKind.DEVICE, source)
        elif source.shape == shapes.get(name):
            shard = shard_of(records[name], [source], 0, 1)
            states[name][state] = StateEntry(StateKind.SHARD, shard)
        else:
            states[name][UNSHARDED + state] = StateEntry(StateKind.DEVICE, source)
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    of_parameters: dict[str, dict[str, Any]] = defaultdict(dict)
    for entry, path in reader.paths.items():
        if path[:2] == GROUPS and len(path) == 4:
            of: Any = of_parameters if isinstance(path[2], str) else groups
            of[path[2]][path[3]] = reader.value(entry)
        elif path[:2] == STATE and len(path) == 4 and entry in reader.metadata.values:
            value = json_value(reader.value(entry), f"optim.{path[2]}.{path[3]}")
            states[path[2]][path[3]] = StateEntry(StateKind.VALUE, value)
    for parameter, options in of_parameters.items():  # those of equal options were one group
        own = {**options, "params": 0}
        alike = (group for group in groups.values() if {**group, "params": 0} == own)
        group = next(alike, None) or {**options, "params": []}
        if not group["params"]:
            groups[len(groups)] = group
        group["params"].append(parameter)
    if not states and not groups:
        return None
    made = tuple(_group(index, groups[index]) for index in sorted(groups))
    return OptimizerState(made or (GroupRecord(tuple(states), {}),), dict(states))


def _group(index: int, options: dict[str, Any]) -> GroupRecord:
    params = options.get("params", [])
    if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
        raise CheckpointError(
            f"optim.param_groups.{index}.params holds no names; save get_optimizer_state_dict("
            f"model, optimizer) of torch.distributed.checkpoint.state_dict, or the model alone"
        )
    group = GroupRecord.of(options, params)
    return replace(group, options=json_value(group.options, f"optim.param_groups.{index}"))


class _Reader:
    """Reads the items of a DCP directory: each is a zip archive of ``torch.save``, whose CRC-32s
    are verified."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.metadata = _checked_metadata(directory)
        of_entries = self.metadata.paths
        self.paths = {
            name: _path(of_entries.get(name) or tuple(name.split(".", 1)))
            for name in (*self.metadata.tensors, *self.metadata.values)
        }
        if not any(path[0] == MODEL and len(path) > 1 for path in self.paths.values()):
            # A model by itself, with other things beside its tensors.
            self.paths = {e: p if len(p) > 1 else (MODEL, *p) for e, p in self.paths.items()}
        self._lock = Lock()
        self._last: tuple[str, Tensor] | None = None

    def sources(self) -> dict[Path, TensorSource]:
        """Return the tensors of the model and of the optimizer's state."""
        found: dict[Path, str] = {}
        for entry in self.metadata.tensors:
            path = self.paths[entry]
            if not _is_read(path, True) or path[:2] == GROUPS:
                continue
            if (other := found.setdefault(path, entry)) != entry:
                raise CheckpointError(f"{shown(entry)} and {shown(other)} are one tensor's names")
        return {path: self.source(entry) for path, entry in found.items()}

    def left_behind(self) -> list[str]:
        """Return all entries that are not read; those beside model and optimizer by their first
        key."""
        return [
            shown(entry if path[0] in (MODEL, OPTIM) else path[0])[1:-1]
            for entry, path in self.paths.items()
            if not _is_read(path, entry in self.metadata.tensors)
        ]

    def source(self, entry: str) -> TensorSource:
        spec = self.metadata.tensors[entry].spec
        make = partial(self._tensor, entry)  # which verifies what it reads
        data = TensorBytes(spec.nbytes, make, remember=False)
        return TensorSource(spec, data, identity=(self.directory, entry))

    def _tensor(self, entry: str) -> Tensor:
        """Read a tensor; the last one stays in memory, as it is copied chunk by chunk."""
        with self._lock:
            if self._last is None or self._last[0] != entry:
                self._last = None
                self._last = entry, self._assembled(entry, self.metadata.tensors[entry])
            return self._last[1]

    def value(self, entry: str) -> Any:
        """Return a value, with numbers in place of tensors of one element, as a learning rate may
        be one."""
        is_tensor = entry in self.metadata.tensors
        found = self.source(entry) if is_tensor else self._item((entry, None))
        return convert_tensors(found, lambda s: s.load().item() if math.prod(s.shape) == 1 else s)

    def _assembled(self, entry: str, tensor: _Tensor) -> Tensor:
        whole = torch.empty(tensor.spec.shape, dtype=tensor.spec.dtype)
        filled = torch.zeros(tensor.spec.shape, dtype=torch.bool)
        for offsets, sizes in tensor.chunks:
            part, expected = self._item((entry, offsets)), TensorSpec(tensor.spec.dtype, sizes)
            if not isinstance(part, TensorSource) or part.spec != expected:
                found = part.spec if isinstance(part, TensorSource) else type(part).__name__
                raise CheckpointError(
                    f"{self.directory}: {entry} is {found} in its file, but {expected} in "
                    f"{DCP_METADATA}"
                )
            at = tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
            whole[at], filled[at] = part.load(), True
        if not filled.all():
            raise CheckpointError(f"{self.directory}: the parts of {entry} do not fill it exactly")
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
    with naming(path):
        data = io.BytesIO(read_small_file(path, MAX_METADATA))
        try:
            read = read_pickle(data, lambda name: bool(_KNOWN.fullmatch(name)) or is_known(name))
            metadata = _metadata(read)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # a damaged pickle can make Python raise anything
            raise CheckpointError("truncated, or not DCP's metadata") from error
        raise_if(list(_problems(metadata, directory)))
        return metadata


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
        if not _fill(tensor.spec.shape, tensor.chunks):
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


def _fill(shape: tuple[int, ...], chunks: Sequence[_Box]) -> bool:
    """Return whether the chunks are in a tensor, with as many elements; that no two overlap is
    seen when they are read."""
    return sum(math.prod(sizes) for _, sizes in chunks) == math.prod(shape) and all(
        len(start) == len(size) == len(shape)
        and all(a + n <= limit for a, n, limit in zip(start, size, shape, strict=True))
        for start, size in chunks
    )
