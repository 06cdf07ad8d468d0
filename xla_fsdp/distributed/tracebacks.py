"""Tracebacks of errors that somebody may keep."""

from __future__ import annotations

import traceback


def forget_locals(error: BaseException | None) -> None:
    """Clear the local variables of the frames that ``error``, and the errors behind it, came
    through, except for those that still run."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
