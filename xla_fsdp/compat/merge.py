"""Merging the files that the ranks of this very job save, as scripts for torch_xla do it.

They merge on one rank right after ``xm.save``, which does not wait for the other ranks, and they
save and merge again with the same paths. So the merge waits until there is a *fresh* file of every
rank: one that was written since the job began, and since the job last merged it.

Invariants: fresh shards are not mixed with others, nor with those of an earlier save of the job;
files none of which is fresh are merged, or refused, at once. An earlier output is replaced, as
torch_xla's own merge does.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xla_fsdp.checkpoint import consolidate
from xla_fsdp.checkpoint.errors import raise_if
from xla_fsdp.checkpoint.save_numbers import number_of
from xla_fsdp.checkpoint.shard_files import DEFAULT_SUFFIX, find_files
from xla_fsdp.distributed.cpu_ranks import Unwind, current_rank_thread

CLOCKS_DIFFER = 2.0  # seconds by which a file system's clock may be behind the host's
PATIENCE = 120.0  # seconds without a change to the files until ranks that do not save are given up
_INTERVAL = 0.1

_Stamp = tuple[float, int]  # when a file was last written, in seconds since the epoch, and its size


def pause() -> None:
    """Let the other ranks go on; leave with them if one has failed."""
    thread = current_rank_thread()
    if thread is not None:
        thread.rank_run.end_seeding(thread.rank)
        if thread.rank_run.failures:
            raise Unwind
    time.sleep(_INTERVAL)


@dataclass
class SavedByJob:
    """Knows which files this job has saved, on the one rank that merges.

    Args:
        began: when the job began, in seconds since the epoch.
        pause: lets the other ranks go on for a moment.
    """

    began: float
    pause: Callable[[], None] = pause
    merged: dict[str, _Stamp] = field(default_factory=dict)  # by path, when last merged

    def wait(
        self, ckpt_prefix: str, ckpt_suffix: str, output: str, patience: float = PATIENCE
    ) -> None:
        """Return when there is a fresh shard of every rank, all of one save, or no file is fresh.

        What does not become complete is left to the merge to report.

        Args:
            ckpt_prefix: what the paths of all shard files start with.
            ckpt_suffix: pattern for the rest of their paths.
            output: where the merge is going to write.
            patience: seconds without a change to the files after which to give up.

        Raises:
            CheckpointError: if some shards stay older than the others.
        """
        seen: dict[str, _Stamp] | None = None
        stale: list[str] = []
        changed = time.monotonic()
        while time.monotonic() - changed <= patience:
            found = _stamps(ckpt_prefix, ckpt_suffix)
            if found != seen:
                fresh = {path for path, stamp in found.items() if self._is_fresh(path, stamp)}
                problems: list[str] = []
                if fresh:
                    shards, problems = consolidate.look_at_shards(
                        ckpt_prefix, ckpt_suffix, output, optimizer=False
                    )
                    numbers = {each.source: number_of(each.metadata) for each in shards}
                    stale = _stale(numbers, fresh)
                if not (fresh and (problems or stale)):
                    self.merged.update(found)
                    return
                seen, changed = found, time.monotonic()
            self.pause()
        raise_if(stale)

    def _is_fresh(self, path: str, stamp: _Stamp) -> bool:
        if path in self.merged:
            return self.merged[path] != stamp
        return stamp[0] >= self.began - CLOCKS_DIFFER


_THIS_JOB = SavedByJob(began=time.time())


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = DEFAULT_SUFFIX,
    save_path: str = "",
    save_model: bool = True,
) -> tuple[OrderedDict[str, Any], str | None]:
    """As ``xla_fsdp.consolidate_sharded_model_checkpoints(..., overwrite=True)``, once all ranks of
    this job have saved their shards.

    Args:
        ckpt_prefix: what the paths of all shard files start with.
        ckpt_suffix: pattern for the rest of their paths.
        save_path: of the merged file; ``ckpt_prefix + "_consolidated.pth"`` if empty.
        save_model: whether to save at all.

    Returns:
        The full state dict, and the path it was saved to (None if it was not).

    Raises:
        CheckpointError: with every problem found; if files are fresh, once nothing has changed for
            ``PATIENCE`` seconds.
    """
    output = consolidate.output_path(ckpt_prefix, save_path)
    _THIS_JOB.wait(ckpt_prefix, ckpt_suffix, output)
    return consolidate.consolidate_sharded_model_checkpoints(
        ckpt_prefix, ckpt_suffix, save_path, save_model, overwrite=True
    )


def _stale(numbers: dict[str, int | None], fresh: set[str]) -> list[str]:
    """Return one line for each shard that is not fresh, or whose save is not the last.

    Args:
        numbers: of the saves, by path.
        fresh: paths of fresh files. If no shard is among them, none is stale.
    """
    of_fresh = {path: number for path, number in numbers.items() if path in fresh}
    last = max((number for number in of_fresh.values() if number is not None), default=None)
    stale = [path for path, number in numbers.items() if path not in fresh or number != last]
    if len(stale) == len(numbers):
        return []
    lines = []
    for path in stale:
        line = (
            f"{path}: an earlier save's, but this job has saved other shards since; save those of "
            f"all ranks, or narrow ckpt_suffix if the file does not belong to them"
        )
        if (number := of_fresh.get(path)) is not None:
            line += (
                f". (When it was saved, its rank had called get_shard_metadata() {number} times, "
                f"but one that saved another {last} times: every rank has to call it as often)"
            )
        lines.append(line)
    return lines


def _stamps(ckpt_prefix: str, ckpt_suffix: str) -> dict[str, _Stamp]:
    stamps: dict[str, _Stamp] = {}
    for path in find_files(ckpt_prefix, ckpt_suffix):
        try:
            status = os.stat(path)
        except FileNotFoundError:  # replaced just now
            continue
        stamps[path] = (status.st_mtime, status.st_size)
    return stamps
