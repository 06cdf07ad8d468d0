"""Numbers that tell one save of a job from the next, for scripts that save to the same paths again.

A rank's saves are counted by how often it asks for shard metadata; as every rank does so for every
save, the files of one save have the same number. Files have none unless ``xla_fsdp.compat`` is
installed, and only its merge reads it.
"""

from __future__ import annotations

import threading
from typing import Any

KEY = "save_number"


class _Count(threading.local):
    """The saves of one rank, which is a process or a thread."""

    saves = 0


# Of the process, as is the installation of ``xla_fsdp.compat``, which sets the event.
_installed = threading.Event()
_count = _Count()


def begin() -> None:
    """Number the saves of this process from now on."""
    _installed.set()


def numbered(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's metadata with the number of the save that it is asked for."""
    if not _installed.is_set():
        return metadata
    _count.saves += 1
    return {**metadata, KEY: _count.saves}


def number_of(metadata: Any) -> int | None:
    """Return the number in a file's metadata, which nobody has checked yet."""
    number = metadata.get(KEY) if isinstance(metadata, dict) else None
    return number if isinstance(number, int) else None
