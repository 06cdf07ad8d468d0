"""Save one step: write a file for each rank, then mark the step as complete.

Each rank writes the shards of its model and optimizer, and *values*: all else (schedulers,
counters, random number states), packed by ``json_values``. A ``.safetensors`` file has the values
in its header and in tensors of their own. A ``.pth`` file has torch_xla's keys, ``model`` and
``shard_metadata``, and the optimizer's state by parameter key.

The *leader* of a directory is the one rank that writes the marker and deletes: rank 0 if all ranks
see the same files, else the first rank on each host to claim it.

Invariants: all ranks raise the same error or none; the marker is written after all files are on
disk, and until then older complete steps are not deleted; a thread may write a rank's file, but
ranks communicate only in the caller's thread; tensors are written without a copy (to a ``.pth``
file: with one).
"""

from __future__ import annotations

import io
import json
import math
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xla_fsdp.checkpoint.checksum import checksum
from xla_fsdp.checkpoint.errors import CheckpointError, raise_if
from xla_fsdp.checkpoint.format import (
    VALUE_PREFIX,
    VALUES_KEY,
    Marker,
    ShardMetadata,
    model_name,
    rank_file_name,
    state_name,
)
from xla_fsdp.checkpoint.json_values import Packed
from xla_fsdp.checkpoint.safetensors_file import plan_file, shard_file_metadata
from xla_fsdp.checkpoint.step_directory import (
    Attempt,
    all_attempts,
    newest_complete,
    remove,
    tidy,
    write_marker,
)
from xla_fsdp.checkpoint.storage import Buffer, Storage
from xla_fsdp.checkpoint.tensor_source import TensorSpec, bytes_of

CLAIM = ".leader"
LOOKED_AT = 4  # newest complete attempts that ranks compare; hosts differ by at most one
LOOK_EVERY = 0.5  # seconds after which the leader looks again for the other ranks' files
PATIENCE = 60.0  # seconds that it goes on after the main thread has ended


