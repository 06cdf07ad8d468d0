"""Steps per second of two ways to train, measured so that both see the same machine.

Words: a *way* is a function that takes one training step; a *block* is some steps of one way,
between two moments at which the device is idle.
Always true: blocks of the ways alternate, so that a change in the machine's load meets all of them;
compilation happens in warm-up steps, which are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch_xla
import torch_xla.core.xla_model as xm

WARM_UP = 4
BLOCKS = 4


def steps_per_second(ways: Mapping[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Take about ``steps`` steps of each way, on every rank, and return its rate."""
    blocks = min(BLOCKS, steps)
    seconds = dict.fromkeys(ways, 0.0)
    for way in ways.values():
        _seconds(way, WARM_UP)
    for _ in range(blocks):
        for name, way in ways.items():
            seconds[name] += _seconds(way, steps // blocks)
    return {name: blocks * (steps // blocks) / spent for name, spent in seconds.items()}


def _seconds(step: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch_xla.sync()
    xm.wait_device_ops()
    return time.perf_counter() - start
