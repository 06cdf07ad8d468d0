"""Run ranks as threads of one process: start them, synchronize them, end them together.

Before a rank executes the collectives that it has traced, it waits at the *gate* for the others.
A rank *unwinds* when it leaves the user's function because another one has failed.
Invariants: no rank executes a collective before all ranks have recorded the same ones (reading a
value counts as a sync); the first failure wins and ends every wait; a gate that has opened lets
every rank through even if a failure comes meanwhile, as its peers would wait in the collective for
a missing rank. Imports no torch_xla, and torch (for its random number generator) only when needed.

Ranks of scripts *start* one after the other, as processes would: each has the process to itself
until it makes a collective or ends.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from xla_fsdp.distributed.advice import advice
from xla_fsdp.distributed.process_state import ProcessState

STACK_LINES = 4

BUSY = 0.02
"""Share of one CPU; a process that uses less waits, even if it looks for something repeatedly."""

ALL_RANKS = (
    "inside `if rank == 0:` (save_checkpoint, full_state_dict, clip_grad_norm_, loss.item(), "
    "xm.rendezvous)"
)
"""What is often called by one rank, and has to be called by all."""

SHARDING = "sharding of "
"""How the facts begin that tell which values a rank shards."""

_CHECKSUM = re.compile(" with checksum [0-9a-f]+")

MORE_BATCHES = (
    "a rank whose data has a batch more than the others' (DataLoader(..., drop_last=True) with a "
    "DistributedSampler gives all as many)"
)

Name = TypeVar("Name", str, bytes)

RankSetup = Callable[[int], None]
"""What a rank's thread does before or after the user's function, given its number."""


class Unwind(BaseException):
    """Ends a rank because another one has failed. A BaseException, so that no
    ``except Exception`` in the rank's code stops it."""


@dataclass(frozen=True)
class Failure:
    """The reason that a run ends: a rank's exception, or a mistake of several ranks."""

    rank: int
    message: str
    error: BaseException | None = None


@dataclass(frozen=True)
class Arrival:
    """A rank that waits at the gate, with the collectives traced since it was last there, and what
    it hands to the others."""

    since: float
    collectives: tuple[str, ...]
    data: Any


