"""Optimizer steps inside the backward loop, for blocks whose parameters are stacked.

A loop that only reduces gradients ends with the gradients of all blocks in memory. A loop that also
steps each block's parameters holds the gradients of one block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.param_group import CannotSliceError
from xla_fsdp.fsdp.engine.stacked_params import is_stack
from xla_fsdp.scan.program import BackwardProgram, Position
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import StackUpdate, TensorSpec, trace_body


@dataclass(frozen=True)
class LoopSteps:
    """Optimizer steps for a loop to make."""

    update: StackUpdate  # of the stacks of parameters and optimizer state
    steps: Any  # ``OptimizerSliceSteps``; receives the updated stacks

    def take_from(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Hand the updated stacks to the optimizer; return the loop's other results."""
        first = len(results) - len(self.update.stacks)
        self.steps.take(results[first:])
        return list(results[:first])


def loop_steps(position: Position, program: BackwardProgram) -> LoopSteps | None:
    """Return the optimizer steps for the parameters whose gradients the loop reduces; None if the
    optimizer steps after the loop, or not in backward at all. The caller makes sure that no other
    loop of this backward computes gradients of the same blocks."""
    group, numbers = position.weights.group, [number for _, number in program.reduced]
    units = position.units
    is_last = all(unit.settings.is_last_backward and unit.schedule.is_last for unit in units)
    stacks = position.shards.of(numbers)
    if group.stepper is None or not numbers or not all(map(is_stack, stacks)):
        return None
    if not is_last or group.replicas.num_shards > 1:  # replicas are summed after the loop
        return None
    if not all(map(_gets_gradient, stacks)):  # as in backward(inputs=...) of other tensors
        return None
    steps = group.stepper.slice_steps(stacks)
    return None if steps is None else _trace(steps, position, program, numbers)


def _gets_gradient(leaf: Tensor) -> bool:
    """Whether the running backward accumulates into ``leaf.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # torch.autograd.grad returns this gradient instead
        return False


def _trace(
    steps: Any, position: Position, program: BackwardProgram, numbers: Sequence[int]
) -> LoopSteps | None:
    # Traced in every backward, as an optimizer's hyperparameters may change. The loop is compiled
    # again only if the traced step differs.
    counts, shards = [len(kept) for kept in steps.kept], position.shards

    def step(values: list[Tensor]) -> list[Tensor]:
        sums, slices = values[: len(numbers)], values[len(numbers) :]
        found = shards.finished({at: each[None] for at, each in zip(numbers, sums, strict=True)})
        grads = present([found[at] for at in numbers])
        return _read_before_write(steps.new_slices([grad[0] for grad in grads], slices), counts)

    stacks = [each for kept in steps.kept for each in kept]
    specs = [*program.loop.ys[: len(numbers)], *map(TensorSpec.slice_of, stacks)]
    try:
        body = trace_body(step, specs, "fsdp_block_step")
    except CannotSliceError:
        return None
    if body.draws_random_numbers:  # all blocks would draw the same numbers
        return None
    xs: list[int | None] = []
    for at, kept in zip(numbers, steps.kept, strict=True):
        sent = position.weights.large.index(at) if shards.is_sent_as_stored(at) else None
        xs += [sent, *[None] * (len(kept) - 1)]
    return LoopSteps(StackUpdate(body, len(numbers), tuple(stacks), tuple(xs)), steps)


def _read_before_write(slices: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Put a barrier after the new slices of each parameter; ``counts`` says how many it has.

    All old slices are then read before a new one is written. Otherwise the compiler may write a
    stack before it has read that stack for another slice, and copies it in every iteration.
    """
    rest, found = list(slices), []
    for count in counts:
        found += ops.barrier(rest[:count])
        rest = rest[count:]
    return found
