"""Files made of tensor sources, written in parallel, all of them or none.

Words: an *output* is one file to be: where it goes, and what it is made of.
Always true: no tensor is ever whole in memory; everything read is held against its fingerprint, and
what is written gets one (in a safetensors header, as ``FINGERPRINTS`` or in the shard's metadata;
in a torch file, as the record's checksum); nothing gets its name before all of this is done.
What goes into which file is decided by ``model_files`` and ``reshard``.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from xla_fsdp.checkpoint.atomic_files import EXISTS, PendingFiles, sync, writing
from xla_fsdp.checkpoint.byte_source import LocalFile
from xla_fsdp.checkpoint.copying import (
    Placement,
    Progress,
    Watched,
    checksums,
    copy,
    default_threads,
    find_damage,
)
from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.fingerprint import EMPTY, written
from xla_fsdp.checkpoint.safetensors_file import Header, plan_file
from xla_fsdp.checkpoint.tensor_source import Part, TensorSource
from xla_fsdp.checkpoint.torch_file import write_checksums, write_skeleton

Fingerprints = Mapping[str, str]


@dataclass(frozen=True)
class WriteOptions:
    """How outputs are written.

    Args:
        overwrite: whether existing files may be replaced.
        verify: whether to read everything again from disk and compare, and to look for damage also
            in what is not needed of the shards.
        threads: that copy at the same time; None for as many as suit this machine.
        progress: called with a number of bytes, each time that many more are copied.
    """

    overwrite: bool = False
    verify: bool = False
    threads: int | None = None
    progress: Progress = lambda _: None


class Output(ABC):
    """One file to be."""

    path: str

    @abstractmethod
    def begin(self, temporary: str) -> list[Placement]:
        """Make the file, with room for its tensors; where these go."""

    @abstractmethod
    def finish(self, temporary: str, checksums: Mapping[int, int]) -> None:
        """Write what depends on the tensors: their CRC-32, by their offsets in the file."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """About how long the file gets."""


@dataclass(frozen=True)
class SafetensorsOutput(Output):
    """A safetensors file.

    Args:
        path: of the file.
        tensors: by name.
        metadata: of the header, from the tensors' fingerprints; as long for any fingerprints.
    """

    path: str
    tensors: Mapping[str, TensorSource]
    metadata: Callable[[Fingerprints], Mapping[str, str]]

    def header(self, fingerprints: Fingerprints | None = None) -> Header:
        """The file's header; without fingerprints, one of the same length."""
        known = dict.fromkeys(self.tensors, EMPTY) if fingerprints is None else fingerprints
        specs = {name: source.spec for name, source in self.tensors.items()}
        return plan_file(specs, self.metadata(known))

    @property
    def nbytes(self) -> int:
        """See ``Output``."""
        return self.header().file_size

    def begin(self, temporary: str) -> list[Placement]:
        """See ``Output``."""
        header = self.header()
        _reserve(temporary, header.file_size)
        return [
            Placement(self.tensors[name], temporary, entry.start)
            for name, entry in header.entries.items()
        ]

    def finish(self, temporary: str, checksums: Mapping[int, int]) -> None:
        """See ``Output``."""
        entries = self.header().entries
        fingerprints = {
            name: written(checksums[entry.start]) if entry.spec.nbytes else EMPTY
            for name, entry in entries.items()
        }
        with open(temporary, "r+b") as file:
            file.write(self.header(fingerprints).to_bytes())


@dataclass(frozen=True)
class TorchOutput(Output):
    """A file of ``torch.save``: plain values, with ``TensorSource`` in place of tensors."""

    path: str
    content: Any

    @property
    def nbytes(self) -> int:
        """See ``Output``."""
        sources = {id(source): source for source in _sources(self.content)}
        return sum(source.spec.nbytes for source in sources.values())

    def begin(self, temporary: str) -> list[Placement]:
        """See ``Output``."""
        return [
            Placement(source, temporary, start)
            for source, start in write_skeleton(self.content, temporary)
        ]

    def finish(self, temporary: str, checksums: Mapping[int, int]) -> None:
        """See ``Output``."""
        write_checksums(temporary, checksums)


@dataclass(frozen=True)
class BytesOutput(Output):
    """A small file whose content is known."""

    path: str
    content: bytes

    @property
    def nbytes(self) -> int:
        """See ``Output``."""
        return len(self.content)

    def begin(self, temporary: str) -> list[Placement]:
        """See ``Output``."""
        with open(temporary, "xb") as file:
            file.write(self.content)
        return []

    def finish(self, temporary: str, checksums: Mapping[int, int]) -> None:
        """See ``Output``."""


