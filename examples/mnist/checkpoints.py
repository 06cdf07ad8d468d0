"""Checkpoints of the MNIST job: what they say beside the shards, and where earlier ones go.

Words: a *point* is how far training has come: whole epochs, and steps of the epoch begun after
them. What is in the directory is ``CheckpointManager``'s; merging is ``verify``'s job.
Always true: ``--resume`` goes on only with the options that decide what a point means.
On several hosts the directory must be on a file system that they share.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from job import JobFailed, Options

MUST_AGREE = ("fake_data", "batch_size", "drop_last", "lr", "momentum", "seed", "compute_dtype")
"""Options that a resumed run must have in common with the run that it continues."""


class Point(NamedTuple):
    """How far training has come; later points compare greater."""

    epochs: int
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.epochs} epochs" + (f" and {self.steps} steps" if self.steps else "")


def describe(point: Point, options: Options, world_size: int) -> dict[str, Any]:
    """What a checkpoint says beside the shards."""
    return {**point._asdict(), "options": _agreed(options, world_size)}


def point_of(described: Mapping[str, Any], options: Options, world_size: int) -> Point:
    """The point of a checkpoint; raises JobFailed if what must agree has changed since."""
    for name, now in _agreed(options, world_size).items():
        before = described["options"][name]
        if before != now:
            raise JobFailed(
                f"--resume: {options.prefix} was written with {name}={before}, this run has "
                f"{name}={now}. Use the same value, or start anew without --resume."
            )
    return Point(described["epochs"], described["steps"])


def _agreed(options: Options, world_size: int) -> dict[str, Any]:
    return {**{name: getattr(options, name) for name in MUST_AGREE}, "num_ranks": world_size}


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of an earlier run into the directory ``replaced`` beside them.

    Otherwise ``--resume`` could find them later and go on with the wrong run. What an even earlier
    run left there is deleted. Returns where they are now, if there are any.
    """
    if not folder.exists():
        return None
    target = folder.parent / "replaced" / folder.name
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    os.replace(folder, target)
    return target
