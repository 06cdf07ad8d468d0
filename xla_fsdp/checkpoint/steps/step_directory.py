"""Name, list and delete the checkpoints of one run in its directory.

    run/job.json
    run/step_00000010/job.json complete.json rank-00000-of-00002.safetensors ...json metrics.json

Every time a step is saved, this *attempt* gets a new folder (``step_00000010.1``, ...). Its
``job.json`` names the job whose files are in it, a rank announces its file by a ``.json`` of the
same name, and the *marker*, ``complete.json``, says that all files are there, and lists them with
their sizes and digests. The run's ``job.json`` names the job that owns the directory; a job that
comes later may take it over.

Invariants: an attempt without a marker is never read; the marker is the last file written and the
first deleted; the newest complete attempt is never deleted, nor is anything of a later job: a job
owns the directory before it makes its first folder, and deletes only what it had listed before it
saw that it is still the owner.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, isnan
from typing import Any, ClassVar, NamedTuple, TypeVar

from xla_fsdp.checkpoint.errors import CheckpointError, collecting, item, shown, typed, whole_number
from xla_fsdp.checkpoint.files.checksum import digest
from xla_fsdp.checkpoint.files.storage import Storage, open_storage
from xla_fsdp.checkpoint.format.codec import Record, decoded, encoded

S = TypeVar("S", bound="_SmallFile")

MARKER = "complete.json"
METRICS = "metrics.json"
JOB = "job.json"
_RANK_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}\.(json|safetensors|pth)")
_FOLDER = re.compile(r"step_(\d{8,})(?:\.([1-9]\d*))?")


def is_step_file(name: str) -> bool:
    """Return whether a file of this name in a directory of a run or a step has a meaning there."""
    return name in (MARKER, METRICS, JOB) or _RANK_FILE.fullmatch(name) is not None


def is_step_folder(name: str) -> bool:
    """Return whether a folder of this name in the directory of a run is one of a step."""
    return _FOLDER.fullmatch(name) is not None


_RANDOM = secrets.token_hex(4)  # of this process and its forks


def job_token() -> str:
    """Return a name that no other job has, for the job whose rank 0 is this process."""
    return f"{socket.gethostname()}-{os.getpid()}-{_RANDOM}"


class Attempt(NamedTuple):
    """One attempt to save a step; later ones compare greater."""

    step: int
    number: int = 0

    @property
    def folder(self) -> str:
        return f"step_{self.step:08d}" + (f".{self.number}" if self.number else "")

    def file(self, name: str) -> str:
        """Return the path of a file of this attempt, relative to the run's directory."""
        return f"{self.folder}/{name}"


@dataclass(frozen=True)
class Best:
    """Which steps are the best, by a metric that was saved with them.

    Args:
        metric: its name.
        mode: "min" if smaller is better, "max" if greater is.
        keep: number of the best steps that are not deleted.
    """

    metric: str
    mode: str = "min"
    keep: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise ValueError(f"metric={self.metric!r}; expected the name of a metric")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r}; expected 'min' or 'max'")
        whole_number("keep", self.keep, 1)

    def ordered(self, metrics: Mapping[Attempt, Mapping[str, float]]) -> list[Attempt]:
        """Return the attempts that have the metric, the best and latest first."""
        known = {
            each: own[self.metric]
            for each, own in metrics.items()
            if self.metric in own and not isnan(own[self.metric])
        }
        sign = 1 if self.mode == "min" else -1
        latest_first = sorted(known, reverse=True)
        return sorted(latest_first, key=lambda each: sign * known[each])


