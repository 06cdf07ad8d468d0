"""Count how launches of CPU ranks end, beside other work: ``python tools/count_launches.py 5000``.

Each launch is a process of its own, forked after the imports, whose ranks compute one of JOBS. What
ended one by a signal is told with the place, by ``faulthandler``; if core files are switched on
(``ulimit -c unlimited``), the core is in the folder that is named, for gdb.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
# Before the import below, so that it finds this checkout.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: split
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814
from xla_fsdp import launch, one_rank_at_a_time

RANKS = 3
LONGEST = 120.0  # seconds of a launch
BUSY = "while True: pass"


def read(rank: int) -> float:
    """Read a value that no collective is in: the ranks compile their first programs at once."""
    return (torch.full((4, 4), 4.0).to(torch_xla.device()) * 2 + 1)[0, 0].item()


def collective(rank: int) -> float:
    """Sum a value over the ranks, by a sync."""
    total: Any = xm.all_reduce("sum", torch.full((4, 4), 2.0 + rank).to(torch_xla.device()))
    torch_xla.sync()
    return total[0, 0].item()


def train(rank: int) -> float:
    """Make a step of a sharded layer."""
    with one_rank_at_a_time():
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
    model = FSDP(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8, device=torch_xla.device())).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    return 9.0


JOBS = (read, collective, train)


def launch_in_child(number: int, folder: Path) -> str:
    """Launch ranks in a forked process, and return how that ended."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _launch(number, folder)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - began > LONGEST:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hung"
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(ended[1])
    return "right" if code == 0 else signal.Signals(-code).name if code < 0 else "raised or wrong"


def _launch(number: int, folder: Path) -> None:
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(all_threads=True)
    right = False
    try:
        right = launch(JOBS[number % len(JOBS)], num_ranks=RANKS) == [9.0] * RANKS
    finally:  # never back into the loop that forked this process
        traceback.print_exc()
        os._exit(0 if right else 1)


def main() -> None:
    """Launch as often as asked for, and print how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("launches", type=int)
    parser.add_argument("--load", type=int, default=4, help="busy processes beside the launches")
    parser.add_argument("--keep", type=Path, help="a folder for what failed launches leave")
    options = parser.parse_args()
    kept = options.keep or Path(tempfile.mkdtemp(prefix="launches-"))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.load)]
    ends: collections.Counter[str] = collections.Counter()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        for number in range(options.launches):
            folder = kept / str(number)
            folder.mkdir(parents=True)
            end = launch_in_child(number, folder)
            ends[end] += 1
            if end == "right":
                shutil.rmtree(folder)
            else:
                print(f"launch {number} ({JOBS[number % len(JOBS)].__name__}): {end}: {folder}")
            if number % 50 == 49:
                print(f"{number + 1} launches: {dict(ends)}, load {os.getloadavg()[0]:.1f}")
            sys.stdout.flush()
    finally:
        for process in busy:
            process.kill()
    sys.exit(set(ends) != {"right"})


if __name__ == "__main__":
    main()
