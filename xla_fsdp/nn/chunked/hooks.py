"""Run a module that is an FSDP unit of its own without its unsharded weight.

The module's own forward runs, with its hooks and checks; only its function that computes losses or
rows is replaced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.inputs import Inputs
from xla_fsdp.fsdp.engine.module_state import ForwardOverride
from xla_fsdp.fsdp.engine.param import held_shape
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.nn.activation_checkpoint import regions_run_once
from xla_fsdp.nn.chunked.weights import why_whole
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import LoopCache

Compute = Callable[..., Tensor]

# ---------------------------------------------------------------- modules


class ChunkedModule:
    """Mixin for an ``nn.Module`` that can run without its unsharded weight.

    Attributes:
        pieces: maximum number of chunks of the weight; None for chunks of a fixed size.
    """

    pieces: int | None
    forward: Callable[..., Any]

    _fsdp_unsharded = ""  # for warnings: what a unit of it holds if it does not run in chunks
    _fsdp_without_reshard = ""  # for warnings: what reshard_after_forward=False does

    @classmethod
    def _check_source(cls, layer: Any, plain: type[nn.Module], *sizes: str) -> None:
        """Refuse a layer whose parameters one of this class cannot take over.

        Args:
            layer: the layer.
            plain: torch's class of such layers.
            sizes: attributes of the layer that are the shape of its weight.
        """
        own = type(layer)
        if not isinstance(layer, plain):
            raise TypeError(
                f"from_{plain.__name__.lower()} takes an nn.{plain.__name__}, got {own.__name__}; "
                f"make a {cls.__name__} before the model is wrapped"
            )
        if own.forward not in (plain.forward, cls.forward):
            raise TypeError(
                f"{own.__name__} has a forward of its own, which a {cls.__name__} would not run; "
                f"keep it as it is"
            )
        weight: Any = layer.weight
        found, expected = tuple(held_shape(weight)), tuple(getattr(layer, each) for each in sizes)
        if found != expected:
            raise ValueError(
                f"the layer's weight has shape {found}, not {expected}: it is sharded. Make a "
                f"{cls.__name__} of the plain model's layer, then shard that"
            )

    def _fsdp_forward_override(self, unit: FSDPState) -> ForwardOverride | None:
        """Return the override that runs this module, the only one of ``unit``, in chunks; None if
        it runs like any unit, with a warning unless ``pieces`` is 1."""
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
        """Return why the module cannot run in chunks; empty if it can."""
        raise NotImplementedError

    def _fsdp_compute_for(
        self, unit: FSDPState, loops: LoopCache, *args: Any, **kwargs: Any
    ) -> Compute | None:
        """Return the function that computes losses or rows in chunks for a forward with these
        arguments; None to run the forward with unsharded parameters."""
        raise NotImplementedError


def pieces_problems(pieces: Any) -> list[str]:
    if pieces is None or (isinstance(pieces, int) and pieces >= 1):
        return []
    return [f"pieces is {pieces!r}; expected a number from 1, or None"]


_COMPUTE = "_fsdp_compute"
"""Attribute of a module whose forward runs in chunks. As an argument, hooks would see it."""


def compute_of(module: nn.Module, default: Compute) -> Compute:
    """Return the function that replaces ``default`` in the running forward of ``module``, if any;
    else ``default``."""
    found: Compute = vars(module).get(_COMPUTE, default)
    return found


class ChunkedForward:
    """The ``ForwardOverride`` of a ``ChunkedModule``. Holds no module, so it can be copied with its
    module; a copy traces loops of its own."""

    def __init__(self) -> None:
        self._loops = LoopCache()

    def run(self, unit: FSDPState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward in chunks, or with unsharded parameters if ``_fsdp_compute_for`` returns
        None."""
        module = cast(Any, unit.group.params[0].originals[0].owners[0].module)
        compute = module._fsdp_compute_for(unit, self._loops, *args, **kwargs)
        if compute is None:
            return unit.run(forward, args, kwargs)
        unit.schedule.cleanup_failed_passes()
        unit.refuse_run()
        unit.reshard()
        inputs = Inputs(args, kwargs)
        vars(module)[_COMPUTE] = compute
        try:
            with regions_run_once():  # nothing to recompute, as no activations are saved
                outputs = inputs.call(forward, [unit.cast_input(t) for t in inputs.sources])
        finally:
            del vars(module)[_COMPUTE]
        unit.schedule.end_forward(of_root=False)
        return outputs.replaced(outputs.tensors, unit.cast_output)


# ---------------------------------------------------------------- for the autograd nodes


def shards_for_forward(unit: FSDPState, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the shards, ordered after what the previous unit computes with, or after ``inputs`` if
    there is none."""
    shards: list[Tensor] = list(unit.group.shards)
    before = unit.schedule.before_loop(inputs)
    if not unit.config.optimization_barrier_in_forward:
        return shards
    return ops.barrier([*shards, *before])[: len(shards)]


def start_backward(unit: FSDPState, grad: Tensor, *needed: Tensor) -> list[Tensor]:
    """Return the gradient of the output and the ``needed`` tensors, ordered after everything that
    backward has computed so far."""
    before = unit.schedule.before_loop([grad])
    if not unit.config.optimization_barrier_in_backward:
        return [grad, *needed]
    grad, *rest = ops.barrier([*before, *needed])
    return [grad, *rest[len(before) - 1 :]]


def end_backward(unit: FSDPState, grad: Tensor | None, of_shards: Sequence[Tensor | None]) -> None:
    """Let the next unit in backward wait for the gradients of the input and of the shards."""
    held = [grad] if grad is not None else present(of_shards)
    unit.schedule.finish_first(each.detach() for each in present(of_shards))
    unit.schedule.after_loop([each.detach() for each in held])
