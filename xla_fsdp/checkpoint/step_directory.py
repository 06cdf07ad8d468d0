"""The directory that checkpoints of one run are kept in: names, completeness, and what is deleted.

    run/step_00000010/rank-00000-of-00008.safetensors ... complete.json

Words: an *attempt* is one saving of one step, in a folder of its own: a step that is saved again
gets a new one (``step_00000010.1``) and replaces the old one only when it is complete; the
*marker* is the file that says that an attempt is complete, and how long its files are.
Always true: an attempt without a marker is never read; the marker is the first file to be deleted
and the last to be written; the newest complete attempt is never deleted.
Who writes what and when is ``commit``'s business; this file works for one caller at a time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from xla_fsdp.checkpoint.errors import CheckpointError, item, typed
from xla_fsdp.checkpoint.storage import Storage, open_storage

MARKER = "complete.json"

FORMAT = "xla_fsdp checkpoint"

VERSION = 1

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
        """The name of a file of this attempt in the directory."""
        return f"{self.folder}/{name}"


@dataclass(frozen=True)
class Marker:
    """What a complete attempt says of itself.

    Args:
        step: that was saved.
        world_size: number of ranks that share the model.
        files: name of every rank's file to its number of bytes.
    """

    step: int
    world_size: int
    files: dict[str, int]

    def to_bytes(self) -> bytes:
        """The content of the marker file."""
        own = {"step": self.step, "world_size": self.world_size, "files": self.files}
        return json.dumps({"format": FORMAT, "version": VERSION, **own}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Marker:
        """The inverse of ``to_bytes``; ``name`` is the file's, for messages.

        Raises:
            CheckpointError: if it is not a marker, or of a later version.
        """
        try:
            content = typed(json.loads(data), dict, "marker")
            if content.get("format") != FORMAT or content.get("version") != VERSION:
                raise CheckpointError(
                    f"is {content.get('format')!r} version {content.get('version')!r}, expected "
                    f"{FORMAT!r} version {VERSION}"
                )
            files = item(content, "files", dict, "")
            return cls(
                item(content, "step", int, ""),
                item(content, "world_size", int, ""),
                {name: typed(size, int, f"files.{name}") for name, size in files.items()},
            )
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{name}: {error}") from error


def rank_file_name(rank: int, world_size: int, suffix: str) -> str:
    """The file of one rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}.{suffix}"


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The greatest step that is completely saved in ``directory``, or None."""
    newest = next(newest_complete(open_storage(directory)), None)
    return None if newest is None else newest.step


def all_attempts(storage: Storage) -> list[Attempt]:
    """Every attempt there is, complete or not, in order."""
    matches = (_FOLDER.fullmatch(name) for name in storage.names())
    return sorted(Attempt(int(m[1]), int(m[2] or 0)) for m in matches if m)


def complete_attempts(storage: Storage) -> list[Attempt]:
    """The attempts that may be read, in order."""
    return sorted(newest_complete(storage))


def newest_complete(storage: Storage, step: int | None = None) -> Iterator[Attempt]:
    """The attempts that may be read, the newest first, perhaps of one step only. One request for
    all, and one for each that is looked at."""
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
    """What a complete attempt says of itself.

    Raises:
        CheckpointError: if it says nothing that makes sense.
    """
    name = f"{storage.where}/{attempt.file(MARKER)}"
    return Marker.from_bytes(storage.read(attempt.file(MARKER)), name)


def remove(storage: Storage, attempt: Attempt) -> None:
    """Delete an attempt. If that is cut short, what is left is not complete."""
    storage.delete(attempt.file(MARKER))
    storage.delete_folder(attempt.folder)


def tidy(storage: Storage, newest: Attempt, keep_last: int | None) -> list[str]:
    """Delete what ``newest``, which is complete, makes superfluous: attempts that were not
    completed, earlier attempts of the same steps, and all but the last ``keep_last`` steps. Later
    steps, too: if any counted, ``newest`` would not have been saved.

    Returns:
        One line for each attempt that could not be deleted; the next call tries again.
    """
    complete = [each for each in complete_attempts(storage) if each <= newest]
    current = {each.step: each for each in complete}  # the last attempt of each step
    kept = [current[step] for step in sorted(current)][-(keep_last or len(current)) :]
    return list(_removed(storage, (a for a in all_attempts(storage) if a not in kept)))


def _removed(storage: Storage, attempts: Iterable[Attempt]) -> Iterable[str]:
    for attempt in attempts:
        try:
            remove(storage, attempt)
        except CheckpointError as error:
            yield from error.problems
