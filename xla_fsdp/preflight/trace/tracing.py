"""Trace one rank's step of the user's own code on this machine, with the other ranks faked.

Invariants: nothing is executed. Where a step would execute its pending operations (a *cut*), they
are recorded as a program, and its results are replaced by *hollow* tensors (zeros that take no
memory). At each cut while the model is built, large parameters become hollow, so that a model that
is larger than memory can be built piece by piece.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from unittest import mock
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from xla_fsdp.distributed.collectives import Collectives, XlaCollectives
from xla_fsdp.fsdp.engine.param import held_shape
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import current_pass, label_of, units_named
from xla_fsdp.fsdp.explain import shards_sent
from xla_fsdp.nn.attention import splash
from xla_fsdp.nn.experts import megablox
from xla_fsdp.nn.forward_weight import with_whole_weights
from xla_fsdp.preflight.read.hlo import Module
from xla_fsdp.preflight.read.traffic import KINDS
from xla_fsdp.preflight.trace.program import (
    DATA,
    GRADIENT,
    PARAMETER,
    STATE,
    Input,
    ParameterTraffic,
    Program,
    Traced,
)
from xla_fsdp.scan import blocks_one_by_one
from xla_fsdp.xla import ops
from xla_fsdp.xla.fake_rank import ZeroPages, fake_rank
from xla_fsdp.xla.graph import (
    buffer_id,
    inputs_of,
    lowered_hlo,
    program_of,
    tensor_id,
    without_metadata,
)

Step = Callable[[], Any]

# Parameters of at least so many bytes become hollow; a step may read values of smaller ones.
LARGE = 2**20


def trace_step(build_step: Callable[[], Step], coords: Sequence[Sequence[int]]) -> Traced:
    """Trace the step of rank 0 in the steady state.

    Args:
        build_step: builds model and optimizer, and returns a function that makes one step.
        coords: coordinates of every fake rank on the torus.

    Raises:
        RuntimeError: if this process has started torch_xla on anything but CPU.
        TypeError: if ``build_step`` returns no function.
        ValueError: if a step leaves nothing to run, or finds no further inputs.
    """
    use_cpu_device()
    earlier = WeakSet(_live_states())
    recorder = Recorder()
    with units_named(), fake_rank(coords, recorder.cut):
        step = fed(build_step(), "to be traced three times")
        recorder.cut()
        step()  # makes the optimizer's state
        recorder.cut()
        gc.collect()  # what only cycles hold would be a part of some programs, and not of others
        recorder.start_recording()
        started = time.monotonic()
        step()
        recorder.cut()
        seconds = time.monotonic() - started
        states = [state for state in _live_states() if state not in earlier]
        # Last, as tensors made under a dispatch mode cannot be used in further steps.
        recorder.start_discarding()
        flops = _count_flops(step)
    if not recorder.programs:
        raise ValueError(
            "the step traced no XLA operations. build_step() must return a function that makes one "
            "training step on the XLA device"
        )
    parameters = tuple(each for state in states for each in _parameter_traffic(state))
    return Traced(tuple(recorder.programs), flops, parameters, seconds)


def fed(step: Step, for_what: str) -> Step:
    """Return a step that raises ValueError, which says ``for_what`` they are needed, if its inputs
    end.

    Raises:
        TypeError: if ``step`` is no function.
    """
    if not callable(step):
        raise TypeError(
            f"build_step() returned a {type(step).__name__}; expected a function that makes one "
            "training step when it is called without arguments"
        )

    def told() -> Any:
        try:
            return step()
        except StopIteration as ended:
            raise ValueError(
                f"the step has no further input; let it have enough {for_what}"
            ) from ended

    return told


def use_cpu_device() -> None:
    """Let torch_xla start on CPU, on one device unless the environment says otherwise.

    Raises:
        RuntimeError: if it has started on anything else.
    """
    if not ops.runtime_started():
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    kind = os.environ.get("PJRT_DEVICE")
    if kind != "CPU":
        raise RuntimeError(
            f"tracing wants a CPU device, and this process uses PJRT_DEVICE={kind}. Run it in a "
            f"process of its own with PJRT_DEVICE=CPU"
        )


# ---------------------------------------------------------------- programs


class Recorder:
    """Records pending operations as programs, and replaces their results by hollow tensors.

    Attributes:
        programs: programs that were cut since ``start_recording``.
    """

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self._phase: Literal["building", "recording", "discarding"] = "building"
        self._hollow = ZeroPages()
        # Each tensor that exists before the present program, its buffer and role, by id(tensor).
        # Weakly, as it may end there, and another one get its id.
        self._before: dict[int, tuple[ref[Tensor], int, str]] = {}

    def start_recording(self) -> None:
        """Record the programs that are cut from now on."""
        self._note_buffers()
        self._phase = "recording"

    def start_discarding(self) -> None:
        """Discard the programs that are cut from now on; their results still become hollow."""
        self._phase = "discarding"

    def cut(self) -> None:
        """End the present program: record or discard all pending operations."""
        live = _live_tensors()
        pending = [tensor for tensor in live if ops.is_pending(tensor)]
        if self._phase == "building":
            waiting = set(map(id, pending))
            self._empty_parameters([tensor for tensor in live if id(tensor) not in waiting])
        if not pending:
            return
        if self._phase == "recording":
            distinct = list({tensor_id(tensor): tensor for tensor in pending}.values())
            self.programs.append(self._program(distinct, live))
        self._replace(pending)
        if self._phase == "recording":
            self._note_buffers()

    def _replace(self, pending: Sequence[Tensor]) -> None:
        shapes = [held_shape(tensor) for tensor in pending]
        dummy = ops.upload(torch.zeros(1))
        for tensor in pending:
            ops.release(tensor, dummy)
        in_use = {id(each) for state in _states() for each in state.in_use}
        for tensor, shape in zip(pending, shapes, strict=True):
            hollow = self._hollow.make(shape, tensor.dtype)
            if torch._is_functional_tensor(tensor) and id(tensor) not in in_use:
                # Not copy_(), which torch_xla would trace as another pending operation.
                tensor.data = hollow
            else:  # what another tensor wraps, or a unit holds against changes
                ops.release(tensor, hollow)
        ops.forget_token()

    def _empty_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Make large parameters hollow; tensors that share a buffer still do so afterwards."""
        buffers = [(each, buffer_id(each)) for each in tensors]
        # Empty shards are tensor subclasses that otherwise answer for the unsharded parameter.
        with torch._C.DisableTorchFunctionSubclass():
            hollow = {
                buffer: self._hollow.make(each.shape, each.dtype)
                for each, buffer in buffers
                if isinstance(each, torch.nn.Parameter) and each.nbytes >= LARGE
            }
            for each, buffer in buffers:
                if buffer in hollow and torch._is_functional_tensor(each):
                    each.data = hollow[buffer]

    def _note_buffers(self) -> None:
        roles = _roles()
        self._before = {
            id(tensor): (ref(tensor), buffer, roles.get(id(tensor), DATA))
            for tensor in _live_tensors()
            if (buffer := buffer_id(tensor)) is not None
        }

    def _program(self, pending: list[Tensor], live: list[Tensor]) -> Program:
        roles = {buffer: role for _, buffer, role in self._before.values()}
        found = inputs_of(pending)
        input_of = {buffer: index for index, buffer in enumerate(found.buffers)}
        aliases = []
        for output, tensor in enumerate(pending):
            before, buffer, _ = self._before.get(id(tensor), (None, -1, DATA))
            if buffer in input_of and before is not None and before() is tensor:
                aliases.append((input_of[buffer], output))
        inputs = tuple(
            Input(roles.get(buffer, DATA), value.numel() * value.element_size())
            for buffer, value in zip(found.buffers, found.values, strict=True)
        )
        labels = _labels(Module(lowered_hlo(pending)))
        hlo = without_metadata(program_of(pending))  # lines of source, too: the cache has it
        others = _sizes_of_others(live, input_of, roles)
        return Program(hlo, inputs, tuple(aliases), labels, others=others)


