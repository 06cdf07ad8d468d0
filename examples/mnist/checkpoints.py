"""Per-rank checkpoint files of the MNIST job: their names, writing, finding, and reading them.

Words: a *point* is how far training has come: whole epochs, and steps of the epoch begun after
them; a *set* is the files of all ranks for one point,
``<prefix>_epoch_<E>[_step_<S>]_rank-<R>-of-<N>.pth``.
Always true: a file that has its name is complete; a file holds host tensors only; ``--resume`` goes
on only from a set that is complete, and with the options that decide what a point means.
On several hosts the files must be on a file system they share. Merging is ``verify``'s job.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from job import JobFailed, Options

MUST_AGREE = (
    "fake_data",
    "batch_size",
    "drop_last",
    "lr",
    "momentum",
    "seed",
    "use_nested_fsdp",
    "auto_wrap_policy",
    "auto_wrap_min_num_params",
    "flatten_parameters",
    "shard_param_on_dim_0",
    "compute_dtype",
)
"""Options that a resumed run must have in common with the run that it continues."""


class Point(NamedTuple):
    """How far training has come; later points compare greater."""

    epochs: int
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.epochs} epochs" + (f" and {self.steps} steps" if self.steps else "")


@dataclass(frozen=True)
class CheckpointSet:
    """The files of one point that there are, by rank."""

    point: Point
    world_size: int
    paths: Mapping[int, Path]

    def missing(self, prefix: Path) -> list[str]:
        """Names of the files that are not there."""
        absent = (rank for rank in range(self.world_size) if rank not in self.paths)
        return [shard_path(prefix, self.point, rank, self.world_size).name for rank in absent]


def point_prefix(prefix: Path, point: Point) -> str:
    """What the paths of all files of ``point`` start with."""
    return f"{prefix}_epoch_{point.epochs}" + (f"_step_{point.steps}" if point.steps else "")


def shard_path(prefix: Path, point: Point, rank: int, world_size: int) -> Path:
    """The file of one rank."""
    return Path(f"{point_prefix(prefix, point)}_rank-{rank:08d}-of-{world_size:08d}.pth")


def save(path: Path, content: Mapping[str, Any], options: Options) -> None:
    """Write ``content``, copied to the host, and the options; all of it or nothing."""
    agreed = {name: getattr(options, name) for name in MUST_AGREE}
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        torch.save({**_on_host(content), "options": agreed}, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: Path, options: Options) -> dict[str, Any]:
    """What ``save`` wrote; raises JobFailed if an option that must agree has changed."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in many ways
        raise JobFailed(f"--resume: {path} cannot be read ({error}); delete its set") from error
    for name in MUST_AGREE:
        before, now = content["options"][name], getattr(options, name)
        if before != now:
            raise JobFailed(
                f"--resume: {path} was written with {name}={before}, this run has {name}={now}. "
                "Use the same value, or start anew without --resume."
            )
    return content


def find_newest(prefix: Path, world_size: int) -> tuple[CheckpointSet, list[str]]:
    """The complete set with the latest point, and a note on each later set that is incomplete.

    Raises:
        JobFailed: there is none; the text names the files that are missing.
    """
    notes: list[str] = []
    for found in sorted(_find_sets(prefix), key=lambda each: each.point, reverse=True):
        missing = found.missing(prefix)
        if found.world_size != world_size:
            notes.append(f"the set of {found.point} is of {found.world_size} ranks, not of this")
        elif missing:
            notes.append(f"the set of {found.point} lacks {', '.join(missing)}")
        else:
            return found, notes
    raise JobFailed(
        f"--resume: found no complete set of checkpoints {prefix}_epoch_*_rank-*-of-"
        f"{world_size:08d}.pth" + "".join(f"; {note}" for note in notes)
    )


def set_aside(prefix: Path) -> int:
    """Move the files of an earlier run out of the way, into the directory ``replaced`` beside them.

    Otherwise ``--resume`` could find them later and go on with the wrong run. What an even earlier
    run left there is overwritten. Returns how many files were moved.
    """
    old = [path for each in _find_sets(prefix) for path in each.paths.values()]
    for path in old:
        (path.parent / "replaced").mkdir(exist_ok=True)
        os.replace(path, path.parent / "replaced" / path.name)
    return len(old)


def _find_sets(prefix: Path) -> list[CheckpointSet]:
    name = re.compile(
        rf"{re.escape(prefix.name)}_epoch_(\d+)(?:_step_(\d+))?_rank-(\d{{8}})-of-(\d{{8}})\.pth"
    )
    by_point: defaultdict[tuple[Point, int], dict[int, Path]] = defaultdict(dict)
    for path in prefix.parent.glob("*.pth"):
        found = name.fullmatch(path.name)
        if found:
            epochs, steps, rank, world_size = (int(part or 0) for part in found.groups())
            by_point[Point(epochs, steps), world_size][rank] = path
    return [CheckpointSet(point, size, paths) for (point, size), paths in by_point.items()]


def _on_host(content: Any) -> Any:
    """A copy of nested dicts, lists and tuples, with every tensor on the CPU."""
    if isinstance(content, Tensor):
        return content.detach().cpu()
    if isinstance(content, Mapping):
        return {key: _on_host(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_on_host(value) for value in content)
    return content