@dataclass
class Run:
    """State of one launch, shared by its rank threads, guarded by ``_changed``.

    Args:
        num_ranks: how many.
        set_up: called with each rank's number where it starts: it puts the process into the state
            in which the rank expects it. None if the ranks start side by side.
    """

    num_ranks: int
    set_up: RankSetup | None = None
    execution: threading.Lock = field(default_factory=threading.Lock)
    """Held while a rank compiles and schedules: one compiles, the others find the result cached."""
    threads: list[RankThread] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    files: dict[str, int] = field(default_factory=dict)
    """Files of shards that ranks have saved, by absolute path, and by which rank."""
    in_collectives: set[int] = field(default_factory=set)
    """Ranks that have made collectives since they last passed the gate."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._traced: list[list[str]] = [[] for _ in range(self.num_ranks)]
        self._at_gate: dict[int, Arrival] = {}
        self._gates_opened = 0
        # Ranks that have passed the gate, but not begun to execute; since when one executes.
        self._to_execute: set[int] = set()
        self._executing_since: float | None = None
        # The rank that excludes the others, by ``turn`` or because it has seeded, and in how
        # many blocks of ``turn`` it is.
        self._exclusive_rank: int | None = None
        self._exclusive_depth = 0
        self._has_seeded = False  # so that its blocks of ``turn`` do not end that
        self._states: dict[int, ProcessState] = {}  # of ranks that others have interrupted
        self._shared_main = sys.modules["__main__"]
        self._starting = self.num_ranks if self.set_up is None else 0  # ranks below have started
        self._starter_used = (-1, 0.0, 0.0)  # its number, CPU seconds, when those grew
        self._delivered: list[Any] = []  # at the gate that has opened last

    # ------------------------------------------------------------ called by the ranks

    def record(self, rank: int, collective: str) -> None:
        """Note that ``rank`` traced ``collective``; raise Unwind if the run has failed."""
        self._let_others_in(rank)
        self.expect(rank, collective)

    def expect(self, rank: int, fact: str) -> None:
        """Note a fact that must be the same on all ranks at their next gate; no rank waits here.

        Raises:
            Unwind: if the run has failed.
        """
        if self.failures:
            raise Unwind
        self._traced[rank].append(fact)

    def traced(self, rank: int) -> tuple[str, ...]:
        """Return the collectives that ``rank`` traced since it last passed the gate."""
        return tuple(self._traced[rank])

    def repeat(self, rank: int, collectives: Sequence[str]) -> None:
        """Record ``collectives`` for a program of ``rank`` that is not traced again."""
        if collectives:
            self.record(rank, collectives[0])
            self._traced[rank] += collectives[1:]

    def forget(self, rank: int) -> None:
        """Forget what ``rank`` traced: it passes the gate with it, or will not execute it."""
        self._traced[rank].clear()
        self.in_collectives.discard(rank)

    def pass_gate(self, rank: int, data: Any = None) -> list[Any]:
        """Wait until every rank is here with the same collectives; return the ``data`` of every
        rank, in order. Raises Unwind if that fails."""
        self._let_others_in(rank)
        with self._changed:
            self._check_may_wait(rank)
            opened_before = self._gates_opened
            self._at_gate[rank] = Arrival(time.monotonic(), tuple(self._traced[rank]), data)
            self.forget(rank)
            if self.finished:
                self._fail_early_return()
            elif len(self._at_gate) == self.num_ranks:
                self._open_gate()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._gates_opened > opened_before or self.failures)
            if self._gates_opened == opened_before:
                raise Unwind
            return self._delivered  # the next gate waits for this rank

    def begin_execution(self, rank: int) -> None:
        """Note that ``rank``, which has passed the gate, has compiled, and executes."""
        with self._changed:
            self._to_execute.discard(rank)
            if self._executing_since is None:
                self._executing_since = time.monotonic()

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, in order; raise Unwind if the run fails.

        All ranks call it, each after it has computed what it had traced.
        """
        self.record(rank, "exchange of host data")
        return self.pass_gate(rank, data)

    def _check_may_wait(self, rank: int) -> None:
        if self.failures:
            raise Unwind
        if self._exclusive_rank == rank:
            raise RuntimeError(
                f"rank {rank} called torch_xla.sync() with collectives inside "
                "one_rank_at_a_time(); the other ranks wait for their turn and cannot join. "
                "Leave the block before the sync."
            )

    def _open_gate(self) -> None:
        arrivals = [self._at_gate[rank] for rank in range(self.num_ranks)]
        difference = first_difference([each.collectives for each in arrivals])
        if difference is None:
            self._delivered = [each.data for each in arrivals]
            self._at_gate.clear()
            self._gates_opened += 1
            self._to_execute = set(range(self.num_ranks))
            self._executing_since = None
        else:
            self.fail(difference)

    def _begin_alone(self, rank: int) -> None:
        """Wait until ``rank`` may start, and reserve the process for it."""
        if self.set_up is None:
            return
        with self._changed:
            self._await(lambda: (self._starting, self._exclusive_rank) == (rank, None))
            self._exclusive_rank, self._has_seeded = rank, True
        self.set_up(rank)

    def _let_others_in(self, rank: int) -> None:
        """Undo ``begin_seeding``; where ranks start alone, wait until all have."""
        self.end_seeding(rank)
        if self._starting < self.num_ranks and self._exclusive_rank != rank:
            with self._changed:
                self._await(lambda: self._starting == self.num_ranks)

    def begin_seeding(self, rank: int) -> None:
        """Reserve the process, with its random number generators, for ``rank``.

        It is released when the rank makes a collective or ends.
        """
        with self._changed:
            self._exclude_others(rank)
            self._has_seeded = True
            self._states.pop(rank, None)

    def end_seeding(self, rank: int) -> None:
        """Release the process, and save its state for ``resume_seeding``."""
        if not self.is_seeding(rank):
            return
        state = ProcessState.now()
        with self._changed:
            if not self.is_seeding(rank):  # another thread was faster
                return
            self._states[rank] = state
            sys.modules["__main__"] = self._shared_main
            self._exclusive_rank, self._has_seeded = None, False
            self._starting += self._starting == rank
            self._changed.notify_all()

    def is_seeding(self, rank: int) -> bool:
        """Return whether the process is reserved for ``rank``, but not by ``turn``."""
        return self._exclusive_rank == rank and not self._exclusive_depth

    def resume_seeding(self, rank: int) -> None:
        """Undo ``end_seeding``: reserve the process again, in the state that was saved."""
        state = self._states.get(rank)
        if state is not None:
            self.begin_seeding(rank)
            state.restore()

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """Let no other rank into such a block, or seed, until this one is left. One that seeds
        inside keeps the process: what it draws next would change what others draw in the block."""
        with self._changed:
            self._exclude_others(rank)
            self._exclusive_depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._exclusive_depth -= 1
                if not self._exclusive_depth and not self._has_seeded:
                    self._exclusive_rank = None
                self._changed.notify_all()

    def _exclude_others(self, rank: int) -> None:
        self._await(lambda: self._exclusive_rank in (None, rank))
        self._exclusive_rank = rank

    def _await(self, holds: Callable[[], bool]) -> None:
        """Wait, with ``_changed`` held, until a condition holds; raise Unwind if the run fails."""
        self._changed.wait_for(lambda: holds() or self.failures)
        if self.failures:
            raise Unwind

    # ------------------------------------------------------------ how a run ends

    def fail(self, failure: Failure) -> None:
        """Record a failure and wake every waiting rank."""
        with self._changed:
            self.failures.append(failure)
            self._changed.notify_all()

    def finish(self, rank: int) -> None:
        """Note that ``rank`` has left the user's function; ranks that wait for it fail now."""
        self.end_seeding(rank)
        with self._changed:
            self.finished.add(rank)
            if self._at_gate and not self.failures:
                self._fail_early_return()
            if len(self.finished) == self.num_ranks and not self.failures:
                self._compare_models()
            self._changed.notify_all()

    def _compare_models(self) -> None:
        """Fail if ranks that have not met since have sharded models of different values. Where one
        has wrapped a module alone, nobody knows which of them are the same."""
        facts = [[each for each in own if each.startswith(SHARDING)] for own in self._traced]
        names = [[_CHECKSUM.sub("", each) for each in own] for own in facts]
        if all(own == names[0] for own in names) and (difference := first_difference(facts)):
            self.fail(difference)

    def _fail_early_return(self) -> None:
        left, waiting = sorted(self.finished), sorted(self._at_gate)
        collective = self._at_gate[waiting[0]].collectives[0]
        self._fail_uneven(
            left[0],
            f"ranks {waiting} wait in torch_xla.sync() to run {collective}, but ranks {left} have "
            f"already returned",
        )

    def _fail_uneven(self, rank: int, what: str) -> None:
        advice = (
            f"Every rank must take the same number of steps and call the same collectives; look "
            f"for {MORE_BATCHES}, an early return, or a call for all ranks {ALL_RANKS}."
        )
        self.fail(Failure(rank, f"{what}. {advice}"))

    # ------------------------------------------------------------ called by the main thread

    def start(
        self, fn: Callable[..., Any], args: tuple[Any, ...], enter: RankSetup, leave: RankSetup
    ) -> None:
        """Start one thread per rank; each runs ``enter(rank)``, ``fn(rank, *args)``, ``leave``."""

        def work(rank: int) -> None:
            if self.failures:
                raise Unwind
            self._begin_alone(rank)
            enter(rank)
            self.results[rank] = fn(rank, *args)

        for rank in range(self.num_ranks):
            self.threads.append(RankThread(self, rank, partial(work, rank), partial(leave, rank)))
        for thread in self.threads:
            thread.start()

    def wait(self, seconds: float, for_all: bool = False) -> bool:
        """Wait until all ranks have finished or (unless ``for_all``) one has failed.

        Returns:
            Whether that happened within ``seconds``.
        """

        def is_over() -> bool:
            return len(self.finished) == self.num_ranks or bool(self.failures and not for_all)

        with self._changed:
            return self._changed.wait_for(is_over, seconds)

    def join_finished(self) -> list[int]:
        """Join the threads of ranks that have finished; return the other ranks."""
        # A thread that is still tearing down when the interpreter exits makes C++ abort.
        with self._changed:
            finished = set(self.finished)
        for thread in self.threads:
            if thread.rank in finished and thread.ident is not None:
                thread.join()
        return sorted(set(range(self.num_ranks)) - finished)

    def give_up_unstarted(self) -> None:
        """Count ranks that an interrupt prevented from starting as finished; should one of their
        threads start yet, it unwinds at once."""
        for rank in range(self.num_ranks):
            if rank >= len(self.threads) or self.threads[rank].ident is None:
                self.finish(rank)

    def longest_wait(self) -> float:
        """Return the seconds since the first rank came to the gate; 0 if nobody waits."""
        with self._changed:
            first = min((a.since for a in self._at_gate.values()), default=None)
        return 0.0 if first is None else time.monotonic() - first

    def who_waits(self) -> tuple[list[int], list[int]]:
        """Return the ranks at the gate, and the ranks they wait for."""
        with self._changed:
            waiting = sorted(self._at_gate)
        return waiting, [r for r in range(self.num_ranks) if r not in waiting]

    def late_to_execute(self, seconds: float) -> list[int]:
        """Return the ranks whose part of collectives others have waited for ``seconds``, in XLA."""
        with self._changed:
            since = self._executing_since
            if since is None or time.monotonic() - since < seconds:
                return []
            return sorted(self._to_execute)

    def idle_starter(self, seconds: float) -> int | None:
        """Return the rank that others wait for to start, if the process has computed nothing for
        ``seconds``, else None; to be called often."""
        with self._changed:
            rank, used, now = self._starting, time.process_time(), time.monotonic()
            if rank == self.num_ranks or not self.is_seeding(rank):
                return None
            known, used_before, since = self._starter_used
            if rank != known or used - used_before > BUSY * seconds:
                self._starter_used = (rank, used, now)
                return None
        return rank if now - since > seconds else None

    def stack(self, rank: int) -> str:
        """Return the innermost Python lines of a rank's thread, as text."""
        frame = sys._current_frames().get(self.threads[rank].ident or 0)
        if frame is None:
            return "    (its thread has ended)\n"
        callers = traceback.walk_stack(frame)
        # What has the frame of a function keeps its tensors: a block that a loop traces would seem
        # to do so while files are read.
        del frame
        places = traceback.StackSummary.extract(callers, lookup_lines=False)
        # How the thread was started is left out.
        while len(places) > 1 and places[-1].filename in (threading.__file__, __file__):
            places.pop()
        return "".join(traceback.StackSummary.from_list(places[:STACK_LINES][::-1]).format())


