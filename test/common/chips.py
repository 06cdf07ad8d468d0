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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from test.common.optimized import EDITS, runnable, serialized
from test.common.parity import Case, assert_parity, run_cases
from test.common.ranks import ChildError, run_warm


@dataclass(frozen=True)
class Job:
    """One function on one slice.

    Args:
        topology: of ``find_topology``.
        fn: a module-level function, called with the rank and ``args``.
        args: shared by all ranks.
        shuffled: ranks lie anywhere on the torus.
        fault: "" for none; "ring": one send of every ring goes the wrong way; "stale": the last
            rank's largest input is that of the program's run before; of what the compiler left:
            "group": one reduction joins other ranks; "send": one send goes the wrong way.
        compiled: programs of all ranks go through the TPU compiler, and what it leaves is run.
    """

    topology: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    shuffled: bool = False
    fault: str = ""
    compiled: bool = False


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


def skip_without_chips() -> None:
    """Skip the calling test where there is no JAX, of which virtual chips are made."""
    import pytest  # not in the child

    pytest.importorskip("jax", reason="virtual chips: pip install '.[preflight]'")


def run_jobs(jobs: Mapping[str, Job], timeout: float = 600) -> dict[str, Done]:
    """Run the jobs in a child process; raises ChildError if that ends early.

    Without JAX the test is skipped.
    """
    skip_without_chips()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "jobs")
        file.write_bytes(pickle.dumps(dict(jobs)))
        done = run_warm("-m", "test.common.chips", str(file), timeout=timeout)
        if done.returncode:
            raise ChildError("virtual chips", done.returncode, done.stderr)
        found: dict[str, Done] = pickle.loads(Path(folder, "results").read_bytes())
        return found


def _run(job: Job, chips: Any) -> Done:
    from xla_fsdp.preflight.rehearse.rehearsal import run_on_chips

    first = len(chips.programs), len(chips.runs)
    with _faulty(job.fault, chips), _compiling(job, chips):
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
    from xla_fsdp.xla import ops

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


# ---------------------------------------------------------------- training


def job_of(topology: str, case: Case, **how: Any) -> Job:
    """Train a case, and keep all that there is to compare."""
    return Job(topology, run_cases, ({"it": replace(case, in_full=True)},), **how)


def assert_right(case: Case, done: Done) -> None:
    """All ranks' losses, parameters, buffers and optimizer states are those of plain torch."""
    assert not done.error, done.error
    case = replace(case, in_full=True)
    ranks = [rank["it"] for rank in done.ranks]
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    groups = (ranks[0]["metadata"] or {}).get("groups") or [[0]]
    for group in groups:
        assert_parity(case, ranks, of=group[0])


# ---------------------------------------------------------------- after the TPU compiler


@contextlib.contextmanager
def _compiling(job: Job, chips: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if job.compiled:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            edit = EDITS.get(job.fault, lambda text: text)
            execute = _Optimized(chips.execute, job.topology, folder, edit)
            stack.enter_context(mock.patch.object(chips, "execute", execute))
            stack.enter_context(_exact_products())
        yield


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Products of float32 that a TPU does not round to bfloat16, as it does by default."""
    from torch_xla import backends

    before = backends.get_mat_mul_precision()
    backends.set_mat_mul_precision("highest")
    try:
        yield
    finally:
        backends.set_mat_mul_precision(before)


class _Optimized:
    """Runs, instead of the programs of all ranks, what the TPU compiler makes of them.

    Args:
        execute: of the virtual chips.
        topology: to compile for.
        folder: of files.
        edit: changes the text of what the compiler left.
    """

    def __init__(
        self, execute: Callable[..., Any], topology: str, folder: Path, edit: Callable[[str], str]
    ) -> None:
        self._execute = execute
        self._topology = topology
        self._folder = folder
        self._edit = edit
        self._left: dict[bytes, bytes] = {}

    def __call__(self, requests: Sequence[Any]) -> Any:
        from xla_fsdp.preflight.rehearse.virtual_chips import same_program

        if len(requests) == 1:
            return self._execute(requests)
        hlo = same_program([each.hlo for each in requests])
        if hlo not in self._left:
            self._left[hlo] = self._optimized(hlo)
        return self._execute([replace(each, hlo=self._left[hlo]) for each in requests])

    def _optimized(self, hlo: bytes) -> bytes:
        from xla_fsdp.preflight.compile.compiler import compile_program
        from xla_fsdp.preflight.topologies import find_topology
        from xla_fsdp.preflight.trace.program import Program
        from xla_fsdp.tpu_flags import compiler_flags

        topology = find_topology(self._topology)
        compiled = compile_program(
            Program(hlo, (), ()),
            topology,
            cache_dir=self._folder,
            flags=compiler_flags(""),
        )
        return serialized(self._edit(runnable(compiled.text, topology.slices)))


def _main(file: Path) -> None:
    from xla_fsdp.preflight.rehearse.virtual_chips import VirtualChips
    from xla_fsdp.xla.virtual_ranks import prepare_devices

    jobs: dict[str, Job] = pickle.loads(file.read_bytes())
    most = max(len(coords_of(job)) for job in jobs.values())
    prepare_devices(most)
    with VirtualChips(most) as chips:
        found = {name: _run(job, chips) for name, job in jobs.items()}
    file.with_name("results").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main = importlib.import_module("test.common.chips")  # whose classes are those that are pickled
    main._main(Path(sys.argv[1]))
