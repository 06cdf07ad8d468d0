"""What a process has once and ranks that are its threads share: command line, working directory,
environment, main module and random number generators.

Imports torch only when needed: the launcher sets the environment before torch is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class RandomState:
    """States of the generators of ``random``, numpy and torch (on the CPU)."""

    python: Any
    numpy: Any
    torch: Any

    @classmethod
    def now(cls) -> RandomState:
        """Return the states of this process."""
        import numpy as np
        import torch

        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    @classmethod
    def fresh(cls) -> RandomState:
        """Return states for a new process: torch's default seed, the others unpredictable."""
        import numpy as np
        import torch

        python, numpy = random.Random().getstate(), np.random.RandomState().get_state()
        return cls(python, numpy, torch.Generator().get_state())

    def restore(self) -> None:
        """Put this process's generators into these states."""
        import numpy as np
        import torch

        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def or_fresh_where_equal(self, other: RandomState) -> RandomState:
        """Return these states, but those of a new process where they are as in ``other``."""
        fresh = self.fresh()
        return RandomState(
            fresh.python if self.python == other.python else self.python,
            fresh.numpy if _values(self.numpy) == _values(other.numpy) else self.numpy,
            fresh.torch if self.torch.equal(other.torch) else self.torch,
        )


def _values(numpy_state: Any) -> tuple[Any, ...]:
    name, key, *rest = numpy_state
    return name, key.tobytes(), *rest


@dataclass(frozen=True)
class ProcessState:
    """The state of a process, as far as ranks that start one after the other need their own.

    Args:
        argv: ``sys.argv``.
        directory: the working directory; None if it was removed.
        environment: the environment variables.
        start_method: how ``multiprocessing`` starts processes; None if that is not decided.
        main: the main module.
        random: states of the random number generators.
    """

    argv: Sequence[str]
    directory: str | None
    environment: Mapping[str, str]
    start_method: str | None
    main: ModuleType
    random: RandomState

    @classmethod
    def now(cls) -> ProcessState:
        """Return the state of this process."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:
            directory = None
        return cls(
            argv=list(sys.argv),
            directory=directory,
            environment=dict(os.environ),
            start_method=multiprocessing.get_start_method(allow_none=True),
            main=sys.modules["__main__"],
            random=RandomState.now(),
        )

    def restore(self) -> None:
        """Put this process into this state."""
        sys.argv = list(self.argv)
        sys.modules["__main__"] = self.main
        if self.directory is not None:
            with contextlib.suppress(FileNotFoundError):
                os.chdir(self.directory)
        self._restore_environment()
        multiprocessing.set_start_method(self.start_method, force=True)
        self.random.restore()

    def _restore_environment(self) -> None:
        # Without clearing it first: threads of libraries read it meanwhile.
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Undo what imports inside the block do to the root logger.

    torch_xla gives it a handler, after which a script's ``logging.basicConfig`` does nothing.
    """
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        yield
    finally:
        root.handlers[:] = handlers