class RankThread(threading.Thread):
    """The thread of one rank; a daemon, as one that is stuck in C++ must not delay the exit."""

    def __init__(self, run: Run, rank: int, *steps: Callable[[], None]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank_run = run
        self.rank = rank
        self.process = os.getpid()
        self._steps = steps

    def turn(self) -> AbstractContextManager[None]:
        """Let no other rank into such a block, or seed, until this one is left."""
        return self.rank_run.turn(self.rank)

    def run(self) -> None:
        """Run the steps in order; record exceptions as failures of the run."""
        try:
            for step in self._steps:
                self._attempt(step)
        finally:
            self.rank_run.finish(self.rank)

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Unwind:
            pass
        except SystemExit as error:
            if error.code not in (0, None):
                self._fail(error)
        except BaseException as error:  # the end of a rank's thread
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next  # begin in the user's function
        error = error.with_traceback(frames or error.__traceback__)
        what = f"rank {self.rank} raised {type(error).__name__}: {error}".removesuffix(": ")
        if to_do := advice(error):
            what += f". {to_do}"
        self.rank_run.fail(Failure(self.rank, what, error))


def current_rank_thread() -> RankThread | None:
    """Return the calling thread if it is that of a rank, else None."""
    thread = threading.current_thread()
    # In a process that it forked, such as a DataLoader's worker, there are no ranks.
    return thread if isinstance(thread, RankThread) and thread.process == os.getpid() else None


def first_difference(traced: Sequence[Sequence[str]]) -> Failure | None:
    """Return a failure for the first collective that differs between ranks, None without one.

    Args:
        traced: the collectives of each rank.
    """
    if all(each == traced[0] for each in traced):
        return None  # as nearly always: a thousand collectives are looked at one by one otherwise
    for position in range(max(map(len, traced))):
        names = [each[position] if each[position:] else "no collective" for each in traced]
        if len(ranks := ranks_by_name(names)) > 1:
            return _difference(position, ranks)
    return None


def ranks_by_name(names: Sequence[Name]) -> dict[Name, list[int]]:
    """Return which ranks have each name; ``names`` has that of each rank."""
    found: dict[Name, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return found


def listed(ranks: Mapping[str, list[int]]) -> str:
    """Say which ranks have each name."""
    return "; ".join(f"{name} on ranks {which}" for name, which in ranks.items())


def _difference(position: int, ranks: Mapping[str, list[int]]) -> Failure:
    first, *_ = min(ranks.values(), key=lambda which: (len(which), -which[0]))
    if all(name.startswith(SHARDING) for name in ranks):
        return Failure(
            first,
            f"the ranks have built models of different values, and each would keep its part of "
            f"another one: {listed(ranks)}. Or pass sync_module_states=True, which takes those of "
            f"rank 0.",
        )
    return Failure(
        first,
        f"the ranks differ in what they traced since they last met: number {position + 1} is "
        f"{listed(ranks)}. Every rank must call the same collectives in the same order, with equal "
        f"shapes, dtypes and groups; look for {MORE_BATCHES}, or for code that depends on the rank "
        f"or on its data, such as a call for all ranks {ALL_RANKS}.",
    )
