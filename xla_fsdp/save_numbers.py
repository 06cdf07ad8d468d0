"""Numbers the saves of a job, for merges that have to tell one from the next.

Words: the *number* of a save is how often its rank had asked for shard metadata by then; as every
rank does so for every save, those of one save have one number.
Always true: metadata has a number only after ``begin``, which is ``compat``'s to call, so the files
of all others stay as they are. What reads checkpoints passes over it.
Which numbers may be merged with which is ``compat_merge``'s business.
"""

from __future__ import annotations

import threading
from typing import Any

_KEY = "save_number"


class _OfRank(threading.local):
    """A rank is a thread or a process."""

    asked = 0


class _SaveNumbers:
    def __init__(self) -> None:
        self.given = False
        self.of_rank = _OfRank()


_numbers = _SaveNumbers()


def begin() -> None:
    """Number the saves from now on."""
    _numbers.given = True


def numbered(metadata: dict[str, Any]) -> dict[str, Any]:
    """A rank's metadata with the number of the save that it is asked for."""
    if not _numbers.given:
        return metadata
    _numbers.of_rank.asked += 1
    return {**metadata, _KEY: _numbers.of_rank.asked}


def number_of(metadata: Any) -> int | None:
    """What was found in a file as its metadata says of its number."""
    number = metadata.get(_KEY) if isinstance(metadata, dict) else None
    return number if isinstance(number, int) else None
