"""Python processes that have imported torch, torch_xla and the package already, for tests that
start many.

Importing them takes most of the time of a small test on ranks. A server process imports them once,
before any device or thread of XLA exists, and forks a child for each program. A child has its own
environment, working directory, streams, exit code and random state, as a new process would, but not
its own seed of ``hash(str)``. Server and children end with the process that started them.
"""

from __future__ import annotations

import atexit
import contextlib
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

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
    """A server, started when it is first needed, and its children one after the other.

    Args:
        root: working directory of the children.
        env: environment of the server.
    """

    def __init__(self, root: Path, env: Mapping[str, str]) -> None:
        self._root = root
        self._env = dict(env)
        self._server: subprocess.Popen[bytes] | None = None
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
            job = {"arguments": arguments, "env": dict(env), "folder": folder, "timeout": timeout}
            try:
                code, in_time = self._ask(job)
            except BaseException:
                self._end()  # what it may still tell is not for the next call
                raise
            out, err = (Path(folder, name).read_bytes() for name in ("out", "err"))
        if not in_time:
            raise subprocess.TimeoutExpired(list(arguments), timeout, out, err)
        return subprocess.CompletedProcess(
            list(arguments), code, out.decode(errors="replace"), err.decode(errors="replace")
        )

    def _ask(self, job: Mapping[str, Any]) -> tuple[int, bool]:
        """The exit code of the job's child, and whether it ended in time."""
        self._server = server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job).encode() + b"\n")
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of warm Pythons ended: {server.wait()}")
        code, in_time = line.split()
        return int(code), bool(int(in_time))

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "test.common.warm_python"],
            cwd=self._root,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        for pipe in (server.stdin, server.stdout):
            assert pipe is not None
            pipe.close()
        server.wait()


# ---------------------------------------------------------------- in the server


def _serve() -> dict[str, Any] | None:
    """Fork a child for each job from stdin. Returns the job in the child; None at the end."""
    with open(STDIN, "rb", closefd=False) as jobs:
        while line := jobs.readline():
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return job
            if not (in_time := _ends_in_time(pid, job["timeout"])):
                os.kill(pid, signal.SIGKILL)  # still its own id: nobody has waited for it
            _, status = os.waitpid(pid, 0)
            _tell(os.waitstatus_to_exitcode(status), in_time)
    return None


def _ends_in_time(pid: int, timeout: float) -> bool:
    """Wait for a child's end: at most so many seconds, and only while there is who asked for it."""
    child = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector:
        selector.register(child, selectors.EVENT_READ)
        selector.register(STDIN, selectors.EVENT_READ)
        ready = {key.fd for key, _ in selector.select(timeout)}
    os.close(child)
    return child in ready


def _tell(code: int, in_time: bool) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        os.write(STDOUT, b"%d %d\n" % (code, in_time))


def _become(job: Mapping[str, Any]) -> None:
    """What a new process would find."""
    os.environ.clear()
    os.environ.update(job["env"])
    np.random.seed()  # random's own is seeded anew in every fork
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
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _import_what_takes_long() -> None:
    import pytest  # noqa: F401

    if find_spec("torch_xla") is None:
        import xla_fsdp.checkpoint  # noqa: F401

        return
    import torch_xla.core.xla_model
    import torch_xla.distributed.xla_multiprocessing  # noqa: F401

    import test.common.models
    import test.common.scenarios  # noqa: F401


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a child's own affair
    _import_what_takes_long()
    gc.freeze()
    found = _serve()
    if found is not None:
        _become(found)
        _run(found["arguments"])