@dataclass(frozen=True)
class Keep:
    """Which complete steps are not deleted, apart from the newest.

    Args:
        last: number of the newest steps; None for all.
        period: steps that are multiples of it are kept in any case.
        best: steps that are kept for a metric.
        damaged: attempts that could not be read: they are left, and do not count as steps.
    """

    last: int | None = None
    period: int | None = None
    best: Best | None = None
    damaged: frozenset[Attempt] = frozenset()

    def kept(
        self, complete: Iterable[Attempt], metrics: Callable[[Attempt], Mapping[str, float]]
    ) -> set[Attempt]:
        """Return those of the complete attempts, in order, that are kept."""
        sound = [each for each in complete if each not in self.damaged]
        current = {each.step: each for each in sound}  # the last attempt of each step
        ordered = [current[step] for step in sorted(current)]
        kept = {*self.damaged, *ordered[-(self.last or len(ordered)) :]}
        kept |= {each for each in ordered if self.period and each.step % self.period == 0}
        if self.best is not None and self.last is not None:
            known = {each: metrics(each) for each in ordered}
            kept.update(self.best.ordered(known)[: self.best.keep])
        return kept


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the greatest step that is completely saved in ``directory``, or None."""
    newest = next(newest_complete(open_storage(directory)), None)
    return None if newest is None else newest.step


def all_attempts(storage: Storage) -> list[Attempt]:
    """Return every attempt, complete or not, in order."""
    return _attempts(storage.names())


def complete_attempts(storage: Storage) -> list[Attempt]:
    """Return the complete attempts, in order."""
    return _complete(storage.tree())


def _complete(tree: Mapping[str, Collection[str]]) -> list[Attempt]:
    return [each for each in _attempts(tree) if MARKER in tree.get(each.folder, ())]


def _attempts(folders: Iterable[str]) -> list[Attempt]:
    matches = (_FOLDER.fullmatch(name) for name in folders)
    return sorted(Attempt(int(m[1]), int(m[2] or 0)) for m in matches if m)


def newest_complete(storage: Storage) -> Iterator[Attempt]:
    """Yield the complete attempts, newest first.

    Lists the directory, and then each attempt's folder when it is reached.
    """
    for attempt in reversed(all_attempts(storage)):
        if MARKER in storage.names(attempt.folder):
            yield attempt


def read_marker(storage: Storage, folder: str = "") -> Marker:
    """Read the marker of a complete attempt in a folder; "" is the storage's own."""
    at = os.path.join(storage.where, folder)
    name = os.path.join(at, MARKER)
    marker = Marker.from_bytes(storage.read(os.path.join(folder, MARKER)), name)
    match = _FOLDER.fullmatch(os.path.basename(os.path.normpath(at)))
    if match and int(match[1]) != marker.step:
        raise CheckpointError(f"{name}: is of step {marker.step}, in the folder of another one")
    return marker


def find_marker(directory: str) -> Marker | None:
    """Read the marker in a directory; None if there is none."""
    storage = open_storage(directory)
    return read_marker(storage) if MARKER in storage.names() else None


def write_metrics(storage: Storage, attempt: Attempt, metrics: Mapping[str, float]) -> None:
    """Write the metrics of an attempt, before its marker."""
    # JSON has no numbers but finite ones; float() reads the text of the others.
    plain = {name: m if isfinite(m) else str(m) for name, m in metrics.items()}
    storage.put(attempt.file(METRICS), json.dumps(plain, indent=1).encode())


def read_metrics(storage: Storage, attempt: Attempt) -> dict[str, float]:
    """Read the metrics that were saved with an attempt; {} if there are none, or no JSON dict.
    What is no number is left out."""
    try:
        found = json.loads(storage.find(attempt.file(METRICS)) or b"{}")
    except (ValueError, RecursionError):
        return {}
    metrics: dict[str, float] = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        with suppress(TypeError, ValueError, OverflowError):
            metrics[name] = float(value)
    return metrics


def read_job(storage: Storage, folder: str = "") -> JobRecord | None:
    """Return the record of the job that owns the directory, or whose folder this is; None if there
    is none, as before version 4."""
    name = f"{folder}/{JOB}" if folder else JOB
    data = storage.find(name)
    return None if data is None else JobRecord.from_bytes(data, f"{storage.where}/{name}")


def owner_of(storage: Storage) -> JobRecord | None:
    """Return the record of the job that owns the directory; None if there is none or it is damaged,
    so that no job is known."""
    data = storage.find(JOB)
    with suppress(CheckpointError):
        return None if data is None else JobRecord.from_bytes(data, JOB)
    return None


def is_owner(storage: Storage, job: str) -> bool:
    """Return whether no other job has taken the directory over."""
    owner = read_job(storage)
    return owner is None or owner.job == job


def remove(storage: Storage, attempt: Attempt) -> None:
    """Delete an attempt, its marker first: if this is interrupted, the rest is not complete."""
    storage.delete_folder(attempt.folder, first=MARKER)


