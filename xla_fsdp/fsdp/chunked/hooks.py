"""How a module that is an FSDP unit of its own runs without its whole weight.

The module's own forward runs, with its hooks and checks; only how it computes one thing, losses or
rows, is replaced meanwhile.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

from torch import Tensor, nn

from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import LoopCache
from xla_fsdp.fsdp.chunked.weights import why_whole
from xla_fsdp.fsdp.engine.activation_checkpoint import regions_run_once
from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.module_state import ForwardOverride
from xla_fsdp.fsdp.engine.state import FSDPState, running_units

Compute = Callable[..., Tensor]

# ---------------------------------------------------------------- modules


class ChunkedModule:
    """Base class, mixed into an ``nn.Module``, of modules that can run without their whole weight.

    Attributes:
        pieces: in how many chunks to gather the weight, at most; None for chunks of a fixed size.
    """

    pieces: int | None

    _fsdp_unsharded = ""  # what a unit of it holds otherwise
    _fsdp_without_reshard = ""  # what reshard_after_forward=False does

    def _fsdp_forward_override(self, unit: FSDPState) -> ForwardOverride | None:
        """Return what runs this module, the only one of ``unit``, in chunks; None if it runs as any
        other, with a warning where it was meant not to."""
        if self.pieces == 1:
            return None
        name = type(self).__name__
        if why := self._fsdp_why_unsharded() or why_whole(unit.group):
            warnings.warn(
                f"{name} will hold {self._fsdp_unsharded}: {why}. With pieces=1 that is what it is "
                f"meant to do",
                stacklevel=5,
            )
            return None
        if unit.settings.keeps_larger:
            warnings.warn(
                f"{name} gathers a piece of its weight at a time, from all ranks: a number for "
                f"reshard_after_forward is ignored; False {self._fsdp_without_reshard}",
                stacklevel=5,
            )
        return ChunkedForward()

    def _fsdp_why_unsharded(self) -> str:
        """Return what about the module keeps it from running in chunks; empty if nothing does."""
        raise NotImplementedError

    def _fsdp_compute_for(
        self, unit: FSDPState, loops: LoopCache, *args: Any, **kwargs: Any
    ) -> Compute | None:
        """Return what to compute by for these arguments of the forward; None if there is no use in
        chunks.

        Args:
            unit: the module's.
            loops: those that were traced before.
            args: of the forward.
            kwargs: of the forward.
        """
        raise NotImplementedError


def pieces_problems(pieces: Any) -> list[str]:
    """Return what is wrong with the option ``pieces``."""
    if pieces is None or (isinstance(pieces, int) and pieces >= 1):
        return []
    return [f"pieces is {pieces!r}; expected a number from 1, or None"]


# A module's forward cannot be handed what it is to compute by: its hooks would see that. The
# variable is one of the thread, as a CPU rank is a thread.
_replaced: ContextVar[tuple[nn.Module, Compute] | None] = ContextVar("_replaced", default=None)


@contextlib.contextmanager
def _computing_by(module: nn.Module, compute: Compute) -> Iterator[None]:
    token = _replaced.set((module, compute))
    try:
        yield
    finally:
        _replaced.reset(token)


def compute_of(module: nn.Module, default: Compute) -> Compute:
    """Return what replaces ``default`` in the forward of ``module`` that is running, or that."""
    replaced = _replaced.get()
    return replaced[1] if replaced is not None and replaced[0] is module else default


class ChunkedForward:
    """The ``ForwardOverride`` of a ``ChunkedModule``. It keeps no module alive, and can be copied
    with its module; copies trace loops of their own."""

    def __init__(self) -> None:
        self._loops = LoopCache()

    def run(self, unit: FSDPState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the module; gather its whole weight where there is no use in chunks."""
        module = cast(Any, unit.group.params[0].originals[0].owners[0].module)
        compute = module._fsdp_compute_for(unit, self._loops, *args, **kwargs)
        if compute is None:
            return unit.run(forward, args, kwargs)
        unit.context.abandon()
        unit.refuse_run()
        unit.reshard()
        given = map_tensors(unit.cast_input, (args, kwargs))
        # checkpoint_module has nothing to recompute: no activations are kept.
        with regions_run_once(), _computing_by(module, compute):
            result = forward(*given[0], **given[1])
        if not running_units():
            unit.context.forward_gate.clear()
        return map_tensors(unit.cast_output, result)


# ---------------------------------------------------------------- in the autograd nodes


def shards_for_forward(unit: FSDPState, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the shards, behind what went into the unit before, or else ``inputs``."""
    shards: list[Tensor] = list(unit.group.shards)
    before = unit.context.forward_gate.swap(inputs)
    if not unit.config.optimization_barrier_in_forward:
        return shards
    return ops.barrier([*shards, *before])[: len(shards)]


def start_backward(unit: FSDPState, grad: Tensor, *needed: Tensor) -> list[Tensor]:
    """Return the gradient of the output, and what else is ``needed``, behind all that backward has
    still to compute."""
    unit.context.watch()
    before = unit.context.fence([grad])
    if not unit.config.optimization_barrier_in_backward:
        return [grad, *needed]
    grad, *rest = ops.barrier([*before, *needed])
    return [grad, *rest[len(before) - 1 :]]


def reduces(unit: FSDPState) -> bool:
    """Whether a loop is to reduce gradients: they neither wait for later micro-batches nor go
    through a user's hook."""
    return unit.settings.sync_gradients and unit.group.reduces_plainly


def end_backward(unit: FSDPState, grad: Tensor | None, of_shards: Sequence[Tensor | None]) -> None:
    """Let what comes next wait for the gradients of the input and of the shards."""
    held = [grad] if grad is not None else present(of_shards)
    unit.context.pending.extend(each.detach() for each in present(of_shards))
    unit.context.backward_gate.hold([each.detach() for each in held])
