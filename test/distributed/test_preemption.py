"""Requests to end: from a signal to one process, to the same step on every rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from test.common.ranks import run_python
from test.common.scenarios import fsdp, make
from xla_fsdp.distributed.launcher import launch
from xla_fsdp.distributed.preemption import Listening, listen, was_asked

RANKS, SIGNALLED_AT = 3, 4


def train(rank: int) -> int:
    """Steps made until all ranks agree; rank 1's process is asked to end at the fourth."""
    import torch
    import torch_xla

    from xla_fsdp import Preemption

    model = fsdp(make(lambda: torch.nn.Linear(4, 4)))
    preemption = Preemption()
    for step in range(1, 100):
        model(torch.ones(2, 4).to(torch_xla.device())).sum().backward()
        model.zero_grad()
        preemption.vote()
        torch_xla.sync()
        if preemption.agreed():
            return step
        if (rank, step) == (1, SIGNALLED_AT):
            os.kill(os.getpid(), signal.SIGTERM)
            while not was_asked():  # the main thread takes it
                time.sleep(0.001)
    return 0


def main() -> None:
    """What a child of the test runs."""
    handler = signal.getsignal(signal.SIGTERM)
    print(launch(train, num_ranks=RANKS, stop_signals=(signal.SIGTERM,)), flush=True)
    assert signal.getsignal(signal.SIGTERM) == handler
    again = launch(lambda rank: was_asked(), num_ranks=RANKS, stop_signals=(signal.SIGTERM,))
    print(again, flush=True)  # now: the signal leaves no time for what is buffered
    os.kill(os.getpid(), signal.SIGTERM)


def test_all_ranks_learn_of_a_signal_after_the_same_step() -> None:
    done = run_python("-c", "from test.distributed.test_preemption import main; main()")
    steps, asked_again = done.stdout.splitlines()
    # The first vote that tells is at most two steps later than the signal, and read a step later.
    assert steps in (str([SIGNALLED_AT + 2] * RANKS), str([SIGNALLED_AT + 3] * RANKS)), done.stderr
    assert asked_again == str([False] * RANKS)
    assert done.returncode == -signal.SIGTERM  # as without launch


def test_signals_are_requests_inside_only() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with listen((signal.SIGUSR1,), to_children=False):
        assert not was_asked()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert was_asked()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert was_asked()
    assert signal.getsignal(signal.SIGUSR1) == before
    with listen((), to_children=False):
        assert not was_asked()


def test_a_signal_that_cannot_be_caught_is_refused_and_nothing_has_changed() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with (
        pytest.raises(ValueError, match=r"SIGKILL.* cannot be caught"),
        listen((signal.SIGUSR1, signal.SIGKILL), to_children=False),
    ):
        pass
    assert signal.getsignal(signal.SIGUSR1) == before


def test_only_the_main_thread_can_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")  # else torch_xla is imported to see
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(
            launch, print, num_ranks=1, stop_signals=(signal.SIGTERM,)
        ).exception()
    assert isinstance(refused, ValueError)
    assert "call launch there" in str(refused)


def asked_within(seconds: float, ready: Path) -> bool:
    """Whether this process is asked in that time; runs in a thread of a process of its own."""

    def wait() -> bool:
        ready.touch()
        end = time.monotonic() + seconds
        while not was_asked() and time.monotonic() < end:
            time.sleep(0.01)
        return was_asked()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(wait).result()


def test_processes_that_ranks_run_in_listen_and_are_told_by_their_parent(tmp_path: Path) -> None:
    """As torch_xla starts them: by an executor, whose workers run the ranks in threads."""
    ready, context = tmp_path / "ready", multiprocessing.get_context("spawn")
    with (
        listen((signal.SIGUSR1,), to_children=True),
        ProcessPoolExecutor(1, mp_context=context) as executor,
    ):
        told = executor.submit(Listening(asked_within, (signal.SIGUSR1,)), 300.0, ready)
        while not ready.exists() and not told.done():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert told.result(timeout=600)
