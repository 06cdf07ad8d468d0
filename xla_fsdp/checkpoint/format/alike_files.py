"""Files of all ranks that are laid out alike: small tensors are read for all ranks at once.

A model of thousands of small parameters on many ranks has hundreds of thousands of pieces. Here
nothing is made for each of them: a tensor of every rank is one object, and a window of all files is
one array of bytes, in whose rows the ranks' pieces of a tensor lie below one another.

Invariants: a piece is read as a whole, and verified whenever it is read; what is damaged is
reported at the end, with whatever else is. Memory is bounded by ``WINDOWS`` times ``WINDOW``.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from xla_fsdp.checkpoint.files.checksum import crcs_in
from xla_fsdp.checkpoint.files.copying import damage
from xla_fsdp.checkpoint.files.safetensors_file import Entry
from xla_fsdp.checkpoint.files.tensor_source import (
    ByteSource,
    Part,
    RecentBlocks,
    TensorSource,
)
from xla_fsdp.checkpoint.format.records import model_name

WINDOW = 1 << 23  # bytes of all files together
WINDOWS = 3  # that are kept, as a parameter and its optimizer states lie apart


@dataclass(frozen=True, eq=False)
class AlikeFile(Mapping[str, TensorSource]):
    """The tensors of one of the files by their names in it, not verified.

    Args:
        name: path of the file, for messages.
        file: its bytes, local or remote.
        entries: by name in the file; the same object in all files.
        checksums: by name in the file.
        shift: bytes by which its tensors come later than ``entries`` say.
    """

    name: str
    file: ByteSource
    entries: Mapping[str, Entry]
    checksums: Mapping[str, str]
    shift: int = 0

    def __getitem__(self, name: str) -> TensorSource:
        entry = self.entries[name]
        return TensorSource(
            entry.spec,
            Part(self.file, entry.start + self.shift, entry.spec.nbytes),
            identity=(self.name, entry.start, entry.spec) if entry.spec.nbytes else None,
            checksum=self.checksums.get(name),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class AlikeFiles:
    """The files of all ranks that have the same ``entries``: at least two, in rank order, each of
    which is asked for when it is read."""

    def __init__(self, entries: Mapping[str, Entry], files: Sequence[AlikeFile]) -> None:
        self._entries, self._files = entries, files
        self._start = min((entry.start for entry in entries.values()), default=0)
        self._end = max((entry.stop for entry in entries.values()), default=0)
        self._windows = RecentBlocks(WINDOWS * WINDOW)
        self._read: set[str] = set()
        self._damaged: dict[tuple[int, str], str] = {}

    def is_small(self, name: str) -> bool:
        """Whether a tensor is read for all ranks at once."""
        return 0 < self._entries[name].spec.nbytes * len(self._files) <= WINDOW

    def tensor(self, name: str) -> TensorOfAll:
        """Return a small tensor of every rank."""
        return TensorOfAll(self, name, self._entries[name], range(len(self._files)))

    def of_rank(self, rank: int, name: str) -> TensorSource:
        """Return a tensor of one rank, not verified."""
        return self._files[rank][name]

    def rows(self, name: str, ranks: range) -> np.ndarray:
        """Return the bytes of a small tensor, one row for each of these ranks; verify them."""
        entry, width = self._entries[name], max(WINDOW // len(self._files), 1)
        rows = np.empty((len(ranks), entry.spec.nbytes), np.uint8)
        before = (entry.start - self._start) // width * width
        for first in range(self._start + before, entry.stop, width):
            read = partial(self._window, first, min(first + width, self._end), ranks)
            window = np.frombuffer(self._windows.get((first, ranks), read), np.uint8)
            low, high = max(entry.start, first), min(entry.stop, first + width)
            part = window.reshape(len(ranks), -1)[:, low - first : high - first]
            rows[:, low - entry.start : high - entry.start] = part
        self._verify(name, ranks, rows)
        return rows

    def problems(self, *, unread: bool) -> list[str]:
        """As ``Verifier`` has it."""
        for name in self._entries if unread else ():
            if self.is_small(name) and name not in self._read:
                self.rows(name, range(len(self._files)))
        return [text for _, text in sorted(self._damaged.items())]

    def _window(self, first: int, last: int, ranks: range) -> memoryview:
        """Return the same bytes of the files of these ranks."""
        rows = np.empty((len(ranks), last - first), np.uint8)
        for rank, row in zip(ranks, rows, strict=True):
            file = self._files[rank]
            file.file.read_into(first + file.shift, row.data)
        return rows.reshape(-1).data

    def _verify(self, name: str, ranks: range, rows: np.ndarray) -> None:
        if len(ranks) == len(self._files):
            self._read.add(name)
        for rank, row in zip(ranks, rows, strict=True):
            text = self._files[rank].checksums.get(name)
            if text is not None and [crc := zlib.crc32(row.data)] != crcs_in(text):
                self._mismatch(rank, name, row, crc)

    def _mismatch(self, rank: int, name: str, row: np.ndarray, crc: int) -> None:
        """Note that these bytes of a tensor have another checksum than is stated."""
        where = f"{self._files[rank].name}: {name.removeprefix(model_name(''))}"
        if problem := damage(where, self.of_rank(rank, name), crc):
            self._damaged[rank, name] = problem


class TensorOfAll(Sequence[TensorSource]):
    """A small tensor of these ranks; as a source, the bytes of all of them after one another."""

    def __init__(self, files: AlikeFiles, name: str, entry: Entry, ranks: range) -> None:
        self._files, self._name, self._entry, self._ranks = files, name, entry, ranks
        self.nbytes, self.at = entry.spec.nbytes * len(ranks), entry.start

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return TensorOfAll(self._files, self._name, self._entry, self._ranks[index])
        known = self._files.of_rank(self._ranks[index], self._name)
        return TensorSource(known.spec, self[index : index + 1], known.identity)

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def identity(self) -> Hashable:
        """Equal for sequences of the same bytes."""
        return self._entry.start, self._entry.spec, self._ranks

    def read_into(self, start: int, buffer: memoryview) -> None:
        width, stop = self._entry.spec.nbytes, start + len(buffer)
        first = start // width
        rows = self._files.rows(self._name, self._ranks[first : -(-stop // width)]).reshape(-1)
        buffer[:] = rows.data[start - first * width : stop - first * width]
