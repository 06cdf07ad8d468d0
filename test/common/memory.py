"""How much memory the process needs."""

from __future__ import annotations

import resource
from pathlib import Path


def peak() -> int:
    """Bytes of memory at most since the last reset."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> int:
    """Forget the peak so far; return the bytes of memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()
