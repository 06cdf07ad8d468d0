"""What a module that streams does when its turn among the units comes, in forward and in backward.

Always true: the module's forward itself runs, with its hooks and checks; only how it computes one
thing is replaced. ``checkpoint_module`` recomputes nothing then, as that keeps no activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from xla_fsdp import xla_ops
from xla_fsdp.backward import running_units
from xla_fsdp.graph_nodes import present
from xla_fsdp.remat import regions_run_once
from xla_fsdp.streamed.instead import computing_by
from xla_fsdp.streamed.weights import StreamedWeights
from xla_fsdp.tree import map_tensors
from xla_fsdp.unit import Unit


def module_of(unit: Unit) -> nn.Module:
    """The module whose parameters the unit holds, where it holds those of one."""
    return unit.group.params[0].members[0].owners[0].module


def run(
    unit: Unit, compute: Callable[..., Tensor], forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """``forward(*args, **kwargs)``, the unit's module called, which computes by ``compute``."""
    unit.backward.abandon()
    unit.refuse_run()
    unit.reshard()
    given = map_tensors(unit.cast_input, (args, kwargs))
    with regions_run_once(), computing_by(module_of(unit), compute):
        result = forward(*given[0], **given[1])
    if not running_units():
        unit.backward.forward_gate.clear()
    return map_tensors(unit.cast_output, result)


def shards_for_forward(unit: Unit, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The shards, behind what went into the unit before, or else ``inputs``."""
    shards: list[Tensor] = list(unit.group.shards)
    before = unit.backward.forward_gate.swap(inputs)
    if not unit.config.optimization_barrier_in_forward:
        return shards
    return xla_ops.barrier([*shards, *before])[: len(shards)]


def start_backward(unit: Unit, grad: Tensor, *needed: Tensor) -> list[Tensor]:
    """What comes into backward, and what else is ``needed``, behind all that it has still to
    compute."""
    unit.backward.watch()
    before = unit.backward.fence([grad])
    if not unit.config.optimization_barrier_in_backward:
        return [grad, *needed]
    grad, *rest = xla_ops.barrier([*before, *needed])
    return [grad, *rest[len(before) - 1 :]]


def end_backward(unit: Unit, grad: Tensor | None, of_shards: Sequence[Tensor | None]) -> None:
    """Let what comes next wait for these: the gradient of the input, and those of the shards."""
    held = [grad] if grad is not None else present(of_shards)
    unit.backward.pending.extend(each.detach() for each in present(of_shards))
    unit.backward.backward_gate.hold([each.detach() for each in held])


def reduces(unit: Unit) -> bool:
    """Whether a loop is to reduce gradients: they are neither kept nor go through a user's hook."""
    return unit.settings.sync_gradients and unit.group.reduces_plainly


def by_unit(unit: Unit, weights: StreamedWeights, whole: dict[str, Tensor]) -> list[Tensor | None]:
    """Gradients of the shards, as the unit makes them of full ones, given by name."""
    return unit.in_backward.reduce(weights.members(whole))
