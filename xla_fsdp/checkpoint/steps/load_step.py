"""Load one rank's part of a complete step, for any number of ranks.

Invariants: of ``.safetensors`` files, a rank reads only the headers of its first file and of those
that hold elements it needs, and only the blocks of these elements; a file is refused if its length
or its description differs from the marker's, or its tensors from the first file's; whatever is read
is verified against checksums (of files before version 4: tensors that are read whole); one error
reports all problems, before any model is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xla_fsdp.checkpoint.convert.model_files import renamed
from xla_fsdp.checkpoint.convert.reshard import (
    EVERYTHING,
    LoadTarget,
    ReadPlan,
    Selection,
    SourceCheckpoint,
    plan_read,
)
from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    MismatchError,
    collecting,
    deleted_meanwhile,
    listed,
    naming,
    raise_if,
    typed,
)
from xla_fsdp.checkpoint.files.safetensors_file import Entry
from xla_fsdp.checkpoint.files.storage import LocalStorage, Storage
from xla_fsdp.checkpoint.files.tensor_source import (
    ByteSource,
    LazyMapping,
    LazySequence,
    Piece,
    RecentBlocks,
    TensorSource,
    bytes_of,
    pieces,
    same_bytes,
)
from xla_fsdp.checkpoint.format.alike_files import AlikeFile, AlikeFiles
from xla_fsdp.checkpoint.format.consistency import check_marker, find_misfits
from xla_fsdp.checkpoint.format.plan import make_plan
from xla_fsdp.checkpoint.format.records import SUFFIXES, VALUES_KEY, OptimizerState
from xla_fsdp.checkpoint.format.shard_files import (
    Shard,
    open_remote_torch,
    open_safetensors,
    open_torch,
    values_of,
    verified_shard,
)
from xla_fsdp.checkpoint.steps.step_directory import (
    MARKER,
    Attempt,
    Marker,
    rank_file_name,
    read_marker,
)

REMOTE_REQUESTS = 16  # at a time, as a request to an object store takes about 50 ms
PARTLY_READ = 1 << 26  # bytes of blocks of which only a part was needed so far


@dataclass(frozen=True)
class LoadedStep:
    """One rank's part of a step, in host memory.

    Args:
        model: by key of the state dict; shards are vectors.
        optimizer: tensors of kind ``SHARD`` are vectors; None if not requested.
        values: saved beside the tensors, by topic.
        same_ranks: whether the numbers of ranks and of tensor-parallel parts are those of the job
            that saved, so that each rank has the same shard again.
        saved_dtypes: of the tensors in ``model``, as they were saved, by the same keys.
    """

    model: dict[str, Tensor]
    optimizer: OptimizerState | None
    values: dict[str, Any]
    same_ranks: bool
    saved_dtypes: dict[str, set[torch.dtype]] = field(default_factory=dict)


def load_step(
    storage: Storage,
    attempt: Attempt,
    target: LoadTarget,
    selection: Selection = EVERYTHING,
) -> LoadedStep:
    """Read the part of a complete attempt that a rank needs; raise ``MismatchError`` if ``target``
    is another model."""
    try:
        return _load(storage, attempt, target, selection)
    except CheckpointError as error:
        if _is_there(storage, attempt):
            raise
        raise CheckpointError(deleted_meanwhile(path_of(storage, attempt.folder))) from error


def _is_there(storage: Storage, attempt: Attempt) -> bool:
    with suppress(CheckpointError):
        return MARKER in storage.names(attempt.folder)
    return True


def _load(
    storage: Storage, attempt: Attempt, target: LoadTarget, selection: Selection
) -> LoadedStep:
    marker = read_marker(storage, attempt.folder)
    same_size = marker.world_size == target.metadata.world_size
    own = target.metadata.rank if same_size else 0
    shards, opened = _open(storage, attempt, marker, own)
    with naming(shards[own].source):
        plan = make_plan(shards[own].metadata, shards[own].state_dict)
    raise_if([f"{s.source}: {problem}" for s in opened for problem in find_misfits(plan, s, s)])
    source = SourceCheckpoint(renamed(plan, selection.rules), shards, own)
    found = plan_read(source, target, selection)
    if found.problems:
        where = f"{storage.where}/{attempt.folder}"
        raise MismatchError([f"{where}: {problem}" for problem in found.problems])
    raise_if(
        [
            f"{storage.where}/{attempt.folder}: {alias} is tied to {name} in the model, but its "
            f"values in the checkpoint differ. Untie them, or load one of them with only="
            for (alias, name), pair in found.ties.items()
            if not same_bytes(*pair)
        ]
    )
    parts = shards[own].metadata.get("tensor_parts", 1)
    same_ranks = same_size and parts == target.metadata.tensor_parts
    threads = 1 if isinstance(storage, LocalStorage) else REMOTE_REQUESTS
    values = typed(values_of(shards[own]), dict, f"{shards[own].source}: values")
    return _read(found, values, threads, same_ranks)


def _open(
    storage: Storage, attempt: Attempt, marker: Marker, own: int
) -> tuple[list[Shard], list[Shard]]:
    """Return the shards of all ranks, and those whose files are open."""
    suffix = next(iter(marker.files), "").rpartition(".")[2]
    names: list[str] = []
    if len(marker.files) == marker.world_size:
        names = [rank_file_name(r, marker.world_size, suffix) for r in range(marker.world_size)]
    if suffix not in SUFFIXES or set(names) != set(marker.files):
        raise CheckpointError(
            f"{storage.where}/{attempt.folder}: the marker lists "
            f"{listed(marker.files, len(marker.files)) or 'no files'}; expected one for each of "
            f"{marker.world_size} ranks"
        )
    if suffix == "pth":
        shards = _open_torch_files(storage, attempt, marker, names)
        return shards, shards
    shards = RankFiles(storage, attempt, marker, names, first=own).shards()
    return shards, [shards[own]]


def _read(found: ReadPlan, values: dict[str, Any], threads: int, same_ranks: bool) -> LoadedStep:
    states = {} if found.optimizer is None else found.optimizer.named_tensors()
    tensors = _read_tensors([*found.model.values(), *states.values()], threads)
    model = {key: tensors[id(source)] for key, source in found.model.items()}
    optimizer = None
    if found.optimizer is not None:
        loaded = {
            key: {n: replace(e, value=tensors.get(id(e.value), e.value)) for n, e in each.items()}
            for key, each in found.optimizer.states.items()
        }
        optimizer = replace(found.optimizer, states=loaded)
    return LoadedStep(model, optimizer, values, same_ranks, found.saved_dtypes)


def _read_tensors(wanted: Sequence[TensorSource], threads: int) -> dict[int, Tensor]:
    """Return tensors by the id of their source. They are read file by file and in the order of
    their bytes, so that neighbours are read together."""
    tensors = [torch.empty(source.shape, dtype=source.dtype) for source in wanted]
    found = [
        (piece, index)
        for index, source in enumerate(wanted)
        for piece in pieces(source.data, 0, source.spec.nbytes)
        if piece.start < piece.stop
    ]

    def read(each: tuple[Piece, int]) -> None:
        piece, index = each
        into = bytes_of(tensors[index])[piece.start : piece.stop]
        wanted[index].data.read_into(piece.start, into)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(read, sorted(found)):
            pass
    return {id(source): tensor for source, tensor in zip(wanted, tensors, strict=True)}


# ---------------------------------------------------------------- the files of all ranks


class RankFiles:
    """The ``.safetensors`` files of all ranks of one job, opened on first use.

    Args:
        storage: that holds them.
        attempt: that they belong to.
        marker: of the attempt.
        names: of every rank's file, in rank order.
        first: rank whose file is opened at once; the others must have the same tensors.
    """

    def __init__(
        self, storage: Storage, attempt: Attempt, marker: Marker, names: Sequence[str], first: int
    ) -> None:
        self._storage, self._attempt, self._marker, self._first = storage, attempt, marker, first
        self._names = names
        self._lock = threading.Lock()
        self._sizes = storage.sizes(attempt.folder)
        self._recent = RecentBlocks(PARTLY_READ)
        self._like: Shard | None = None
        self._opened: dict[int, Shard] = {}
        self.entries = self.file(first).entries

    def shards(self) -> list[Shard]:
        """Return every rank's shard, without opening further files."""
        shards = [
            self.open(rank) if rank == self._first else self._unopened(rank)
            for rank in range(len(self._names))
        ]
        if len(shards) > 1 and isinstance(self._storage, LocalStorage):
            # Reads of a remote store wait; they are made by many threads, for one tensor each.
            shards[0] = replace(shards[0], alike=SmallTensors(self, len(shards)))
        return shards

    def open(self, rank: int) -> Shard:
        """Return the shard in a rank's file, which is opened on the first call."""
        with self._lock:
            if rank not in self._opened:
                name = self._names[rank]
                at, size = self._attempt.file(name), self._marker.files[name].nbytes
                source = checked_source(self._storage, at, size, self._sizes.get(name))
                shard = open_safetensors(source, self.source(rank), self._like)
                self._like = self._like or shard
                check_marker(shard, self._marker)
                self._opened[rank] = verified_shard(shard, self._recent)
            return self._opened[rank]

    def file(self, rank: int) -> AlikeFile:
        """Return the bytes of a rank's file, and where its tensors are."""
        file = self.open(rank).file
        assert file is not None  # as of all safetensors files
        return file

    def tensor(self, rank: int, name: str) -> TensorSource:
        """Return a tensor of a rank's file, assuming the dtype and shape it has in the first file;
        the file is opened, and the assumption checked, when the tensor is read."""
        entry = self.entries[name]
        return TensorSource(entry.spec, _TensorOfRank(self, rank, name, entry))

    def source(self, rank: int) -> str:
        """Return the path of a rank's file, for messages."""
        return path_of(self._storage, self._attempt.file(self._names[rank]))

    def _unopened(self, rank: int) -> Shard:
        metadata = {**self.open(self._first).metadata, "rank": rank, "global_rank": None}
        content = LazyMapping(self.entries, partial(self.tensor, rank))
        return Shard(self.source(rank), content, metadata)


