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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from xla_fsdp.fsdp.engine.all_gather import AllGather
from xla_fsdp.fsdp.engine.module_state import FSDPModuleBase
from xla_fsdp.fsdp.engine.reduce_scatter import ReduceScatter
from xla_fsdp.fsdp.engine.schedule import Schedule, current_pass
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
_STEPS: dict[type, dict[str, str]] = {
    FSDPState: {"_compute": "forward", "_recompute": "recompute"},
    ReduceScatter: {
        **dict.fromkeys(("scatter", "scatter_alone", "scatter_tensors"), "reduce-scatter"),
        **dict.fromkeys(("sum_replicas", "sum_replicas_of"), "all-reduce"),
    },
}

_GATHERS = ("pack", "unshard", "gather_larger", "unshard_larger", "unshard_sent", "gather_tensors")

# Functions around the loops of blocks, by what a block that runs in them does; and the methods that
# communicate for all blocks of a loop.
_LOOPS = {"_forward": "forward", "_backward": "recompute"}
_OF_BLOCKS = ("gather", "reduce", "gather_small", "reduce_small", "sum_replicas")

_pre_backward = FSDPState.pre_backward


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
    names = _UnitNames()
    with metadata(True), contextlib.ExitStack() as stack:
        for owner, methods in _STEPS.items():
            for method, phase in methods.items():
                stack.enter_context(
                    _replaced(owner, method, functools.partial(names.in_phase, phase))
                )
        for method in _GATHERS:
            stack.enter_context(_replaced(AllGather, method, names.in_gather))
        stack.enter_context(_replaced(FSDPModuleBase, "_fsdp_run", names.in_module))
        stack.enter_context(_replaced(FSDPState, "pre_backward", names.before_backward))
        stack.enter_context(_replaced(FSDPState, "post_backward", names.after_backward))
        stack.enter_context(_replaced(Region, "_recompute", names.in_region))
        stack.enter_context(_replaced(Schedule, "_end", names.at_end_of_pass))
        for part, phase in _LOOPS.items():
            wrapper = functools.partial(names.around_loop, phase)
            stack.enter_context(_replaced(scan_autograd, part, wrapper))
        for method in _OF_BLOCKS:
            stack.enter_context(_replaced(BlockWeights, method, names.with_weights))
        stack.enter_context(_replaced(Position, "run", names.in_block))
        stack.enter_context(_replaced(scan_program, "_differentiate", names.in_gradient))
        yield


@dataclass
class _OpenScopes(threading.local):
    """Scopes of the units whose backward this thread is in, outermost first.

    Attributes:
        number: of the backward pass.
    """

    number: int = -1
    scopes: list[tuple[FSDPState, Scope]] = field(default_factory=list)

    def close_from(self, first: int) -> None:
        """Close the scopes from number ``first`` on, the last one first."""
        while len(self.scopes) > first:
            self.scopes.pop()[1].close()


class _UnitNames:
    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._backward = _OpenScopes()
        self._loops: WeakKeyDictionary[BlockWeights, str] = WeakKeyDictionary()
        self._in_loop = threading.local()  # has the ``phase`` of blocks that run

    def in_phase(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(owner: Any, *args: Any, **kwargs: Any) -> Any:
            with self._scope(owner, phase):
                return original(owner, *args, **kwargs)

        return step

    def in_gather(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(owner: AllGather, *args: Any, **kwargs: Any) -> Any:
            of_pass = "forward" if current_pass() == -1 else "backward"
            with self._scope(owner, of_pass), self._scope(owner, "all-gather"):
                return original(owner, *args, **kwargs)

        return step

    def in_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module._fsdp_unit not in self._of:  # the root runs first
                self._name_units_in(module)
            return original(module, *args, **kwargs)

        return run

    def in_region(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def recompute(region: Region) -> Any:
            with self._scope(region.unit, "recompute"):
                return original(region)

        return recompute

    def before_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(unit: FSDPState, *args: Any, **kwargs: Any) -> Any:
            ready = original(unit, *args, **kwargs)
            here = self._backward
            if here.number != current_pass():  # or a pass has raised in this thread
                here.close_from(0)
                here.number = current_pass()
            here.scopes.append((unit, self._push(unit, "backward")))
            return ready

        return step

    def after_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(unit: FSDPState, *args: Any, **kwargs: Any) -> Any:
            here = self._backward
            open_units = [each for each, _ in here.scopes]
            if unit in open_units:
                here.close_from(open_units.index(unit))
            return original(unit, *args, **kwargs)

        return step

    def at_end_of_pass(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(schedule: Schedule, *args: Any, **kwargs: Any) -> Any:
            self._backward.close_from(0)  # of units without parameters and gradients of inputs
            return original(schedule, *args, **kwargs)

        return end

    def around_loop(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(holder: Any, *args: Any) -> Any:
            call = holder if isinstance(holder, ScanCall) else holder.call
            for at, own in zip(call.blocks.positions, call.positions, strict=True):
                self._loops[at.weights] = joined([self._of.get(unit, "unit") for unit in own.units])
            self._in_loop.phase = phase
            return original(holder, *args)

        return run

    def with_weights(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(weights: BlockWeights, *args: Any) -> Any:
            owners = weights.group.gather, weights.group.reduction
            before = {each: self._of.get(each, "unit") for each in owners}
            self._of.update(dict.fromkeys(owners, self._loops[weights]))
            try:
                return original(weights, *args)
            finally:
                self._of.update(before)

        return method

    def in_block(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(position: Position, *args: Any) -> Any:
            with _named(f"{self._loops[position.weights]}/{self._in_loop.phase}"):
                return original(position, *args)

        return run

    def in_gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def differentiate(position: Position, *args: Any) -> Any:
            with _named(f"{self._loops[position.weights]}/backward"):
                return original(position, *args)

        return differentiate

    @contextlib.contextmanager
    def _scope(self, owner: Any, phase: str) -> Iterator[None]:
        with _named(self._name(owner, phase)):
            yield

    def _push(self, owner: Any, phase: str) -> Scope:
        return Scope(self._name(owner, phase))

    def _name(self, owner: Any, phase: str) -> str:
        return f"{self._of.get(owner, 'unit') if owner else 'unit'}/{phase}"

    def _name_units_in(self, root: nn.Module) -> None:
        for path, module in [("", root), *root.named_modules()]:
            if isinstance(module, FSDPModuleBase):
                unit = module._fsdp_unit
                for owner in (unit, unit.group.gather, unit.group.reduction):
                    self._of[owner] = path or "root"


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
def _replaced(
    owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Any]
) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrapper(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
