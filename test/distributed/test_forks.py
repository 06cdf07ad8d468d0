"""Forks while other threads are at work, as where ranks start workers of a DataLoader."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from test.common.ranks import run_on_ranks
from xla_fsdp.distributed import forks
from xla_fsdp.distributed.cpu_ranks import current_rank_thread
from xla_fsdp.distributed.forks import QuietForks

FORKS = 5
CHILD_SECONDS = 60.0
DRAWN = 2_000_000  # numbers at a time, by which the generator's mutex is held most of the time

Events = dict[str, threading.Event]
EVENTS: Events = {name: threading.Event() for name in ("ready", "over")}  # of a child process


def child_ends(work: Callable[[], object]) -> bool:
    """Fork, and return whether ``work`` comes to its end in the child, with a true result."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    end = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def seeds() -> bool:
    """Seed, as workers do first."""
    torch.manual_seed(1)
    return True


def fork_while_another_rank_draws(rank: int) -> list[bool]:
    if rank == 0:
        EVENTS["ready"].wait()
        try:
            return [child_ends(seeds) for _ in range(FORKS)]
        finally:
            EVENTS["over"].set()
    numbers = torch.empty(DRAWN)
    while not EVENTS["over"].is_set():
        numbers.random_()
        EVENTS["ready"].set()
    return []


def fork_while_another_rank_seeds(rank: int) -> list[bool]:
    if rank == 0:
        EVENTS["ready"].wait()
        try:
            return [child_ends(lambda: seeds() and current_rank_thread() is None)]
        finally:
            EVENTS["over"].set()
    torch.manual_seed(0)  # the generator is this rank's, until it ends
    EVENTS["ready"].set()
    EVENTS["over"].wait()
    return []


def test_a_child_finds_no_lock_that_another_rank_holds() -> None:
    assert run_on_ranks(fork_while_another_rank_draws, 2)[0] == [True] * FORKS


def test_a_child_does_not_wait_for_ranks() -> None:
    assert run_on_ranks(fork_while_another_rank_seeds, 2)[0] == [True]


# ---------------------------------------------------------------- in this process, without forks


@pytest.fixture
def busy_thread() -> Iterator[None]:
    """Let a thread compute without the interpreter's lock."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("busy_thread")
def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.3)
    before, quiet = sys.getswitchinterval(), QuietForks()
    for _ in range(2):
        begun = time.monotonic()
        quiet.begin(lambda: False)
        quiet.end()
        assert time.monotonic() - begun < 30
        assert sys.getswitchinterval() == before
    quiet.end()  # by a thread that has not begun


def test_a_fork_waits_longer_at_each_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine others compute for longer before they rest."""
    holds: list[float] = []

    def rest(_: QuietForks, hold: float) -> bool:
        holds.append(hold)
        return len(holds) == 7

    monkeypatch.setattr(QuietForks, "_others_rest", rest)
    monkeypatch.setattr(forks, "PAUSE", 0.0)
    quiet = QuietForks()
    quiet.begin(lambda: False)
    quiet.end()
    assert holds == [0.1, 0.2, 0.4, 0.8, *[forks.LONGEST_HOLD] * 3]


def test_a_fork_waits_for_the_end_of_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.0)
    looks = iter([True] * 5)
    quiet = QuietForks()
    quiet.begin(lambda: next(looks, False))
    quiet.end()
    assert next(looks, None) is None
