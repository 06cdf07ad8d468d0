"""Kill processes that save in a loop, again and again, and look at what they leave each time.

``python -m test.common.kills <directory> <number of kills> <seed> <kind>`` prints one JSON object;
the kinds are those of ``KINDS``. Saving and looking happen in children forked from one process, as
importing torch takes longer than a hundred saves; the parent itself must not compute, because
torch's threads do not survive a fork.
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
from typing import Any

from test.common import stores
from test.common.saving import damage_of, save_step
from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.save_step import Job
from xla_fsdp.checkpoint.step_directory import all_attempts, complete_attempts, latest_step
from xla_fsdp.checkpoint.storage import open_storage

WORLD_SIZE = 2
LONGEST = 0.05
"""Seconds from the first complete save to the kill: a few saves."""
FAULTS = 0.01
"""Of the requests to a faulty store."""


def main(directory: str, kills: int, seed: int, kind: str) -> dict[str, Any]:
    chance = random.Random(seed)
    found: dict[str, Any] = {
        "kills": 0,
        "cut short": 0,
        "stopped": 0,
        "steps": 0,
        "problems": [],
    }
    where = f"faulty://{directory}" if kind == "faulty" else directory
    for number in range(kills):
        known, stopped = KINDS[kind](where, number, chance)
        storage = open_storage(where)
        latest = latest_step(where)
        found["kills"] += 1
        found["stopped"] += stopped
        found["cut short"] += len(all_attempts(storage)) > len(complete_attempts(storage))
        if latest is None or latest < known:
            found["problems"].append(f"step {known} was complete, but the latest is {latest}")
        else:
            found["steps"] = latest
            found["problems"] += look(where, latest)
    return found


def kill_one(directory: str, number: int, chance: random.Random) -> tuple[int, int]:
    """Let a job save, and kill it.

    Returns:
        The last step that it said was complete, and how many jobs stopped by themselves.
    """
    child = Child(directory, Job(f"job {number}", take_over=True))
    child.wait_for_a_step()
    time.sleep(chance.uniform(0, LONGEST))
    return child.kill(), 0


def kill_two(directory: str, number: int, chance: random.Random) -> tuple[int, int]:
    """Let a job save, and another in its place while it goes on; in half of the rounds it sleeps
    in between. Kill both; what the second one said counts."""
    zombie = Child(directory, Job(f"zombie {number}", take_over=True))
    zombie.wait_for_a_step()
    time.sleep(chance.uniform(0, LONGEST))
    asleep = chance.random() < 0.5
    if asleep:
        os.kill(zombie.pid, signal.SIGSTOP)
    child = Child(directory, Job(f"job {number}", frozenset([f"zombie {number}"])))
    child.wait_for_a_step()
    if asleep:
        os.kill(zombie.pid, signal.SIGCONT)
    time.sleep(chance.uniform(0, 2 * LONGEST))
    stopped = zombie.has_stopped()
    zombie.kill()
    return child.kill(), stopped


def kill_faulty(directory: str, number: int, chance: random.Random) -> tuple[int, int]:
    """As ``kill_one``, on a store where requests fail."""
    child = Child(directory, Job(f"job {number}", take_over=True), chance.random())
    child.wait_for_a_step()
    time.sleep(chance.uniform(0, 2 * LONGEST))
    return child.kill(), 0


KINDS = {"one": kill_one, "two": kill_two, "faulty": kill_faulty}


class Child:
    """A process that saves one step after the other, and says which are complete."""

    def __init__(self, directory: str, job: Job, faults: float | None = None) -> None:
        self.pid, self._pipe = forked(lambda said: save_forever(directory, said, job, faults))

    def wait_for_a_step(self) -> None:
        select.select([self._pipe], [], [], 60)

    def has_stopped(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> int:
        """The last step that it said was complete; 0 if none."""
        os.kill(self.pid, signal.SIGKILL)
        return max(map(int, output(self.pid, self._pipe).split()), default=0)


def look(directory: str, step: int) -> list[str]:
    """What a child finds wrong with a step; at least one line if it fails."""
    child, pipe = forked(
        lambda said: os.write(said, json.dumps(damage_of(directory, step)).encode())
    )
    return json.loads(output(child, pipe) or '["the reader failed"]')


def save_forever(directory: str, said: int, job: Job, faults: float | None) -> None:
    """Until another job has taken over."""
    if faults is not None:
        stores.Faulty.chance, stores.Faulty.probability = random.Random(faults), FAULTS
    step = 0
    while True:
        try:
            step = max(step, latest_step(directory) or 0) + 1
            errors = save_step(directory, step, WORLD_SIZE, keep_last=2, job=job)
        except CheckpointError as error:
            errors = [error]
        text = "\n".join(str(error) for error in errors if error)
        if "taken over" in text or "belongs to job" in text:
            return
        if not text:
            os.write(said, f"{step}\n".encode())
        elif faults is None and "would never be the latest" not in text:
            raise RuntimeError(errors)


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
    stores.register()
    directory, count, seed, kind = sys.argv[1:]
    sys.stdout.write(json.dumps(main(directory, int(count), int(seed), kind)))
