"""``XLA_FSDP_CHECK=1``: what holds between two backward passes is asserted when one ends."""

from __future__ import annotations

import os
from collections.abc import Sequence

ENABLED = os.environ.get("XLA_FSDP_CHECK") == "1"


def expect_none(problems: Sequence[str]) -> None:
    """Raise AssertionError if there are problems."""
    if problems:
        raise AssertionError(
            "at the end of a backward pass (XLA_FSDP_CHECK=1): " + "; ".join(problems) + ". "
            "This is an error of xla_fsdp: report it with these lines"
        )
