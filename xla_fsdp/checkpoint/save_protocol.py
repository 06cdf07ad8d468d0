"""How the ranks of a job save one step together, so that it counts only if all of it is there.

Words: to *exchange* is to give every rank a few bytes of every rank (the only communication here);
a *leader* is the one rank that marks and deletes in a directory: rank 0 where all ranks see the
same files, else the first to come on every host; a *save* is one attempt, from ``begin`` to
``wait``.
Always true: all ranks raise the same error or none; the marker is written after every rank has
said that its file is on disk; what was complete before stays complete until then; a rank's bytes
may go to disk in a thread, but ranks talk only in the caller's.
What a rank writes is the caller's business; names and deletion are ``step_directory``'s.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.shard_writer import Sink, Written
from xla_fsdp.checkpoint.step_directory import (
    Attempt,
    Marker,
    all_attempts,
    newest_complete,
    rank_file_name,
    remove,
    tidy,
    write_marker,
)
from xla_fsdp.checkpoint.storage import Chunk, Storage

CLAIM = ".leader"

LOOKED_AT = 4

"""Complete attempts that a rank tells the others about; hosts are at most one apart."""

LOOK_EVERY = 0.5

"""Seconds between two looks of rank 0 for the other ranks' files."""

PATIENCE = 60.0

"""Seconds that it goes on looking after the program has come to its end."""


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

    def agree(self, problems: Sequence[str], value: Any = None) -> list[Any]:
        """The JSON value that every rank gave, unless a rank has problems.

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
class Place:
    """Where a rank's file belongs.

    Args:
        shard: the rank's place among those that share a model.
        num_shards: how many these are.
        group: which of the groups that share a model this is; all hold the same.
        suffix: of the file.
    """

    shard: int
    num_shards: int
    group: int
    suffix: str

    def file(self, shard: int) -> str:
        """The file of one of the ranks that share a model."""
        return rank_file_name(shard, self.num_shards, self.suffix)


class Save:
    """One saving of one step.

    Args:
        storage: of the calling rank.
        ranks: all that take part.
        place: of the calling rank's file.
        step: that is saved.
        keep_last: how many complete steps to keep; None for all.
    """

    def __init__(
        self, storage: Storage, ranks: Ranks, place: Place, step: int, keep_last: int | None
    ) -> None:
        self._storage, self._ranks, self._place = storage, ranks, place
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
        said = self._ranks.agree(found, (max(numbers), complete))
        self._refuse_earlier([{Attempt(*each) for each in own} for _, own in said])
        self._attempt = Attempt(self._step, max(number for number, _ in said))
        self._find_leaders()

    def start(self, write: Callable[[Sink, str], Written]) -> None:
        """Write this rank's file in a thread. ``write`` is given the storage and the name."""
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
            self._ranks.agree(self._try(lambda: self._mark(sizes)))
        except CheckpointError:
            self._try(self._withdraw)
            raise
        self._tidy()

    # ------------------------------------------------------------ phases

    def _own_attempts(self) -> list[Attempt]:
        return [each for each in all_attempts(self._storage) if each.step == self._step]

    def _refuse_earlier(self, complete: Sequence[set[Attempt]]) -> None:
        """What is complete on some hosts only was cut short, and does not count."""
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
        leaders = [rank for rank, leads in enumerate(self._ranks.agree(problems, first)) if leads]
        self._shared = len(leaders) <= 1
        self._leads = self._ranks.rank == 0 if self._shared else first

    @property
    def _writes(self) -> bool:
        """Where all see the same files, one group's are enough."""
        return self._place.group == 0 or not self._shared

    def _work(self, write: Callable[[Sink, str], Written]) -> None:
        try:
            sink: Sink = self._storage if self._writes else _Nowhere()
            self._written = write(sink, self._attempt.file(self._place.file(self._place.shard)))
            if self._shared and self._leads:
                self._mark_when_all_are_there()
        except Exception as error:  # raised by wait()
            self._error = error

    def _mark_when_all_are_there(self) -> None:
        """So that the step counts even if the job ends before ``wait``. A file that has its name
        is whole, so this needs no word from the other ranks."""
        expected = [self._place.file(shard) for shard in range(self._place.num_shards)]
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
        """Every file's size, once all are written and replicas are seen to agree."""
        failure = [] if self._error is None else _lines(self._error)
        own = self._written and (self._place.shard, self._writes, *self._written)
        files: dict[int, int] = {}
        digests: dict[int, tuple[int, str]] = {}
        problems = []
        for rank, said in enumerate(self._ranks.agree(failure, own)):
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
        if problems:
            raise CheckpointError(problems)
        return {self._place.file(shard): nbytes for shard, nbytes in sorted(files.items())}

    def _mark(self, files: dict[str, int]) -> None:
        if self._leads:
            if not self._shared:  # of several replicas' files, this host has its own
                here = self._storage.names(self._attempt.folder)
                files = {n: self._size(n) if n in here else size for n, size in files.items()}
            marker = Marker(self._step, self._place.num_shards, files)
            write_marker(self._storage, self._attempt, marker)

    def _withdraw(self) -> None:
        if self._leads:
            remove(self._storage, self._attempt)

    def _tidy(self) -> None:
        """What cannot be deleted is no reason to stop a run that has just been saved."""
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


class _Nowhere:
    """Takes the bytes of a file that a replica writes, too."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See ``Sink``."""
        for _ in chunks:
            pass


def _lines(error: Exception) -> list[str]:
    return error.problems if isinstance(error, CheckpointError) else [repr(error)]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"ranks {shown}"
