"""The MNIST digits as tensors, read by torchvision from files that are found or fetched here.

Files that are there already, gzipped or not, are read and never changed; otherwise the first of
``SOURCES`` that can deliver is asked. torchvision does not name a damaged file and takes any label,
so both are checked here. Nothing here needs torch_xla.
"""

from __future__ import annotations

import fcntl
import gzip
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from sources import PART, RAW, SIDE, SOURCES, STEMS, Source, SourceFailed

MEAN, STD = 0.1307, 0.3081
"""Mean and standard deviation of the training pixels, scaled to 0..1."""

FULL = (60_000, 10_000)
"""How many digits MNIST has for training and for test."""


class MnistDataError(ValueError):
    """MNIST files are missing or not what they should be; the text names the file and the cure."""


@dataclass(frozen=True)
class MnistData:
    """Images, uint8 ``[N, 28, 28]``, and labels, int64 ``[N]``, 0 to 9, on the CPU.

    ``source`` says where they came from; ``notice`` is empty unless they are not the full set.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str
    notice: str = ""


def load_mnist(root: str | Path = "data/mnist", sources: Sequence[Source] = SOURCES) -> MnistData:
    """The MNIST digits in ``root``, which are fetched into it first if it has none.

    The four files may lie in ``root`` itself, in ``raw`` or in ``MNIST/raw``. Several processes may
    call this with one ``root``: the first fetches, the others wait.

    Raises:
        MnistDataError: if files in ``root`` are missing or damaged (none is ever replaced), if
            ``root`` cannot be written, or if no source could deliver (each one's reason is given).
    """
    root = Path(root)
    try:
        data = _load_local(root)
        if data is None:
            root.mkdir(parents=True, exist_ok=True)
            with (root / ".mnist.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
                data = _load_local(root) or _fetch(root, sources)
    except OSError as error:
        raise MnistDataError(
            f"{root}: found {error}, expected a directory that can be read and written. "
            "Give --data_dir a directory for the MNIST files."
        ) from error
    return data


def _load_local(root: Path) -> MnistData | None:
    """What ``root`` already holds, or None. A complete set goes before an incomplete one."""
    folders = (root / folder for folder in (".", RAW, "raw", PART))
    folder = max(folders, key=lambda folder: len(_find(folder)))
    if not _find(folder):
        return None
    try:
        return _read(folder, f"files in {folder}")
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
        kept = root / source.folder
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=root) as work:
            try:
                source.fetch(Path(work))
                data = _read(Path(work, RAW), f"{source.name}, kept in {kept}", failures)
            except (SourceFailed, OSError, EOFError, ValueError, zlib.error) as error:
                failures.append(f"{source.name}: {error}.")
                continue
            kept.parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(work, RAW), kept)  # one rename: all four files appear at once
            return data
    raise MnistDataError(
        f"{root}: found no MNIST files, and no source could deliver them:\n  - "
        + "\n  - ".join(failures)
        + f"\nPut {', '.join(STEMS)} (gzipped or not) into a directory and name it with --data_dir."
    )


# ---------------------------------------------------------------- reading


def _find(folder: Path) -> dict[str, Path]:
    """The files of ``folder`` by their stems, under the usual names; unpacked ones win."""
    ways = [(dot, end) for end in (".gz", "") for dot in (".idx", "-idx")]
    names = [(stem, stem.replace("-idx", dot) + end) for dot, end in ways for stem in STEMS]
    return {stem: folder / name for stem, name in names if (folder / name).is_file()}


def _read(folder: Path, source: str, failures: Sequence[str] = ()) -> MnistData:
    """The digits in ``folder``; raises MnistDataError at the first file that is not right."""
    from torchvision.datasets import MNIST  # takes 2 s, and synthetic digits do without

    found = _find(folder)
    missing = [stem for stem in STEMS if stem not in found]
    if missing:
        raise MnistDataError(
            f"{folder}: found {len(found)} of the {len(STEMS)} MNIST files, "
            f"expected also {', '.join(missing)} (gzipped or not)"
        )
    with tempfile.TemporaryDirectory() as staging:
        Path(staging, RAW).mkdir(parents=True)
        for stem, path in found.items():
            _stage(path, Path(staging, RAW, stem))
        train, test = MNIST(staging, train=True), MNIST(staging, train=False)
    tensors = (train.data, train.targets, test.data, test.targets)
    _check_labels(found[STEMS[1]], *tensors[:2])
    _check_labels(found[STEMS[3]], *tensors[2:])
    return MnistData(*tensors, source, _notice(len(train), len(test), failures))


def _stage(original: Path, path: Path) -> None:
    """Put a file, unpacked and checked, where torchvision looks for it."""
    try:
        content = original.read_bytes()
        content = gzip.decompress(content) if original.suffix == ".gz" else content
        _check_length(content, rank=3 if "idx3" in path.name else 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise MnistDataError(f"{original}: {error}") from None
    path.write_bytes(content)


def _check_length(content: bytes, rank: int) -> None:
    """Raise ValueError unless ``content`` is a whole IDX file of at least one image or label."""
    header = content[: 4 + 4 * rank].ljust(4 + 4 * rank, b"\0")
    found = np.frombuffer(header, ">u4").tolist()  # magic number, count, height, width
    expected = [0x0800 + rank, max(found[1], 1), SIDE, SIDE][: 1 + rank]
    length = len(header) + math.prod(expected[1:])
    if found != expected or len(content) != length:
        raise ValueError(
            f"found {len(content)} bytes with magic number and sizes {found}, "
            f"expected {length} bytes with {expected}"
        )


def _check_labels(path: Path, images: Tensor, labels: Tensor) -> None:
    if len(labels) != len(images):
        raise MnistDataError(f"{path}: found {len(labels)} labels, expected {len(images)}")
    worst, index = (int(value) for value in labels.max(0))
    if worst > 9:
        raise MnistDataError(f"{path}: found label {worst} at index {index}, expected 0 to 9")


def _notice(train: int, test: int, failures: Sequence[str]) -> str:
    """What the user must be told unless the set is full, with why no other source was used."""
    if (train, test) == FULL:
        return ""
    return " ".join(
        [
            f"This is NOT the full MNIST but {train:,} digits for training and {test:,} for test:",
            "expect less accuracy (about 97% instead of 99% with 5,000).",
            *(["Tried before:", *failures] if failures else []),
            "To have the full set fetched, move these files away.",
        ]
    )
