"""Write files from tensor sources, in parallel: either all files get their names, or none.

Invariants: tensors are copied in chunks and verified against their checksums; written tensors get
checksums (in a safetensors header, or as the CRC-32 of a torch file's record); all this is done
before the first file gets its final name.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from xla_fsdp.checkpoint.errors import CheckpointError, collecting, failing, raise_if
from xla_fsdp.checkpoint.files.checksum import room_for, written
from xla_fsdp.checkpoint.files.copying import (
    CopyTask,
    Progress,
    Verifier,
    copy,
    default_threads,
    find_damage,
    read_crcs,
    write_crcs,
)
from xla_fsdp.checkpoint.files.safetensors_file import Header, plan_file
from xla_fsdp.checkpoint.files.storage import (
    EXISTS,
    AtomicFiles,
    exists,
    find_special,
    is_url,
    open_storage,
    remove_abandoned,
    split_path,
    sync,
)
from xla_fsdp.checkpoint.files.tensor_source import LocalFile, Part, TensorSource, convert_tensors
from xla_fsdp.checkpoint.files.torch_file import write_skeleton

MIXED = (
    "is of another merge, but a reader would take it for a part of this one; remove it, choose "
    "another save_path, or overwrite it (--overwrite)"
)

Checksums = Mapping[str, str]


@dataclass(frozen=True)
class WriteOptions:
    """How outputs are written.

    Args:
        overwrite: whether existing files may be replaced.
        verify: whether to read all written files again and compare, and to verify tensors of the
            shards too that the output does not need.
        threads: that copy at the same time; None for ``default_threads()``.
        progress: called with the number of bytes of every copied chunk.
    """

    overwrite: bool = False
    verify: bool = False
    threads: int | None = None
    progress: Progress = lambda _: None


class Output(ABC):
    """One file to be written, or a directory with all that is in it."""

    path: str
    is_directory = False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The approximate size of the file."""

    @abstractmethod
    def begin(self, temporary: str) -> list[CopyTask]:
        """Create the file with room for its tensors; return what to copy into it."""

    def irreplaceable(self) -> list[str]:
        """Return a line if there is something at the path that must never be replaced."""
        return []

    def finish(self, temporary: str, crcs: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Write checksums into the complete file, given the CRC-32 of each block of each of the
        tensors that ``begin`` returned. The outputs before this one are finished."""


@dataclass
class SafetensorsOutput(Output):
    """A safetensors file.

    Args:
        path: of the file.
        tensors: by name.
        metadata: returns the header's metadata, given the tensors' checksums; its length must not
            depend on their values.
    """

    path: str
    tensors: Mapping[str, TensorSource]
    metadata: Callable[[Checksums], Mapping[str, str]]
    final_header: Header | None = field(default=None, init=False)  # once it is finished

    def header(self, checksums: Checksums | None = None) -> Header:
        """Return the file's header; without checksums, one with zeros in their place."""
        known = checksums or {n: room_for(t.spec.nbytes) for n, t in self.tensors.items()}
        specs = {name: source.spec for name, source in self.tensors.items()}
        return plan_file(specs, self.metadata(known))

    @property
    def nbytes(self) -> int:
        return self.header().file_size

    def begin(self, temporary: str) -> list[CopyTask]:
        header = self.header()
        with open(temporary, "wb") as file:
            file.truncate(header.file_size)  # zeros, which take no room on most file systems yet
        return [
            CopyTask(self.tensors[name], temporary, entry.start)
            for name, entry in header.entries.items()
        ]

    def finish(self, temporary: str, crcs: Sequence[Sequence[int]]) -> None:
        names = zip(self.header().entries, crcs, strict=True)
        self.final_header = self.header({name: written(*own) for name, own in names})
        with open(temporary, "r+b") as file:
            file.write(self.final_header.to_bytes())


@dataclass(frozen=True)
class TorchOutput(Output):
    """A file of ``torch.save``; its content has a ``TensorSource`` in place of each tensor."""

    path: str
    content: Any

    @property
    def nbytes(self) -> int:
        sources: list[TensorSource] = []
        convert_tensors(self.content, sources.append)
        return sum(source.spec.nbytes for source in sources)

    def begin(self, temporary: str) -> list[CopyTask]:
        return write_skeleton(self.content, temporary)


@dataclass
class BytesOutput(Output):
    path: str
    content: bytes

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def begin(self, temporary: str) -> list[CopyTask]:
        with open(temporary, "wb") as file:
            file.write(self.content)
        return []


def write_outputs(
    outputs: Sequence[Output],
    options: WriteOptions,
    verifiers: Sequence[Verifier] = (),
) -> None:
    """Write all files, and missing directories, then give them their names, in this order. The
    verifiers are of the tensors that the outputs read."""
    with AtomicFiles(overwrite=options.overwrite, verify=options.verify) as files:
        for folder in {os.path.dirname(output.path) for output in outputs}:
            remove_abandoned(folder)
        begun = [(output, files.add(output.path)) for output in outputs]
        tasks: list[list[CopyTask]] = []
        for output, temporary in begun:
            with failing(output.path):
                tasks.append(output.begin(temporary))
        with _final_names(begun):
            crcs = iter(_copy(list(chain(*tasks)), options, verifiers))
        for (output, temporary), own in zip(begun, tasks, strict=True):
            with failing(output.path):
                output.finish(temporary, list(islice(crcs, len(own))))
        files.commit()


def find_output_problems(
    outputs: Sequence[Output], *, overwrite: bool, make_directories: bool
) -> list[str]:
    """Return one line for each reason why these files cannot be written; change nothing."""
    problems: list[str] = []
    needed: dict[str, int] = {}
    for output in outputs:
        path, directory = output.path, os.path.dirname(output.path) or "."
        if is_url(path):
            with collecting(problems):
                problems += [f"{path}: {EXISTS}"] if exists(path) and not overwrite else []
            needed[tempfile.gettempdir()] = needed.get(tempfile.gettempdir(), 0) + output.nbytes
            continue
        while make_directories and not os.path.lexists(directory):
            directory = os.path.dirname(directory) or "."
        is_directory = os.path.isdir(path)
        if is_directory and not output.is_directory:
            problems.append(f"{path}: is a directory; save_path must name a file")
        elif special := find_special(path):
            problems += special
        elif os.path.lexists(path) and not (overwrite and is_directory == output.is_directory):
            problems.append(f"{path}: {EXISTS}")
        elif strange := output.irreplaceable():
            problems += strange
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


def find_shard_files(paths: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return one line for each path that is one of the shard files that are read."""
    known = {os.path.realpath(source) for source in sources}
    return [
        f"{path}: is one of the shard files; choose another save_path"
        for path in paths
        if os.path.realpath(path) in known
    ]


def _copy(
    tasks: Sequence[CopyTask], options: WriteOptions, verifiers: Sequence[Verifier]
) -> list[list[int]]:
    """Copy all tensors; return the CRC-32 of each block of each."""
    threads = options.threads or default_threads()
    crcs = copy(tasks, threads=threads, progress=options.progress)
    raise_if(find_damage(verifiers, unread=options.verify))
    if options.verify:
        _verify(tasks, crcs, threads)
    write_crcs(tasks, crcs)
    return crcs


def _verify(tasks: Sequence[CopyTask], crcs: Sequence[Sequence[int]], threads: int) -> None:
    """Read all written tensors again, and compare their CRC-32."""
    for path in dict.fromkeys(task.path for task in tasks):
        sync(path)
        _drop_page_cache(path)
    sources = [Part(LocalFile(t.path), t.start, t.source.spec.nbytes) for t in tasks]
    found = read_crcs(sources, threads=threads)
    raise_if(
        [
            f"{task.path}: bytes from {task.start} on are not what was written there; "
            f"the disk is failing"
            for task, old, new in zip(tasks, crcs, found, strict=True)
            if old != new
        ]
    )


def _drop_page_cache(path: str) -> None:
    """Let the next read come from the disk."""
    # macOS has no such call.
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def _final_names(begun: Sequence[tuple[Output, str]]) -> Iterator[None]:
    """Replace temporary paths in error messages by the final ones, which users know."""
    try:
        yield
    except CheckpointError as error:
        lines = error.problems
        for output, temporary in begun:
            lines = [line.replace(temporary, output.path) for line in lines]
        raise CheckpointError(lines) from error


@dataclass(frozen=True)
class FilesJob:
    """Planned files, which can be checked and described without changing anything.

    Args:
        outputs: in the order in which they get their names.
        verifiers: of the tensors that the outputs read.
        make_directories: whether to create missing directories.
        sources: paths of the shard files, which are never replaced.
        content: tells the user what is in them.
        older: files of an earlier merge that a reader would take for parts of this one; they are
            deleted after it, if existing files may be replaced.
    """

    outputs: Sequence[Output]
    verifiers: Sequence[Verifier] = field(repr=False)
    make_directories: bool
    sources: Sequence[str] = field(default=(), repr=False)
    content: object = field(default="", repr=False)
    older: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """The approximate number of bytes to write."""
        return sum(output.nbytes for output in self.outputs)

    def find_problems(self, *, overwrite: bool) -> list[str]:
        """Return one line for each reason why they cannot be written."""
        mixed = [] if overwrite else [f"{path}: {MIXED}" for path in self.older]
        paths = [*(output.path for output in self.outputs), *self.older]
        return [
            *find_shard_files(paths, self.sources),
            *find_output_problems(
                self.outputs, overwrite=overwrite, make_directories=self.make_directories
            ),
            *(problem for path in self.older for problem in find_special(path)),
            *mixed,
        ]

    def describe(self) -> Iterator[str]:
        """Yield lines that tell the user what would be written."""
        for output in self.outputs:
            tensors = (
                f", {len(output.tensors)} tensors" if isinstance(output, SafetensorsOutput) else ""
            )
            yield f"would write {output.path} (about {output.nbytes:,} bytes{tensors})"
        for path in self.older:
            yield f"would remove {path}"

    def run(self, options: WriteOptions) -> None:
        """Check and write."""
        raise_if(self.find_problems(overwrite=options.overwrite))
        self.write(options)

    def write(self, options: WriteOptions) -> None:
        """Write them; raise ``CheckpointError`` if that fails or a tensor is damaged."""
        write_outputs(self.outputs, options, self.verifiers)
        for path in self.older:
            folder, name = split_path(path)
            open_storage(folder).delete(name)
