"""Saving one step: what a rank writes, and how the ranks make it count only if all of it is there.

Each rank writes its shards, its optimizer's, and *values*: whatever has no shards (schedulers,
counters, random number states), packed by ``json_values``. A ``.safetensors`` file has values in
its header and in tensors of their own; a ``.pth`` file has torch_xla's keys, ``model`` and
``shard_metadata``, and the optimizer's state by parameter key.

The *leader* is the one rank that marks and deletes in a directory: rank 0 where all ranks see the
same files, else the first to come on every host.

Invariants: all ranks raise the same error or none; the marker is written after every rank has said
that its file is on disk, and until then what was complete stays complete; a rank's bytes may go to
disk in a thread, but ranks talk only in the caller's; tensors are written straight from where they
are (into a ``.pth`` file: copied once).
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
LOOKED_AT = 4  # complete attempts that a rank tells the others about; hosts are at most one apart
LOOK_EVERY = 0.5  # seconds between two looks of rank 0 for the other ranks' files
PATIENCE = 60.0  # seconds that it goes on looking after the program has come to its end


@dataclass(frozen=True)
class RankContent:
    """All that one rank saves, in host memory.

    Args:
        metadata: of its shards; checksums are filled in when it is written.
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
        """Return the same with the checksum of every tensor in the metadata."""
        checksums = {name: checksum(bytes_of(t)) for name, t in self.tensors().items()}
        return replace(self, metadata=replace(self.metadata, fingerprints=checksums))


class Written(NamedTuple):
    """A rank's file: its size, and a checksum of all its shards (not of tensors that are not
    sharded, which may differ between replicas)."""

    nbytes: int
    digest: str


def write_rank_file(storage: Storage | None, name: str, content: RankContent) -> Written:
    """Write one rank's file, as ``.safetensors`` or ``.pth`` by its name.

    Args:
        storage: None to write nothing, as another rank writes the same.
        name: of the file.
        content: of the file.

    Raises:
        CheckpointError: if it cannot be written, or holds what the format has not.
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
    """Return a checksum of all shards of a rank's content, which has checksums already."""
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
    # The whole file at once: a zip archive needs to go back, which a stream cannot.
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
    """The ranks of a job, seen from one.

    Args:
        rank: of the caller, among all.
        count: how many there are.
        exchange: given this rank's bytes, returns every rank's, in order. All ranks call it.
    """

    rank: int
    count: int
    exchange: Callable[[bytes], list[bytes]]

    def all_gather_or_raise(self, problems: Sequence[str], value: Any = None) -> list[Any]:
        """Return the JSON value that every rank gave, unless a rank has problems.

        Raises:
            CheckpointError: the same on every rank, with the problems of all.
        """
        own = json.dumps([list(problems), value]).encode()
        said = [json.loads(data) for data in self.exchange(own)]
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, (lines, _) in enumerate(said):
            for line in dict.fromkeys(lines):
                ranks_of[line].append(rank)
        if ranks_of:
            raise CheckpointError([f"{_ranks(ranks)}: {line}" for line, ranks in ranks_of.items()])
        return [given for _, given in said]


@dataclass(frozen=True)
class ShardFile:
    """Which file a rank writes.

    Args:
        shard: the rank's number among those that share a model.
        num_shards: how many these are.
        group: which of the groups that share a model this is; all hold the same.
        suffix: of the file.
    """

    shard: int
    num_shards: int
    group: int
    suffix: str

    def name(self, shard: int) -> str:
        """Return the name of the file of one of the ranks that share a model."""
        return rank_file_name(shard, self.num_shards, self.suffix)


class Save:
    """One saving of one step.

    Args:
        storage: of the calling rank.
        ranks: all that take part.
        file: that the calling rank writes.
        step: that is saved.
        keep_last: how many complete steps to keep; None for all.
    """

    def __init__(
        self, storage: Storage, ranks: Ranks, file: ShardFile, step: int, keep_last: int | None
    ) -> None:
        self._storage, self._ranks, self._file = storage, ranks, file
        self._step, self._keep_last = step, keep_last
        self._attempt = Attempt(step)
        self._leads = False
        self._shared = True
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._error: Exception | None = None
        self._waited_for = threading.Event()

    def begin(self, problems: Sequence[str] = ()) -> None:
        """Agree on a new attempt. Every rank calls it.

        Args:
            problems: why this rank cannot save at all, if so.

        Raises:
            CheckpointError: with the problems of all ranks, or if a later step is complete.
        """
        found, numbers, complete = list(problems), [0], []
        try:
            numbers += [each.number + 1 for each in self._own_attempts()]
            complete = list(islice(newest_complete(self._storage), LOOKED_AT))
        except CheckpointError as error:
            found += error.problems
        said = self._ranks.all_gather_or_raise(found, (max(numbers), complete))
        self._refuse_earlier([{Attempt(*each) for each in own} for _, own in said])
        self._attempt = Attempt(self._step, max(number for number, _ in said))
        self._find_leaders()

    def start(self, write: Callable[[Storage | None, str], Written]) -> None:
        """Write this rank's file in a thread, by ``write(storage, name)``."""
        self._thread = threading.Thread(target=self._work, args=(write,), name="save_checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when the step is complete for all ranks. Every rank calls it, once.

        Raises:
            CheckpointError: on every rank, with what went wrong on any; the step is then removed.
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
        # What is complete on some hosts only was cut short, and does not count.
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
        """Whether this rank writes: where all see the same files, one group's are enough."""
        return self._file.group == 0 or not self._shared

    def _work(self, write: Callable[[Storage | None, str], Written]) -> None:
        try:
            storage = self._storage if self._writes else None
            self._written = write(storage, self._attempt.file(self._file.name(self._file.shard)))
            if self._shared and self._leads:
                self._mark_when_all_are_there()
        except Exception as error:  # raised by wait()
            self._error = error

    def _mark_when_all_are_there(self) -> None:
        # So that the step counts even if the job ends before ``wait``. A file that has its name is
        # whole, so this needs no word from the other ranks.
        expected = [self._file.name(shard) for shard in range(self._file.num_shards)]
        last_look = math.inf
        while time.monotonic() < last_look and not self._waited_for.wait(LOOK_EVERY):
            if last_look == math.inf and not threading.main_thread().is_alive():
                last_look = time.monotonic() + PATIENCE
            with suppress(CheckpointError):  # there is another look, and there is wait()
                if set(expected) <= set(self._storage.names(self._attempt.folder)):
                    self._mark({name: self._size(name) for name in expected})
                    return

    def _size(self, name: str) -> int:
        return self._storage.source(self._attempt.file(name)).nbytes

    def _collect(self) -> dict[str, int]:
        """Return every file's size, once all are written and replicas are seen to agree."""
        failure = [] if self._error is None else _lines(self._error)
        own = self._written and (self._file.shard, self._writes, *self._written)
        files: dict[int, int] = {}
        digests: dict[int, tuple[int, str]] = {}
        problems = []
        for rank, said in enumerate(self._ranks.all_gather_or_raise(failure, own)):
            shard, writes, nbytes, digest = said
            if writes:  # a replica's file would differ in what is not sharded
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
            if not self._shared:  # of several replicas' files, this host has its own
                here = self._storage.names(self._attempt.folder)
                files = {n: self._size(n) if n in here else size for n, size in files.items()}
            marker = Marker(self._step, self._file.num_shards, files)
            write_marker(self._storage, self._attempt, marker)

    def _withdraw(self) -> None:
        if self._leads:
            remove(self._storage, self._attempt)

    def _tidy(self) -> None:
        # What cannot be deleted is no reason to stop a run that has just been saved.
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