def tidy(
    storage: Storage, newest: Attempt, keep: Keep, job: str, remains: Collection[Attempt]
) -> list[str]:
    """Delete every attempt that ``newest``, which is complete and of ``job``, makes superfluous, as
    long as ``job`` owns the directory.

    Deletes incomplete attempts, all but the last attempt of each step, and steps not to keep.

    Args:
        storage: of the run.
        newest: the attempt that was saved.
        keep: which complete steps are kept.
        job: that saved it.
        remains: attempts that were there when ``newest`` began, to delete even if they are later:
            ``Save.begin`` refuses to save before a later step that is complete on every host.

    Returns:
        One line for each attempt that could not be deleted; the next call tries again.
    """
    tree = storage.tree()
    listed = _attempts(tree)
    complete = [each for each in _complete(tree) if each <= newest]
    kept = {newest} | keep.kept(complete, partial(read_metrics, storage))
    problems: list[str] = []
    for folder in ("", *(each.folder for each in sorted(kept))):
        storage.sweep(folder)
    for attempt in listed:
        if attempt not in kept and (attempt < newest or attempt in remains):
            with collecting(problems):
                if not is_owner(storage, job):
                    return problems
                remove(storage, attempt)
    return problems


# ---------------------------------------------------------------- small files

# Beside the files of the ranks; each has a format and a version.


class _SmallFile(Record):
    """A dataclass that is the content of a JSON file."""

    NAME: ClassVar[str]
    VERSIONS: ClassVar[tuple[int, ...]] = (1,)
    """That are read; the last one is written."""

    def to_bytes(self) -> bytes:
        version = self.VERSIONS[-1]
        content = {"format": self.NAME, "version": version, **encoded(self, "", version)}
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_bytes(cls: type[S], data: bytes, name: str) -> S:
        """Read the result of ``to_bytes``; ``name`` is the file's, for messages."""
        try:
            content = typed(json.loads(data), dict, "content")
            found, version = content.get("format"), content.get("version")
            if found != cls.NAME or version not in cls.VERSIONS:
                raise CheckpointError(
                    f"is {shown(found)} version {shown(version)}, expected {cls.NAME!r} version "
                    f"{cls.VERSIONS[-1]}"
                )
            return decoded(cls, content, "", version)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{name}: {error}") from error


@dataclass(frozen=True)
class JobRecord(_SmallFile):
    """The content of ``job.json``: which job saves where the file is.

    In the directory of a run it names the job that may save there; in the folder of a step, the
    save that the folder belongs to.

    Args:
        job: token of the job.
        step: that it saves.
        world_size: number of ranks in a sharding group.
        rank: that wrote this file: it leads the ranks that see it.
        replaced: tokens of the jobs from which it took the directory over, the last one last.
    """

    NAME = "xla_fsdp job"

    job: str
    step: int
    world_size: int
    rank: int
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileRecord(Record):
    """What a rank says of its file.

    Args:
        nbytes: size of the file.
        digest: of its description (of a safetensors file: its header), which holds the checksums
            of everything else. None in steps that were saved before there were digests.
    """

    nbytes: int
    digest: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "digest": self.digest}

    @classmethod
    def from_json(cls, data: Any, where: str, version: int) -> FileRecord:
        if version == 1 and not isinstance(data, dict):  # of a marker
            return cls(typed(data, int, where))
        nbytes = item(typed(data, dict, where), "bytes", int, where)
        return cls(nbytes, item(data, "digest", str, where))


@dataclass(frozen=True)
class Announcement(_SmallFile):
    """The content of a small file by which a rank announces its file, or why there is none.

    Args:
        job: token of the job.
        step: that was saved.
        file: None if it could not be written.
        problems: why it could not be written.
    """

    NAME = "xla_fsdp file"

    job: str
    step: int
    file: FileRecord | None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Marker(_SmallFile):
    """The content of ``complete.json``, which marks a step as complete.

    Args:
        step: that was saved.
        world_size: number of ranks in a sharding group.
        files: every rank's file by name, as its rank announced it.
        job: token of the job; None in version 1, which has no digests either.
    """

    NAME = "xla_fsdp checkpoint"
    VERSIONS = (1, 2)

    step: int
    world_size: int
    files: dict[str, FileRecord]
    job: str | None = field(default=None, metadata={"since": 2})


def rank_file_name(rank: int, world_size: int, suffix: str) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.{suffix}"


def digest_of_torch_file(metadata: Mapping[str, Any], values: str) -> str:
    """Return the digest of the description of a ``.pth`` file: its metadata, and the JSON of the
    values beside the tensors."""
    return digest(json.dumps([metadata, values], sort_keys=True).encode())
