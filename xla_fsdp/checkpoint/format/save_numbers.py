"""Number the saves of a job, for torch_xla scripts that save to the same paths again.

A rank counts its calls of ``get_shard_metadata()``. Every rank calls it once for every save, so the
files of one save have the same number. Only after ``xla_fsdp.compat.install()`` are files numbered,
and only ``xla_fsdp.compat.merge`` reads the numbers.
"""

from __future__ import annotations

import threading
from typing import Any

KEY = "save_number"


class _Count(threading.local):  # thread-local, as ranks on CPU are threads of one process
    saves = 0


_installed = threading.Event()  # for all ranks of the process, as ``xla_fsdp.compat.install``
_count = _Count()


def begin() -> None:
    """Number the saves of this process from now on."""
    _installed.set()


def numbered(metadata: dict[str, Any]) -> dict[str, Any]:
    """Count one more save of the calling rank, and return its metadata with that number."""
    if not _installed.is_set():
        return metadata
    _count.saves += 1
    return {**metadata, KEY: _count.saves}


def number_of(metadata: Any) -> int | None:
    """Return the number in a file's metadata, which may be malformed; None if it has none."""
    number = metadata.get(KEY) if isinstance(metadata, dict) else None
    return number if isinstance(number, int) else None
