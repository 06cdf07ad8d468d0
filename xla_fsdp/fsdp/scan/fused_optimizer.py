"""Steps of an optimizer inside the backward loop, for blocks whose parameters are stacked.

Why: a loop that only reduces gradients has those of all blocks in the end. One that steps each
block's parameters when it has their gradients keeps none.
Always true: blocks that ran in more than one loop since they were changed, or whose gradients
others wait for or nobody does, are stepped with whole stacks after the loop, or not at all. The
step is traced anew every time, as an optimizer's numbers change; a loop that would compute the same
is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import Like, Update, trace_body
from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.param_group import CannotSliceError, SliceSteps
from xla_fsdp.fsdp.engine.stacked_params import is_stack
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.scan.program import BackwardProgram
from xla_fsdp.fsdp.scan.shards import Shards
from xla_fsdp.fsdp.scan.weights import BlockWeights


@dataclass(frozen=True)
class LoopSteps:
    """Steps that a loop is to make.

    Args:
        update: what becomes of stacks in each round.
        steps: takes the new ones.
    """

    update: Update
    steps: SliceSteps

    def taken(self, results: Sequence[Tensor]) -> list[Tensor]:
        """What the loop returned, without the new stacks, which are taken."""
        first = len(results) - len(self.update.stacks)
        self.steps.take(results[first:])
        return list(results[:first])


def loop_steps(
    units: Sequence[FSDPState], shards: Shards, weights: BlockWeights, program: BackwardProgram
) -> LoopSteps | None:
    """How the loop steps the parameters whose gradients it reduces; None if it does not.

    Args:
        units: the blocks', whose gradients are reduced, and used in no other loop of this pass.
        shards: the blocks'.
        weights: how they travel.
        program: the loop.
    """
    group, numbers = units[0].group, program.reduced
    is_last = all(unit.settings.is_last_backward and unit.context.is_last for unit in units)
    stacks = shards.of(numbers)
    if group.stepper is None or not numbers or not all(map(is_stack, stacks)):
        return None
    if not is_last or group.replicas.num_shards > 1:  # their sums come after the loop
        return None
    if not all(map(_gets_gradient, stacks)):  # of a backward that was asked for others'
        return None
    steps = group.stepper.slice_steps(stacks)
    return None if steps is None else _traced(steps, shards, weights, program)


def _gets_gradient(leaf: Tensor) -> bool:
    """Whether the backward pass that is running adds to the gradient of a leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # autograd.grad was asked for the leaf's
        return False


def _traced(
    steps: SliceSteps, shards: Shards, weights: BlockWeights, program: BackwardProgram
) -> LoopSteps | None:
    numbers = program.reduced
    counts = [len(kept) for kept in steps.kept]

    def step(values: list[Tensor]) -> list[Tensor]:
        sums, slices = values[: len(numbers)], values[len(numbers) :]
        found = shards.finished({at: each[None] for at, each in zip(numbers, sums, strict=True)})
        grads = present([found[at] for at in numbers])
        return _each_at_once(steps.new_slices([grad[0] for grad in grads], slices), counts)

    stacks = [each for kept in steps.kept for each in kept]
    likes = [*program.loop.collected[: len(numbers)], *map(Like.slice_of, stacks)]
    try:
        body = trace_body(step, likes, "fsdp_block_step")
    except CannotSliceError:
        return None
    if body.draws_random_numbers:  # every block would draw the same
        return None
    sliced: list[int | None] = []
    for at, kept in zip(numbers, steps.kept, strict=True):
        sent = weights.large.index(at) if shards.is_sent_as_stored(at) else None
        sliced += [sent, *[None] * (len(kept) - 1)]
    return LoopSteps(Update(body, len(numbers), tuple(stacks), tuple(sliced)), steps)


def _each_at_once(slices: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Slices of which so many belong to each parameter: none of these is there before all are. What
    a new slice is computed from is then read before any of it is written; else the compiler would
    copy a stack that it writes, and computes another's slice from, in every round."""
    rest, found = list(slices), []
    for count in counts:
        found += ops.barrier(rest[:count])
        rest = rest[count:]
    return found
