"""Save one step: write a file for each rank, announce it, then mark the step as complete.

The *leader* of a directory is the one rank that writes the marker and deletes: rank 0 if all ranks
see the same files, else the first on each host to make the attempt's folder. The *token* of a
job names it in everything that it writes; a job that finds another's in a directory stops.

Invariants: all ranks raise the same error or none, and agree on everything before anything is
written; the marker lists what ranks have announced, and is written after all files have been listed
with these sizes; until then older complete steps are not deleted; a thread may write a rank's file,
but ranks communicate only in the caller's thread.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from xla_fsdp.checkpoint.errors import CheckpointError, collecting, lines_of, raise_if
from xla_fsdp.checkpoint.files.storage import Storage
from xla_fsdp.checkpoint.steps.rank_file import RankContent, Written, write_rank_file
from xla_fsdp.checkpoint.steps.step_directory import (
    JOB,
    MARKER,
    Announcement,
    Attempt,
    FileRecord,
    JobRecord,
    Keep,
    Marker,
    all_attempts,
    is_owner,
    newest_complete,
    owner_of,
    rank_file_name,
    read_job,
    remove,
    tidy,
    write_metrics,
)

LOOKED_AT = 4  # newest complete attempts that ranks compare; hosts differ by at most one
LOOK_EVERY = 0.5  # seconds after which the leader looks again for announcements
PATIENCE = 300.0  # seconds that it goes on after the main thread has ended
LOST_EXIT_CODE = 1
REMEMBERED = 64  # jobs that were replaced, in ``job.json``


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

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let all ranks raise what this one raises in the block, before their next
        ``all_gather_or_raise`` returns.

        A rank that raised alone would leave the others waiting for it.
        """
        try:
            yield
        except Exception as error:  # whatever it is, the other ranks have to hear of it
            self.all_gather_or_raise(lines_of(error))


@dataclass(frozen=True)
class ShardFile:
    """The file of a rank, which is number ``shard`` of its sharding group."""

    shard: int
    num_shards: int
    suffix: str

    @property
    def name(self) -> str:
        return rank_file_name(self.shard, self.num_shards, self.suffix)

    @property
    def announcement(self) -> str:
        """The name of the small file that announces this one."""
        return rank_file_name(self.shard, self.num_shards, "json")


@dataclass(frozen=True)
class Job:
    """The job that saves.

    Args:
        token: its name, which no other job has.
        replaced: tokens of jobs in whose place it goes on, as it has loaded what they saved.
        take_over: whether it goes on in the place of whichever job owns the directory.
    """

    token: str
    replaced: frozenset[str] = frozenset()
    take_over: bool = False


class _Place(NamedTuple):
    """What ranks tell each other of themselves and of the directory that they see."""

    shard: int
    agreed: dict[str, Any]  # must be equal on all ranks
    job: str
    replaced: list[str]
    take_over: bool
    owner: dict[str, Any] | None
    number: int
    complete: list[Attempt]


