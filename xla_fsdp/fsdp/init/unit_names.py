"""Write the names of FSDP units into the metadata of traced programs.

An operation's ``op_name`` in the HLO then holds the phase in which a unit traced it, such as
``blocks.3/all-gather.1``, innermost last; profiles and dumps show it. Phases are in ``PHASES``.
Blocks that run as a loop have one name, such as ``blocks.0-11``.
torch_xla numbers equal scopes, and notes them only in its debug mode for IR, which takes the Python
stack of every operation. Off, nothing of this file is called: turned on, it replaces methods.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

from xla_fsdp.fsdp.engine.all_gather import AllGather
from xla_fsdp.fsdp.engine.module_state import FSDPModuleBase, named_fsdp_modules
from xla_fsdp.fsdp.engine.reduce_scatter import ReduceScatter
from xla_fsdp.fsdp.engine.schedule import Schedule, ScheduleLog, current_pass
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.nn.activation_checkpoint import Region
from xla_fsdp.scan import autograd as scan_autograd
from xla_fsdp.scan import program as scan_program
from xla_fsdp.scan.autograd import ScanCall
from xla_fsdp.scan.program import Position
from xla_fsdp.scan.weights import BlockWeights
from xla_fsdp.xla.graph import Scope, metadata

VARIABLE = "XLA_FSDP_UNIT_NAMES"

PHASES = ("forward", "recompute", "backward", "all-gather", "reduce-scatter", "all-reduce")

_SCOPE = re.compile(rf"([^/]+)/({'|'.join(PHASES)})(?:\.\d+)?(?=/|$)")

# Methods that trace one phase of a unit, by class.
_STEPS: dict[type, dict[str, Sequence[str]]] = {
    FSDPState: {"forward": ["_compute"], "recompute": ["_recompute"]},
    ReduceScatter: {
        "reduce-scatter": ["scatter", "scatter_alone", "scatter_tensors"],
        "all-reduce": ["sum_replicas", "sum_replicas_of"],
    },
}

_GATHERS = ("pack", "unshard", "gather_larger", "unshard_larger", "unshard_sent", "gather_tensors")

# Functions around the loops of blocks, by what a block that runs in them does; and the methods that
# communicate for all blocks of a loop.
_LOOPS = {"_forward": "forward", "_backward": "recompute"}
_OF_BLOCKS = ("gather", "reduce", "gather_small", "reduce_small", "sum_replicas")

_pre_backward = FSDPState.pre_backward

_Context = Callable[[Any], AbstractContextManager[Any]]


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


def turn_on_if_asked() -> None:
    """Name the units of this process from now on if ``XLA_FSDP_UNIT_NAMES`` is 1."""
    if os.environ.get(VARIABLE) == "1":
        _named_for_good()


@functools.cache
def _named_for_good() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(units_named())
    return stack


@contextlib.contextmanager
def units_named() -> Iterator[None]:
    """Name units in what is traced inside the block. A block inside another does nothing."""
    if FSDPState.pre_backward is not _pre_backward:
        yield
        return
    names = _UnitNames(WeakSet())
    with metadata(True), contextlib.ExitStack() as stack:

        def around(owner: Any, functions: Iterable[str], context: _Context) -> None:
            for name in functions:
                stack.enter_context(_replaced(owner, name, context))

        for owner, phases in _STEPS.items():
            for phase, methods in phases.items():
                around(owner, methods, partial(_in_phase, phase))
        around(AllGather, _GATHERS, _in_gather)
        around(FSDPModuleBase, ["_fsdp_run"], names.in_module)
        around(FSDPState, ["pre_backward"], names.before_backward)
        around(FSDPState, ["post_backward"], names.after_backward)
        around(Region, ["_recompute"], lambda region: _in_phase("recompute", region.unit))
        around(Schedule, ["_end"], names.at_end_of_pass)
        for function, phase in _LOOPS.items():
            around(scan_autograd, [function], partial(names.around_loop, phase))
        around(BlockWeights, _OF_BLOCKS, names.with_weights)
        around(Position, ["run"], lambda position: names.in_block(position, names.phase))
        around(scan_program, ["_differentiate"], lambda at: names.in_block(at, "backward"))
        yield


class _UnitNames(threading.local):
    """What this thread traces.

    Args:
        named: the units that have names, of all threads.

    Attributes:
        phase: of the blocks that run in a loop.
    """

    phase = ""

    def __init__(self, named: WeakSet[FSDPState]) -> None:
        self._named = named
        self._loops: WeakKeyDictionary[BlockWeights, str] = WeakKeyDictionary()
        # Of the units whose backward this thread is in, outermost first, and the pass of these.
        self._scopes: list[tuple[FSDPState, Scope]] = []
        self._number = -1

    @contextlib.contextmanager
    def in_module(self, module: Any) -> Iterator[None]:
        if module._fsdp_unit not in self._named:  # the root runs first
            for path, inner in named_fsdp_modules(module):
                inner._fsdp_unit.group.log.unit = path or "root"
                self._named.add(inner._fsdp_unit)
        yield

    @contextlib.contextmanager
    def before_backward(self, unit: FSDPState) -> Iterator[None]:
        yield
        if self._number != current_pass():  # or a pass has raised in this thread
            self._close_from(0)
            self._number = current_pass()
        self._scopes.append((unit, Scope(f"{_log_of(unit).unit}/backward")))

    @contextlib.contextmanager
    def after_backward(self, unit: FSDPState) -> Iterator[None]:
        open_units = [each for each, _ in self._scopes]
        if unit in open_units:
            self._close_from(open_units.index(unit))
        yield

    @contextlib.contextmanager
    def at_end_of_pass(self, schedule: Schedule) -> Iterator[None]:
        self._close_from(0)  # of units without parameters and gradients of inputs
        yield

    def _close_from(self, first: int) -> None:
        while len(self._scopes) > first:
            self._scopes.pop()[1].close()

    @contextlib.contextmanager
    def around_loop(self, phase: str, holder: Any) -> Iterator[None]:
        call = holder if isinstance(holder, ScanCall) else holder.call
        for at, own in zip(call.blocks.positions, call.positions, strict=True):
            self._loops[at.weights] = joined([_log_of(unit).unit for unit in own.units])
        self.phase = phase
        yield

    @contextlib.contextmanager
    def with_weights(self, weights: BlockWeights) -> Iterator[None]:
        log = weights.group.log
        before, log.unit = log.unit, self._loops[weights]
        try:
            yield
        finally:
            log.unit = before

    def in_block(self, position: Position, phase: str) -> AbstractContextManager[None]:
        return _named(f"{self._loops[position.weights]}/{phase}")


def _log_of(owner: Any) -> ScheduleLog:
    """Return the log, which has the name, of a unit or a part of one."""
    log = owner.group.log if isinstance(owner, FSDPState) else owner.log
    return cast(ScheduleLog, log)


def _in_phase(phase: str, owner: Any) -> AbstractContextManager[None]:
    return _named(f"{_log_of(owner).unit if owner else 'unit'}/{phase}")


@contextlib.contextmanager
def _in_gather(gather: AllGather) -> Iterator[None]:
    of_pass = "forward" if current_pass() == -1 else "backward"
    with _in_phase(of_pass, gather), _in_phase("all-gather", gather):
        yield


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


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    scope = Scope(name)
    try:
        yield
    finally:
        scope.close()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, context: _Context) -> Iterator[None]:
    """Let a function run in ``context(its first argument)`` inside the block."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(first: Any, *args: Any, **kwargs: Any) -> Any:
        with context(first):
            return original(first, *args, **kwargs)

    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)
