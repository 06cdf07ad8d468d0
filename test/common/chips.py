"""Run functions on the virtual chips of slices, several jobs in one child process.

``run_jobs({"name": Job("v5e:2x2", fn, args)})`` calls ``fn(rank, *args)`` on every rank of the
job's slice, one job after the other, and returns what each rank has returned.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from test.common.ranks import ChildError, run_warm

FAULTS = ("ring", "stale")


@dataclass(frozen=True)
class Job:
    """One function on one slice.

    Args:
        topology: of ``find_topology``.
        fn: a module-level function, called with the rank and ``args``.
        args: shared by all ranks.
        shuffled: ranks lie anywhere on the torus.
        fault: "" for none; "ring": one send of every ring goes the wrong way; "stale": the last
            rank's largest input is that of the program's run before.
    """

    topology: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    shuffled: bool = False
    fault: str = ""


@dataclass(frozen=True)
class Done:
    """What became of a job.

    Args:
        ranks: what each rank has returned; empty if one failed.
        error: class and text of what was raised; "" if nothing was.
        programs: texts of the programs with collectives, in order of first use.
        runs: index in ``programs`` for each run.
    """

    ranks: list[Any]
    error: str = ""
    programs: tuple[str, ...] = ()
    runs: tuple[int, ...] = ()


def run_jobs(jobs: Mapping[str, Job], timeout: float = 600) -> dict[str, Done]:
    """Run the jobs in a child process; raises ChildError if that ends early."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "jobs")
        file.write_bytes(pickle.dumps(dict(jobs)))
        done = run_warm("-m", "test.common.chips", str(file), timeout=timeout)
        if done.returncode:
            raise ChildError("virtual chips", done.returncode, done.stderr)
        found: dict[str, Done] = pickle.loads(Path(folder, "results").read_bytes())
        return found


def _run(job: Job, chips: Any) -> Done:
    from xla_fsdp.preflight.rehearsal import run_on_chips

    first = len(chips.programs), len(chips.runs)
    with _faulty(job.fault, chips):
        try:
            ranks, error = run_on_chips(job.fn, coords_of(job), chips, job.args), ""
        except Exception as raised:
            ranks, error = [], f"{type(raised).__name__}: {raised}"
    used = chips.runs[first[1] :]
    numbers = sorted({each for each in used if chips.is_joint(each)})
    at = {number: index for index, number in enumerate(numbers)}
    texts = tuple(text_of(chips.programs[number]) for number in numbers)
    return Done(ranks, error, texts, tuple(at[each] for each in used if each in at))


def text_of(hlo: bytes) -> str:
    """A program's names as text: what is looked for in it are opcodes."""
    return hlo.decode("latin-1")


def coords_of(job: Job) -> list[tuple[int, ...]]:
    """Coordinates of the job's ranks."""
    from xla_fsdp.preflight.topologies import find_topology

    coords = find_topology(job.topology).coords
    if job.shuffled:
        random.Random(1).shuffle(coords)
    return coords


@contextlib.contextmanager
def _faulty(fault: str, chips: Any) -> Iterator[None]:
    from xla_fsdp.distributed import collectives
    from xla_fsdp.distributed.xla import ops

    with contextlib.ExitStack() as stack:
        # Else only what is large goes around rings.
        stack.enter_context(mock.patch.object(collectives, "RING", 1))
        if fault == "ring":
            wrong = _misdirected(ops.collective_permute)
            stack.enter_context(mock.patch.object(ops, "collective_permute", wrong))
        if fault == "stale":
            stack.enter_context(mock.patch.object(chips, "execute", _Stale(chips.execute)))
        yield


def _misdirected(permute: Callable[..., Any]) -> Callable[..., Any]:
    """Let two ranks get what is meant for the other."""

    def wrong(value: Any, sends: Sequence[tuple[int, int]]) -> Any:
        (a, to_a), (b, to_b), *others = sends
        return permute(value, [(a, to_b), (b, to_a), *others])

    return wrong


class _Stale:
    """Runs programs, the last rank's on the largest input of the run before."""

    def __init__(self, execute: Callable[..., Any]) -> None:
        self._execute = execute
        self._before: dict[bytes, Any] = {}

    def __call__(self, requests: Sequence[Any]) -> Any:
        last = requests[-1]
        if len(requests) > 1:
            at = max(range(len(last.inputs)), key=lambda index: last.inputs[index].numel())
            fresh = last.inputs[at]
            last.inputs[at] = self._before.get(last.hlo, fresh)
            self._before[last.hlo] = fresh
        return self._execute(requests)


def _main(file: Path) -> None:
    from xla_fsdp.distributed.xla.virtual_ranks import prepare_devices
    from xla_fsdp.preflight.virtual_chips import VirtualChips

    jobs: dict[str, Job] = pickle.loads(file.read_bytes())
    most = max(len(coords_of(job)) for job in jobs.values())
    prepare_devices(most)
    with VirtualChips(most) as chips:
        found = {name: _run(job, chips) for name, job in jobs.items()}
    file.with_name("results").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main = importlib.import_module("test.common.chips")  # whose classes are those that are pickled
    main._main(Path(sys.argv[1]))
