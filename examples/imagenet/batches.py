"""A rank's batches of an epoch, decoded by worker processes and waiting on the device.

Words: a *position* in an epoch is the number of batches that were used already; to *fill* a batch
is to complete it: for training with pictures from the epoch's beginning, for validation with none.
Always true: every batch has the same size, so that no step is compiled for the last one; every rank
takes the same number of batches; the order depends on seed and epoch alone, and ranks take turns in
it, so that the first n batches of all ranks are the same pictures on any number of ranks.
What a pick gives is ``pictures``'s business.
"""

from __future__ import annotations

import math
import queue
import signal
import threading
from collections.abc import Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from job import Options
from pictures import HostBatch, Pick, Problem, joined
from place import Place

POLL = 0.1
"""Seconds between two looks of a waiting thread for its end."""


@dataclass(frozen=True)
class Batch:
    """On the device: pictures uint8 [B, 3, size, size] and labels int64 [B]; and the problems that
    damaged pictures had, on the host."""

    pixels: Tensor
    labels: Tensor
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Loading:
    """How batches are loaded; see the flags of the same names.

    Args:
        workers: processes that decode.
        per_worker: batches that each has ready.
        persistent: whether they live from epoch to epoch.
        on_host: batches that wait for their transfer.
        on_device: batches that wait for their step.
        threads: that transfer.
    """

    workers: int
    per_worker: int
    persistent: bool
    on_host: int
    on_device: int
    threads: int

    @classmethod
    def of(cls, options: Options) -> Loading:
        """What the flags say."""
        return cls(
            options.num_workers,
            options.prefetch_factor,
            options.persistent_workers,
            options.loader_prefetch_size,
            options.device_prefetch_size,
            options.cpu_to_device_transfer_threads,
        )


class Picks(Sampler[list[Pick]]):
    """The picks of one rank's batches in one epoch, from a position on.

    Args:
        data: what is picked from.
        place: of the rank.
        size: of a batch.
        seed: of the order; None for that of the files, each of which one rank picks, once.
        drop_last: whether to leave out a batch that would have to be filled.
    """

    def __init__(
        self, data: Sized, place: Place, *, size: int, seed: int | None, drop_last: bool
    ) -> None:
        self._count, self._place, self._size, self._seed = len(data), place, size, seed
        own = self._count / place.world_size
        rounded = math.floor(own / size) if drop_last else math.ceil(math.ceil(own) / size)
        self.per_epoch = rounded
        self.epoch, self.begin, self.end = 0, 0, rounded

    def __iter__(self) -> Iterator[list[Pick]]:
        order = self._order()
        missing = self.per_epoch * self._size - len(order)
        if missing > 0:
            order += [-1] * missing if self._seed is None else list(islice(cycle(order), missing))
        for batch in range(self.begin, self.end):
            chosen = order[batch * self._size : (batch + 1) * self._size]
            yield [(index, self.epoch) for index in chosen]

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def _order(self) -> list[int]:
        rank, world_size = self._place.rank, self._place.world_size
        if self._seed is None:
            return list(range(rank, self._count, world_size))
        sampler: DistributedSampler[int] = DistributedSampler(
            range(self._count),  # type: ignore[arg-type]  # only its length is used
            num_replicas=world_size,
            rank=rank,
            seed=self._seed,
        )
        sampler.set_epoch(self.epoch)
        return list(sampler)


class Batches:
    """One rank's batches, epoch by epoch."""

    def __init__(self, data: Dataset, picks: Picks, place: Place, loading: Loading) -> None:
        self._picks, self._place, self._loading = picks, place, loading
        self._loader = DataLoader(
            data,
            batch_sampler=picks,
            collate_fn=joined,
            num_workers=loading.workers,
            prefetch_factor=loading.per_worker if loading.workers else None,
            persistent_workers=loading.persistent and loading.workers > 0,
            worker_init_fn=_outlive_signals,
            # Its own: the one of the process is shared by CPU ranks.
            generator=torch.Generator(),
        )

    @property
    def per_epoch(self) -> int:
        """Batches of a whole epoch."""
        return self._picks.per_epoch

    @contextmanager
    def epoch(
        self, number: int, begin: int = 0, end: int | None = None
    ) -> Iterator[Iterator[Batch]]:
        """Inside, the batches of epoch ``number`` from position ``begin`` up to ``end``."""
        self._picks.epoch, self._picks.begin = number, begin
        self._picks.end = self.per_epoch if end is None else min(end, self.per_epoch)
        ahead = _Ahead(self._loader, self._place.device, self._loading)
        try:
            yield ahead.batches()
        finally:
            ahead.stop()


class _Ahead:
    """Takes batches from a loader and onto the device, in threads, some ahead of their use."""

    def __init__(self, loader: DataLoader, device: torch.device, loading: Loading) -> None:
        self._loader, self._device = loader, device
        self._host: queue.Queue[HostBatch | Exception | None] = queue.Queue(loading.on_host)
        self._ready: queue.Queue[Future[Batch] | Exception | None] = queue.Queue(loading.on_device)
        self._stopped = threading.Event()
        self._transfers = ThreadPoolExecutor(loading.threads, thread_name_prefix="transfer")
        self._threads = [
            threading.Thread(target=self._read, name="loader", daemon=True),
            threading.Thread(target=self._send, name="sender", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def batches(self) -> Iterator[Batch]:
        """All of them, in order."""
        while (found := self._ready.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found.result()

    def stop(self) -> None:
        """End the threads, also in the middle."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._transfers.shutdown()

    def _read(self) -> None:
        # Worker processes are forked here: by a thread that is no rank.
        try:
            for batch in self._loader:
                if not self._put(self._host, batch):
                    return
            self._put(self._host, None)
        except Exception as error:  # for the rank to raise
            self._put(self._host, error)

    def _send(self) -> None:
        while True:
            try:
                found = self._host.get(timeout=POLL)
            except queue.Empty:
                if self._stopped.is_set():
                    return
                continue
            over = found is None or isinstance(found, Exception)
            ready = found if over else self._transfers.submit(self._transfer, found)
            if not self._put(self._ready, ready) or over:
                return

    def _transfer(self, batch: HostBatch) -> Batch:
        # Not to(): it copies into an empty tensor, which is traced. A sync of the rank's thread
        # in between would compute that tensor as well, by a program of its own.
        pixels, labels = batch.pixels, batch.labels
        if self._device.type == "xla":
            pixels, labels = xm.send_cpu_data_to_device([pixels, labels], self._device)
        return Batch(pixels, labels, batch.problems)

    def _put(self, waiting: queue.Queue, item: object) -> bool:
        """Whether it was put before ``stop``."""
        while not self._stopped.is_set():
            try:
                waiting.put(item, timeout=POLL)
                return True
            except queue.Full:
                continue
        return False


def _outlive_signals(worker: int) -> None:
    """A shutdown tells every process of a job; its batches are wanted until the rank has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
