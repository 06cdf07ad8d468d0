"""The autograd node of identical blocks that run as a loop.

It takes the blocks' input, the other arguments and all leaves of the blocks, and gives each its
gradient, as the blocks' own nodes would. Gradients that are not simply reduced (they wait for later
micro-batches, or go through a user's hook) are handed to the blocks' units, unsharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import LoopCache, new_seeds
from xla_fsdp.fsdp.engine.autograd import mark_constants, present
from xla_fsdp.fsdp.engine.state import FSDPState, refuse_changed
from xla_fsdp.fsdp.scan.fused_optimizer import loop_steps
from xla_fsdp.fsdp.scan.program import (
    BackwardProgram,
    Blocks,
    ForwardProgram,
    Inputs,
    backward_program,
    forward_program,
    split,
)
from xla_fsdp.fsdp.scan.weights import BlockShards


class ForwardCounter:
    """Counts the forwards of some blocks whose gradients may be added to each other: those that ran
    with the same values. All ranks count alike, as they run the same program; which of them still
    have a graph they may not know alike."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._count = 0

    def add(self, versions: list[int]) -> None:
        """Count one more, with parameters of these versions."""
        self._count = self._count + 1 if versions == self._versions else 1
        self._versions = versions

    def is_one(self, versions: list[int]) -> bool:
        """Whether there was one forward with these."""
        return versions == self._versions and self._count == 1


