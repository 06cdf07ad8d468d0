"""The autograd node of blocks that run as a loop.

Its inputs are the blocks' input, the other arguments and the shards of all blocks. Unsharded
gradients that the loop cannot reduce (they wait for later micro-batches, or a user's hook reduces
them) are handed to the blocks' FSDP states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.context_parallel import current_context, in_context
from xla_fsdp.distributed.higher_order import differentiable_once
from xla_fsdp.fsdp.engine.autograd import mark_constants, present, refuse_changed
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.scan.fused_optimizer import loop_steps
from xla_fsdp.scan.program import (
    BackwardProgram,
    BlockInputs,
    Blocks,
    ForwardProgram,
    Inputs,
    Position,
    backward_program,
    forward_program,
)
from xla_fsdp.scan.tracing import split
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import LoopCache, new_seeds


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

    blocks: Blocks
    collects: bool  # whether the caller holds outputs of inner blocks
    loops: LoopCache
    key: Hashable  # equal for calls that can run the same loops
    counter: ForwardCounter
    # Runs the blocks, given x and the others, for gradients of gradients.
    one_by_one: Callable[[Tensor, Sequence[Tensor]], Tensor] | None = None

    @property
    def positions(self) -> list[Position]:
        return self.blocks.positions

    @property
    def first_unit(self) -> FSDPState:
        """The unit of the first block; all have the same options."""
        return self.positions[0].units[0]

    @property
    def leaves(self) -> list[Tensor]:
        """The shards of all blocks, by position."""
        return [leaf for position in self.positions for leaf in position.shards.leaves]

    @property
    def versions(self) -> list[int]:
        """The version counter of each leaf."""
        return [each for position in self.positions for each in position.shards.versions]

    def run(self, x: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the output of the last block, of the shape and dtype of ``x``; and, if the caller
        collects them, by position the inputs of all blocks, [length, *x.shape].

        Args:
            x: input of the first block.
            others: the other tensor arguments of all blocks.
        """
        leaves = self.leaves
        tensors = (x, *others, *leaves)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            output, *inner = _ScannedBlocks.apply(self, len(others), x, *others, *leaves)
        else:
            done = _forward(self, x, others, None)
            output, inner = done.output, done.block_inputs if self.collects else []
        return output, inner


@dataclass(frozen=True)
class _Forward:
    output: Tensor
    inputs: Inputs
    seeds: Tensor | None  # [length] int64, if blocks draw random numbers
    ys: list[Tensor]  # saved activations, [length, ...]
    program: ForwardProgram

    @property
    def block_inputs(self) -> list[Tensor]:
        """The inputs of the blocks, by position."""
        return self.program.block_inputs(self.ys)