class Save:
    """Saves one step: call ``begin``, ``start`` and ``wait``, on every rank.

    If nobody calls ``wait``, the step is completed nevertheless before the process ends, where all
    ranks see the same files; if that fails, the process says so and ends with exit code 1.

    Args:
        storage: of the calling rank.
        ranks: that save.
        file: of the calling rank.
        step: to save.
        keep: complete steps not to delete.
        job: that saves; of the tokens of all ranks, rank 0's counts.
        metrics: of the step, as JSON; the leader's are written.
        same: what else has to be equal on all ranks, by name.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        file: ShardFile,
        step: int,
        keep: Keep,
        job: Job,
        metrics: Mapping[str, Any] | None = None,
        same: Mapping[str, Any] | None = None,
    ) -> None:
        self._storage, self._ranks, self._file = storage, ranks, file
        self._step, self._keep = step, keep
        self._job, self._metrics, self._same = job, metrics or {}, same or {}
        self._process = os.getpid()
        self._attempt = Attempt(step)
        self._leads = False  # whether this rank marks and deletes in its directory
        self._shared = True  # whether all ranks see the same files
        self._expected: list[ShardFile] = []  # that are written into this directory
        self._writes = False  # whether this rank writes one of them
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._error: Exception | None = None
        self._marked = False
        self._lost: list[str] = []  # why other ranks' files are missing
        self._waited_for = threading.Event()
        self._remains: frozenset[Attempt] = frozenset()  # were there before
        self._cleaner: threading.Thread | None = None
        self._not_deleted: list[str] = []

    def begin(self, problems: Sequence[str] = ()) -> None:
        """Agree on a new attempt, and make its folder. Every rank calls it.

        Args:
            problems: reasons why this rank cannot save, if any.

        Raises:
            CheckpointError: with the problems of all ranks; if ranks differ in what they save; if
                another job owns the directory; or if a later step is complete.
        """
        own, found = None, list(problems)
        with collecting(found):
            own = self._look()
        gathered = [_Place(*each) for each in self._ranks.all_gather_or_raise(found, own)]
        raise_if(list(disagreements([place.agreed for place in gathered])))
        self._job = replace(self._job, token=gathered[0].job)
        self._refuse_other_jobs(gathered)
        self._refuse_earlier([{Attempt(*each) for each in place.complete} for place in gathered])
        self._attempt = Attempt(self._step, max(place.number for place in gathered))
        self._make_folder(gathered)

    def start(
        self,
        content: RankContent,
        write: Callable[[Storage | None, str, RankContent], Written] = write_rank_file,
    ) -> None:
        """Write this rank's file in a thread."""
        metadata = replace(content.metadata, step=self._step, job=self._job.token)
        work = partial(self._work, write, replace(content, metadata=metadata))
        # Not a daemon, as ranks on CPU are: those end with the process, whatever they are doing.
        name = f"saving step {self._step} in {self._storage.where}"
        self._thread = threading.Thread(target=work, name=name, daemon=False)
        self._thread.start()
        atexit.register(self._end_process_if_lost)

    def give_up(self, error: Exception) -> None:
        """Write nothing, because of an error of this rank, which ``wait`` raises on all; in place
        of ``start``."""
        self._fail(error)
        atexit.register(self._end_process_if_lost)

    def wait(self) -> None:
        """Return when the step is complete for all ranks. Every rank calls it, once.

        Raises:
            CheckpointError: on every rank, if any rank failed; the attempt is then deleted.
        """
        self._waited_for.set()
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self._end_process_if_lost)
        try:
            files = self._collect()
            with self._ranks.failing_together():
                self._mark(files)
            self._ranks.all_gather_or_raise([])
        except CheckpointError:
            if self._leads:
                self._remove()
            raise
        self._start_tidying()

    def finish(self) -> None:
        """Wait until superfluous steps are deleted, too; warn of those that could not be."""
        if self._cleaner is not None:
            self._cleaner.join()
        problems, self._not_deleted = self._not_deleted, []
        for problem in problems:
            warnings.warn(problem, stacklevel=2)

    # ------------------------------------------------------------ begin

    def _look(self) -> _Place:
        self._remains = frozenset(all_attempts(self._storage))
        attempts = [each for each in self._remains if each.step == self._step]
        try:
            owner = read_job(self._storage)
        except CheckpointError as error:
            owner = owner_of(self._storage)
            if owner is None and not self._job.take_over:
                remedy = "If no other job saves there, pass take_over=True, or delete this file"
                raise CheckpointError([f"{line}. {remedy}" for line in error.problems]) from error
        return _Place(
            shard=self._file.shard,
            agreed={
                "step": self._step,
                "number of shards": self._file.num_shards,
                "file_format": self._file.suffix,
                "keep_last": self._keep.last,
                "keep_period": self._keep.period,
                **self._same,
            },
            job=self._job.token,
            replaced=sorted(self._job.replaced),
            take_over=self._job.take_over,
            owner=None if owner is None else vars(owner),
            number=max((each.number + 1 for each in attempts), default=0),
            complete=list(
                islice(
                    (e for e in newest_complete(self._storage) if e not in self._keep.damaged),
                    LOOKED_AT,
                )
            ),
        )

    def _refuse_other_jobs(self, places: Sequence[_Place]) -> None:
        own, where = self._job.token, self._storage.where
        known = {own, *(token for place in places for token in place.replaced)}
        for place in places:
            other = place.owner and JobRecord(**place.owner)
            if other and own in other.replaced:
                raise CheckpointError(
                    f"{where} was taken over by job {other.job}: this job, {own}, must not save "
                    f"there any more. End one of the two"
                )
            if other and other.job not in known and not any(p.take_over for p in places):
                raise CheckpointError(
                    f"{where} belongs to job {other.job}, which began to save step {other.step} "
                    f"there. If it has ended, load from there first, or pass take_over=True; if "
                    f"not, save to another directory"
                )

    def _refuse_earlier(self, complete: Sequence[set[Attempt]]) -> None:
        # An attempt that is complete on some hosts only was interrupted, and is ignored.
        latest = max(set.intersection(*complete), default=None)
        if latest is not None and latest.step > self._step:
            raise CheckpointError(
                f"{self._storage.where} holds step {latest.step}, so step {self._step} would never "
                f"be the latest one. Save to another directory, or delete the later steps"
            )

    def _make_folder(self, places: Sequence[_Place]) -> None:
        """Own the directory, make the attempt's folder, and find out who sees the same one."""
        made = False
        try:
            with self._ranks.failing_together():
                made = self._own(places[self._ranks.rank].owner)
            self._ranks.all_gather_or_raise([])
            with self._ranks.failing_together():
                leader = self._leader()
            leaders = self._ranks.all_gather_or_raise([], leader)
        except CheckpointError:
            if made:
                self._remove()
            raise
        self._find_files(places, leaders)

    def _own(self, owner: dict[str, Any] | None) -> bool:
        """Make this job the owner of the directory, and the attempt's folder; return whether this
        rank made it."""
        rank = self._ranks.rank
        record = JobRecord(self._job.token, self._step, self._file.num_shards, rank)
        if not self._storage.per_host and rank:
            return False
        if owner is None or owner["job"] != record.job:
            replaced = () if owner is None else (*owner["replaced"], owner["job"])
            new = replace(record, replaced=replaced[-REMEMBERED:])
            self._storage.put(JOB, new.to_bytes())
        return self._storage.create(self._attempt.file(JOB), record.to_bytes())

    def _leader(self) -> int:
        """Return the rank that made the folder that this rank sees."""
        made = read_job(self._storage, self._attempt.folder)
        if made is None or made.job != self._job.token:
            raise CheckpointError(
                f"{self._storage.where}/{self._attempt.folder} was made at the same moment by job "
                f"{made and made.job}: end one of the two jobs"
            )
        return made.rank

    def _find_files(self, places: Sequence[_Place], leaders: Sequence[int]) -> None:
        """Find out who marks, and which files are written into the directory of this rank."""
        self._shared = len(set(leaders)) == 1
        here = leaders[self._ranks.rank]
        self._leads = self._ranks.rank == (0 if self._shared else here)
        # Of replicas that see the same directory, one is written; they share the writing.
        holders: dict[int, list[int]] = defaultdict(list)
        for rank, place in enumerate(places):
            if leaders[rank] == here:
                holders[place.shard].append(rank)
        writers = [ranks[shard % len(ranks)] for shard, ranks in holders.items()]
        self._writes = self._ranks.rank in writers
        self._expected = [replace(self._file, shard=shard) for shard in sorted(holders)]

    # ------------------------------------------------------------ the thread

    def _work(
        self, write: Callable[[Storage | None, str, RankContent], Written], content: RankContent
    ) -> None:
        try:
            storage = self._storage if self._writes else None
            self._written = write(storage, self._attempt.file(self._file.name), content)
            self._announce(self._written.file)
            if self._shared and self._leads:
                self._mark_when_all_are_announced()
        except Exception as error:  # raised by wait()
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        with suppress(CheckpointError):  # the leader then waits in vain
            self._announce(None, lines_of(error))

    def _announce(self, file: FileRecord | None, problems: Sequence[str] = ()) -> None:
        if self._writes:
            said = Announcement(self._job.token, self._step, file, tuple(problems))
            name = self._attempt.file(self._file.announcement)
            self._storage.write(name, [said.to_bytes()])

    def _mark_when_all_are_announced(self) -> None:
        # So that the step is complete even if the job ends before ``wait``.
        names = {file.announcement for file in self._expected}
        last_look = math.inf
        while time.monotonic() < last_look and not self._waited_for.wait(LOOK_EVERY):
            if last_look == math.inf and not threading.main_thread().is_alive():
                last_look = time.monotonic() + PATIENCE
            with suppress(CheckpointError):  # the next iteration or wait() tries again
                if names <= set(self._storage.names(self._attempt.folder)):
                    said = self._announced()
                    self._lost = [problem for each in said.values() for problem in each.problems]
                    if not self._lost:
                        self._mark(_files(said))
                    return

    def _announced(self) -> dict[str, Announcement]:
        """Return what ranks say of the files in this directory, by name."""
        return {
            file.name: Announcement.from_bytes(
                self._storage.read(self._attempt.file(file.announcement)),
                f"{self._storage.where}/{self._attempt.file(file.announcement)}",
            )
            for file in self._expected
        }

    # ------------------------------------------------------------ wait

    def _collect(self) -> dict[str, FileRecord]:
        """Return every file, after checking that all are written and replicas equal."""
        failure = [] if self._error is None else lines_of(self._error)
        file, shards = self._written or (None, None)
        own = (self._file.shard, self._writes, file and astuple(file), shards)
        files: dict[str, FileRecord] = {}
        first: dict[int, tuple[int, str]] = {}
        problems = []
        for rank, written in enumerate(self._ranks.all_gather_or_raise(failure, own)):
            shard, writes, file, checksum_of_shards = written
            if writes:  # another replica's file may differ, because of its unsharded tensors
                files.setdefault(replace(self._file, shard=shard).name, FileRecord(*file))
            other, expected = first.setdefault(shard, (rank, checksum_of_shards))
            if checksum_of_shards != expected:
                problems.append(
                    f"ranks {other} and {rank} hold shard {shard} of the model, but with different "
                    f"values: sharding groups must be replicas of one model to be saved in one "
                    f"directory"
                )
        raise_if(problems)
        return dict(sorted(files.items()))

    def _mark(self, files: Mapping[str, FileRecord]) -> None:
        """Mark the step, if this rank leads, after listing all files in its directory."""
        if not self._leads:
            return
        if not is_owner(self._storage, self._job.token):
            raise CheckpointError(
                f"{self._storage.where} was taken over by another job while step {self._step} was "
                f"saved: this step is not complete. End one of the two jobs"
            )
        if not self._shared:  # the files of replicas on other hosts may differ
            files = {**files, **_files(self._announced())}
        self._check_listed(files)
        if not self._marked:
            if self._metrics:
                write_metrics(self._storage, self._attempt, self._metrics)
            marker = Marker(self._step, self._file.num_shards, dict(files), self._job.token)
            self._storage.put(self._attempt.file(MARKER), marker.to_bytes())
            self._marked = True

    def _check_listed(self, files: Mapping[str, FileRecord]) -> None:
        def differences() -> list[str]:
            found = self._storage.sizes(self._attempt.folder)
            return [
                f"{self._storage.where}/{self._attempt.file(file.name)}: {files[file.name].nbytes} "
                f"bytes were written, but {found.get(file.name, 'none')} are there"
                for file in self._expected
                if found.get(file.name) != files[file.name].nbytes
            ]

        raise_if(self._storage.lasting_problems(differences))

    def _start_tidying(self) -> None:
        if self._leads:
            self._cleaner = threading.Thread(target=self._tidy, name="tidy_steps", daemon=False)
            self._cleaner.start()
        if self._storage.per_host:  # local files are deleted in no time
            self.finish()

    def _tidy(self) -> None:
        at = (self._storage, self._attempt, self._keep, self._job.token, self._remains)
        try:
            self._not_deleted = tidy(*at)
        except Exception as error:  # the step is saved: this must not end the job, but be told
            self._not_deleted = lines_of(error)

    def _remove(self) -> None:
        with suppress(CheckpointError):  # another error is on its way
            remove(self._storage, self._attempt)

    # ------------------------------------------------------------ the end of the process

    def _end_process_if_lost(self) -> None:
        """Called when the process ends, after its threads, if nobody has called ``wait``."""
        if os.getpid() != self._process:  # a fork, which has no part in the save
            return
        problems = self._lost if self._error is None else lines_of(self._error)
        if self._leads and not self._marked and not problems:
            problems = [
                "not all ranks announced their files"
                if self._shared
                else "ranks on hosts that do not share a file system have to wait() for it"
            ]
        if problems:
            lines = "\n".join(problems)
            print(
                f"xla_fsdp: step {self._step} was not saved in {self._storage.where}: {lines}",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(LOST_EXIT_CODE)


def _files(said: Mapping[str, Announcement]) -> dict[str, FileRecord]:
    return {name: each.file for name, each in said.items() if each.file is not None}


def disagreements(agreed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each thing that is not equal on all ranks."""
    for what in agreed[0]:
        ranks: dict[Any, list[int]] = defaultdict(list)
        for rank, values in enumerate(agreed):
            ranks[values[what]].append(rank)
        if len(ranks) > 1:
            each = "; ".join(f"{value} on {_ranks(own)}" for value, own in ranks.items())
            yield f"ranks disagree about {what}: {each}. All must pass the same"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"ranks {shown}"
