"""Where a rank stands among the ranks of a job.

Always true: a ``Place`` is plain data, made once per rank and handed to whatever divides work among
ranks. Needs no torch_xla, so that this can be tested without ranks; asking the runtime for it is
left to ``ranks``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """A rank's number, how many there are, and its device."""

    rank: int
    world_size: int
    device: torch.device
