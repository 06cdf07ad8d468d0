"""Cost of an asynchronous save: how long it takes to return, and the CPU of training beside it.

    python benchmarks/async_save.py --megabytes 94 --ranks 2 --steps 20 --rounds 5

Trains a stack of linear layers with AdamW, whose shards on each rank have ``--megabytes``. In every
round, the same number of steps runs without a save and then beside one, so that other work on the
machine meets both. It prints medians:

    returns         seconds until ``save_checkpoint(asynchronous=True)`` returns
    steps           CPU seconds of the process for one step on all ranks, without a save
    beside a save   the same while a save is written, without the CPU of the threads that write
    slowed          the median over rounds of how much more that is
    writing         CPU seconds of the threads that write, for all ranks
    left            seconds that ``wait()`` takes after the steps; if not near 0, use more steps
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

from xla_fsdp import XlaFullyShardedDataParallel, launch, save_checkpoint
from xla_fsdp.state import train_checkpoint

LAYERS = 4
BATCH = 64
WARM_UP = 3
BYTES_PER_PARAMETER = 12  # fp32, with two states


class Writers:
    """CPU seconds of the threads that write, while ``measured``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def measured(self) -> Iterator[None]:
        write = train_checkpoint.write_rank_file

        def timed(*args: Any) -> Any:
            try:
                return write(*args)
            finally:
                with self._lock:
                    self.seconds += time.thread_time()  # of a thread that does nothing else

        train_checkpoint.write_rank_file = timed
        try:
            yield
        finally:
            train_checkpoint.write_rank_file = write


def train(rank: int, args: argparse.Namespace, folder: str, writers: Writers) -> None:
    """Run all rounds; rank 0 prints the result."""
    import torch
    import torch_xla
    from torch import nn

    width = round((args.megabytes * 1e6 * args.ranks / BYTES_PER_PARAMETER / LAYERS) ** 0.5)
    torch.manual_seed(0)
    wrap = XlaFullyShardedDataParallel
    model = wrap(nn.Sequential(*(wrap(nn.Linear(width, width, bias=False)) for _ in range(LAYERS))))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, width).to(torch_xla.device())

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        torch_xla.sync(wait=True)

    for _ in range(WARM_UP):
        step()
    rounds = [
        one_round(number, args.steps, model, optimizer, step, folder, writers)
        for number in range(args.rounds + 1)
    ]
    if rank == 0:
        print(json.dumps(summary(rounds[1:])))  # the first one makes the copy in host memory


def one_round(
    number: int,
    steps: int,
    model: Any,
    optimizer: Any,
    step: Callable[[], None],
    folder: str,
    writers: Writers,
) -> dict[str, float]:
    """Run steps without a save, and then beside one."""
    import torch_xla.core.xla_model as xm

    def run() -> float:
        xm.rendezvous("all ranks")  # they share the process, whose CPU is measured
        began = time.process_time()
        for _ in range(steps):
            step()
        xm.rendezvous("all ranks")
        return time.process_time() - began

    alone = run()
    wrote, began = writers.seconds, time.perf_counter()
    pending = save_checkpoint(folder, model, optimizer, step=number, asynchronous=True, keep_last=1)
    returned = time.perf_counter()
    beside, ended = run(), time.perf_counter()
    pending.wait()
    left = time.perf_counter() - ended
    xm.rendezvous("all ranks")
    writing = writers.seconds - wrote
    return {
        "returns": returned - began,
        "steps": alone / steps,
        "beside a save": (beside - writing) / steps,
        "slowed": (beside - writing) / alone - 1,
        "writing": writing,
        "left": left,
    }


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=94, help="of each rank's file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="without a save, and beside one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    writers = Writers()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder, writers.measured():
        launch(train, (args, folder, writers), num_ranks=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
