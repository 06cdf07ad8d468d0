"""Profiles of some training steps, for xprof and TensorBoard, with the names of the FSDP units."""

from __future__ import annotations

import os
from pathlib import Path

import torch_xla.debug.profiler as profiler

PROFILED = range(10, 15)
"""Steps of a run that are recorded: compiled, and with batches waiting."""


def name_units() -> None:
    """Let programs hold the names of their units. Call it before ``launch``."""
    os.environ.setdefault("XLA_FSDP_UNIT_NAMES", "1")


class Profile:
    """Records some steps into ``folder``, and serves a profiler at ``port`` if one is given; None
    records none."""

    def __init__(self, folder: Path | None, port: int | None = None) -> None:
        self._folder, self._steps, self._running = folder, 0, False
        serves = folder is not None and port is not None
        # Kept: the server ends with the object.
        self._server = profiler.start_server(port) if serves else None

    def step(self) -> None:
        """A step begins."""
        self._steps += 1
        if self._folder is None:
            return
        if self._steps == PROFILED.start:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.start_trace(str(self._folder))
            self._running = True
        elif self._steps == PROFILED.stop:
            self.stop()

    def stop(self) -> None:
        """Write what was recorded, if something is being recorded."""
        if self._running:
            profiler.stop_trace()
            self._running = False
