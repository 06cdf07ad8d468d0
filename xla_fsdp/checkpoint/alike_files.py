"""Files of all ranks that are laid out alike: small tensors are read for all ranks at once.

A model of thousands of small parameters on many ranks has hundreds of thousands of pieces. Here
nothing is made for each of them: a tensor of every rank is one object, and a window of all files is
one array of bytes, in whose rows the ranks' pieces of a tensor lie below one another.

Invariants: a piece is read as a whole, and verified whenever it is read; what is damaged is
reported at the end, with whatever else is. Memory is bounded by ``WINDOWS`` times ``WINDOW``.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, overload

import numpy as np

from xla_fsdp.checkpoint.checksum import crcs_in
from xla_fsdp.checkpoint.copying import damage
from xla_fsdp.checkpoint.format import model_name
from xla_fsdp.checkpoint.safetensors_file import Entry
from xla_fsdp.checkpoint.tensor_source import ByteSource, Part, TensorSource, TensorSpec

WINDOW = 1 << 23  # bytes of all files together
WINDOWS = 3  # that are kept, as a parameter and its optimizer states lie apart


class Moved:
    """The bytes of a file whose tensors come later than in another one.

    Args:
        file: local or remote.
        by: number of bytes; less than 0 if they come earlier.
    """

    def __init__(self, file: ByteSource, by: int) -> None:
        self.nbytes = file.nbytes - by
        self._file, self._by = file, by

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._file.read_into(start + self._by, buffer)


class FileTensors(Mapping[str, TensorSource]):
    """Tensors of a file by key, each made when it is asked for.

    Args:
        file: local or remote.
        name: of the file, for messages.
        entries: of the tensors, by key; the same object for files that are laid out alike.
        prefix: that makes names in the file of keys.
        checksums: by name in the file.
    """

    def __init__(
        self,
        file: ByteSource,
        name: str,
        entries: Mapping[str, Entry],
        prefix: str,
        checksums: Mapping[str, str],
    ) -> None:
        self._file, self._name, self._entries = file, name, entries
        self._prefix, self._checksums = prefix, checksums

    def __getitem__(self, key: str) -> TensorSource:
        entry = self._entries[key]
        return TensorSource(
            entry.spec,
            Part(self._file, entry.start, entry.spec.nbytes),
            identity=(self._name, entry.start, entry.spec) if entry.spec.nbytes else None,
            checksum=self._checksums.get(f"{self._prefix}{key}"),
        )

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class AlikeFile:
    """One of the files.

    Args:
        name: path of the file, for messages.
        file: its bytes.
        entries: by name in the file; the same object in all files.
        checksums: by name in the file.
    """

    name: str
    file: ByteSource
    entries: Mapping[str, Entry]
    checksums: Mapping[str, str]


class AlikeFiles:
    """The files of all ranks, in rank order; at least two, with the same ``entries``."""

    def __init__(self, files: Sequence[AlikeFile]) -> None:
        self._files = files
        self._entries = files[0].entries
        self._end = min(each.file.nbytes for each in files)
        self._windows: OrderedDict[int, tuple[int, np.ndarray]] = OrderedDict()
        self._read: set[str] = set()
        self._damaged: dict[tuple[int, str], str] = {}
        self._lock = Lock()

    def is_small(self, name: str) -> bool:
        """Whether a tensor is read for all ranks at once."""
        return 0 < self._entries[name].spec.nbytes * len(self._files) <= WINDOW

    def tensor(self, name: str) -> TensorOfAll:
        """Return a small tensor of every rank."""
        return TensorOfAll(self, name, self._entries[name], range(len(self._files)))

    def of_rank(self, rank: int, name: str) -> TensorSource:
        """Return a tensor of one rank, not verified."""
        each, entry = self._files[rank], self._entries[name]
        part = Part(each.file, entry.start, entry.spec.nbytes)
        identity = (each.name, entry.start, entry.spec) if entry.spec.nbytes else None
        return TensorSource(entry.spec, part, identity, each.checksums.get(name))

    def rows(self, name: str, ranks: range) -> np.ndarray:
        """Return the bytes of a small tensor, one row for each of these ranks; verify them."""
        entry = self._entries[name]
        first, window = self._window(entry.start, entry.stop)
        found = window[ranks.start : ranks.stop, entry.start - first : entry.stop - first]
        rows = np.ascontiguousarray(found)
        self._verify(name, ranks, rows)
        return rows

    def large(self, rank: int) -> dict[str, TensorSource]:
        """Return the tensors of a rank that are not small, by name, not verified."""
        names = (name for name in self._entries if not self.is_small(name))
        return {name: self.of_rank(rank, name) for name in names}

    def problems(self, *, unread: bool) -> list[str]:
        """Return one line for every damaged tensor.

        Args:
            unread: whether to check tensors too of which nothing was read.
        """
        for name in self._entries if unread else ():
            if self.is_small(name) and name not in self._read:
                self.rows(name, range(len(self._files)))
        return [text for _, text in sorted(self._damaged.items())]

    def _window(self, start: int, stop: int) -> tuple[int, np.ndarray]:
        """Return an array with bytes ``start`` to ``stop`` of all files, and what its first column
        is."""
        with self._lock:
            for first, (last, window) in self._windows.items():
                if first <= start and stop <= last:
                    self._windows.move_to_end(first)
                    return first, window
            last = min(max(stop, start + WINDOW // len(self._files)), self._end)
            window = np.empty((len(self._files), last - start), np.uint8)
            for row, each in zip(window, self._files, strict=True):
                each.file.read_into(start, memoryview(row))
            self._windows[start] = last, window
            while len(self._windows) > WINDOWS:
                self._windows.popitem(last=False)
            return start, window

    def _verify(self, name: str, ranks: range, rows: np.ndarray) -> None:
        if len(ranks) == len(self._files):
            self._read.add(name)
        for rank, row in zip(ranks, rows, strict=True):
            text = self._files[rank].checksums.get(name)
            if text is not None and [crc := zlib.crc32(row.data)] != crcs_in(text):
                where = f"{self._files[rank].name}: {name.removeprefix(model_name(''))}"
                if problem := damage(where, self.of_rank(rank, name), crc):
                    self._damaged[rank, name] = problem


class TensorOfAll(Sequence[TensorSource]):
    """A small tensor of several ranks.

    Args:
        files: of all ranks.
        name: in the files.
        entry: of the tensor in every file.
        ranks: of the tensors in this sequence.
    """

    def __init__(self, files: AlikeFiles, name: str, entry: Entry, ranks: range) -> None:
        self._files, self._name, self._entry, self._ranks = files, name, entry, ranks

    @overload
    def __getitem__(self, index: int) -> TensorSource: ...
    @overload
    def __getitem__(self, index: slice) -> TensorOfAll: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return TensorOfAll(self._files, self._name, self._entry, self._ranks[index])
        known = self._files.of_rank(self._ranks[index], self._name)
        one = self[index : index + 1]
        return TensorSource(known.spec, one.joined(0, known.spec.nbytes), known.identity)

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def spec(self) -> TensorSpec:
        return self._entry.spec

    @property
    def identity(self) -> Hashable:
        """Equal for sequences of the same bytes."""
        return self._entry.start, self._entry.spec, self._ranks

    def joined(self, start: int, stop: int) -> ByteSource:
        """Return bytes ``start`` to ``stop`` of all tensors after one another."""
        return _JoinedRows(self, start, stop - start)

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return the bytes of the tensors with these numbers, one in each row."""
        return self._files.rows(self._name, self._ranks[first:last])


class _JoinedRows:
    def __init__(self, tensors: TensorOfAll, start: int, nbytes: int) -> None:
        self._tensors, self._start, self.nbytes = tensors, start, nbytes

    def read_into(self, start: int, buffer: memoryview) -> None:
        width = self._tensors.spec.nbytes
        low = self._start + start
        high = low + len(buffer)
        first = low // width
        rows = self._tensors.rows(first, -(-high // width)).reshape(-1)
        buffer[:] = rows.data[low - first * width : high - first * width]
