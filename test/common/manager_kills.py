"""Kill jobs that save by a ``CheckpointManager`` of two tiers, again and again.

``python -m test.common.manager_kills <directory> <number of kills> <seed> <kind>`` prints one JSON
object; the kinds are "local" and "bucket", which is where the first tier is. Every job goes on
where the one before was killed, on 1 to 4 ranks; in a third of the rounds the disk is lost, too.
Jobs are forked from one process, which has imported everything.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch_xla.runtime as xr
from torch import nn

from test.common.kills import bucket, forked, local_disk
from xla_fsdp import CheckpointManager, XlaFullyShardedDataParallel, launch, one_rank_at_a_time

SIZES = (2, 3, 1, 4)
EVERY = 3
"""Steps from one save to the store to the next; all others go to the disk."""
LONGEST = 1.0
"""Seconds from the first complete save to the kill."""


def main(directory: str, kills: int, seed: int, kind: str) -> dict[str, Any]:
    """Kill so often; what was lost or wrong, of which step on each job went on."""
    chance = random.Random(seed)
    disk = Path(directory, "disk")
    found: dict[str, Any] = {"kills": 0, "lost disks": 0, "went on from": [], "problems": []}
    known = {"store": 0, "disk": 0}
    with (bucket if kind == "bucket" else local_disk)(f"{directory}/run") as where:
        for _ in range(kills):
            least = max(known.values())
            ranks = SIZES[found["kills"] % len(SIZES)]
            lines = killed(where, str(disk), ranks, chance.uniform(0, LONGEST), least)
            found["problems"] += said(lines, "wrong: ")
            found["went on from"] += map(int, said(lines, "from "))
            for step in map(int, said(lines, "done ")):
                known["disk" if step % EVERY else "store"] = step
            found["kills"] += 1
            if chance.random() < 1 / 3:
                shutil.rmtree(disk, ignore_errors=True)
                known["disk"] = 0
                found["lost disks"] += 1
    return found


def said(lines: list[str], what: str) -> list[str]:
    return [line.removeprefix(what) for line in lines if line.startswith(what)]


def killed(where: str, disk: str, ranks: int, seconds: float, least: int) -> list[str]:
    """What a job said before it was killed."""

    def work(pipe: int) -> None:
        os.setpgid(0, 0)
        launch(train, (where, disk, pipe, least), num_ranks=ranks)

    child, pipe = forked(work)
    os.set_blocking(pipe, False)
    text, end = b"", None
    while end is None or time.monotonic() < end:
        select.select([pipe], [], [], 0.01)
        try:
            text += (more := os.read(pipe, 1 << 16))
            if not more:
                break  # it has failed
        except BlockingIOError:
            pass
        if end is None and b"done" in text:
            end = time.monotonic() + seconds
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.set_blocking(pipe, True)
    with os.fdopen(pipe, "rb") as rest:
        text += rest.read()
    lines = text.decode().splitlines()
    return lines if end is not None else [*lines, "wrong: the job has failed"]


def train(rank: int, where: str, disk: str, pipe: int, least: int) -> None:
    """Go on, and save every step, until the end comes; say which are complete."""

    def say(text: str) -> None:
        if rank == 0:
            os.write(pipe, f"{text}\n".encode())

    with one_rank_at_a_time():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 9))
    model = XlaFullyShardedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(
        where,
        save_interval_steps=EVERY,
        keep_last=2,
        local_directory=disk,
        local_interval_steps=1,
    )
    restored = manager.restore(model, optimizer)
    step = restored.step if restored else 0
    if step < least:
        say(f"wrong: step {least} was complete, but the latest is {step}")
    if restored is not None:
        values = {v for p in model.parameters() for v in p.detach().cpu().flatten().tolist()}
        ranks, extra = xr.world_size(), restored.extra
        if values - {float(step), 0.0} or extra != [
            step,
            rank if extra[2] == ranks else 0,
            extra[2],
        ]:
            say(f"wrong: step {step} holds {values} and {restored.extra}")
        say(f"from {step}")
    chance = random.Random(step)
    while True:
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
        manager.save(step, model, optimizer, extra=[step, rank, xr.world_size()])
        if step - 1 > (restored.step if restored else 0):
            say(f"done {step - 1}")
        if chance.random() < 0.3:
            manager.wait()
            say(f"done {step}")


if __name__ == "__main__":
    directory, count, seed, kind = sys.argv[1:]
    sys.stdout.write(json.dumps(main(directory, int(count), int(seed), kind)))
    sys.stdout.flush()