LITTLE = 1 << 12
"""Bytes of a rank's part of a tensor that takes longer to find than to read."""


class SmallTensors(AlikeFiles):
    """Small tensors are read for all ranks that are needed at once; one that is damaged, and those
    of a file that is laid out otherwise, each for itself."""

    def __init__(self, files: RankFiles, count: int) -> None:
        super().__init__(files.entries, LazySequence(range(count), files.file))
        self._of_ranks = files

    def is_small(self, name: str) -> bool:
        """As of ``AlikeFiles``; of larger ones a rank reads its own share alone."""
        return super().is_small(name) and self._entries[name].spec.nbytes <= LITTLE

    def of_rank(self, rank: int, name: str) -> TensorSource:
        """As of ``AlikeFiles``; opens no file."""
        return self._of_ranks.tensor(rank, name)

    def rows(self, name: str, ranks: range) -> np.ndarray:
        """As of ``AlikeFiles``; raises ``CheckpointError`` if a tensor is damaged."""
        if all(self._of_ranks.file(rank).entries is self._entries for rank in ranks):
            return super().rows(name, ranks)
        rows = np.empty((len(ranks), self._entries[name].spec.nbytes), np.uint8)
        for rank, row in zip(ranks, rows, strict=True):
            self.of_rank(rank, name).data.read_into(0, row.data)
        return rows

    def _mismatch(self, rank: int, name: str, row: np.ndarray, crc: int) -> None:
        self.of_rank(rank, name).data.read_into(0, row.data)  # raises