def _sizes_of_others(
    live: Iterable[Tensor], inputs: Collection[int], roles: Mapping[int, str]
) -> dict[str, int]:
    found: dict[int, int] = {}
    # Empty shards are tensor subclasses that otherwise answer for the unsharded parameter.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in live:
            if (buffer := buffer_id(tensor)) is not None and buffer not in inputs:
                found[buffer] = tensor.nbytes
    sizes: Counter[str] = Counter()
    for buffer, nbytes in found.items():
        sizes[roles.get(buffer, DATA)] += nbytes
    return dict(sizes)


def _labels(module: Module) -> dict[str, str]:
    return {
        each.name: label_of(each.origin)
        for computation in module.computations.values()
        for each in computation.instructions
        if each.opcode in KINDS
    }


def _live_tensors() -> list[Tensor]:
    held = ops.let_backward_end()
    return [each for each in ops.live_tensors() if all(each is not h for h in held)]


def _roles() -> dict[int, str]:
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


# ---------------------------------------------------------------- operations


class _ForwardFlops(FlopCounterMode):
    """Counts FLOPs of forward passes only, without gradients and recomputation."""

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        given = tree_leaves((args, kwargs))
        if isinstance(out, Tensor) and not any(isinstance(each, Tensor) for each in given):
            # Made under this mode it is of another kind than those made before, and ``.data`` of
            # one does not take the other.
            return torch._to_functional_tensor(out) if out.device.type == "xla" else out
        if current_pass() != -1:
            return out
        return super()._count_flops(func_packet, out, args, kwargs)


