"""By which errors loops are refused."""

from __future__ import annotations

from xla_fsdp.xla import ops
from xla_fsdp.xla.lost import ChangedOutsideError


class NoLoopError(ValueError, RuntimeError):
    """Blocks, or the way they are called, cannot run as a loop; one by one they can.

    A class of its own, so that nobody takes an error of the user's code, which scanned blocks run,
    for one of these.
    """

    # Both kinds, as callers may expect either. No TypeError: torch's operators would make a
    # NotImplemented of one that a placeholder raises.


REFUSALS = (NoLoopError, ops.NoValueError, ChangedOutsideError)
"""What a forward raises if its blocks cannot run as a loop; values are wanted where a block, or its
gradient, runs an operator on the host."""
