"""What the calling thread runs: whose forward or backward, and in which phase of which unit.

By that torch functions that are called with shards compute, or raise (``GuardedShard``). And by it
operations are named in traced programs: their ``op_name`` in the HLO then holds the phase in which
a unit traced them, such as ``blocks.3/all-gather.1``, innermost last; profiles and dumps show it.
Phases are in ``PHASES``. Blocks that run as a loop have one name, such as ``blocks.0-11``.
torch_xla numbers equal scopes, and notes them only in its debug mode for IR, which takes the Python
stack of every operation: so there are none outside of ``units_named``.

Invariants: in optimizers and backward passes, torch functions called with shards run no code of
this package but one look-up.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from enum import Enum, auto
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import Variable

from xla_fsdp.xla.graph import Scope, metadata

current_pass = torch._C._current_graph_task_id
"""Returns the number of the backward pass that the calling thread runs, or -1 outside of one."""

# ---------------------------------------------------------------- whose code


class Code(Enum):
    """What code a thread runs."""

    OUTSIDE = auto()  # of forwards: the user's, or backward
    FORWARD = auto()  # of a user's module
    PACKAGE = auto()  # this package's, or an optimizer's step


class Thread(threading.local):
    """What the calling thread does.

    Attributes:
        runs: what code.
        units: those whose forward runs, outermost first.
        before_steps: ``runs`` before each optimizer step.
    """

    def __init__(self) -> None:
        self.runs = Code.OUTSIDE
        self.units: list[Any] = []
        self.before_steps: list[Code] = []


this_thread = Thread()


@contextmanager
def _running(code: Code) -> Iterator[None]:
    before, this_thread.runs = this_thread.runs, code
    try:
        yield
    finally:
        this_thread.runs = before


package_code = functools.partial(_running, Code.PACKAGE)
"""``with package_code():`` runs this package's code, which may compute with shards."""
forward_code = functools.partial(_running, Code.FORWARD)
"""``with forward_code():`` runs the forward of a user's module."""


@contextmanager
def running(unit: Any) -> Iterator[None]:
    """Run the forward of a user's module, of which ``unit`` has the parameters."""
    this_thread.units.append(unit)
    try:
        with forward_code():
            yield
    finally:
        this_thread.units.remove(unit)


@contextmanager
def with_shards() -> Iterator[None]:
    """Let the block compute with shards, except in the forward of a user's module."""
    with _running(Code.FORWARD if this_thread.runs is Code.FORWARD else Code.PACKAGE):
        yield


def begin_step() -> None:
    """Let an optimizer compute with shards, also one that steps in a forward (of a module whose
    forward is a training step)."""
    this_thread.before_steps.append(this_thread.runs)
    this_thread.runs = Code.PACKAGE


def end_step() -> None:
    """Undo the latest ``begin_step``. After a step that raised, leaving the forward does so."""
    this_thread.runs = this_thread.before_steps.pop()


class GuardedShard:
    """The ``__torch_function__`` of a class of shards: in the forward of a user's module its
    ``_fsdp_in_forward``, outside its ``_fsdp_outside``, and elsewhere torch's own."""

    def __get__(self, shard: Any, kind: Any) -> Any:
        if this_thread.runs is Code.FORWARD:
            return kind._fsdp_in_forward
        if this_thread.runs is Code.OUTSIDE and current_pass() == -1:
            return kind._fsdp_outside
        return torch._C._disabled_torch_function_impl


# ---------------------------------------------------------------- names of units and phases

PHASES = ("forward", "recompute", "backward", "all-gather", "reduce-scatter", "all-reduce")

_SCOPE = re.compile(rf"([^/]+)/({'|'.join(PHASES)})(?:\.\d+)?(?=/|$)")

P = ParamSpec("P")
T = TypeVar("T")

_named = threading.Lock()  # held while units are named


def label_of(op_name: str) -> str:
    """Return the unit and phase in an operation's ``op_name``, such as "blocks.3: reduce-scatter"
    or "blocks.3: all-gather, forward"; "" if it was traced outside of units."""
    found = _SCOPE.findall(op_name)
    if not found:
        return ""
    unit, phase = found[-1]
    passes = [each for _, each in found if each in ("forward", "backward")]
    of_pass = f", {passes[-1]}" if phase == "all-gather" and passes else ""
    return f"{unit}: {phase}{of_pass}"


@functools.cache
def turn_on_if_asked() -> ExitStack:
    """Name the units of this process from now on if ``XLA_FSDP_UNIT_NAMES`` is 1."""
    stack = ExitStack()
    if os.environ.get("XLA_FSDP_UNIT_NAMES") == "1":
        stack.enter_context(units_named())
    return stack


@contextmanager
def units_named() -> Iterator[None]:
    """Name units in what is traced inside the block. A block inside another does nothing."""
    if not _named.acquire(blocking=False):
        yield
        return
    try:
        with metadata(True):
            yield
    finally:
        _named.release()


def scope(unit: str, phase: str) -> AbstractContextManager[Any]:
    """Name what is traced inside the block, if units are named."""
    return closing(Scope(f"{unit}/{phase}")) if _named.locked() else nullcontext()


def in_phase(phase: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a method run in a scope of this phase of the unit of which its object has the ``log``; of
    an all-gather, in one of the pass as well."""

    def decorated(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if not _named.locked():
                return method(*args, **kwargs)
            owner: Any = args[0]
            of_pass = "forward" if current_pass() == -1 else "backward"
            outer = scope(owner.log.unit, of_pass) if phase == "all-gather" else nullcontext()
            with outer, scope(owner.log.unit, phase):
                return method(*args, **kwargs)

        return run

    return decorated


class _BackwardScopes(threading.local):
    """Of the units whose backward the calling thread is in, outermost first."""

    def __init__(self) -> None:
        self._open: list[tuple[object, Scope]] = []
        self._pass = -1

    def enter(self, unit: object, name: str) -> None:
        """Name what the backward of ``unit`` traces from now on, if units are named."""
        if not _named.locked():
            return
        if self._pass != current_pass():  # or a pass has raised in this thread
            self._close()
            self._pass = current_pass()
            # Units without parameters and gradients of inputs end with their pass.
            Variable._execution_engine.queue_callback(self._close)
        self._open.append((unit, Scope(f"{name}/backward")))

    def leave(self, unit: object) -> None:
        """End the scope of ``unit``, and of those inside it."""
        units = [each for each, _ in self._open]
        if unit in units:
            self._close(units.index(unit))

    def _close(self, first: int = 0) -> None:
        while len(self._open) > first:
            self._open.pop()[1].close()


backward_scopes = _BackwardScopes()


def joined(names: Sequence[str]) -> str:
    """Return one name for several modules, such as "blocks.0-11" or "blocks.0,2,...,10"."""
    first, last = names[0], names[-1]
    if first == last:
        return first
    parts = list(zip(first.split("."), last.split("."), strict=False))
    at = next((at for at, (a, b) in enumerate(parts) if a != b), 0)
    start, end = parts[at]
    if not (start.isdecimal() and end.isdecimal() and int(end) > int(start)):
        return f"{first}...{last}"
    step, rest = divmod(int(end) - int(start), len(names) - 1)
    numbers = f"{start}-{end}"
    if step > 1 and not rest:
        numbers = f"{start},{int(start) + step},...,{end}" if len(names) > 2 else f"{start},{end}"
    return ".".join([*(a for a, _ in parts[:at]), numbers, *(a for a, _ in parts[at + 1 :])])
