"""The directory that the checkpoints of one run are kept in: names, completeness, deletion.

    run/step_00000010/rank-00000-of-00008.safetensors ... complete.json

Each saving of a step, an *attempt*, has a folder of its own: a step that is saved again gets a new
one (``step_00000010.1``), which replaces the old one only when it is complete. The *marker* is the
file that says that an attempt is complete, and how long its files are.

Invariants: an attempt without a marker is never read; the marker is the first file to be deleted
and the last to be written; the newest complete attempt is never deleted.
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
    """One saving of a step; later ones compare greater."""

    step: int
    number: int = 0

    @property
    def folder(self) -> str:
        """Its name in the directory."""
        return f"step_{self.step:08d}" + (f".{self.number}" if self.number else "")

    def file(self, name: str) -> str:
        """Return the name of a file of this attempt in the directory."""
        return f"{self.folder}/{name}"


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the greatest step that is completely saved in ``directory``, or None."""
    newest = next(newest_complete(open_storage(directory)), None)
    return None if newest is None else newest.step


def all_attempts(storage: Storage) -> list[Attempt]:
    """Return every attempt there is, complete or not, in order."""
    matches = (_FOLDER.fullmatch(name) for name in storage.names())
    return sorted(Attempt(int(m[1]), int(m[2] or 0)) for m in matches if m)


def complete_attempts(storage: Storage) -> list[Attempt]:
    """Return the attempts that may be read, in order."""
    return sorted(newest_complete(storage))


def newest_complete(storage: Storage, step: int | None = None) -> Iterator[Attempt]:
    """Yield the attempts that may be read, the newest first, perhaps of one step only.

    Makes one request for all, and one for each that is looked at.
    """
    for attempt in reversed(all_attempts(storage)):
        if step in (None, attempt.step) and MARKER in storage.names(attempt.folder):
            yield attempt


def write_marker(storage: Storage, attempt: Attempt, marker: Marker) -> None:
    """Declare an attempt complete. Every file must be in place.

    Raises:
        CheckpointError: if the marker cannot be written.
    """
    storage.write(attempt.file(MARKER), [marker.to_bytes()])


def read_marker(storage: Storage, attempt: Attempt) -> Marker:
    """Read the marker of a complete attempt.

    Raises:
        CheckpointError: if it makes no sense.
    """
    name = f"{storage.where}/{attempt.file(MARKER)}"
    return Marker.from_bytes(storage.read(attempt.file(MARKER)), name)


def remove(storage: Storage, attempt: Attempt) -> None:
    """Delete an attempt. If that is cut short, what is left is not complete."""
    storage.delete(attempt.file(MARKER))
    storage.delete_folder(attempt.folder)


def tidy(storage: Storage, newest: Attempt, keep_last: int | None) -> list[str]:
    """Delete what ``newest``, which is complete, makes superfluous.

    That is attempts that were not completed, earlier attempts of the same steps, all but the last
    ``keep_last`` steps, and later steps: if any counted, ``newest`` would not have been saved.

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
