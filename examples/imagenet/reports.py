"""What the ImageNet job tells its user beside losses: compilations, damage.

Words: a *problem* is the path of a damaged picture, and what is wrong with it.
Always true: every damaged picture is named once by each rank that met it, and counted once for all.
The bar, lines, the log of losses, scalars and profiles are in ``shared``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics

from pictures import Problem


class Compilations:
    """How many programs were compiled in which phase, each time that it came."""

    def __init__(self) -> None:
        self._before = _compiled()
        self._counts: dict[str, list[int]] = {}

    def end(self, phase: str) -> None:
        """What was compiled since the end of the phase before was compiled in this one."""
        now = _compiled()
        self._counts.setdefault(phase, []).append(now - self._before)
        self._before = now

    def __str__(self) -> str:
        each = (f"{phase} {'+'.join(map(str, found))}" for phase, found in self._counts.items())
        return f"programs compiled: {', '.join(each)}"


def _compiled() -> int:
    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


class Damage:
    """The damaged pictures that this rank met, by path."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._paths: set[str] = set()

    def add(self, problems: Iterable[Problem]) -> None:
        """Name those that are new."""
        for path, reason in problems:
            if path not in self._paths:
                self._paths.add(path)
                # One write, so that no other rank's line comes between a line and its end.
                sys.stderr.write(f"rank {self._rank}: left out {path}: {reason}\n")
                sys.stderr.flush()

    def of_all_ranks(self) -> list[str]:
        """The damaged pictures that any rank met. Every rank calls it."""
        own = json.dumps(sorted(self._paths)).encode()
        return sorted({path for each in xm.rendezvous("damage", own) for path in json.loads(each)})