@dataclass(frozen=True)
class ScanCall:
    """One forward of all blocks."""

    units: list[FSDPState]  # the blocks', in order
    shards: BlockShards  # the blocks'
    blocks: Blocks  # what loops are made of
    own: list[Tensor]  # stacks of the tensors that differ between blocks
    shared: list[Tensor]  # tensors that all blocks hold
    loops: LoopCache  # those that were traced before
    key: Hashable  # equal for calls that can run the same loops
    counter: ForwardCounter  # counts the blocks' forwards

    def run(self, x: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return what the last block returns.

        Args:
            x: the first one's input.
            others: further arguments of all.
        """
        leaves = self.shards.leaves
        tensors = (x, *others, *leaves)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _ScannedBlocks.apply(self, len(others), x, *others, *leaves)
        return _forward(self, x, others, None).output


@dataclass(frozen=True)
class _Forward:
    """What a run of the forward loop leaves for backward."""

    output: Tensor
    inputs: Inputs
    seeds: Tensor | None
    ys: list[Tensor]
    program: ForwardProgram


class _ScannedBlocks(torch.autograd.Function):
    """(x, others, leaves) to the output of the last block."""

    @staticmethod
    def forward(ctx: Any, call: ScanCall, num_others: int, x: Tensor, *tensors: Tensor) -> Tensor:
        others = tensors[:num_others]
        # Backward may be asked for less, and yet what it runs again is to be what forward ran.
        ctx.needs = tuple(ctx.needs_input_grad[3 : 3 + num_others])
        done = _forward(call, x, others, ctx.needs)
        inputs = done.inputs
        ctx.call, ctx.program = call, done.program
        # What is sent of large parameters is stacked again in backward. Kept, that of blocks with
        # shards of their own would take as much memory as all these in the compute dtype.
        parts = (inputs.small, inputs.own, done.ys, others, inputs.shared)
        ctx.sizes = [len(part) for part in parts]
        ctx.save_for_backward(*itertools.chain(*parts), *present([done.seeds]))
        ctx.versions = call.shards.versions
        call.counter.add(ctx.versions)
        ctx.autocast = (torch.get_autocast_dtype("xla"), torch.is_autocast_enabled("xla"))
        mark_constants(ctx, [done.output], [True])
        return done.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        with torch.autocast("xla", dtype=ctx.autocast[0], enabled=ctx.autocast[1]):
            grad_x, others, leaves = _backward(ctx, grad)
        return (None, None, grad_x, *others, *leaves)


def _forward(
    call: ScanCall, x: Tensor, others: Sequence[Tensor], needs: Sequence[bool] | None
) -> _Forward:
    unit, weights, shards = call.units[0], call.blocks.weights, call.shards
    with torch.no_grad():
        before = unit.context.forward_gate.swap([x])
        # What came before the blocks, such as the table of an embedding, is to be done with before
        # large parameters are stacked: else both are in memory.
        first = [x] if unit.config.optimization_barrier_in_forward else []
        sent = shards.to_send(weights.large, shards.of(weights.large), first)
        sent_small = shards.sent(weights.small, shards.of(weights.small))
        if unit.config.optimization_barrier_in_forward:
            stacks = ops.barrier([*sent, *sent_small, *before])[: len(sent) + len(sent_small)]
            sent, sent_small = stacks[: len(sent)], stacks[len(sent) :]
        small = weights.gather_small(sent_small)
        inputs = Inputs(sent, small, call.own, list(others), call.shared)
        program = call.loops.get(
            ("forward", needs, call.key), lambda: forward_program(call.blocks, inputs, needs)
        )
        prefetched = _prefetched(call, inputs, 0)
        draws = program.loop.draws_random_numbers
        seeds = new_seeds(len(call.units), x.device) if draws else None
        results = program.loop.run([x, *prefetched, *inputs.xs, *inputs.constants], seeds)
        unit.context.forward_gate.hold([results[0]])
    return _Forward(results[0], inputs, seeds, results[1 + len(prefetched) :], program)


def _prefetched(call: ScanCall, inputs: Inputs, block: int) -> list[Tensor]:
    """Gather what is prefetched for the first iteration, which is of this block."""
    sent = [inputs.sent[at][block] for at in call.blocks.prefetched_xs]
    return call.blocks.weights.gather(call.blocks.weights.prefetched, sent)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    call: ScanCall = ctx.call
    unit, needs = call.units[0], ctx.needs
    unit.context.watch()
    grad, sent = _gated(call, grad, ctx.versions)
    inputs, ys, seeds = _restored(ctx, sent)
    reduces = _all_reduce(call.units)
    program = _backward_program(call, inputs, ctx.program, ys, needs, reduces)
    first = _prefetched(call, inputs, len(call.units) - 1) + call.blocks.store.first_carry(ys)
    zeros = [
        torch.zeros_like(each) for each, need in zip(inputs.others, needs, strict=True) if need
    ]
    steps = None
    # Gradients of several forwards are added first, and the sum is stepped with after backward.
    if reduces and call.counter.is_one(ctx.versions):
        steps = loop_steps(call.units, call.shards, call.blocks.weights, program)
    operands = [grad, *first, *zeros, *inputs.xs, *ys, *inputs.constants]
    results = program.loop.run(operands, seeds, None if steps is None else steps.update)
    if steps is not None:
        results = steps.take_from(results)
    at = 1 + len(first)
    sums, grads = iter(results[at : at + len(zeros)]), results[at + len(zeros) :]
    # What the loop has stepped with is not among its ys.
    reduced = dict(zip(program.reduced, grads, strict=False)) if steps is None else {}
    unsharded = dict(zip(program.unsharded, grads[len(reduced) :], strict=True))
    leaves = _leaf_grads(call, reduced, unsharded) if reduces else _by_units(call, unsharded)
    unit.context.pending.extend(grad.detach() for grad in present(leaves))
    unit.context.backward_gate.hold([results[0].detach()])
    return results[0], [next(sums) if need else None for need in needs], leaves


def _gated(call: ScanCall, grad: Tensor, versions: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient, and what is sent of large parameters, behind all that backward has still
    to compute.

    Raises:
        RuntimeError: if leaves are not of these ``versions``.
    """
    unit, large = call.units[0], call.blocks.weights.large
    refuse_changed(versions, call.shards.versions)
    before = unit.context.fence([grad])
    leaves = call.shards.of(large)
    if unit.config.optimization_barrier_in_backward:
        grad, *rest = ops.barrier([*before, *leaves])
        leaves = rest[len(before) - 1 :]
        # What is left of the units after the blocks, such as the head's gradient or its step, is to
        # be done with: what a loop does not use lies beside all that it needs.
        [grad] = ops.once_computed(before[1:], [grad])
    return grad, call.shards.to_send(large, leaves, before)


def _restored(ctx: Any, sent: list[Tensor]) -> tuple[Inputs, list[Tensor], Tensor | None]:
    small, own, ys, others, shared, seeds = split(ctx.saved_tensors, ctx.sizes)
    return Inputs(sent, small, own, others, shared), ys, seeds[0] if seeds else None


def _all_reduce(units: Sequence[FSDPState]) -> bool:
    """Whether the gradients of all blocks are simply reduced, and divided alike."""
    divisors = {(u.group.reduction.predivide, u.group.reduction.postdivide) for u in units}
    plain = (u.settings.sync_gradients and u.group.reduces_plainly for u in units)
    return len(divisors) == 1 and all(plain)


def _backward_program(
    call: ScanCall,
    inputs: Inputs,
    forward: ForwardProgram,
    ys: Sequence[Tensor],
    needs: Sequence[bool],
    reduces: bool,
) -> BackwardProgram:
    predivide = call.blocks.weights.group.reduction.predivide  # a constant of the program
    return call.loops.get(
        ("backward", (tuple(needs), reduces, predivide), call.key),
        lambda: backward_program(call.blocks, inputs, forward, ys, needs, reduces=reduces),
    )


def _leaf_grads(
    call: ScanCall, reduced: dict[int, Tensor], unsharded: dict[int, Tensor]
) -> list[Tensor | None]:
    """Return gradients of all leaves, from reduced ones of large parameters, and unsharded ones by
    original of small ones."""
    weights = call.blocks.weights
    return call.shards.finished(
        weights.sum_replicas({**reduced, **weights.reduce_small(unsharded)})
    )


def _by_units(call: ScanCall, unsharded: dict[int, Tensor]) -> list[Tensor | None]:
    """Let the blocks' units reduce gradients, or keep them until they are to be reduced."""
    originals = range(call.blocks.weights.group.num_originals)
    return call.shards.joined(
        [
            unit.reduce_grads([unsharded[m][block] if m in unsharded else None for m in originals])
            for block, unit in enumerate(call.units)
        ]
    )
