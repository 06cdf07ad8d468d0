"""What the job tells its user while it runs: a bar, a line per epoch, a log of losses.

Words: a *report* is the loss and accuracy at one step, averaged over all ranks.
Always true: only rank 0 says anything; the bar, on stderr, is shown on a terminal only; the loss
log is written line by line, so a run that was stopped leaves what it had reached.
What the numbers are is left to each example's ``train.py``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tqdm import tqdm

from place import Place


class Progress:
    """Shows one run; on ranks other than 0 it shows nothing.

    Args:
        place: of this rank.
        loss_log: where to write every report as a line of JSON, if anywhere.
        begin: whole epochs, and steps of the one after them, that an earlier run has made.
    """

    def __init__(self, place: Place, loss_log: Path | None, begin: tuple[int, int]) -> None:
        self._shown = place.rank == 0
        self._log = _open_log(loss_log, begin) if self._shown and loss_log else None
        self.summary = ""
        self._spent: dict[str, float] = {}

    @contextmanager
    def epoch(self, number: int, done: int, total: int) -> Iterator[None]:
        """Show a bar inside; ``done`` of ``total`` steps were taken before."""
        self._number, self.summary = number, "nothing left to train"
        quiet = None if self._shown else True  # None: quiet unless stderr is a terminal
        self._bar = tqdm(
            desc=f"epoch {number}",
            initial=done,
            total=total,
            unit="step",
            disable=quiet,
            leave=False,
        )
        with self._bar:
            yield

    def step(self) -> None:
        """One step was taken."""
        self._bar.update()

    def report(self, step: int, loss: float, accuracy: float) -> None:
        """Show where the epoch is; ``summary`` is the same as text, for a line per epoch.

        Args:
            step: number of the step, from 1.
            loss: of this step, averaged over the ranks.
            accuracy: on the images that all ranks have seen since the bar began, in percent.
        """
        self.summary = f"train loss {loss:.4f}, train accuracy {accuracy:.1f}%"
        self._bar.set_postfix_str(self.summary)
        if self._log is not None:
            line = {"epoch": self._number, "step": step, "loss": loss, "accuracy": accuracy}
            print(json.dumps(line), file=self._log, flush=True)

    def say(self, text: str) -> None:
        """Print a line."""
        if self._shown:
            tqdm.write(text)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time that is spent inside to that of ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent[phase] = self.seconds(phase) + time.perf_counter() - start

    def seconds(self, phase: str) -> float:
        """Time spent in ``phase`` so far."""
        return self._spent.get(phase, 0.0)

    def phases(self) -> str:
        """The time spent in each phase, as text."""
        return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._spent.items())


def _open_log(path: Path, begin: tuple[int, int]) -> IO[str]:
    """The log, with the lines up to ``begin``: a resumed run writes the later ones again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if begin > (0, 0) and path.exists() else []
    log = path.open("w")
    for line in lines:
        report = json.loads(line)
        if (report["epoch"] - 1, report["step"]) <= begin:
            print(line, file=log)
    return log