def write_outputs(
    outputs: Sequence[Output], options: WriteOptions, watched: Sequence[Watched] = ()
) -> None:
    """Write all files, then give them their names, in this order.

    Args:
        outputs: whose directories exist, or can be made in one that does.
        options: see there.
        watched: tensors among what the outputs are made of, to hold against their fingerprints.

    Raises:
        CheckpointError: if anything cannot be read or written, is damaged, or exists already;
            nothing has been changed then.
    """
    with PendingFiles(overwrite=options.overwrite) as files:
        begun = [(output, files.add(output.path)) for output in outputs]
        placements: list[Placement] = []
        for output, temporary in begun:
            with writing(output.path):
                placements += output.begin(temporary)
        with _named(begun):
            found = _copy(placements, options, watched)
        for output, temporary in begun:
            with writing(output.path):
                output.finish(temporary, found.get(temporary, {}))
        files.commit()


def find_output_problems(
    outputs: Sequence[Output], *, overwrite: bool, make_directories: bool
) -> list[str]:
    """Why these files could not be written, one line each. Nothing is changed to find out.

    Args:
        outputs: all that will be written together.
        overwrite: whether existing files may be replaced.
        make_directories: whether directories that are not there are made.
    """
    problems = []
    needed: dict[str, int] = {}
    for output in outputs:
        path, directory = output.path, os.path.dirname(output.path) or "."
        while make_directories and not os.path.lexists(directory):
            directory = os.path.dirname(directory) or "."
        if os.path.isdir(path):
            problems.append(f"{path}: is a directory; save_path must name a file")
        elif os.path.lexists(path) and not overwrite:
            problems.append(f"{path}: {EXISTS}")
        elif not os.path.isdir(directory):
            problems.append(f"{path}: cannot be written, there is no directory {directory}")
        elif not os.access(directory, os.W_OK | os.X_OK):
            problems.append(f"{path}: cannot be written, {directory} may not be changed")
        else:
            needed[directory] = needed.get(directory, 0) + output.nbytes
    for directory, size in needed.items():
        free = shutil.disk_usage(directory).free
        if size > free:
            problems.append(f"{directory}: {size:,} bytes are needed, and {free:,} are free")
    return problems


def _copy(
    placements: Sequence[Placement], options: WriteOptions, watched: Sequence[Watched]
) -> dict[str, dict[int, int]]:
    """The CRC-32 of everything that was copied, by file and offset."""
    threads = options.threads or default_threads()
    copied = copy(placements, threads=threads, progress=options.progress)
    if damage := find_damage(watched, unread=options.verify):
        raise CheckpointError(damage)
    if options.verify:
        _verify(placements, copied, threads)
    by_file: dict[str, dict[int, int]] = {}
    for placement, checksum in zip(placements, copied, strict=True):
        by_file.setdefault(placement.path, {})[placement.start] = checksum
    return by_file


def _verify(placements: Sequence[Placement], copied: Sequence[int], threads: int) -> None:
    """Read all of it again."""
    for path in dict.fromkeys(placement.path for placement in placements):
        sync(path)
        _forget(path)
    sources = [Part(LocalFile(p.path), p.start, p.source.spec.nbytes) for p in placements]
    problems = [
        f"{placement.path}: bytes from {placement.start} on are not what was written there; "
        f"the disk is failing"
        for placement, old, new in zip(
            placements, copied, checksums(sources, threads=threads), strict=True
        )
        if old != new
    ]
    if problems:
        raise CheckpointError(problems)


def _forget(path: str) -> None:
    """Let what is read next come from the disk, where the system allows to ask for that."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def _named(begun: Sequence[tuple[Output, str]]) -> Iterator[None]:
    """Users know the files by their final names."""
    try:
        yield
    except CheckpointError as error:
        lines = error.problems
        for output, temporary in begun:
            lines = [line.replace(temporary, output.path) for line in lines]
        raise CheckpointError(lines) from error


def _reserve(path: str, size: int) -> None:
    """A new file of this size, all zeros."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def _sources(content: Any) -> Iterator[TensorSource]:
    if isinstance(content, TensorSource):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _sources(value)
    elif isinstance(content, list):
        for value in content:
            yield from _sources(value)
