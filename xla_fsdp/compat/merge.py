"""Merge shards while the ranks of the same job save them, as torch_xla scripts do.

Such scripts merge on one rank right after ``xm.save``, which does not wait for the other ranks, and
repeat this with the same paths. So the merge waits for a *fresh* file of every rank: one that was
written since the job began, and since the job last merged it.

Invariants: shards of different saves are never merged; if no file is fresh, they are merged, or
refused, without waiting. An earlier output is replaced, as by torch_xla's own merge.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xla_fsdp.checkpoint.convert import consolidate
from xla_fsdp.checkpoint.errors import raise_if
from xla_fsdp.checkpoint.format.save_numbers import number_of
from xla_fsdp.checkpoint.format.shard_files import DEFAULT_SUFFIX, find_files
from xla_fsdp.distributed.cpu_ranks import Unwind, current_rank_thread

CLOCKS_DIFFER = 2.0  # seconds by which a file server's clock may be slow
PATIENCE = 120.0  # seconds without a change to the files after which waiting ends
_INTERVAL = 0.1

_Stamp = tuple[float, int]  # when a file was last written, in seconds since the epoch, and its size


def pause() -> None:
    """Sleep, so that other ranks can save; on CPU, raise ``Unwind`` if one of them has failed."""
    thread = current_rank_thread()
    if thread is not None:
        thread.rank_run.end_seeding(thread.rank)
        if thread.rank_run.failures:
            raise Unwind
    time.sleep(_INTERVAL)


@dataclass
class SavedByJob:
    """Waits for the shards that this job saves, on the one rank that merges.

    Args:
        began: time when the job began, in seconds since the epoch.
        pause: called between two looks at the files.
    """

    began: float
    pause: Callable[[], None] = pause
    merged: dict[str, _Stamp] = field(default_factory=dict)  # by path, when last merged

    def wait(
        self, ckpt_prefix: str, ckpt_suffix: str, output: str, patience: float = PATIENCE
    ) -> None:
        """Wait until the fresh shards of one save are complete; return at once if none is fresh.

        Also returns if nothing changes for ``patience`` seconds: the merge then reports the
        problems. Raises CheckpointError if then some shards are of an earlier save than others.
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
    """Wait until all ranks of this job have saved, then merge, replacing an existing output.

    Arguments and result are those of ``xla_fsdp.consolidate_sharded_model_checkpoints``.

    Raises:
        CheckpointError: with every problem found; if any file is fresh, only after ``PATIENCE``
            seconds without a change to the files.
    """
    output = consolidate.output_path(ckpt_prefix, save_path)
    _THIS_JOB.wait(ckpt_prefix, ckpt_suffix, output)
    return consolidate.consolidate_sharded_model_checkpoints(
        ckpt_prefix, ckpt_suffix, save_path, save_model, overwrite=True
    )


def _stale(numbers: dict[str, int | None], fresh: set[str]) -> list[str]:
    """Return one line for each shard that is not among the ``fresh``, or of an earlier save than
    the last; ``numbers`` are of saves, by path. If no shard is fresh, none is stale."""
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
