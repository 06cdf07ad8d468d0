"""Name, list and delete the checkpoints of one run in its directory.

    run/job.json
    run/step_00000010/job.json complete.json rank-00000-of-00002.safetensors ...json

Every time a step is saved, this *attempt* gets a new folder (``step_00000010.1``, ...). Its
``job.json`` names the job whose files are in it, a rank announces its file by a ``.json`` of the
same name, and the *marker*, ``complete.json``, says that all files are there, and lists them with
their sizes and digests. The run's ``job.json`` names the job that owns the directory; a job that
comes later may take it over.

Invariants: an attempt without a marker is never read; the marker is the last file written and the
first deleted; the newest complete attempt is never deleted, nor is anything of a later job: a job
owns the directory before it makes its first folder, and deletes only what it had listed before it
saw that it is still the owner.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator
from typing import NamedTuple

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.format import JobRecord, Marker
from xla_fsdp.checkpoint.storage import Storage, open_storage

MARKER = "complete.json"
JOB = "job.json"
_FOLDER = re.compile(r"step_(\d{8,})(?:\.([1-9]\d*))?")


_RANDOM = secrets.token_hex(4)  # of this process and its forks


def job_token() -> str:
    """Return a name that no other job has, for the job whose rank 0 is this process."""
    return f"{socket.gethostname()}-{os.getpid()}-{_RANDOM}"


class Attempt(NamedTuple):
    """One attempt to save a step; later ones compare greater."""

    step: int
    number: int = 0

    @property
    def folder(self) -> str:
        return f"step_{self.step:08d}" + (f".{self.number}" if self.number else "")

    def file(self, name: str) -> str:
        """Return the path of a file of this attempt, relative to the run's directory."""
        return f"{self.folder}/{name}"


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the greatest step that is completely saved in ``directory``, or None."""
    newest = next(newest_complete(open_storage(directory)), None)
    return None if newest is None else newest.step


def all_attempts(storage: Storage) -> list[Attempt]:
    """Return every attempt, complete or not, in order."""
    matches = (_FOLDER.fullmatch(name) for name in storage.names())
    return sorted(Attempt(int(m[1]), int(m[2] or 0)) for m in matches if m)


def complete_attempts(storage: Storage) -> list[Attempt]:
    """Return the complete attempts, in order."""
    return sorted(newest_complete(storage))


def newest_complete(storage: Storage, step: int | None = None) -> Iterator[Attempt]:
    """Yield the complete attempts, newest first; only those of ``step``, unless it is None.

    Lists the directory, and then each attempt's folder when it is reached.
    """
    for attempt in reversed(all_attempts(storage)):
        if step in (None, attempt.step) and MARKER in storage.names(attempt.folder):
            yield attempt


def write_marker(storage: Storage, attempt: Attempt, marker: Marker) -> None:
    """Mark an attempt as complete; all its files must be on disk."""
    storage.put(attempt.file(MARKER), marker.to_bytes())


def read_marker(storage: Storage, attempt: Attempt) -> Marker:
    """Read the marker of a complete attempt.

    Raises:
        CheckpointError: if it cannot be read, is malformed or belongs to another step.
    """
    name = f"{storage.where}/{attempt.file(MARKER)}"
    marker = Marker.from_bytes(storage.read(attempt.file(MARKER)), name)
    check_step(marker, attempt.folder, name)
    return marker


def check_step(marker: Marker, folder: str, name: str) -> None:
    """Raise ``CheckpointError`` if the name of a marker's folder is that of another step."""
    match = _FOLDER.fullmatch(folder)
    if match and int(match[1]) != marker.step:
        raise CheckpointError(f"{name}: is of step {marker.step}, in the folder of another one")


def read_job(storage: Storage, folder: str = "") -> JobRecord | None:
    """Return the record of the job that owns the directory, or whose folder this is; None if there
    is none, as before version 4.

    Raises:
        CheckpointError: if it cannot be read or is malformed.
    """
    name = f"{folder}/{JOB}" if folder else JOB
    if JOB not in storage.names(folder):
        return None
    return JobRecord.from_bytes(storage.read(name), f"{storage.where}/{name}")


def is_owner(storage: Storage, job: str) -> bool:
    """Return whether no other job has taken the directory over."""
    owner = read_job(storage)
    return owner is None or owner.job == job


def remove(storage: Storage, attempt: Attempt) -> None:
    """Delete an attempt, its marker first: if this is interrupted, the rest is not complete."""
    storage.delete(attempt.file(MARKER))
    storage.delete_folder(attempt.folder)


def tidy(storage: Storage, newest: Attempt, keep_last: int | None, job: str) -> list[str]:
    """Delete every attempt that ``newest``, which is complete and of ``job``, makes superfluous, as
    long as ``job`` owns the directory.

    Deletes incomplete attempts, all but the last attempt of each step, all but the last
    ``keep_last`` steps, and whatever is later than ``newest``: ``Save.begin`` refuses to save
    before a later step that is complete on every host, so those are remains of a crash.

    Returns:
        One line for each attempt that could not be deleted; the next call tries again.
    """
    listed = all_attempts(storage)
    complete = [each for each in complete_attempts(storage) if each <= newest]
    current = {each.step: each for each in complete}  # the last attempt of each step
    remaining = [current[step] for step in sorted(current)][-(keep_last or len(current)) :]
    problems: list[str] = []
    for attempt in listed:
        if attempt not in remaining:
            try:
                if not is_owner(storage, job):
                    return problems
                remove(storage, attempt)
            except CheckpointError as error:
                problems += error.problems
    return problems
