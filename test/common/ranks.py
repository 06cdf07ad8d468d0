"""Run functions on CPU ranks, and programs, in child processes that end when their time is up.

``run_on_ranks(fn, 4, *args)`` calls ``fn(rank, *args)`` on every rank and returns the values, which
travel pickled: functions must be module-level, and results host values.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from test.common.warm_python import WarmPython

P = ParamSpec("P")
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
# Programs of a scanned step compile in a fifth of the time that the first flag alone leaves.
FAST_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
STDERR_LINES = 60
PATIENCE = 900.0
"""Seconds that a child has: many times what it needs on a machine that does nothing else."""


class ChildError(RuntimeError):
    """The child failed; ``returncode`` is None if it was killed because its time was up."""

    def __init__(self, what: str, returncode: int | None, stderr: str) -> None:
        lines = stderr.splitlines()
        if len(lines) > 2 * STDERR_LINES:  # where XLA aborts, its reason is above all stacks
            lines[STDERR_LINES:-STDERR_LINES] = ["[...]"]
        super().__init__(f"{what}; its stderr:\n" + "\n".join(lines))
        self.returncode = returncode
        self.stderr = stderr


def run_on_ranks(
    fn: str | Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = PATIENCE,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``num_ranks`` CPU ranks of a child process.

    ``fn`` is ``"package.module:function"`` or a module-level function. Returns the results in rank
    order; raises ChildError if the child fails or needs more than ``timeout`` seconds. The test is
    skipped where there is no torch_xla.
    """
    skip_without_torch_xla()
    target = fn if isinstance(fn, str) else f"{fn.__module__}:{fn.__qualname__}"
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.write_bytes(pickle.dumps((target, num_ranks, args)))
        done = run_warm("-m", "test.common.ranks", str(job), timeout=timeout, env=env)
        if done.returncode:
            what = f"{target} on {num_ranks} ranks ended with exit code {done.returncode}"
            raise ChildError(what, done.returncode, done.stderr)
        return pickle.loads(Path(folder, "results").read_bytes())


def skip_without_torch_xla() -> None:
    """Skip the test where only what needs no torch_xla is tested."""
    if find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed here")


def run_warm(
    *arguments: str, timeout: float = PATIENCE, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module (``-m``), code (``-c``) or a file as ``run_python`` does, in a process that has
    imported torch, torch_xla and the package."""
    warm = warm_python()
    if not warm.fits(environment(env)):
        return run_python(*arguments, timeout=timeout, env=env)
    with _killed_in_time(arguments, timeout):
        return warm.run(arguments, environment(env), timeout)


@functools.cache
def warm_python() -> WarmPython:
    """Return the server that all tests of this process share."""
    return WarmPython(ROOT, environment())


def run_python(
    *arguments: str,
    timeout: float = PATIENCE,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run this Python on CPU, usually from the repository's root; returns output and exit code."""
    command = [sys.executable, *arguments]
    with _killed_in_time(arguments, timeout):
        return subprocess.run(
            command, cwd=cwd, env=environment(env), timeout=timeout, capture_output=True, text=True
        )


@contextlib.contextmanager
def _killed_in_time(arguments: Sequence[str], timeout: float) -> Iterator[None]:
    try:
        yield
    except subprocess.TimeoutExpired as expired:
        stderr = (expired.stderr or b"").decode(errors="replace")
        what = f"{' '.join(arguments)} was killed after {timeout:g} s"
        raise ChildError(what, None, stderr) from None


def cached_outcome(fn: Callable[P, T]) -> Callable[P, T]:
    """Call ``fn`` once for each set of arguments, also if it raises.

    A launch that failed fails every test that needs it, without another attempt for each.
    """

    @functools.cache
    def attempt(*args: P.args, **kwargs: P.kwargs) -> tuple[T | None, Exception | None]:
        try:
            return fn(*args, **kwargs), None
        except Exception as error:
            return None, error

    @functools.wraps(fn)
    def outcome(*args: P.args, **kwargs: P.kwargs) -> T:
        value, error = attempt(*args, **kwargs)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    return outcome


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: CPU, quick compilation, every replay of a compiled step
    checked, and ``more``."""
    own = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": FAST_COMPILE, "XLA_FSDP_CHECK": "1"}
    return {**os.environ, **own, **(more or {})}


def _call(rank: int, target: str, *args: Any) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(rank, *args)


def _main(job: Path) -> None:
    from xla_fsdp.distributed.launcher import launch

    target, num_ranks, args = pickle.loads(job.read_bytes())
    results = launch(_call, (target, *args), num_ranks=num_ranks)
    job.with_name("results").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
