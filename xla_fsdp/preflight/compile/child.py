"""Child processes with JAX, whose runtime clashes with torch_xla's in one process.

``Child`` starts ``python -m MODULE FILE_DESCRIPTOR FOLDER``, which answers requests on the
connection of the descriptor by ``serve``, until the other end closes it. The folder is for files of
both, and is removed in the end, also if the parent is killed.

Invariants: torch_xla is never loaded in such a process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1
LOG_BYTES = 2000
DUMP = "dump"  # in the folder: what the compiler dumps


class CompileError(RuntimeError):
    """The TPU compiler refused a program, or needed more host memory than allowed."""


class Child:
    """A process that answers requests.

    Args:
        name: what it is, for errors.
        module: what it runs, a module that calls ``serve``.
        environment: its environment variables.

    Attributes:
        folder: of files that it writes.
    """

    def __init__(self, name: str, module: str, environment: Mapping[str, str]) -> None:
        self._name = name
        self._folder = tempfile.TemporaryDirectory(prefix="preflight-")
        self.folder = Path(self._folder.name)
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(self.folder)]
        with (self.folder / "log").open("wb") as log, theirs:
            self.process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdout=log, stderr=log
            )
        with contextlib.suppress(OSError):  # if memory runs out, it is to end first
            Path(f"/proc/{self.process.pid}/oom_score_adj").write_text("1000")

    def ask(self, *request: Any, waiting: Callable[[], None] = lambda: None) -> tuple[str, Any]:
        """Return the error of a request, and the answer if that is empty.

        Args:
            request: name and arguments of what is to be called.
            waiting: called some ten times a second until then; what it raises ends this.

        Raises:
            CompileError: if the process has ended.
        """
        try:
            self._connection.send(request)
        except OSError as ended:
            raise self._ended() from ended
        while not self._connection.poll(POLL_SECONDS):
            waiting()
        try:
            error, answer = self._connection.recv()
        except (EOFError, OSError) as ended:
            raise self._ended() from ended
        return error, answer

    def close(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self._folder.cleanup()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ended(self) -> CompileError:
        code = self.process.wait()
        if -code == signal.SIGKILL:
            return CompileError(
                f"{self._name} was killed, as the system does when memory runs out: free some, or "
                f"let less run at once (jobs, max_host_mem). It is tried again in the next run"
            )
        tail = (self.folder / "log").read_text(errors="replace")[-LOG_BYTES:]
        return CompileError(f"{self._name} ended with exit code {code}; its last lines:\n{tail}")


# ---------------------------------------------------------------- in the child


def serve(answers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer the requests of the parent, by name."""
    connection, folder = Connection(int(sys.argv[1])), sys.argv[2]
    threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            kind, *request = connection.recv()
            try:
                answer = "", answers[kind](*request)
            except Exception as error:  # XLA has many exception types
                answer = f"{type(error).__name__}: {error}", None
            connection.send(answer)
    shutil.rmtree(folder, ignore_errors=True)


def _end_with(parent: int, folder: str) -> None:
    """End this process, and remove its folder, when its parent was killed while it computes."""
    while os.getppid() == parent:
        time.sleep(5 * POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
