"""A rank's batches: which images it trains on in an epoch, and its share of the test images.

The order of an epoch depends only on the seed and the epoch, so an epoch can be continued at any
position, which is the number of batches that were used already. Every rank takes the same number of
batches, of the same shapes. Images travel to the device as bytes, 16 KB a batch.
There are no worker processes: the images are in memory, and picking a batch takes microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from place import Place

TEST_BATCH = 250

Batch = tuple[Tensor, Tensor]
"""Images, uint8 ``[B, 28, 28]``, and labels, int64 ``[B]``, on the device."""


class TrainBatches:
    """The training images of one rank, reshuffled every epoch."""

    def __init__(
        self, images: Tensor, labels: Tensor, place: Place, *, size: int, drop_last: bool, seed: int
    ) -> None:
        self._images = images
        self._labels = labels
        self._device = place.device
        self._size = size
        self._sampler: DistributedSampler[int] = DistributedSampler(
            range(len(labels)),  # type: ignore[arg-type]  # only its length is used
            num_replicas=place.world_size,
            rank=place.rank,
            seed=seed,
            drop_last=drop_last,
        )
        per_rank = len(self._sampler) / size
        self.per_epoch = math.floor(per_rank) if drop_last else math.ceil(per_rank)

    def epoch(self, number: int, position: int = 0, end: int | None = None) -> Iterator[Batch]:
        """The batches of epoch ``number`` from ``position`` up to, not including, ``end``."""
        self._sampler.set_epoch(number)
        order = torch.tensor(list(self._sampler))
        for batch in range(position, self.per_epoch if end is None else min(end, self.per_epoch)):
            chosen = order[batch * self._size : (batch + 1) * self._size]
            yield self._images[chosen].to(self._device), self._labels[chosen].to(self._device)


def test_batches(images: Tensor, labels: Tensor, place: Place) -> Iterator[Batch]:
    """A rank's share of the test images, each of which is in exactly one rank's share.

    Batches are filled up with images labelled -1, which are to be ignored.
    """
    count = len(labels)
    size = min(TEST_BATCH, math.ceil(count / place.world_size))
    num_batches = math.ceil(count / (size * place.world_size))
    indices = torch.arange(place.rank, num_batches * size * place.world_size, place.world_size)
    for chosen in indices.split(size):
        wanted = chosen < count
        chosen = chosen % count
        targets = torch.where(wanted, labels[chosen], -1)
        yield images[chosen].to(place.device), targets.to(place.device)
