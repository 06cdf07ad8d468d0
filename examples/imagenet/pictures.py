"""Pictures in folders, as torchvision's own pipeline gives them; damaged ones are no failure.

Words: a *pick* is which picture to take in which epoch, (-1, epoch) for none; a *blank* is what a
pick of none and a damaged picture give: zeros, with a label that losses and scores leave out.
Always true: pictures stay bytes until they are on the device; in a worker process crop and flip
depend on seed, epoch and picture alone, so an epoch can be repeated from anywhere, on any rank.
What picks a rank makes is left to ``batches``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torchvision import transforms
from torchvision.datasets import ImageFolder

from job import JobFailed, Options

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's training pixels, scaled to 0..1."""
IGNORED = -1
"""The label of a blank."""
RESIZED = 256 / 224
"""Side of a picture before its middle is cut out, by that of the middle."""

Pick = tuple[int, int]
Problem = tuple[str, str]
"""The path of a damaged picture, and what is wrong with it."""


class Picture(NamedTuple):
    """uint8 [3, size, size], its label, and what is wrong with it, if anything."""

    pixels: Tensor
    label: int
    problem: Problem | None = None


@dataclass(frozen=True)
class HostBatch:
    """Pictures uint8 [B, 3, size, size], labels int64 [B], and the problems of damaged ones."""

    pixels: Tensor
    labels: Tensor
    problems: tuple[Problem, ...] = ()


class Pictures(Dataset):
    """The pictures below ``folder/<class>/``.

    Args:
        folder: ``.../train`` or ``.../val``.
        transform: from a decoded picture to uint8 [3, size, size].
        size: of the result.
        seed: of crops and flips.
    """

    def __init__(
        self, folder: Path, transform: Callable[[Any], Tensor], size: int, seed: int
    ) -> None:
        try:
            self._files = ImageFolder(str(folder))
        except FileNotFoundError as error:
            raise JobFailed(
                f"{folder}: {error}. Expected a folder for each class with JPEG files in it; give "
                "--datadir the directory that holds train and val, or use --fake_data."
            ) from error
        self.classes: list[str] = self._files.classes
        self._transform, self._size, self._seed = transform, size, seed

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, pick: Pick) -> Picture:
        index, epoch = pick
        if index < 0:
            return self._blank()
        path, label = self._files.samples[index]
        try:
            picture = self._files.loader(path)
        except Exception as error:  # a damaged file can fail in many ways
            return self._blank((path, str(error) or type(error).__name__))
        if get_worker_info() is not None:  # CPU ranks share the random numbers of their process
            torch.random.default_generator.manual_seed(self._seed_of(index, epoch))
        return Picture(self._transform(picture), label)

    def _blank(self, problem: Problem | None = None) -> Picture:
        size = self._size
        return Picture(torch.zeros(3, size, size, dtype=torch.uint8), IGNORED, problem)

    def _seed_of(self, index: int, epoch: int) -> int:
        # Mixed into 32 bits: torch's CPU generator leaves out what lies above.
        mixed = hashlib.blake2b(repr((self._seed, epoch, index)).encode(), digest_size=4)
        return int.from_bytes(mixed.digest(), "big")


class Noise(Dataset):
    """``count`` times the same noise, of the form of pictures."""

    def __init__(self, count: int, size: int, classes: int) -> None:
        own = torch.Generator().manual_seed(0)
        self._count = count
        self._pixels = torch.randint(256, (3, size, size), dtype=torch.uint8, generator=own)
        self.classes = [str(number) for number in range(classes)]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, pick: Pick) -> Picture:
        index, _ = pick
        label = IGNORED if index < 0 else index % len(self.classes)
        return Picture(self._pixels, label)


FAKE_CLASSES = 1000


def load_pictures(options: Options) -> tuple[Pictures | Noise, Pictures | Noise]:
    """Training and validation pictures; raises JobFailed if there are none."""
    size = options.img_size
    if options.fake_data:
        count = options.fake_pictures
        return Noise(count, size, FAKE_CLASSES), Noise(max(1, count // 24), size, FAKE_CLASSES)
    train = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(options.min_crop, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )
    val = transforms.Compose(
        [
            transforms.Resize(round(size * RESIZED)),
            transforms.CenterCrop(size),
            transforms.PILToTensor(),
        ]
    )
    found = (
        Pictures(options.datadir / "train", train, size, options.seed),
        Pictures(options.datadir / "val", val, size, options.seed),
    )
    if found[0].classes != found[1].classes:
        odd = sorted(set(found[0].classes) ^ set(found[1].classes))
        raise JobFailed(
            f"{options.datadir}: train and val hold different classes: {', '.join(odd[:5])}"
        )
    return found


def joined(pictures: Sequence[Picture]) -> HostBatch:
    """A batch of pictures."""
    return HostBatch(
        torch.stack([each.pixels for each in pictures]),
        torch.tensor([each.label for each in pictures]),
        tuple(each.problem for each in pictures if each.problem),
    )


def normalize(pixels: Tensor) -> Tensor:
    """uint8 [B, 3, size, size] to float32 of zero mean and unit variance, on its device."""
    mean = torch.tensor(MEAN, device=pixels.device).view(1, 3, 1, 1) * 255
    std = torch.tensor(STD, device=pixels.device).view(1, 3, 1, 1) * 255
    return (pixels.float() - mean) / std
