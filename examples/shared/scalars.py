"""Scalars of a run for TensorBoard."""

from __future__ import annotations

from pathlib import Path


class Scalars:
    """TensorBoard scalars, if there is a directory for them; rank 0's alone is given one."""

    def __init__(self, logdir: Path | None) -> None:
        self._writer = None
        if logdir is not None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._writer = SummaryWriter(str(logdir))

    def add(self, step: int, **values: float) -> None:
        """Write values of a step, counted over all epochs."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name.replace("_", "/", 1), value, step)
            self._writer.flush()

    def close(self) -> None:
        """Nothing more is written."""
        if self._writer is not None:
            self._writer.close()
