"""Trace one rank's step of the user's own code on this machine, with the other ranks pretended.

Words: the *steady state* is a step whose inputs include the optimizer's state, as from the second
one on; to *cut* is to take what is pending as a program and go on as if it had run; *hollow*
tensors are zeros without memory.
Always true: nothing is executed; what is cut is hollow from then on, shapes and dtypes right, and
so are large parameters from the first cut on: of a unit that is built, nothing stays in memory.
What the programs need is found by ``compiler`` and ``traffic``.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.fake_rank import ZeroPages, fake_rank
from xla_fsdp.distributed.xla.graph import (
    buffer_id,
    input_buffers,
    lowered_hlo,
    program_of,
    tensor_id,
)
from xla_fsdp.fsdp.engine.backward_pass import current_pass
from xla_fsdp.fsdp.scan import blocks_one_by_one
from xla_fsdp.preflight.hlo import Module
from xla_fsdp.preflight.lower_bound import live_units, parameter_traffic
from xla_fsdp.preflight.program import DATA, GRADIENT, PARAMETER, STATE, Input, Program, Traced
from xla_fsdp.preflight.traffic import KINDS

Step = Callable[[], Any]

LARGE = 2**20

"""Bytes from which on a parameter's values are given up; a step may read smaller ones."""


def trace_step(
    build_step: Callable[[], Step], coords: Sequence[Sequence[int]], *, rank: int = 0
) -> Traced:
    """What ``rank`` runs in a step.

    Args:
        build_step: builds model and optimizer, and returns a function that makes one step.
        coords: place on the torus of every pretended rank.
        rank: which of them to be.

    Raises:
        RuntimeError: if this process has started torch_xla on anything but one CPU device.
        ValueError: if a step leaves nothing to run.
    """
    use_one_cpu_device()
    earlier = {id(unit) for unit in live_units()}
    recorder = Recorder()
    with fake_rank(rank, coords, recorder.cut):
        step = build_step()
        recorder.cut()
        step()  # makes the optimizer's state
        recorder.cut()
        with recorder.recording():
            step()
            recorder.cut()
        units = [unit for unit in live_units() if id(unit) not in earlier]
        # Last: tensors made under a dispatch mode are of another kind, and nothing can follow.
        with recorder.discarding():
            flops = _count_flops(step)
    if not recorder.programs:
        raise ValueError(
            "the step traced no XLA operations. build_step() must return a function that makes one "
            "training step on the XLA device"
        )
    return Traced(tuple(recorder.programs), flops, parameter_traffic(units))


def use_one_cpu_device() -> None:
    """Let torch_xla start on one CPU device.

    Raises:
        RuntimeError: if it has started on anything else.
    """
    if not ops.runtime_started():
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    kind, count = os.environ.get("PJRT_DEVICE"), ops.local_device_count()
    if kind != "CPU" or count != 1:
        raise RuntimeError(
            f"tracing wants one CPU device, and this process uses PJRT_DEVICE={kind} with {count} "
            f"device(s). Run it in a "
            f"process of its own with PJRT_DEVICE=CPU and CPU_NUM_DEVICES=1"
        )


