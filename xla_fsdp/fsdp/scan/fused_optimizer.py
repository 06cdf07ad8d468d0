"""Steps of an optimizer inside the backward loop, for blocks whose parameters are stacked.

A loop that only reduces gradients holds those of all blocks in the end. One that steps each block's
parameters when it has their gradients holds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import StackUpdate, TensorSpec, trace_body
from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.param_group import CannotSliceError, SliceSteps
from xla_fsdp.fsdp.engine.stacked_params import is_stack
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.scan.program import BackwardProgram
from xla_fsdp.fsdp.scan.weights import BlockShards, BlockWeights


@dataclass(frozen=True)
class LoopSteps:
    """Steps that a loop is to make."""

    update: StackUpdate  # changes the stacks of parameters and of the optimizer's state
    steps: SliceSteps  # takes the changed ones

    def take_from(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Take the changed stacks from what the loop returned; return the rest."""
        first = len(results) - len(self.update.stacks)
        self.steps.take(results[first:])
        return list(results[:first])


def loop_steps(
    units: Sequence[FSDPState],
    shards: BlockShards,
    weights: BlockWeights,
    program: BackwardProgram,
) -> LoopSteps | None:
    """Return how the loop steps the parameters whose gradients it reduces; None where whole stacks
    are stepped after the loop, or nothing is.

    Args:
        units: the blocks', whose gradients are reduced, and used in no other loop of this backward.
        shards: the blocks'.
        weights: how they come into the loop.
        program: the loop.
    """
    group, numbers = units[0].group, program.reduced
    is_last = all(unit.settings.is_last_backward and unit.context.is_last for unit in units)
    stacks = shards.of(numbers)
    if group.stepper is None or not numbers or not all(map(is_stack, stacks)):
        return None
    if not is_last or group.replicas.num_shards > 1:  # replicas are summed after the loop
        return None
    if not all(map(_gets_gradient, stacks)):  # of a backward that was asked for others'
        return None
    steps = group.stepper.slice_steps(stacks)
    return None if steps is None else _trace(steps, shards, weights, program)


def _gets_gradient(leaf: Tensor) -> bool:
    """Whether the backward pass that is running adds to the gradient of a leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # autograd.grad was asked for the leaf's
        return False


def _trace(
    steps: SliceSteps, shards: BlockShards, weights: BlockWeights, program: BackwardProgram
) -> LoopSteps | None:
    # In every backward, as an optimizer's numbers change; the loop is only built anew if the traced
    # step differs.
    numbers = program.reduced
    counts = [len(kept) for kept in steps.kept]

    def step(values: list[Tensor]) -> list[Tensor]:
        sums, slices = values[: len(numbers)], values[len(numbers) :]
        found = shards.finished({at: each[None] for at, each in zip(numbers, sums, strict=True)})
        grads = present([found[at] for at in numbers])
        return _together(steps.new_slices([grad[0] for grad in grads], slices), counts)

    stacks = [each for kept in steps.kept for each in kept]
    specs = [*program.loop.ys[: len(numbers)], *map(TensorSpec.slice_of, stacks)]
    try:
        body = trace_body(step, specs, "fsdp_block_step")
    except CannotSliceError:
        return None
    if body.draws_random_numbers:  # every block would draw the same
        return None
    xs: list[int | None] = []
    for at, kept in zip(numbers, steps.kept, strict=True):
        sent = weights.large.index(at) if shards.is_sent_as_stored(at) else None
        xs += [sent, *[None] * (len(kept) - 1)]
    return LoopSteps(StackUpdate(body, len(numbers), tuple(stacks), tuple(xs)), steps)


def _together(slices: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Put a barrier behind the new slices of each parameter, of which there are so many.

    All that they are computed from is then read before any of them is written. Else the compiler
    would copy a stack that it writes, and computes another's slice from, in every iteration.
    """
    rest, found = list(slices), []
    for count in counts:
        found += ops.barrier(rest[:count])
        rest = rest[count:]
    return found