class _TensorOfRank:
    def __init__(self, files: RankFiles, rank: int, name: str, entry: Entry) -> None:
        self.nbytes, self.place, self.at = entry.spec.nbytes, files.source(rank), entry.start
        self._files, self._rank, self._name, self._spec = files, rank, name, entry.spec

    def read_into(self, start: int, buffer: memoryview) -> None:
        tensor = self._files.open(self._rank).content.get(self._name)
        if tensor is None or tensor.spec != self._spec:
            raise CheckpointError(
                f"{self._files.source(self._rank)}: {self._name} is "
                f"{tensor.spec if tensor else 'missing'}, expected {self._spec}"
            )
        tensor.data.read_into(start, buffer)


def _open_torch_files(
    storage: Storage, attempt: Attempt, marker: Marker, names: Sequence[str]
) -> list[Shard]:
    """Open the ``.pth`` files of all ranks; remote ones are copied."""
    open_file = open_torch if isinstance(storage, LocalStorage) else open_remote_torch
    for name in names:
        checked_source(storage, attempt.file(name), marker.files[name].nbytes)
    recent = RecentBlocks(PARTLY_READ)
    paths = [path_of(storage, attempt.file(name)) for name in names]
    shards = [verified_shard(open_file(path), recent) for path in paths]
    problems: list[str] = []
    for shard in shards:
        with collecting(problems):
            check_marker(shard, marker)
            if VALUES_KEY not in shard.notes:
                raise CheckpointError(
                    f"{shard.source}: has no 'values'; save_checkpoint did not write it"
                )
    raise_if(problems)
    return shards


def path_of(storage: Storage, name: str) -> str:
    """Return the path of a file, for messages."""
    return f"{storage.where.rstrip('/')}/{name}"


def checked_source(
    storage: Storage, name: str, size: int, listed_size: int | None = None
) -> ByteSource:
    """Return a file, of ``listed_size`` bytes if that is known."""
    try:
        source = storage.source(name, listed_size)
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
