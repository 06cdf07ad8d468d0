"""Small synthetic MNIST files for tests: four IDX files of random digits, written independently.

Words: *digits* maps each file's usual name to the array it holds.
Always true: the bytes are laid out here from the format's description, not with the code under
test; the same seed gives the same digits. Corruption is left to the tests.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
NAMES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)

Digits = dict[str, np.ndarray]


def make_digits(train: int = 6, test: int = 4, seed: int = 0) -> Digits:
    """Random images and labels under the four usual names."""
    random = np.random.default_rng(seed)

    def images(count: int) -> np.ndarray:
        return random.integers(0, 256, (count, 28, 28), dtype=np.uint8)

    def labels(count: int) -> np.ndarray:
        return random.integers(0, 10, count, dtype=np.uint8)

    arrays = images(train), labels(train), images(test), labels(test)
    return dict(zip(NAMES, arrays, strict=True))


def idx_bytes(array: np.ndarray) -> bytes:
    """The IDX file of ``array``: images (magic 2051) if it has three dims, else labels (2049)."""
    if array.ndim == 3:
        return struct.pack(">IIII", 2051, *array.shape) + array.tobytes()
    return struct.pack(">II", 2049, len(array)) + array.tobytes()


def write_digits(directory: Path, digits: Digits, *, packed: bool = False) -> Path:
    """Write ``digits`` into ``directory`` (made if needed), gzipped on request; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, array in digits.items():
        content = idx_bytes(array)
        if packed:
            (directory / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (directory / name).write_bytes(content)
    return directory
