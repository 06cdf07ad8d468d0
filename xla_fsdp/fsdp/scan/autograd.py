"""The autograd node of identical blocks that run as a loop.

Words: see ``program`` and ``shards``. Always true: it takes the stream, the other arguments and all
leaves of the blocks, and gives each its gradient, as the blocks' own nodes would; what backward
needs is saved the way autograd saves tensors. Gradients that are not simply reduced (they
are kept, or go through a user's hook) are handed to the blocks' units, in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import new_seeds, reroot_random_numbers
from xla_fsdp.fsdp.engine.autograd import mark_constants, present
from xla_fsdp.fsdp.engine.state import FSDPState, refuse_changed
from xla_fsdp.fsdp.scan.fused_optimizer import loop_steps
from xla_fsdp.fsdp.scan.offload import Keeping
from xla_fsdp.fsdp.scan.program import BackwardProgram, ForwardProgram, Inputs, gradients
from xla_fsdp.fsdp.scan.shards import Shards
from xla_fsdp.fsdp.scan.weights import BlockWeights


class Passes:
    """Counts the forwards of some blocks, whose gradients may be added to each other: those that
    ran with the same values. All ranks count alike, as they run the same program; which of them
    still have a graph they may not know alike."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._count = 0

    def begin(self, versions: list[int]) -> None:
        """One more, with parameters of these versions."""
        self._count = self._count + 1 if versions == self._versions else 1
        self._versions = versions

    def is_alone(self, versions: list[int]) -> bool:
        """Whether there was one forward with these."""
        return versions == self._versions and self._count == 1


@dataclass(frozen=True)
class Job:
    """One forward of all blocks.

    Args:
        units: the blocks', in order.
        shards: the blocks'.
        weights: how parameters travel.
        passes: counts the blocks' forwards.
        keeping: where what is collected waits.
        forward: returns the forward loop for these inputs, and for which of the other arguments
            need gradients; None where there will be no backward.
        backward: returns the backward loop.
    """

    units: list[FSDPState]
    shards: Shards
    weights: BlockWeights
    passes: Passes
    keeping: Keeping
    forward: Callable[[Inputs, Sequence[bool] | None], ForwardProgram]
    backward: Callable[..., BackwardProgram]


@dataclass(frozen=True)
class Held:
    """Tensors that the blocks hold.

    Args:
        own: stacks of those that differ between blocks.
        shared: those that all share.
    """

    own: list[Tensor]
    shared: list[Tensor]


def run(job: Job, stream: Tensor, others: Sequence[Tensor], held: Held) -> Tensor:
    """What the last block returns.

    Args:
        job: what to run.
        stream: the first one's input.
        others: further arguments of all.
        held: buffers.
    """
    leaves = job.shards.leaves
    tensors = (stream, *others, *leaves)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Blocks.apply(job, held, len(others), stream, *others, *leaves)
    return _forward(job, held, stream, others, None)[0]


class _Blocks(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, held: Held, num_others: int, stream: Tensor, *tensors: Tensor
    ) -> Tensor:
        others = tensors[:num_others]
        # Backward may be asked for less, and yet what it runs again is to be what forward ran.
        ctx.needs = tuple(ctx.needs_input_grad[4 : 4 + num_others])
        output, inputs, seeds, collected, program = _forward(job, held, stream, others, ctx.needs)
        ctx.job, ctx.program = job, program
        # What is sent of large parameters is stacked again in backward. Kept, that of blocks with
        # shards of their own would take as much memory as all these in the compute dtype.
        sliced = [*inputs.small, *inputs.own]
        parts = (inputs.small, inputs.own, collected, others, inputs.shared)
        ctx.sizes = [len(part) for part in parts]
        ctx.save_for_backward(*sliced, *collected, *inputs.constant, *present([seeds]))
        ctx.versions = job.shards.versions
        job.passes.begin(ctx.versions)
        ctx.autocast = (torch.get_autocast_dtype("xla"), torch.is_autocast_enabled("xla"))
        mark_constants(ctx, [output], [True])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.needs_input_grad)
        if grad is None:
            return (None,) * count
        with torch.autocast("xla", dtype=ctx.autocast[0], enabled=ctx.autocast[1]):
            grad_x, others, leaves = _backward(ctx, grad)
        return (None, None, None, grad_x, *others, *leaves)