@dataclass(frozen=True)
class RankContent:
    """The content of one rank's file, in host memory.

    Args:
        metadata: of its shards, without checksums.
        model: by key of the state dict, without aliases.
        states: tensors of the optimizer by key and state.
        values: everything else.
    """

    metadata: ShardMetadata
    model: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]
    values: Packed

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in a file."""
        named = {model_name(key): tensor for key, tensor in self.model.items()}
        for key, states in self.states.items():
            named |= {state_name(key, state): tensor for state, tensor in states.items()}
        extra = {f"{VALUE_PREFIX}{i}": tensor for i, tensor in enumerate(self.values.tensors)}
        return {**named, **extra}

    def with_checksums(self) -> RankContent:
        """Return the content with the checksum of every tensor in its metadata."""
        checksums = {name: checksum(bytes_of(t)) for name, t in self.tensors().items()}
        return replace(self, metadata=replace(self.metadata, fingerprints=checksums))


class Written(NamedTuple):
    """The size of a rank's file, and one checksum of all its shards.

    Unsharded tensors are left out, as they may differ between replicas.
    """

    nbytes: int
    digest: str


def write_rank_file(storage: Storage | None, name: str, content: RankContent) -> Written:
    """Write one rank's file, as ``.safetensors`` or ``.pth`` by its name.

    Args:
        storage: None to write nothing, because another sharding group writes this file.
        name: of the file.
        content: of the file.

    Raises:
        CheckpointError: if it cannot be written, or the format has no such dtype or value.
    """
    full = content.with_checksums()
    size = 0

    def counted(chunks: Iterator[Buffer]) -> Iterator[Buffer]:
        nonlocal size
        for chunk in chunks:
            size += len(chunk)
            yield chunk

    chunks = _pth_chunks(full) if name.endswith(".pth") else _safetensors_chunks(full)
    if storage is None:
        deque(counted(chunks), maxlen=0)
    else:
        storage.write(name, counted(chunks))
    return Written(size, _digest(full))


def _digest(content: RankContent) -> str:
    metadata = content.metadata
    names = [model_name(record.key) for record in metadata.params]
    for key, states in (metadata.optimizer.states if metadata.optimizer else {}).items():
        names += [state_name(key, state) for state in states.sharded]
    return checksum("\n".join(metadata.fingerprints[name] for name in names).encode())


def _safetensors_chunks(content: RankContent) -> Iterator[Buffer]:
    tensors = content.tensors()
    extra = {VALUES_KEY: json.dumps(content.values.json)}
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    header = plan_file(specs, shard_file_metadata(content.metadata, extra))
    yield header.to_bytes()
    for name in header.entries:
        yield bytes_of(tensors[name])


def _pth_chunks(content: RankContent) -> Iterator[Buffer]:
    # In memory first: to write a zip archive, torch.save has to seek, which a stream cannot.
    buffer = io.BytesIO()
    content_of_file = {
        "model": dict(content.model),
        "shard_metadata": content.metadata.to_dict(),
        "optimizer": {"state": {key: dict(states) for key, states in content.states.items()}},
        "values": {"json": json.dumps(content.values.json), "tensors": content.values.tensors},
    }
    torch.save(content_of_file, buffer)
    yield buffer.getbuffer()


# ---------------------------------------------------------------- all ranks together


@dataclass(frozen=True)
class Ranks:
    """Communication between the ranks of a job.

    Args:
        rank: of the caller, among all.
        count: number of ranks.
        exchange: all-gather of bytes: given this rank's, returns every rank's, in rank order.
    """

    rank: int
    count: int
    exchange: Callable[[bytes], list[bytes]]

    def all_gather_or_raise(self, problems: Sequence[str], value: Any = None) -> list[Any]:
        """Return the JSON value of every rank, in rank order; all ranks call it.

        Raises:
            CheckpointError: the same on every rank, if any rank has problems; with all of them.
        """
        own = json.dumps([list(problems), value]).encode()
        gathered = [json.loads(data) for data in self.exchange(own)]
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, (lines, _) in enumerate(gathered):
            for line in dict.fromkeys(lines):
                ranks_of[line].append(rank)
        if ranks_of:
            raise CheckpointError([f"{_ranks(ranks)}: {line}" for line, ranks in ranks_of.items()])
        return [each for _, each in gathered]


@dataclass(frozen=True)
class ShardFile:
    """The file of a rank.

    Args:
        shard: the rank in its sharding group.
        num_shards: number of ranks in a sharding group.
        group: index of the sharding group; the groups are replicas.
        suffix: of the file.
    """

    shard: int
    num_shards: int
    group: int
    suffix: str

    def name(self, shard: int) -> str:
        """Return the name of the file of one shard."""
        return rank_file_name(shard, self.num_shards, self.suffix)


class Save:
    """Saves one step: call ``begin``, ``start`` and ``wait``, on every rank.

    Args:
        storage: of the calling rank.
        ranks: that save.
        file: of the calling rank.
        step: to save.
        keep_last: number of complete steps not to delete; None for all.
    """

    def __init__(
        self, storage: Storage, ranks: Ranks, file: ShardFile, step: int, keep_last: int | None
    ) -> None:
        self._storage, self._ranks, self._file = storage, ranks, file
        self._step, self._keep_last = step, keep_last
        self._attempt = Attempt(step)
        self._leads = False  # whether this rank marks and deletes in its directory
        self._shared = True  # whether all ranks see the same files
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._error: Exception | None = None
        self._waited_for = threading.Event()

    def begin(self, problems: Sequence[str] = ()) -> None:
        """Agree on a new attempt. Every rank calls it.

        Args:
            problems: reasons why this rank cannot save, if any.

        Raises:
            CheckpointError: with the problems of all ranks, or if a later step is complete.
        """
        found, numbers, complete = list(problems), [0], []
        try:
            numbers += [each.number + 1 for each in self._own_attempts()]
            complete = list(islice(newest_complete(self._storage), LOOKED_AT))
        except CheckpointError as error:
            found += error.problems
        gathered = self._ranks.all_gather_or_raise(found, (max(numbers), complete))
        self._refuse_earlier([{Attempt(*each) for each in own} for _, own in gathered])
        self._attempt = Attempt(self._step, max(number for number, _ in gathered))
        self._find_leaders()

    def start(self, write: Callable[[Storage | None, str], Written]) -> None:
        """Write this rank's file in a thread, by ``write(storage, name)``."""
        self._thread = threading.Thread(target=self._work, args=(write,), name="save_checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when the step is complete for all ranks. Every rank calls it, once.

        Raises:
            CheckpointError: on every rank, if any rank failed; the attempt is then deleted.
        """
        self._waited_for.set()
        if self._thread is not None:
            self._thread.join()
        try:
            sizes = self._collect()
            self._ranks.all_gather_or_raise(self._try(lambda: self._mark(sizes)))
        except CheckpointError:
            self._try(self._withdraw)
            raise
        self._tidy()

    def _own_attempts(self) -> list[Attempt]:
        return [each for each in all_attempts(self._storage) if each.step == self._step]

    def _refuse_earlier(self, complete: Sequence[set[Attempt]]) -> None:
        # An attempt that is complete on some hosts only was interrupted, and is ignored.
        latest = max(set.intersection(*complete), default=None)
        if latest is not None and latest.step > self._step:
            raise CheckpointError(
                f"{self._storage.where} holds step {latest.step}, so step {self._step} would never "
                f"be the latest one. Save to another directory, or delete the later steps"
            )

    def _find_leaders(self) -> None:
        first, problems = False, []
        try:
            first = self._storage.claim(self._attempt.file(CLAIM))
        except CheckpointError as error:
            problems = error.problems
        leaders = [
            rank
            for rank, leads in enumerate(self._ranks.all_gather_or_raise(problems, first))
            if leads
        ]
        self._shared = len(leaders) <= 1
        self._leads = self._ranks.rank == 0 if self._shared else first

    @property
    def _writes(self) -> bool:
        """Whether this rank writes its file: on shared storage, one sharding group's suffice."""
        return self._file.group == 0 or not self._shared

    def _work(self, write: Callable[[Storage | None, str], Written]) -> None:
        try:
            storage = self._storage if self._writes else None
            self._written = write(storage, self._attempt.file(self._file.name(self._file.shard)))
            if self._shared and self._leads:
                self._mark_when_all_files_exist()
        except Exception as error:  # raised by wait()
            self._error = error

    def _mark_when_all_files_exist(self) -> None:
        # So that the step is complete even if the job ends before ``wait``. No communication is
        # needed, as a file gets its name only when it is complete.
        expected = [self._file.name(shard) for shard in range(self._file.num_shards)]
        last_look = math.inf
        while time.monotonic() < last_look and not self._waited_for.wait(LOOK_EVERY):
            if last_look == math.inf and not threading.main_thread().is_alive():
                last_look = time.monotonic() + PATIENCE
            with suppress(CheckpointError):  # the next iteration or wait() tries again
                if set(expected) <= set(self._storage.names(self._attempt.folder)):
                    self._mark({name: self._size(name) for name in expected})
                    return

    def _size(self, name: str) -> int:
        return self._storage.source(self._attempt.file(name)).nbytes

    def _collect(self) -> dict[str, int]:
        """Return the size of every file, after checking that all are written and replicas equal."""
        failure = [] if self._error is None else _lines(self._error)
        own = self._written and (self._file.shard, self._writes, *self._written)
        files: dict[int, int] = {}
        digests: dict[int, tuple[int, str]] = {}
        problems = []
        for rank, written in enumerate(self._ranks.all_gather_or_raise(failure, own)):
            shard, writes, nbytes, digest = written
            if writes:  # another replica's size may differ, because of its unsharded tensors
                files.setdefault(shard, nbytes)
            first, expected = digests.setdefault(shard, (rank, digest))
            if digest != expected:
                problems.append(
                    f"ranks {first} and {rank} hold shard {shard} of the model, but with different "
                    f"values: sharding groups must be replicas of one model to be saved in one "
                    f"directory"
                )
        raise_if(problems)
        return {self._file.name(shard): nbytes for shard, nbytes in sorted(files.items())}

    def _mark(self, files: dict[str, int]) -> None:
        if self._leads:
            if not self._shared:  # sizes on this host, as the files of replicas may differ
                here = self._storage.names(self._attempt.folder)
                files = {n: self._size(n) if n in here else size for n, size in files.items()}
            marker = Marker(self._step, self._file.num_shards, files)
            write_marker(self._storage, self._attempt, marker)

    def _withdraw(self) -> None:
        if self._leads:
            remove(self._storage, self._attempt)

    def _tidy(self) -> None:
        # The step is saved: a failure to delete older ones must not end the job.
        try:
            problems = tidy(self._storage, self._attempt, self._keep_last) if self._leads else []
        except CheckpointError as error:
            problems = error.problems
        for problem in problems:
            warnings.warn(problem, stacklevel=2)

    def _try(self, phase: Callable[[], None]) -> list[str]:
        try:
            phase()
        except CheckpointError as error:
            return error.problems
        return []


def _lines(error: Exception) -> list[str]:
    return error.problems if isinstance(error, CheckpointError) else [repr(error)]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"ranks {shown}"
