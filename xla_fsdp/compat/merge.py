"""Numbers the saves of a job, for merges that have to tell one from the next.

Words: the *number* of a save is how often its rank had asked for shard metadata by then; as every
rank does so for every save, those of one save have one number.
Always true: metadata has a number only after ``begin``, which is ``compat``'s to call, so the files
of all others stay as they are. What reads checkpoints passes over it.
Which numbers may be merged with which is ``compat_merge``'s business.

Merging the files that the ranks of this very job save, as scripts for torch_xla do it.

They merge on one rank right after ``xm.save``, which does not wait for the other ranks, and they
run again with the same paths. Words: a file is *fresh* if it was written since the job began, and
since the job last merged it; a shard is *stale* if it is not, or of an earlier save of the job than
others (see ``save_numbers``), while others are fresh.
Always true: fresh shards are not mixed with stale ones; files none of which is fresh are merged, or
refused, at once. An earlier output is replaced, as torch_xla's own merge does.
Merging itself is left to ``checkpoint.consolidate``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_fsdp.checkpoint import consolidate
from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.shard_files import DEFAULT_SUFFIX, Shard, find_files
from xla_fsdp.distributed.cpu_ranks import Unwind, current_rank_thread

_KEY = "save_number"


class _OfRank(threading.local):
    """A rank is a thread or a process."""

    asked = 0


class _SaveNumbers:
    def __init__(self) -> None:
        self.given = False
        self.of_rank = _OfRank()


_numbers = _SaveNumbers()


def begin() -> None:
    """Number the saves from now on."""
    _numbers.given = True


def numbered(metadata: dict[str, Any]) -> dict[str, Any]:
    """A rank's metadata with the number of the save that it is asked for."""
    if not _numbers.given:
        return metadata
    _numbers.of_rank.asked += 1
    return {**metadata, _KEY: _numbers.of_rank.asked}


def number_of(metadata: Any) -> int | None:
    """What was found in a file as its metadata says of its number."""
    number = metadata.get(_KEY) if isinstance(metadata, dict) else None
    return number if isinstance(number, int) else None


CLOCKS_DIFFER = 2.0

"""Seconds by which a file system's clock may be behind the host's."""

PATIENCE = 120.0

"""Seconds without any change to the files until ranks that have not saved are given up."""

_INTERVAL = 0.1

_Stamp = tuple[float, int]

"""When a file was last written, in seconds since the epoch, and its size."""


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
    """Tells what this job has saved; the one rank that merges has the only use of it.

    Args:
        began: when the job began, in seconds since the epoch.
        pause: lets the other ranks go on for a moment.
    """

    began: float
    pause: Callable[[], None] = pause
    merged: dict[str, _Stamp] = field(default_factory=dict)  # by path, when last merged

    def is_fresh(self, path: str, stamp: _Stamp) -> bool:
        """Whether the file was written since."""
        if path in self.merged:
            return self.merged[path] != stamp
        return stamp[0] >= self.began - CLOCKS_DIFFER

    def wait(
        self, ckpt_prefix: str, ckpt_suffix: str, output: str, patience: float = PATIENCE
    ) -> None:
        """Return when the shards are complete, all fresh and of one save, or no file is fresh.

        What does not become complete is left to the merge to report.

        Args:
            ckpt_prefix: what the paths of all shard files start with.
            ckpt_suffix: pattern for the rest of their paths.
            output: where the merge is going to write.
            patience: see ``PATIENCE``.

        Raises:
            CheckpointError: if shards stay a mixture of fresh and stale ones.
        """
        seen: dict[str, _Stamp] | None = None
        changed = time.monotonic()
        while True:
            found = _stamps(ckpt_prefix, ckpt_suffix)
            if found != seen:
                seen, changed = found, time.monotonic()
                problems, stale = self._unsaved(ckpt_prefix, ckpt_suffix, output, found)
                if not problems and not stale:
                    self.merged.update(found)
                    return
            elif time.monotonic() - changed > patience:
                break
            self.pause()
        if stale:
            raise CheckpointError(stale)

    def _unsaved(
        self, ckpt_prefix: str, ckpt_suffix: str, output: str, found: dict[str, _Stamp]
    ) -> tuple[list[str], list[str]]:
        """What keeps the merge from beginning: problems of the files; stale shards."""
        fresh = {path for path, stamp in found.items() if self.is_fresh(path, stamp)}
        if not fresh:
            return [], []
        shards, problems = consolidate.look_at_shards(
            ckpt_prefix, ckpt_suffix, output, optimizer=False
        )
        stale = _stale(shards, fresh)
        return problems, stale if len(stale) < len(shards) else []


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


def _stale(shards: Sequence[Shard], fresh: Collection[str]) -> list[str]:
    """One line for each shard that is not fresh, or whose save is not the last."""
    numbers = {shard.source: number_of(shard.metadata) for shard in shards if shard.source in fresh}
    last = max((number for number in numbers.values() if number is not None), default=None)
    return [
        f"{shard.source}: an earlier save's, but this job has saved other shards since; save "
        f"those of all ranks, or narrow ckpt_suffix if the file does not belong to them"
        + _counts(numbers.get(shard.source), last)
        for shard in shards
        if shard.source not in fresh or numbers[shard.source] != last
    ]


def _counts(number: int | None, last: int | None) -> str:
    if number is None:
        return ""
    return (
        f". (When it was saved, its rank had called get_shard_metadata() {number} times, but one "
        f"that saved another {last} times: every rank has to call it as often)"
    )


def _stamps(ckpt_prefix: str, ckpt_suffix: str) -> dict[str, _Stamp]:
    stamps: dict[str, _Stamp] = {}
    for path in find_files(ckpt_prefix, ckpt_suffix):
        try:
            status = os.stat(path)
        except FileNotFoundError:  # replaced just now
            continue
        stamps[path] = (status.st_mtime, status.st_size)
    return stamps