def _count_flops(step: Step) -> int:
    """Return the FLOPs of a step, three times the forward: backward has two products for each."""
    # Unrolled, and attention and experts without their kernels: products in these are not counted.
    attend = mock.patch.object(splash, "SPLASH", splash.Counted())
    mix = mock.patch.object(megablox, "MEGABLOX", megablox.COUNTED)
    counter = _ForwardFlops(display=False)
    with attend, mix, blocks_one_by_one(), with_whole_weights(), counter:
        step()
    return 3 * counter.get_total_flops()


# ---------------------------------------------------------------- the least traffic
# This counts without padding. Remat needs no further gathers; an embedding that sends rows, not its
# table, may need less.


def _live_states() -> list[FSDPState]:
    gc.collect()
    return _states()


def _states() -> list[FSDPState]:
    return [each for each in gc.get_objects() if type(each) is FSDPState]


def _parameter_traffic(state: FSDPState) -> Iterator[ParameterTraffic]:
    for param in state.group.params:
        gathered, reduced = shards_sent(state, param)
        off_torus = _off_torus(param.collectives)
        layout, needs_grad = param.packing.layout, param.leaf.requires_grad
        shard_numel = layout.numel / layout.num_shards
        dtype = param.compute_dtype or param.leaf.dtype
        grad_dtype = state.config.gradient_dtype or dtype
        yield ParameterTraffic(
            name=param.originals[0].names[0],
            numel=layout.numel,
            gathered_bytes=round(gathered * shard_numel * dtype.itemsize),
            reduced_bytes=round(reduced * shard_numel * grad_dtype.itemsize * needs_grad),
            off_torus=off_torus if needs_grad else (),
            is_tensor_parallel=any(original.is_cut for original in param.originals),
        )


def _off_torus(collectives: Collectives) -> tuple[int, ...]:
    """Return the first group of ranks if the groups do not follow the torus, else ()."""
    if not isinstance(collectives, XlaCollectives) or collectives.follows_torus:
        return ()
    groups = collectives.groups
    return tuple(groups[0] if groups else range(collectives.num_shards))