class _ScannedBlocks(torch.autograd.Function):
    """Map (x, others, leaves) to the output of the last block, and the collected inputs."""

    @staticmethod
    def forward(
        ctx: Any, call: ScanCall, num_others: int, x: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        others = tensors[:num_others]
        # Saved, as backward may need fewer gradients, but must recompute what forward traced.
        ctx.needs = tuple(ctx.needs_input_grad[3 : 3 + num_others])
        done = _forward(call, x, others, ctx.needs)
        inputs = done.inputs
        ctx.call, ctx.program = call, done.program
        # The stacks of large parameters are not saved but made again in backward: for separate
        # shards they are a copy of all shards in the compute dtype.
        own = [each for block in inputs.blocks for each in (block.small, block.own, block.shared)]
        # Random numbers of a loop are not those of single blocks.
        kept = [x] if call.one_by_one is not None and done.seeds is None else []
        parts = (kept, done.ys, others, *own)
        ctx.sizes, ctx.can_run_again = [len(part) for part in parts], bool(kept)
        ctx.save_for_backward(*itertools.chain(*parts), *present([done.seeds]))
        ctx.versions = call.versions
        call.counter.add(ctx.versions)
        ctx.autocast = (torch.get_autocast_dtype("xla"), torch.is_autocast_enabled("xla"))
        ctx.context = current_context()
        inner = []
        if call.collects:  # copies: the caller may change them, and backward needs the inputs
            inner = [call.blocks.store.get(each).clone() for each in done.block_inputs]
        mark_constants(ctx, [done.output], [True])
        return (done.output, *inner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *inner: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and not present(inner):
            return (None,) * len(ctx.needs_input_grad)
        if grad is None:
            raise RuntimeError(
                "backward reaches outputs of inner blocks of a loop, but not that of the last one. "
                "The blocks behind them would get gradients of zero, where they have none if they "
                "run one by one: use the last output as well, or do not scan these blocks"
            )
        autocast = torch.autocast("xla", dtype=ctx.autocast[0], enabled=ctx.autocast[1])
        with autocast, in_context(ctx.context):
            if ctx.can_run_again and torch.is_grad_enabled():
                return (None, None, *_backward_one_by_one(ctx, grad))
            return (None, None, *_backward(ctx, grad, *inner))


def _forward(
    call: ScanCall, x: Tensor, others: Sequence[Tensor], needs: Sequence[bool] | None
) -> _Forward:
    unit = call.first_unit
    with torch.no_grad():
        before = unit.schedule.before_loop([x])
        # Free what computed x, such as an embedding's unsharded table, before large parameters are
        # stacked; otherwise both are in memory at once.
        first = [x] if unit.config.optimization_barrier_in_forward else []
        sent = _to_send(call, _large_leaves(call), first)
        sent_small = [at.shards.sent_small(at.weights.small) for at in call.positions]
        if unit.config.optimization_barrier_in_forward:
            flat = [each for stacks in (*sent, *sent_small) for each in stacks]
            sizes = [len(stacks) for stacks in (*sent, *sent_small)]
            *stacks, _ = split(ops.barrier([*flat, *before]), sizes)
            sent, sent_small = stacks[: len(sent)], stacks[len(sent) :]
        small = [
            at.weights.gather_small(stacks)
            for at, stacks in zip(call.positions, sent_small, strict=True)
        ]
        inputs = _inputs(sent, small, [(at.own, at.shared) for at in call.positions], others)
        program = call.loops.get(
            ("forward", (needs, call.collects), call.key),
            lambda: forward_program(call.blocks, inputs, needs, collects=call.collects),
        )
        prefetched = _prefetched(call, inputs, 0, 0)
        draws = program.loop.body.draws_random_numbers
        seeds = new_seeds(call.blocks.length, x.device) if draws else None
        results = program.loop.run([x, *prefetched, *inputs.xs, *inputs.constants], seeds)
        unit.schedule.after_loop([results[0]])
    return _Forward(results[0], inputs, seeds, results[1 + len(prefetched) :], program)


def _inputs(
    sent: Sequence[list[Tensor]],
    small: Sequence[list[Tensor]],
    held: Sequence[tuple[list[Tensor], list[Tensor]]],
    others: Sequence[Tensor],
) -> Inputs:
    parts = zip(sent, small, held, strict=True)
    blocks = [BlockInputs(large, few, own, shared) for large, few, (own, shared) in parts]
    return Inputs(blocks, list(others))


def _large_leaves(call: ScanCall) -> list[list[Tensor]]:
    """Return the leaves of large parameters, by position."""
    return [at.shards.of(at.weights.large) for at in call.positions]


def _to_send(
    call: ScanCall, leaves: Sequence[Sequence[Tensor]], after: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Return stacks of large parameters, by position."""
    pairs = zip(call.positions, leaves, strict=True)
    return [at.shards.sent_large(at.weights.large, own, after) for at, own in pairs]


def _prefetched(call: ScanCall, inputs: Inputs, position: int, iteration: int) -> list[Tensor]:
    """Gather the prefetched parameters of the block that runs first."""
    at = call.positions[position]
    sent = [inputs.blocks[position].sent[each][iteration] for each in at.prefetched_sent]
    return at.weights.gather(at.weights.prefetched, sent)


def _backward_one_by_one(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients with a graph, which those of a loop do not have."""
    call: ScanCall = ctx.call
    refuse_changed(ctx.versions, call.versions)
    [x], _, others, *_ = split(ctx.saved_tensors, ctx.sizes)
    assert call.one_by_one is not None  # as ``can_run_again`` says
    output = call.one_by_one(x, others).to(grad.dtype)
    inputs = [x, *others, *call.leaves]
    wanted = [each for each in inputs if each.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if each.requires_grad else None for each in inputs)


@differentiable_once(
    "Scanned blocks run as one loop, whose backward is a program without a graph. Run them one "
    "by one: call remove() of what scan_blocks returned, or give scan_layers=False"
)
def _backward(ctx: Any, grad: Tensor, *inner: Tensor | None) -> tuple[Tensor | None, ...]:
    call: ScanCall = ctx.call
    schedule, needs = call.first_unit.schedule, ctx.needs
    grad, sent = _gated(call, grad, ctx.versions)
    _, ys, others, *held, seeds = split(ctx.saved_tensors, ctx.sizes)
    own = list(zip(held[1::3], held[2::3], strict=True))
    inputs = _inputs(sent, held[::3], own, others)
    reduces = _all_reduce(call)
    collected = tuple(each is not None for each in inner) or (False,) * len(call.positions)
    program = _backward_program(call, inputs, ctx.program, ys, needs, collected, reduces)
    last = (len(call.positions) - 1, call.blocks.length - 1)
    first = _prefetched(call, inputs, *last) + call.blocks.store.first_carry(ys)
    zeros = [
        torch.zeros_like(each) for each, need in zip(inputs.others, needs, strict=True) if need
    ]
    steps = None
    # Several forwards with the same parameters: autograd adds their gradients, and the optimizer
    # steps with the sum after backward.
    if reduces and len(call.positions) == 1 and call.counter.is_one(ctx.versions):
        steps = loop_steps(call.positions[0], program)
    loop_inputs = [grad, *first, *zeros, *inputs.xs, *ys, *present(inner), *inputs.constants]
    update = None if steps is None else steps.update
    results = program.loop.run(loop_inputs, seeds[0] if seeds else None, update)
    if steps is not None:
        results = steps.take_from(results)
    at_grads = 1 + len(first)
    sums, grads = iter(results[at_grads : at_grads + len(zeros)]), results[at_grads + len(zeros) :]
    # Gradients that the loop's optimizer step has used are not among its ys.
    reduced = dict(zip(program.reduced, grads, strict=False)) if steps is None else {}
    unsharded = dict(zip(program.unsharded, grads[len(reduced) :], strict=True))
    leaves = [
        leaf
        for number in range(len(call.positions))
        for leaf in _leaf_grads(
            call, number, _at(number, reduced), _at(number, unsharded), reduces=reduces
        )
    ]
    schedule.finish_first(grad.detach() for grad in present(leaves))
    schedule.after_loop([results[0].detach()])
    return (results[0], *(next(sums) if need else None for need in needs), *leaves)


def _at(position: int, grads: dict[tuple[int, int], Tensor]) -> dict[int, Tensor]:
    return {number: grad for (at, number), grad in grads.items() if at == position}


def _gated(
    call: ScanCall, grad: Tensor, versions: Sequence[int]
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the gradient and the stacks of large parameters, ordered after everything that
    backward has computed so far.

    Raises:
        RuntimeError: if a leaf was changed in place since forward.
    """
    unit = call.first_unit
    refuse_changed(versions, call.versions)
    before = unit.schedule.before_loop([grad])
    leaves = _large_leaves(call)
    if unit.config.optimization_barrier_in_backward:
        flat = [leaf for own in leaves for leaf in own]
        grad, *rest = ops.barrier([*before, *flat])
        *leaves, _ = split(rest[len(before) - 1 :], list(map(len, leaves)))
        # Finish the pending work of the units after the blocks, such as the head's gradient or
        # optimizer step: its inputs would stay in memory during the whole loop.
        [grad] = ops.with_data_dependency(before[1:], [grad])
    return grad, _to_send(call, leaves, before)


def _all_reduce(call: ScanCall) -> bool:
    """Whether a loop can reduce the gradients of all blocks: each unit reduces in this backward,
    without a hook, and divides alike."""
    units = [unit for position in call.positions for unit in position.units]
    divisors = {(u.group.reduction.predivide, u.group.reduction.postdivide) for u in units}
    return len(divisors) == 1 and all(unit.reduces_plainly for unit in units)


def _backward_program(
    call: ScanCall,
    inputs: Inputs,
    forward: ForwardProgram,
    ys: Sequence[Tensor],
    needs: Sequence[bool],
    collected: tuple[bool, ...],
    reduces: bool,
) -> BackwardProgram:
    predivide = call.first_unit.group.reduction.predivide  # a constant of the program
    return call.loops.get(
        ("backward", (tuple(needs), collected, reduces, predivide), call.key),
        lambda: backward_program(
            call.blocks, inputs, forward, ys, needs, collected, reduces=reduces
        ),
    )


def _leaf_grads(
    call: ScanCall,
    position: int,
    reduced: dict[int, Tensor],
    unsharded: dict[int, Tensor],
    *,
    reduces: bool,
) -> list[Tensor | None]:
    """Return the gradients of the leaves of a position, from reduced ones of large parameters and
    unsharded ones of small parameters, by original; all are unsharded if the loop does not reduce
    gradients."""
    own, weights = call.positions[position], call.positions[position].weights
    if reduces:
        sums = weights.sum_replicas({**reduced, **weights.reduce_small(unsharded)})
        return own.shards.finished(sums)
    # Each FSDP state reduces or accumulates the gradients of its block.
    originals = range(len(weights.group.originals))
    return own.shards.joined(
        [
            unit.reduce_grads(
                [unsharded[at][block] if at in unsharded else None for at in originals]
            )
            for block, unit in enumerate(own.units)
        ]
    )
