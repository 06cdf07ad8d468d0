"""The order in which the units of one model gather and reduce, and the ends of their passes.

Nothing runs here. torch_xla records operations, and XLA orders what it compiles by data alone. What
a verb of ``Schedule`` returns is to be computed first: the caller puts it and what it gathers
behind one barrier (``ops.barrier_after_``). The TPU compiler drops barriers before it schedules, so
what must hold until then gets a data dependency as well (``ops.with_data_dependency``).
``docs/decisions`` has the measurements.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from xla_fsdp.distributed.packing import Bucket
from xla_fsdp.fsdp.engine.thread import current_pass, this_thread
from xla_fsdp.xla import ops

# ---------------------------------------------------------------- the schedule


class Dummies:
    """The data of freed parameters, by dtype.

    Code below torch functions could still read it: its shape hardly broadcasts, and NaN is seen in
    any result.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[torch.dtype, Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return the data for ``tensor``."""
        dtype, shape = tensor.dtype, (3, 5, 7, 11)
        value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
        if tensor.is_inference():  # not kept, as code that replaces live tensors expects none
            with torch.inference_mode():
                return torch.full(shape, value, dtype=dtype, device=self._device)
        if dtype not in self._tensors:
            # Not computed by a program: that of the first step would return it, and so be another
            # one than that of the second.
            made = torch.full(shape, value, dtype=dtype)
            self._tensors[dtype] = ops.upload(made, self._device)
        return self._tensors[dtype]


class Schedule:
    """Shared by all units of one model, ``FSDPState``s; it is the root's.

    Args:
        device: this rank's XLA device.
        sync_on_end: run the traced program when a backward pass ends.

    Attributes:
        is_last: False if more backward passes follow before the optimizer step; the first gather
            of the next pass then waits for what is unfinished at the end of this one.
        deferred: what is to run before the forward of a unit ends, if it has not run by then, such
            as blocks of a loop: has ``finish()`` and ``drop()``.
        unreduced: units with gradients left by ``no_sync``.
        to_check: units that have changed since the last pass; None without ``XLA_FSDP_CHECK=1``,
            which asserts what holds between two passes when one ends.
    """

    def __init__(self, device: torch.device, *, sync_on_end: bool = False) -> None:
        self.dummies = Dummies(device)
        self.is_last = True
        self.deferred: list[Any] = []
        # A list, not a set: all ranks must reduce in the same order.
        self.unreduced: list[Any] = []
        self._sync_on_end = sync_on_end
        # What the unit before computes with, by whether it does so in backward. A forward may run a
        # backward pass, which has an order of its own.
        self._last: dict[bool, list[Tensor]] = {False: [], True: []}
        self._unfinished: list[Tensor] = []
        # Numbers of the backward passes that run, or have raised: reentrant checkpoints run passes
        # inside passes.
        self._passes: set[int] = set()
        # The units that hold parameters: for a backward pass, by its number; -1 for a forward or
        # backward that may never run.
        self._holding: dict[Any, int] = {}
        checks = os.environ.get("XLA_FSDP_CHECK") == "1"
        self.to_check: dict[weakref.ref[Any], None] | None = {} if checks else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "to_check": None if self.to_check is None else {}}

    def replay_facts(self) -> tuple[Any, ...]:
        """Return what a traced step depends on besides tensors."""
        return self.is_last, [*map(id, self.unreduced)]

    def end_deferred(self, *, has_raised: bool = False) -> None:
        """Run what was called and has not run, before a forward ends; forget it after an error."""
        while self.deferred:
            deferred = self.deferred.pop()
            deferred.drop() if has_raised else deferred.finish()

    # ------------------------------------------------------------ gathers

    def before_gather(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that a gather must wait for: what the unit before computes with, or
        if there is none the ``inputs`` of what uses the gathered parameters.

        A gather then overlaps with the computation of the unit before, and at most two units'
        parameters are in memory at once. Without it XLA may start all gathers at once, or merge the
        backward's gather with the forward's and hold the unsharded parameters in between.
        """
        backward = current_pass() != -1
        now = [*inputs, *self._take_unfinished()] if backward else [*inputs]
        last, self._last[backward] = self._last[backward], now
        return last or now

    def before_loop(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that a loop, or what is gathered for it, must wait for.

        In backward these are its own ``inputs`` and all that is unfinished, which would need memory
        while the loop runs.
        """
        if current_pass() == -1:
            return self.before_gather(inputs)
        self._last[True] = []
        return [*inputs, *self._take_unfinished()]

    def after_loop(self, results: Sequence[Tensor]) -> None:
        """Let the next gather wait for the ``results`` of a loop."""
        self._last[current_pass() != -1] = list(results)

    # ------------------------------------------------------------ reductions

    def finish_first(self, tensors: Iterable[Tensor]) -> None:
        """Let the next gather of the current backward pass wait for ``tensors`` (reduced gradients,
        gradients of inputs, stepped shards), as their units' parameters would else still be in
        memory."""
        self.ensure_end_of_pass_callback()
        self._unfinished += tensors

    # ------------------------------------------------------------ ends of passes

    def ensure_end_of_pass_callback(self) -> None:
        """Clean up when the current backward pass ends."""
        number = current_pass()
        if number not in self._passes:
            self._passes.add(number)
            Variable._execution_engine.queue_callback(partial(self._end, number))

    def hold_for_pass(self, unit: Any) -> None:
        """Let ``unit`` free its parameters when the current backward pass ends."""
        self.ensure_end_of_pass_callback()
        self._holding[unit] = current_pass()

    def hold_for_next(self, unit: Any) -> None:
        """Let ``unit`` free its parameters when the root's forward or the outermost backward pass
        ends, unless ``use`` comes first."""
        self._holding.setdefault(unit, -1)

    def use(self, unit: Any) -> None:
        """Undo ``hold_for_next``, because the unit runs now."""
        if self._holding.get(unit) == -1:
            del self._holding[unit]

    def end_hold(self, unit: Any) -> bool:
        """Undo ``hold_for_pass``; return whether the current pass had called that."""
        return self._holding.get(unit) == current_pass() and self._holding.pop(unit) is not None

    def end_forward(self, *, of_root: bool) -> None:
        """Clean up when the forward of a unit, or a loop in its place, has returned."""
        if this_thread.units:
            return
        self._last[False] = []  # as live tensors they would become outputs of the program
        if of_root and current_pass() == -1:
            self._free(-1)

    def cleanup_failed_passes(self) -> None:
        """Clean up after passes that raised. Does nothing inside a backward pass."""
        if current_pass() != -1:
            return
        if not this_thread.units:
            self._last[False] = []
            self._free(-1)
        if self._passes:
            self._passes.clear()
            self._clear()
            self._free(*{*self._holding.values()} - {-1})

    def _end(self, number: int) -> None:
        self._passes.discard(number)
        self._free(number)
        if self._passes:
            return
        # Gradients that earlier passes under no_sync left in units that this pass did not reach.
        for unit in list(self.unreduced):
            unit.reduce_unreduced()
        self._free(-1)
        if self.is_last:
            self._clear()
        if self.to_check is not None:
            found, self.to_check = self.to_check, {}
            self._check([unit for reference in found if (unit := reference()) is not None])
        if self.is_last and self._sync_on_end:
            ops.sync()

    def _free(self, *numbers: int) -> None:
        for unit in [unit for unit, number in self._holding.items() if number in numbers]:
            del self._holding[unit]
            unit.end_pass()

    def _take_unfinished(self) -> list[Tensor]:
        self.ensure_end_of_pass_callback()
        found, self._unfinished = self._unfinished, []
        return found

    def _clear(self) -> None:
        """Drop what backward has stored; as live tensors it would become outputs of programs."""
        self._last[True], self._unfinished = [], []

    def _check(self, units: Sequence[Any]) -> None:
        stored = [*self._last[True], *self._unfinished]
        problems = [f"the schedule keeps {len(stored)} tensors"] * bool(stored and self.is_last)
        problems += [f"{unit} waits for another end" for unit in self._holding]
        problems += [each for unit in units for each in unit.problems()]
        if problems:
            raise AssertionError(
                f"at the end of a backward pass (XLA_FSDP_CHECK=1): {'; '.join(problems)}. This is "
                f"an error of xla_fsdp: report it with these lines"
            )


# ---------------------------------------------------------------- what it tells

_log = logging.getLogger("xla_fsdp.schedule")


class ScheduleLog:
    """Tells what one unit gathers, frees and reduces, at debug level, as it is traced. What is
    replayed, or found in a cache of loops, is not traced again.

    Attributes:
        unit: name of the unit's first module, as far out as there are units.
    """

    def __init__(self) -> None:
        self.unit = "root"

    @contextlib.contextmanager
    def of(self, unit: str) -> Iterator[None]:
        """Tell of ``unit`` inside the block."""
        before, self.unit = self.unit, unit
        try:
            yield
        finally:
            self.unit = before

    def sends(self, what: str, sent: Mapping[Bucket, Tensor], params: Sequence[Any] = ()) -> None:
        """Tell of collectives by their name, each given what is sent of one bucket, whose numbers
        are those of ``params``, if they are known."""
        if _log.isEnabledFor(logging.DEBUG):
            for bucket, tensor in sent.items():
                names = [params[at].key for at in bucket.numbers if params] or ["a part"]
                of = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
                self.sends_one(f"{what} of {of}", tensor)

    def sends_one(self, what: str, sent: Tensor) -> None:
        """Tell of one collective that is given ``sent``."""
        if _log.isEnabledFor(logging.DEBUG):
            self._tell(f"{what}, {list(sent.shape)} {str(sent.dtype).removeprefix('torch.')}")

    def frees(self, *, kept: bool) -> None:
        """Tell that modules hold shards again; ``kept`` if backward uses the parameters."""
        if _log.isEnabledFor(logging.DEBUG):
            self._tell("keep until backward" if kept else "free")

    def _tell(self, what: str) -> None:
        # The rank, as CPU ranks share a process, and autograd's threads have names of their own.
        when = "forward" if current_pass() == -1 else "backward"
        _log.debug("rank %d, %s: %s, in %s", ops.rank(), self.unit, what, when)
