"""Kill a process that saves in a loop, again and again, and look at what it leaves each time.

``python -m test.common.kills <directory> <number of kills> <seed>`` prints one JSON object. Saving
and looking happen in children forked from one process, as importing torch takes longer than a
hundred saves; the parent itself must not compute, because torch's threads do not survive a fork.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from test.common.saving import damage_of, save_step
from xla_fsdp.checkpoint.step_directory import all_attempts, complete_attempts, latest_step
from xla_fsdp.checkpoint.storage import open_storage

WORLD_SIZE = 2
LONGEST = 0.05
"""Seconds from the first complete save to the kill: a few saves."""


def main(directory: str, kills: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    found: dict[str, Any] = {"kills": 0, "cut short": 0, "steps": 0, "problems": []}
    for _ in range(kills):
        known = kill_one(directory, chance.uniform(0, LONGEST))
        storage = open_storage(directory)
        latest = latest_step(directory)
        found["kills"] += 1
        found["cut short"] += len(all_attempts(storage)) > len(complete_attempts(storage))
        if latest is None or latest < known:
            found["problems"].append(f"step {known} was complete, but the latest is {latest}")
        else:
            found["steps"] = latest
            found["problems"] += look(directory, latest)
    return found


def kill_one(directory: str, delay: float) -> int:
    """Let a child save, and kill it; the last step that it said was complete."""
    child, pipe = forked(lambda said: save_forever(directory, said))
    select.select([pipe], [], [], 60)  # until the first step is complete
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return max(map(int, output(child, pipe).split()))


def look(directory: str, step: int) -> list[str]:
    """What a child finds wrong with a step; at least one line if it fails."""
    child, pipe = forked(
        lambda said: os.write(said, json.dumps(damage_of(directory, step)).encode())
    )
    return json.loads(output(child, pipe) or '["the reader failed"]')


def save_forever(directory: str, said: int) -> NoReturn:
    step = (latest_step(directory) or 0) + 1
    while True:
        errors = save_step(directory, step, WORLD_SIZE, keep_last=2)
        if any(errors):
            raise RuntimeError(errors)
        os.write(said, f"{step}\n".encode())
        step += 1


def forked(work: Callable[[int], Any]) -> tuple[int, int]:
    """A child that does ``work`` and ends, and what it writes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        work(writing)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def output(child: int, pipe: int) -> bytes:
    os.waitpid(child, 0)
    with os.fdopen(pipe, "rb") as said:
        return said.read()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
