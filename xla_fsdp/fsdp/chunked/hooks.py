"""Lets a module's own forward, with its hooks and checks, compute one thing otherwise.

Always true: it is so for one module, on the calling thread, inside a block.

What a module that streams makes once and needs in every step.

What a module that streams does when its turn among the units comes, in forward and in backward.

Always true: the module's forward itself runs, with its hooks and checks; only how it computes one
thing is replaced. ``checkpoint_module`` recomputes nothing then, as that keeps no activations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.chunked.weights import StreamedWeights
from xla_fsdp.fsdp.engine.activation_checkpoint import regions_run_once
from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.state import FSDPState, running_units


class _Now(threading.local):
    """Which module of the calling thread computes otherwise, and how."""

    def __init__(self) -> None:
        self.module: nn.Module | None = None
        self.compute: Callable[..., Tensor] | None = None


_now = _Now()


@contextlib.contextmanager
def computing_by(module: nn.Module, compute: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, forwards of ``module`` on this thread find ``compute``."""
    before = (_now.module, _now.compute)
    _now.module, _now.compute = module, compute
    try:
        yield
    finally:
        _now.module, _now.compute = before


def compute_of(module: nn.Module, otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What ``module`` computes by at the moment; ``otherwise`` where nobody says."""
    return _now.compute if _now.module is module and _now.compute is not None else otherwise


T = TypeVar("T")


@dataclass
class Kept:
    """Traced loops and the like, of one module."""

    _kept: dict[Hashable, Any] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under ``key``, made if need be."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies make their own."""
        return Kept, ()


def module_of(unit: FSDPState) -> nn.Module:
    """The module whose parameters the unit holds, where it holds those of one."""
    return unit.group.params[0].members[0].owners[0].module


def run(
    unit: FSDPState,
    compute: Callable[..., Tensor],
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """``forward(*args, **kwargs)``, the unit's module called, which computes by ``compute``."""
    unit.context.abandon()
    unit.refuse_run()
    unit.reshard()
    given = map_tensors(unit.cast_input, (args, kwargs))
    with regions_run_once(), computing_by(module_of(unit), compute):
        result = forward(*given[0], **given[1])
    if not running_units():
        unit.context.forward_gate.clear()
    return map_tensors(unit.cast_output, result)


def shards_for_forward(unit: FSDPState, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The shards, behind what went into the unit before, or else ``inputs``."""
    shards: list[Tensor] = list(unit.group.shards)
    before = unit.context.forward_gate.swap(inputs)
    if not unit.config.optimization_barrier_in_forward:
        return shards
    return ops.barrier([*shards, *before])[: len(shards)]


def start_backward(unit: FSDPState, grad: Tensor, *needed: Tensor) -> list[Tensor]:
    """What comes into backward, and what else is ``needed``, behind all that it has still to
    compute."""
    unit.context.watch()
    before = unit.context.fence([grad])
    if not unit.config.optimization_barrier_in_backward:
        return [grad, *needed]
    grad, *rest = ops.barrier([*before, *needed])
    return [grad, *rest[len(before) - 1 :]]


def end_backward(unit: FSDPState, grad: Tensor | None, of_shards: Sequence[Tensor | None]) -> None:
    """Let what comes next wait for these: the gradient of the input, and those of the shards."""
    held = [grad] if grad is not None else present(of_shards)
    unit.context.pending.extend(each.detach() for each in present(of_shards))
    unit.context.backward_gate.hold([each.detach() for each in held])


def reduces(unit: FSDPState) -> bool:
    """Whether a loop is to reduce gradients: they are neither kept nor go through a user's hook."""
    return unit.settings.sync_gradients and unit.group.reduces_plainly


def by_unit(
    unit: FSDPState, weights: StreamedWeights, whole: dict[str, Tensor]
) -> list[Tensor | None]:
    """Gradients of the shards, as the unit makes them of full ones, given by name."""
    return unit.reduce_grads(weights.members(whole))
