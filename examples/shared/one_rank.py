"""Building the shards of one rank of a large job, on any machine, and what that takes.

Words: a *pretended* job is one rank with the others left out, as ``LocalCollectives`` allows.
Always true: what is built is what that rank would build, values included; memory is the peak of
this process above what it took to start torch_xla. On CPU that holds the device's memory, too, so
the shards are counted twice while they are copied.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import torch_xla
from torch import nn

from xla_fsdp import LocalCollectives
from xla_fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814

GIB = 2**30


def report_building(build: Callable[..., nn.Module], ranks: int) -> str:
    """Build the model as rank 0 of ``ranks``; returns a line on its size, memory and time.

    Args:
        build: makes the sharded model; called with options for the wrapper.
        ranks: how many there are to be.
    """
    options = {"collectives": LocalCollectives(0, ranks)}
    FSDP(nn.Linear(8, 8), **options)  # what torch_xla sets up at its first use
    before, start = _peak_bytes(), time.perf_counter()
    model = build(**options)
    torch_xla.sync()
    seconds, peak = time.perf_counter() - start, _peak_bytes() - before
    elements = sum(param.numel() for param in model.parameters())
    return (
        f"rank 0 of {ranks}: {elements / 1e6:.1f} million elements in its shards "
        f"({elements * 4 / GIB:.2f} GiB in fp32), built in {seconds:.0f} s with a peak of "
        f"{peak / GIB:.2f} GiB of host memory"
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
