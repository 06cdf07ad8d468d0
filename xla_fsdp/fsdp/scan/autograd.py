"""The autograd node of identical blocks that run as a loop.

Its inputs are the blocks' input, the other arguments and the shards of all blocks. Unsharded
gradients that the loop cannot reduce (they wait for later micro-batches, or a user's hook reduces
them) are handed to the blocks' FSDP states.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.higher_order import differentiable_once
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
    """Counts consecutive forwards that ran with the same parameter values, whose gradients autograd
    may add up. Ranks run the same program, so they count alike; whether a graph is still alive may
    differ between them (garbage collection), so that cannot be asked."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._count = 0

    def add(self, versions: list[int]) -> None:
        """Count a forward that ran with parameters of these versions."""
        self._count = self._count + 1 if versions == self._versions else 1
        self._versions = versions

    def is_one(self, versions: list[int]) -> bool:
        """Whether exactly one forward ran with parameters of these versions."""
        return versions == self._versions and self._count == 1


@dataclass(frozen=True)
class ScanCall:
    """One forward of all blocks."""

    units: list[FSDPState]  # one per block, in order
    shards: BlockShards
    blocks: Blocks
    own: list[Tensor]  # stacks [length, ...] of the tensors that differ between blocks
    shared: list[Tensor]  # tensors that all blocks hold
    loops: LoopCache
    key: Hashable  # equal for calls that can run the same loops
    counter: ForwardCounter

    def run(self, x: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the output of the last block, of the shape and dtype of ``x``.

        Args:
            x: input of the first block.
            others: the other tensor arguments, the same for every block.
        """
        leaves = self.shards.leaves
        tensors = (x, *others, *leaves)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _ScannedBlocks.apply(self, len(others), x, *others, *leaves)
        return _forward(self, x, others, None).output


@dataclass(frozen=True)
class _Forward:
    output: Tensor
    inputs: Inputs
    seeds: Tensor | None  # [length] int64, if blocks draw random numbers
    ys: list[Tensor]  # saved activations, [length, ...]
    program: ForwardProgram


class _ScannedBlocks(torch.autograd.Function):
    """Map (x, others, leaves) to the output of the last block."""

    @staticmethod
    def forward(ctx: Any, call: ScanCall, num_others: int, x: Tensor, *tensors: Tensor) -> Tensor:
        others = tensors[:num_others]
        # Saved, as backward may need fewer gradients, but must recompute what forward traced.
        ctx.needs = tuple(ctx.needs_input_grad[3 : 3 + num_others])
        done = _forward(call, x, others, ctx.needs)
        inputs = done.inputs
        ctx.call, ctx.program = call, done.program
        # The stacks of large parameters are not saved but made again in backward: for separate
        # shards they are a copy of all shards in the compute dtype.
        parts = (inputs.small, inputs.own, done.ys, others, inputs.shared)
        ctx.sizes = [len(part) for part in parts]
        ctx.save_for_backward(*itertools.chain(*parts), *present([done.seeds]))
        ctx.versions = call.shards.versions
        call.counter.add(ctx.versions)
        ctx.autocast = (torch.get_autocast_dtype("xla"), torch.is_autocast_enabled("xla"))
        mark_constants(ctx, [done.output], [True])
        return done.output

    @staticmethod
    @differentiable_once(
        "Scanned blocks run as one loop, whose backward is a program without a graph. Run them one "
        "by one: call remove() of what scan_blocks returned, or leave out scan_layers"
    )
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
        # Free what computed x, such as an embedding's unsharded table, before large parameters are
        # stacked; otherwise both are in memory at once.
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
    """Gather the prefetched parameters of the first iteration, which runs ``block``."""
    sent = [inputs.sent[at][block] for at in call.blocks.prefetched_xs]
    return call.blocks.weights.gather(call.blocks.weights.prefetched, sent)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    call: ScanCall = ctx.call
    unit, needs = call.units[0], ctx.needs
    unit.context.watch()
    grad, sent = _gated(call, grad, ctx.versions)
    small, own, ys, others, shared, seeds = split(ctx.saved_tensors, ctx.sizes)
    inputs = Inputs(sent, small, own, others, shared)
    reduces = _all_reduce(call.units)
    program = _backward_program(call, inputs, ctx.program, ys, needs, reduces)
    first = _prefetched(call, inputs, len(call.units) - 1) + call.blocks.store.first_carry(ys)
    zeros = [
        torch.zeros_like(each) for each, need in zip(inputs.others, needs, strict=True) if need
    ]
    steps = None
    # Several forwards with the same parameters: autograd adds their gradients, and the optimizer
    # steps with the sum after backward.
    if reduces and call.counter.is_one(ctx.versions):
        steps = loop_steps(call.units, call.shards, call.blocks.weights, program)
    loop_inputs = [grad, *first, *zeros, *inputs.xs, *ys, *inputs.constants]
    update = None if steps is None else steps.update
    results = program.loop.run(loop_inputs, seeds[0] if seeds else None, update)
    if steps is not None:
        results = steps.take_from(results)
    at = 1 + len(first)
    sums, grads = iter(results[at : at + len(zeros)]), results[at + len(zeros) :]
    # Gradients that the loop's optimizer step has used are not among its ys.
    reduced = dict(zip(program.reduced, grads, strict=False)) if steps is None else {}
    unsharded = dict(zip(program.unsharded, grads[len(reduced) :], strict=True))
    leaves = _leaf_grads(call, reduced, unsharded) if reduces else _by_units(call, unsharded)
    unit.context.pending.extend(grad.detach() for grad in present(leaves))
    unit.context.backward_gate.hold([results[0].detach()])
    return results[0], [next(sums) if need else None for need in needs], leaves


def _gated(call: ScanCall, grad: Tensor, versions: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient and the stacks of large parameters, ordered after everything that
    backward has computed so far.

    Raises:
        RuntimeError: if a leaf was changed in place since forward.
    """
    unit, large = call.units[0], call.blocks.weights.large
    refuse_changed(versions, call.shards.versions)
    before = unit.context.fence([grad])
    leaves = call.shards.of(large)
    if unit.config.optimization_barrier_in_backward:
        grad, *rest = ops.barrier([*before, *leaves])
        leaves = rest[len(before) - 1 :]
        # Finish the pending work of the units after the blocks, such as the head's gradient or
        # optimizer step: its inputs would stay in memory during the whole loop.
        [grad] = ops.once_computed(before[1:], [grad])
    return grad, call.shards.to_send(large, leaves, before)


def _all_reduce(units: Sequence[FSDPState]) -> bool:
    """Whether a loop can reduce the gradients of all blocks: each unit reduces in this backward,
    without a hook, and divides alike."""
    divisors = {(u.group.reduction.predivide, u.group.reduction.postdivide) for u in units}
    reduced = (u.settings.sync_gradients and u.group.reduces_plainly for u in units)
    return len(divisors) == 1 and all(reduced)


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
    """Return the gradients of all leaves, from reduced ones of large parameters and unsharded ones
    of small parameters, by original."""
    weights = call.blocks.weights
    return call.shards.finished(
        weights.sum_replicas({**reduced, **weights.reduce_small(unsharded)})
    )


def _by_units(call: ScanCall, unsharded: dict[int, Tensor]) -> list[Tensor | None]:
    # Each FSDP state reduces or accumulates the gradients of its block.
    originals = range(call.blocks.weights.group.num_originals)
    return call.shards.joined(
        [
            unit.reduce_grads(
                [unsharded[at][block] if at in unsharded else None for at in originals]
            )
            for block, unit in enumerate(call.units)
        ]
    )
