"""Name, list and delete the checkpoints of one run in its directory.

    run/step_00000010/rank-00000-of-00008.safetensors ... complete.json

Every time a step is saved, this *attempt* gets a new folder (``step_00000010.1``, ...). Its
*marker*, ``complete.json``, says that all its files are on disk, and how long they are.

Invariants: an attempt without a marker is never read; the marker is the last file written and the
first deleted; the newest complete attempt is never deleted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.format import Marker
from xla_fsdp.checkpoint.storage import Storage, open_storage

MARKER = "complete.json"
_FOLDER = re.compile(r"step_(\d{8,})(?:\.([1-9]\d*))?")


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
    storage.write(attempt.file(MARKER), [marker.to_bytes()])


def read_marker(storage: Storage, attempt: Attempt) -> Marker:
    """Read the marker of a complete attempt.

    Raises:
        CheckpointError: if it cannot be read or is malformed.
    """
    name = f"{storage.where}/{attempt.file(MARKER)}"
    return Marker.from_bytes(storage.read(attempt.file(MARKER)), name)


def remove(storage: Storage, attempt: Attempt) -> None:
    """Delete an attempt, its marker first: if this is interrupted, the rest is not complete."""
    storage.delete(attempt.file(MARKER))
    storage.delete_folder(attempt.folder)


def tidy(storage: Storage, newest: Attempt, keep_last: int | None) -> list[str]:
    """Delete every attempt that ``newest``, which is complete, makes superfluous.

    Deletes incomplete attempts, all but the last attempt of each step, all but the last
    ``keep_last`` steps, and whatever is later than ``newest``: ``Save.begin`` refuses to save
    before a later step that is complete on every host, so those are remains of a crash.

    Returns:
        One line for each attempt that could not be deleted; the next call tries again.
    """
    complete = [each for each in complete_attempts(storage) if each <= newest]
    current = {each.step: each for each in complete}  # the last attempt of each step
    remaining = [current[step] for step in sorted(current)][-(keep_last or len(current)) :]
    problems: list[str] = []
    for attempt in all_attempts(storage):
        if attempt not in remaining:
            try:
                remove(storage, attempt)
            except CheckpointError as error:
                problems += error.problems
    return problems
