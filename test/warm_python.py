"""Pythons that have imported torch and torch_xla already, for tests that start many.

Importing the two takes most of the time of a small test on ranks. A *server* process imports them
once, before any device or thread of XLA exists, and forks a *child* for each program to run.
Always true: a child has the environment, the working directory and the streams of a process of its
own, and ends as one, with its own exit code, traceback and handlers at exit. The server ends with
the process that started it.
Not for tests of what happens when these packages are imported, nor with other variables of
``READ_ONCE`` than the server's: see ``fits``.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READ_ONCE = (
    "LIBTPU_INIT_ARGS",
    "PJRT_DEVICE",
    "PYTHONPATH",
    "TF_CPP_MIN_LOG_LEVEL",
    "XLA_FLAGS",
)
"""Variables that have had their effect when torch_xla has been imported."""

STDIN, STDOUT, STDERR = range(3)


class WarmPython:
    """A server, and its children one after the other.

    Args:
        root: working directory of the children.
        env: environment of the server.
    """

    def __init__(self, root: Path, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "test.warm_python"],
            cwd=root,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        atexit.register(self._end)

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether a child can have this environment."""
        return all(env.get(name) == self._env.get(name) for name in READ_ONCE)

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run(["python", *arguments], env=env, timeout=timeout)`` with the output
        captured as text; the first argument is ``-m`` or the path of a program."""
        with tempfile.TemporaryDirectory() as folder:
            job = {"arguments": list(arguments), "env": dict(env), "folder": folder}
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(job).encode() + b"\n")
            pid = self._hear(None)
            code = self._hear(timeout)
            if code is None:
                os.kill(pid, signal.SIGKILL)
                self._hear(None)
            out, err = (Path(folder, name).read_bytes() for name in ("out", "err"))
        if code is None:
            raise subprocess.TimeoutExpired(list(arguments), timeout, out, err)
        return subprocess.CompletedProcess(
            list(arguments), code, out.decode(errors="replace"), err.decode(errors="replace")
        )

    def _hear(self, timeout: float | None) -> Any:
        """The next number that the server tells; None if it does not in ``timeout`` seconds."""
        assert self._server.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                return None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of warm Pythons ended: {self._server.wait()}")
        return int(line)

    def _end(self) -> None:
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            pipe.close()
        self._server.wait()


# ---------------------------------------------------------------- in the server


def _serve() -> dict[str, Any] | None:
    """Fork a child for each job from stdin. Returns the job in the child; None at the end."""
    with open(STDIN, "rb", closefd=False) as jobs:
        while line := jobs.readline():
            pid = os.fork()
            if pid == 0:
                return json.loads(line)
            _tell(pid)
            _, status = os.waitpid(pid, 0)
            _tell(os.waitstatus_to_exitcode(status))
    return None


def _tell(number: int) -> None:
    os.write(STDOUT, b"%d\n" % number)


def _become(job: Mapping[str, Any]) -> None:
    """What a new process would find."""
    os.environ.clear()
    os.environ.update(job["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    writing = os.O_WRONLY | os.O_CREAT
    for stream, path, flags in (
        (STDIN, os.devnull, os.O_RDONLY),
        (STDOUT, os.path.join(job["folder"], "out"), writing),
        (STDERR, os.path.join(job["folder"], "err"), writing),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, stream)
        os.close(opened)


def _run(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _import_what_takes_long() -> None:
    import pytest  # noqa: F401
    import torch_xla.core.xla_model
    import torch_xla.distributed.xla_multiprocessing  # noqa: F401


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a child's own affair
    _import_what_takes_long()
    gc.freeze()
    found = _serve()
    if found is not None:
        _become(found)
        _run(found["arguments"])
