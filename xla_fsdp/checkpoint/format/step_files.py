"""The small JSON files of a step, beside the files of the ranks, with a format and a version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from xla_fsdp.checkpoint.errors import CheckpointError, item, shown, typed
from xla_fsdp.checkpoint.files.checksum import digest
from xla_fsdp.checkpoint.format.codec import Record, decoded, encoded

S = TypeVar("S", bound="_SmallFile")


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
