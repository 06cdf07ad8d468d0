"""Reads the files of one step's ranks, of which most are never opened.

Words: the *first* file is the one that says which tensors all of them hold; *values* are what has
no shards, see ``rank_file``.
Always true: opening a ``.safetensors`` file reads its header, and nothing else is read before it is
used; a file that has another length than the marker says, or other tensors than the first, is
refused. ``.pth`` files are opened all at once, and must be on this machine.
What is made of the tensors is ``reshard``'s business.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from xla_fsdp.checkpoint.byte_source import ByteSource
from xla_fsdp.checkpoint.errors import CheckpointError, typed
from xla_fsdp.checkpoint.format import model_name
from xla_fsdp.checkpoint.plain_values import unpack
from xla_fsdp.checkpoint.safetensors_file import (
    Header,
    TensorSpec,
    read_header,
    read_tensor,
    shard_metadata_of,
)
from xla_fsdp.checkpoint.shard_files import Shard, open_shard
from xla_fsdp.checkpoint.shard_writer import VALUE_PREFIX, VALUES_KEY
from xla_fsdp.checkpoint.storage import LocalStorage, Storage
from xla_fsdp.checkpoint.tensor_source import TensorSource
from xla_fsdp.checkpoint.torch_file import read_torch_file


class RankFile:
    """An opened ``.safetensors`` file of one rank.

    Raises:
        CheckpointError: if it is not a sound file of a rank.
    """

    def __init__(self, source: ByteSource, name: str) -> None:
        self.name = name
        self._source = source
        self.header: Header = read_header(source, name)
        try:
            self.metadata = shard_metadata_of(self.header)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error

    def read_into(self, tensor: str, spec: TensorSpec, start: int, buffer: memoryview) -> None:
        """Bytes of a tensor from ``start`` on; ``CheckpointError`` if it is not as expected."""
        entry = self.header.entries.get(tensor)
        if entry is None or entry.spec != spec:
            raise CheckpointError(
                f"{self.name}: {tensor} is {entry.spec if entry else 'missing'}, expected {spec}"
            )
        self._source.read_into(entry.start + start, buffer)

    def values(self) -> Any:
        """What was packed beside the tensors."""
        text = self.header.metadata.get(VALUES_KEY, "{}")
        try:
            packed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.name}: {VALUES_KEY} is not JSON: {error}") from error
        entries = self.header.entries
        count = sum(name.startswith(VALUE_PREFIX) for name in entries)
        names = [f"{VALUE_PREFIX}{index}" for index in range(count)]
        if absent := [name for name in names if name not in entries]:
            raise CheckpointError(f"{self.name}: {absent[0]} is missing")
        return unpack(packed, [read_tensor(self._source, entries[name]) for name in names])


class RankFiles:
    """The files of all ranks of one job, opened when they are first read.

    Args:
        storage: where they are.
        sizes: name to number of bytes of every rank's file, in rank order, all ``.safetensors``.
        first: the rank whose file is opened at once: the others must hold the same tensors.

    Raises:
        CheckpointError: if that file cannot be opened.
    """

    def __init__(self, storage: Storage, sizes: Mapping[str, int], first: int) -> None:
        self._storage, self._sizes, self._first = storage, sizes, first
        self._names = list(sizes)
        self._lock = threading.Lock()
        self._opened: dict[int, RankFile] = {}
        self.open(first)

    def open(self, rank: int) -> RankFile:
        """The file of a rank."""
        with self._lock:
            if rank not in self._opened:
                name = self._names[rank]
                source = checked_source(self._storage, name, self._sizes[name])
                self._opened[rank] = RankFile(source, path_of(self._storage, name))
            return self._opened[rank]

    def shards(self) -> list[Shard]:
        """Every rank's shard; the files other than the first stay closed."""
        prefix = model_name("")
        names = list(self._opened[self._first].header.entries)
        model = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        others = {name: name for name in names if not name.startswith(prefix)}
        return [self._shard(rank, model, others) for rank in range(len(self._names))]

    def values(self, rank: int) -> Any:
        """What a rank saved beside its tensors."""
        return self.open(rank).values()

    def _shard(self, rank: int, model: Mapping[str, str], others: Mapping[str, str]) -> Shard:
        return Shard(
            source=path_of(self._storage, self._names[rank]),
            state_dict=_Tensors(self, rank, model),
            metadata={**self._opened[self._first].metadata, "rank": rank, "global_rank": None},
            optimizer=_Tensors(self, rank, others),
        )

    def tensor(self, rank: int, name: str) -> TensorSource:
        """A tensor of a rank's file, which is taken to be as in the first one."""
        first = self._opened[self._first]
        prints = first.metadata.get("fingerprints") if rank == self._first else None
        known = prints.get(name) if isinstance(prints, dict) else None
        spec = first.header.entries[name].spec
        return TensorSource(spec, _Elements(self, rank, name, spec), fingerprint=known)


class _Tensors(Mapping[str, TensorSource]):
    """Tensors of a rank's file, made when they are asked for: of most ranks, none ever is."""

    def __init__(self, files: RankFiles, rank: int, names: Mapping[str, str]) -> None:
        self._files, self._rank, self._names = files, rank, names

    def __getitem__(self, key: str) -> TensorSource:
        return self._files.tensor(self._rank, self._names[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def path_of(storage: Storage, name: str) -> str:
    """A file's name for messages."""
    return f"{storage.where.rstrip('/')}/{name}"


def checked_source(storage: Storage, name: str, size: int) -> ByteSource:
    """A file that is known to exist and to have ``size`` bytes.

    Raises:
        CheckpointError: if that is not so.
    """
    try:
        source = storage.source(name)
    except CheckpointError as error:
        folder, _, base = name.rpartition("/")
        if base in storage.names(folder):
            raise
        raise CheckpointError(
            f"{path_of(storage, name)}: is not here. Hosts that do not share a file system have "
            f"only the files of their own ranks: load with the same ranks on the same hosts, or "
            f"bring all files to a place that all hosts see"
        ) from error
    if source.nbytes != size:
        raise CheckpointError(
            f"{path_of(storage, name)}: has {source.nbytes} bytes, but {size} were written"
        )
    return source


class _Elements:
    """The bytes of one tensor in a rank's file."""

    def __init__(self, files: RankFiles, rank: int, name: str, spec: TensorSpec) -> None:
        self.nbytes = spec.nbytes
        self._files, self._rank, self._name, self._spec = files, rank, name, spec

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        file = self._files.open(self._rank)
        file.read_into(self._name, self._spec, start, buffer)


class TorchRankFiles:
    """As ``RankFiles``, for ``.pth`` files, which must be on this machine; all are opened."""

    def __init__(self, storage: Storage, sizes: Mapping[str, int]) -> None:
        self._paths = [path_of(storage, name) for name in sizes]
        if not isinstance(storage, LocalStorage):
            raise CheckpointError(
                f"{self._paths[0]}: .pth files can only be loaded from a local directory"
            )
        for name, size in sizes.items():
            checked_source(storage, name, size)

    def shards(self) -> list[Shard]:
        """Every rank's shard."""
        return [open_shard(path) for path in self._paths]

    def values(self, rank: int) -> Any:
        """What a rank saved beside its tensors."""
        path = self._paths[rank]
        saved = typed(read_torch_file(path), dict, path).get("values")
        if not isinstance(saved, dict):
            raise CheckpointError(f"{path}: has no 'values'; it was not written by save_checkpoint")
        try:
            packed = json.loads(saved["json"])
            return unpack(packed, [source.load() for source in saved["tensors"]])
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its 'values' are damaged: {error!r}") from error
