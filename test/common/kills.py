"""Kill processes that save in a loop, again and again, and look at what they leave each time.

``python -m test.common.kills <directory> <number of kills> <seed> <kind>`` prints one JSON object;
the kinds are those of ``KINDS``. Saving and looking happen in children forked from one process, as
importing torch takes longer than a hundred saves; the parent itself must not compute, because
torch's threads do not survive a fork.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from test.common import stores
from test.common.saving import damage_of, save_step
from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.steps import save_step as save_step_module
from xla_fsdp.checkpoint.steps.save_step import Job
from xla_fsdp.checkpoint.steps.step_directory import all_attempts, complete_attempts, latest_step

WORLD_SIZE = 2
LONGEST = 0.05
"""Seconds from the first complete save to the kill: a few saves."""
BEHIND = 0.03
"""Longest seconds that an asynchronous save has before it is waited for."""
AT_MOST = 10
FAULTS = 0.01
"""Of the requests to a faulty store."""


def main(directory: str, kills: int, seed: int, kind: str) -> dict[str, Any]:
    """Kill so often, and on until a kill has cut a step short, and a job that was replaced has
    stopped by itself, but at most ``AT_MOST`` times as often."""
    chance, how = random.Random(seed), KINDS[kind]
    found: dict[str, Any] = {
        "kind": kind,
        "kills": 0,
        "asynchronous": 0,
        "cut short": 0,
        "stopped": 0,
        "steps": 0,
        "problems": [],
    }
    with how.store(directory) as where:
        for number in range(AT_MOST * kills):
            if number >= kills and found["cut short"] and (found["stopped"] or not how.replaces):
                break
            asynchronous = chance.random() < how.asynchronous
            known, stopped = how.kill(where, number, chance, asynchronous, how.longest)
            seen = look(where)
            found["kills"] += 1
            found["asynchronous"] += asynchronous
            found["stopped"] += stopped
            found["cut short"] += seen["attempts"] > seen["complete"]
            found["steps"] = max(found["steps"], seen["latest"])
            found["problems"] += seen["damage"]
            if seen["latest"] < known:
                problem = f"step {known} was complete, but the latest is {seen['latest']}"
                found["problems"].append(problem)
    return found


def kill_one(
    directory: str, number: int, chance: random.Random, asynchronous: bool, longest: float
) -> tuple[int, int]:
    """Let a job save, and kill it.

    Returns:
        The last step that it said was complete, and how many jobs stopped by themselves.
    """
    child = Child(directory, Job(f"job {number}", take_over=True), chance, asynchronous)
    child.wait_for_a_step()
    time.sleep(chance.uniform(0, longest + BEHIND * asynchronous))
    return child.kill(), 0


def kill_two(
    directory: str, number: int, chance: random.Random, asynchronous: bool, longest: float
) -> tuple[int, int]:
    """Let a job save, and another in its place while it goes on; in half of the rounds it sleeps
    in between. Kill both; what the second one said counts."""
    zombie = Child(directory, Job(f"zombie {number}", take_over=True), chance, asynchronous)
    zombie.wait_for_a_step()
    time.sleep(chance.uniform(0, longest))
    asleep = chance.random() < 0.5
    if asleep:
        os.kill(zombie.pid, signal.SIGSTOP)
    job = Job(f"job {number}", frozenset([f"zombie {number}"]))
    child = Child(directory, job, chance, asynchronous)
    child.wait_for_a_step()
    if asleep:
        os.kill(zombie.pid, signal.SIGCONT)
    time.sleep(chance.uniform(0, 2 * longest))
    stopped = zombie.has_stopped()
    zombie.kill()
    return child.kill(), stopped


@contextmanager
def local_disk(directory: str) -> Iterator[str]:
    yield directory


@contextmanager
def faulty_store(directory: str) -> Iterator[str]:
    """Requests to it fail, for those who save."""
    yield f"faulty://{directory}"


@contextmanager
def bucket(directory: str) -> Iterator[str]:
    """A server in a process of its own: this one must not have threads when it forks."""
    from fsspec.config import conf

    from test.common import buckets

    command = [sys.executable, "-m", "test.common.buckets"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        os.environ.update(buckets.environment(one.stdout.readline().strip()))
        conf["gs"] = {"token": "anon", "project": "project"}
        importlib.import_module("gcsfs")  # for all children
        yield buckets.URL
        one.stdin.close()


class Kind(NamedTuple):
    """Which jobs save where, and which part of their saves is asynchronous."""

    kill: Callable[[str, int, random.Random, bool, float], tuple[int, int]]
    asynchronous: float
    store: Callable[[str], AbstractContextManager[str]] = local_disk
    longest: float = LONGEST

    @property
    def replaces(self) -> bool:
        """Whether a job takes the place of another one that goes on."""
        return self.kill is kill_two


KINDS = {
    "one": Kind(kill_one, 0.0),
    "async": Kind(kill_one, 1.0),
    "two": Kind(kill_two, 0.5),
    "faulty": Kind(kill_one, 0.5, faulty_store),
    "two faulty": Kind(kill_two, 0.5, faulty_store),
    "bucket": Kind(kill_one, 0.5, bucket, 20 * LONGEST),
}


class Child:
    """A process that saves one step after the other, and says which are complete."""

    def __init__(self, directory: str, job: Job, chance: random.Random, asynchronous: bool) -> None:
        own = random.Random(chance.random())
        behind = BEHIND if asynchronous else 0.0
        self.pid, self._pipe = forked(lambda said: save_forever(directory, said, job, own, behind))

    def wait_for_a_step(self) -> None:
        select.select([self._pipe], [], [], 300)

    def has_stopped(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> int:
        """The last step that it said was complete; 0 if none."""
        os.kill(self.pid, signal.SIGKILL)
        return max(map(int, output(self.pid, self._pipe).split()), default=0)


def look(directory: str) -> dict[str, Any]:
    """What a child finds in a directory; damage, if it fails."""
    child, pipe = forked(lambda said: os.write(said, json.dumps(seen_in(directory)).encode()))
    failed = {"latest": 0, "attempts": 0, "complete": 0, "damage": ["the reader failed"]}
    return json.loads(output(child, pipe) or json.dumps(failed))


def seen_in(directory: str) -> dict[str, Any]:
    storage, latest = open_storage(directory), latest_step(directory)
    return {
        "latest": latest or 0,
        "attempts": len(all_attempts(storage)),
        "complete": len(complete_attempts(storage)),
        "damage": [] if latest is None else damage_of(directory, latest),
    }


def save_forever(directory: str, said: int, job: Job, chance: random.Random, behind: float) -> None:
    """Until another job has taken over."""
    faulty = directory.startswith("faulty://")
    if faulty:
        stores.Faulty.chance, stores.Faulty.probability = chance, FAULTS
    save_step_module.LOOK_EVERY = 0.002
    step = 0
    while True:
        try:
            step = max(step, latest_step(directory) or 0) + 1
            rest = chance.uniform(0, behind)
            errors = save_step(directory, step, WORLD_SIZE, keep_last=2, job=job, behind=rest)
        except CheckpointError as error:
            errors = [error]
        text = "\n".join(str(error) for error in errors if error)
        if "taken over" in text or "belongs to job" in text:
            return
        if not text:
            os.write(said, f"{step}\n".encode())
        elif not faulty and "would never be the latest" not in text:
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