def _forward(
    job: Job, held: Held, stream: Tensor, others: Sequence[Tensor], needs: Sequence[bool] | None
) -> tuple[Tensor, Inputs, Tensor | None, list[Tensor], ForwardProgram]:
    unit, weights = job.units[0], job.weights
    with torch.no_grad():
        before = unit.context.forward_gate.swap([stream])
        # Before large parameters are stacked, what came before the blocks, such as the table of an
        # embedding, is to be done with.
        first = [stream] if unit.config.optimization_barrier_in_forward else []
        sent = job.shards.to_send(weights.large, job.shards.of(weights.large), first)
        of_small = job.shards.sent(weights.small, job.shards.of(weights.small))
        if unit.config.optimization_barrier_in_forward:
            stacks = ops.barrier([*sent, *of_small, *before])[: len(sent) + len(of_small)]
            sent, of_small = stacks[: len(sent)], stacks[len(sent) :]
        small = weights.gather_small(of_small)
        inputs = Inputs(sent, small, held.own, list(others), held.shared)
        program = job.forward(inputs, needs)
        ahead = _first_ahead(weights, inputs, 0)
        seeds = _seeds(program, len(job.units), stream.device)
        results = program.loop.run([stream, *ahead, *inputs.sliced, *inputs.constant], seeds)
        unit.context.forward_gate.hold([results[0]])
    return results[0], inputs, seeds, results[1 + len(ahead) :], program


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    job: Job = ctx.job
    unit, weights = job.units[0], job.weights
    unit.context.watch()
    grad, sent = _gated(job, grad, ctx.versions)
    inputs, collected, seeds = _restored(ctx, sent)
    needs = ctx.needs
    reduces = _reduces_as_one(job.units)
    program = job.backward(inputs, ctx.program, collected, needs, reduces)
    first = _first_ahead(weights, inputs, len(job.units) - 1) + job.keeping.first(collected)
    wanted = [
        torch.zeros_like(each) for each, need in zip(inputs.others, needs, strict=True) if need
    ]
    sliced = [*inputs.sliced, *collected]
    steps = None
    if reduces and job.passes.is_alone(ctx.versions):
        steps = loop_steps(job.units, job.shards, weights, program)
    update = None if steps is None else steps.update
    results = program.loop.run([grad, *first, *wanted, *sliced, *inputs.constant], seeds, update)
    if steps is not None:
        results = steps.taken(results)
    at = 1 + len(first)
    sums, stacks = iter(results[at : at + len(wanted)]), results[at + len(wanted) :]
    reduced, full = gradients(program, stacks, reduced=steps is None)
    leaves = _reduced(job, reduced, full) if reduces else _handed_over(job, full)
    unit.context.pending.extend(grad.detach() for grad in present(leaves))
    unit.context.backward_gate.hold([results[0].detach()])
    return results[0], [next(sums) if need else None for need in needs], leaves


def _reduces_as_one(units: Sequence[FSDPState]) -> bool:
    """Whether the gradients of all blocks are simply reduced, and divided alike."""
    divisors = {(u.group.reduction.predivide, u.group.reduction.postdivide) for u in units}
    plain = (u.settings.sync_gradients and u.group.reduces_plainly for u in units)
    return len(divisors) == 1 and all(plain)


def _restored(ctx: Any, sent: list[Tensor]) -> tuple[Inputs, list[Tensor], Tensor | None]:
    saved, parts = list(ctx.saved_tensors), []
    for size in ctx.sizes:
        parts.append(saved[:size])
        saved = saved[size:]
    small, own, collected, others, shared = parts
    return Inputs(sent, small, own, others, shared), collected, saved[0] if saved else None


def _gated(job: Job, grad: Tensor, versions: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """The gradient, and what is sent of large parameters, behind all that backward has still to
    compute.

    Raises:
        RuntimeError: if leaves are not of these ``versions``.
    """
    unit, large = job.units[0], job.weights.large
    refuse_changed(versions, job.shards.versions)
    before = unit.context.fence([grad])
    leaves = job.shards.of(large)
    if unit.config.optimization_barrier_in_backward:
        grad, *rest = ops.barrier([*before, *leaves])
        leaves = rest[len(before) - 1 :]
        # What is left of the units after the blocks, such as the head's gradient or its step, is to
        # be done with: what a loop does not use lies beside all that it needs.
        [grad] = ops.once_computed(before[1:], [grad])
    return grad, job.shards.to_send(large, leaves, before)


def _first_ahead(weights: BlockWeights, inputs: Inputs, block: int) -> list[Tensor]:
    """Full parameters ahead, of the block that comes first."""
    places = [weights.large.index(at) for at in weights.ahead]
    return weights.gather(weights.ahead, [inputs.sent[at][block] for at in places])


def _seeds(program: ForwardProgram, length: int, device: torch.device) -> Tensor | None:
    if not program.body.draws_random_numbers:
        return None
    reroot_random_numbers(device)
    return new_seeds(length, device)


def _reduced(job: Job, reduced: dict[int, Tensor], full: dict[int, Tensor]) -> list[Tensor | None]:
    """Gradients of all leaves."""
    sums = {**reduced, **job.weights.reduce_small(full)}
    return job.shards.finished(job.weights.sum_replicas(sums))


def _handed_over(job: Job, full: dict[int, Tensor]) -> list[Tensor | None]:
    """The same, by the units themselves."""
    members = range(job.weights.num_members)
    return job.shards.joined(
        [
            unit.reduce_grads([full[m][block] if m in full else None for m in members])
            for block, unit in enumerate(job.units)
        ]
    )