@dataclass
class Recorder:
    """Takes what is pending as a program, and puts hollow tensors in its place."""

    programs: list[Program] = field(default_factory=list)
    _recording: bool = False
    _discarding: bool = False
    _hollow: ZeroPages = field(default_factory=ZeroPages)
    _before: dict[int, tuple[int, str]] = field(default_factory=dict)  # by tensor: buffer and role

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Programs cut inside are kept."""
        self._note_buffers()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """What is cut inside is lost; for what follows in the step, shapes stay right."""
        self._discarding = True
        yield

    def cut(self) -> None:
        """Take what is pending."""
        live = _live_tensors()
        pending = [tensor for tensor in live if ops.is_pending(tensor)]
        if not (self._recording or self._discarding):
            waiting = set(map(id, pending))
            self._empty_parameters([tensor for tensor in live if id(tensor) not in waiting])
        if not pending:
            return
        if self._recording and not self._discarding:
            self.programs.append(self._program(_distinct(pending)))
        if self._discarding:
            for tensor in pending:
                ops.release(tensor, self._hollow.make(tensor.shape, tensor.dtype))
            return
        shapes = [tensor.shape for tensor in pending]
        dummy = ops.upload(torch.zeros(1))
        for tensor in pending:
            ops.release(tensor, dummy)
        for tensor, shape in zip(pending, shapes, strict=True):
            # Not in place, which torch_xla would trace as one more operation on the old value.
            tensor.data = self._hollow.make(shape, tensor.dtype)
        ops.forget_token()
        if self._recording:
            self._note_buffers()

    def _empty_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Large parameters give up their values; what shares a buffer still does."""
        placed = [(each, buffer_id(each)) for each in tensors]
        with (
            torch._C.DisableTorchFunctionSubclass()
        ):  # shards without values act as full parameters
            hollow = {
                buffer: self._hollow.make(each.shape, each.dtype)
                for each, buffer in placed
                if isinstance(each, torch.nn.Parameter) and each.nbytes >= LARGE
            }
            for each, buffer in placed:
                if buffer in hollow:
                    each.data = hollow[buffer]

    def _note_buffers(self) -> None:
        roles = _roles()
        self._before = {
            id(tensor): (buffer, roles.get(id(tensor), DATA))
            for tensor in _live_tensors()
            if (buffer := buffer_id(tensor)) is not None
        }

    def _program(self, pending: list[Tensor]) -> Program:
        roles = dict(self._before.values())
        buffers = input_buffers(pending)
        place = {buffer: index for index, (buffer, _) in enumerate(buffers)}
        aliases = []
        for output, tensor in enumerate(pending):
            buffer, _ = self._before.get(id(tensor), (-1, DATA))
            if buffer in place:
                aliases.append((place[buffer], output))
        inputs = tuple(
            Input(roles.get(buffer, DATA), value.numel() * value.element_size())
            for buffer, value in buffers
        )
        return Program(program_of(pending), inputs, tuple(aliases), _operand_sizes(pending))


def _operand_sizes(pending: list[Tensor]) -> dict[str, int]:
    """Elements that each collective of the traced program takes, by the name of its instruction."""
    entry = Module(lowered_hlo(pending)).entry
    return {
        each.name: sum(math.prod(entry.by_name[name].sizes) for name in each.operands)
        for each in entry.instructions
        if each.opcode in KINDS
    }


def _live_tensors() -> list[Tensor]:
    """Every Python object that stands for a tensor on the device."""
    found: dict[int, Tensor] = {}
    for tensor in [each for each in gc.get_objects() if issubclass(type(each), Tensor)]:
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None and each.device.type == "xla":
                found[id(each)] = each
    return list(found.values())


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """One of the objects for each tensor on the device."""
    return list({tensor_id(tensor): tensor for tensor in tensors}.values())


def _roles() -> dict[int, str]:
    """What tensors are for, by identity of the Python object."""
    roles: dict[int, str] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer):
            states = [value for state in each.state.values() for value in state.values()]
            roles.update({id(value): STATE for value in states if isinstance(value, Tensor)})
        elif issubclass(type(each), torch.nn.Parameter):
            roles[id(each)] = PARAMETER
            if each.grad is not None:
                roles[id(each.grad)] = GRADIENT
    return roles


class _ForwardFlops(FlopCounterMode):
    """Counts outside of backward passes only, so neither gradients nor recomputations."""

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if current_pass() != -1:
            return out
        return super()._count_flops(func_packet, out, args, kwargs)


def _count_flops(step: Step) -> int:
    """Three times the forward's: each product has two in backward. A loop does not show its own."""
    with blocks_one_by_one(), _ForwardFlops(display=False) as counter:
        step()
    return 3 * counter.get_total_flops()
