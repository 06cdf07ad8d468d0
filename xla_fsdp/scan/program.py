"""Trace the forward loop and the backward loop of blocks.

Each iteration runs one block, or as many as the pattern that repeats has; each of these has its own
*position*. Terms are those of ``xla.loop``:

forward    carry      the first block's input x, its unsharded prefetched parameters
           xs         by position: sent tensors of large parameters (prefetched ones of the first
                      position: of the next iteration), unsharded small parameters, tensors and
                      numbers that differ between blocks
           constants  the other arguments, by position: tensors that all blocks share
           ys         by position: the block's input x and the activations that the policy saves;
                      without backward none, or the inputs that the caller collects
backward   carry      gradient of the last block's output, its unsharded prefetched parameters,
                      activations fetched from the host, gradients of the other arguments so far
           xs         as in forward, then forward's ys, then gradients of blocks' inputs that the
                      caller has collected
           constants  as in forward
           ys         reduced gradients of large parameters, unsharded gradients of small ones
                      (reduced after the loop); all unsharded if they are not reduced yet

Invariant: only one block's parameters, and the prefetched ones of the next block, are unsharded at
a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import current_pass, scope
from xla_fsdp.nn.late_products import LateProducts, computing_late, leave_linear
from xla_fsdp.nn.remat_policy import ActivationStore, Recorded, RematPolicy, Replay
from xla_fsdp.scan.tracing import Template, split
from xla_fsdp.scan.weights import BlockShards, BlockWeights
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import Loop, TensorSpec, cast_in_loop, graph_hash, trace_body, use_seed


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of the blocks at one position, or one iteration's slices of them."""

    sent: list[Tensor]  # stacks of sent tensors, by large parameter; cast in the loop if necessary
    small: list[Tensor]  # stacks of unsharded small parameters, by original
    own: list[Tensor]  # stacks of tensors, and then of numbers, that differ between blocks
    shared: list[Tensor]  # tensors that all blocks hold


@dataclass(frozen=True)
class Inputs:
    """The inputs that both loops have in common, or one iteration's slices of them."""

    blocks: list[BlockInputs]  # by position
    others: list[Tensor]  # the tensor arguments except the first

    @property
    def xs(self) -> list[Tensor]:
        return [each for own in self.blocks for each in (*own.sent, *own.small, *own.own)]

    @property
    def constants(self) -> list[Tensor]:
        return [*self.others, *(each for own in self.blocks for each in own.shared)]

    def sliced(self, values: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
        """Split the values (xs, further xs, constants) of an iteration into the slices of these
        inputs and the further xs."""
        num_xs, num_further = len(self.xs), len(values) - len(self.xs) - len(self.constants)
        xs, further, others, shared = split(values, [num_xs, num_further, len(self.others)])
        blocks: list[BlockInputs] = []
        for own in self.blocks:
            sent, small, tensors, xs = split(xs, [len(own.sent), len(own.small), len(own.own)])
            held, shared = split(shared, [len(own.shared)])
            blocks.append(BlockInputs(sent, small, tensors, held))
        return Inputs(blocks, others), further


@dataclass(frozen=True)
class Position:
    """The blocks that run at one position of an iteration, in one forward."""

    template: Template  # the block that is traced
    weights: BlockWeights
    others: tuple[int, ...]  # which of all other arguments it takes, in order
    units: list[FSDPState]  # one per iteration
    shards: BlockShards
    own: list[Tensor]  # stacks [length, ...] of the tensors and numbers that differ between blocks
    shared: list[Tensor]  # tensors that all blocks hold

    @property
    def prefetched(self) -> list[TensorSpec]:
        """Specs of the unsharded originals of prefetched parameters."""
        params = [self.weights.group.params[at] for at in self.weights.prefetched]
        return [
            TensorSpec(tuple(original.shape), param.compute_dtype or param.leaf.dtype)
            for param in params
            for original in param.originals
        ]

    @property
    def prefetched_sent(self) -> list[int]:
        """Indices of the prefetched parameters among the large ones."""
        return [self.weights.large.index(at) for at in self.weights.prefetched]

    def run(
        self, params: list[Tensor], given: BlockInputs, x: Tensor, others: list[Tensor]
    ) -> Tensor:
        """Run the block with unsharded parameters and the slices ``given``; return its output."""
        template = self.template
        phase = "forward" if current_pass() == -1 else "recompute"
        own, shared = iter(given.own), iter(given.shared)
        held = [
            next(shared) if at in template.shared else next(own)
            for at in range(len(template.state.tensors))
        ]
        with scope(self.weights.name, phase):
            _, output, _ = template.run(params, held, [x, *others], list(own))
        return output

    def as_leaves(self, params: list[Tensor]) -> list[Tensor]:
        """Copy parameters to new autograd leaves; frozen ones need no gradient."""
        pairs = zip(params, self.template.trained, strict=True)
        leaves = [each.clone().requires_grad_(need) for each, need in pairs]
        for matrix in self.weights.originals(self.weights.matrices):
            leave_linear(leaves[matrix])
        return leaves


@dataclass(frozen=True)
class Blocks:
    """Everything besides the inputs that both loops are built from."""

    positions: list[Position]  # whose templates are the blocks of the first iteration
    length: int  # number of iterations
    policy: RematPolicy
    store: ActivationStore

    def prefetched_xs(self, inputs: Inputs, position: int) -> list[int]:
        """Indices of the xs that are sent one iteration early if it begins at ``position``."""
        before = sum(len(own.sent + own.small + own.own) for own in inputs.blocks[:position])
        return [before + at for at in self.positions[position].prefetched_sent]


@dataclass
class ForwardProgram:
    """The forward loop."""

    loop: Loop  # maps (x, prefetched, xs, constants) to (x, prefetched, ys)
    replays: list[Replay]  # by position: recomputes a block in backward
    # By position: among the ys, index of the block's input, then of each activation that the policy
    # saves. Equal ones of a block are stored once.
    saved_at: list[list[int]]

    def block_inputs(self, ys: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of the blocks, by position: [length, ...] each."""
        return [ys[own[0]] for own in self.saved_at]


@dataclass
class BackwardProgram:
    """The backward loop."""

    loop: Loop
    reduced: list[tuple[int, int]]  # (position, parameter) of the first ys: reduced gradients
    unsharded: list[tuple[int, int]]  # (position, original) of the others: unsharded gradients


def forward_program(
    blocks: Blocks, inputs: Inputs, needs: Sequence[bool] | None, *, collects: bool
) -> ForwardProgram:
    """Trace an iteration of the forward loop. ``needs`` says which of the other arguments need
    gradients; it is None if there is no backward. The inputs of the blocks then are among the ys if
    the caller ``collects`` them."""
    replays: list[Replay] = []
    saved_at: list[list[int]] = []
    prefetched = blocks.positions[0].prefetched
    num_carry = 1 + len(prefetched)

    def body(values: list[Tensor]) -> list[Tensor]:
        x, following = values[0], values[1:num_carry]
        own, _ = inputs.sliced(values[num_carry:])
        ys: list[Tensor] = []
        for at, position in enumerate(blocks.positions):
            # Otherwise XLA starts all gathers early, and leaves one of them blocking, as matmuls
            # hide one gather at a time; and none is left for the last matmul of the block.
            params, following = _gathered(
                blocks, own, following, at, at + 1, values[0], in_turn=True
            )
            recorded = _record(blocks, position, own, at, params, x, needs)
            replays.append(recorded.replay)
            kept = [x, *recorded.kept] if collects or needs is not None else []
            once, indices = _deduplicate(kept)
            saved_at.append([len(ys) + index for index in indices])
            ys += once if needs is None else blocks.store.put(once)
            x = recorded.output
        return [x, *following, *ys]

    specs = _specs([blocks.positions[0].template.specs[0], *prefetched], inputs, [])
    traced = trace_body(body, specs, "fsdp_block_forward")  # calls body once
    early = blocks.prefetched_xs(inputs, 0)
    loop = Loop(traced, blocks.length, num_carry, len(inputs.xs), prefetched=early)
    return ForwardProgram(loop, replays, saved_at)


def _record(
    blocks: Blocks,
    position: Position,
    inputs: Inputs,
    at: int,
    params: list[Tensor],
    x: Tensor,
    needs: Sequence[bool] | None,
) -> Recorded:
    """Run a block in forward, and record what backward needs, if there is one."""
    own, others = inputs.blocks[at], [inputs.others[each] for each in position.others]
    _seed_own_numbers(blocks, at)
    if needs is None:
        return Recorded(position.run(params, own, x, others), [], lambda run, module, kept: run())
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        params = position.as_leaves(params)
        others = _requiring_grad(others, [needs[each] for each in position.others])
    return blocks.policy(lambda: position.run(params, own, x, others), position.template.module, x)


def backward_program(
    blocks: Blocks,
    inputs: Inputs,
    forward: ForwardProgram,
    ys: Sequence[Tensor],
    needs: Sequence[bool],
    collected: Sequence[bool],
    *,
    reduces: bool,
) -> BackwardProgram:
    """Trace an iteration of the backward loop, after a forward loop that has returned ``ys``.

    ``needs`` says which of the other arguments need gradients, ``collected`` at which positions the
    inputs of blocks have gradients of their own, ``reduces`` whether the loop reduces gradients of
    large parameters over the ranks.
    """
    result: dict[str, list[tuple[int, int]]] = {}
    last, store = len(blocks.positions) - 1, blocks.store
    prefetched, stored = blocks.positions[last].prefetched, store.carry_specs(ys)
    wanted = {at: n for n, at in enumerate(at for at, need in enumerate(needs) if need)}

    def body(values: list[Tensor]) -> list[Tensor]:
        sizes = [1, len(prefetched), len(stored), len(wanted)]
        [grad], following, fetched, sums, rest = split(values, sizes)
        own, further = inputs.sliced(rest)
        slices, of_inputs = further[: len(ys)], iter(reversed(further[len(ys) :]))
        once, next_stored = store.take(fetched, slices)
        reduced: dict[tuple[int, int], Tensor] = {}
        left: dict[tuple[int, int], Tensor] = {}
        for at in reversed(range(len(blocks.positions))):
            position = blocks.positions[at]
            x, *saved = (once[index] for index in forward.saved_at[at])
            weights = position.weights
            large = weights.large if reduces else []
            params, following = _gathered(blocks, own, following, at, at - 1, values[0])
            leaves = position.as_leaves(params)
            as_products = weights.reduced_as_products(large)
            late = LateProducts({param: leaves[n] for param, n in as_products.items()})
            _seed_own_numbers(blocks, at)
            with scope(weights.name, "backward"):
                grad, grads, other_grads = _differentiate(
                    position, forward.replays[at], own, at, x, leaves, late, saved, needs, grad
                )
            if collected[at]:
                grad = grad + next(of_inputs)
            asked = [wanted[each] for each in position.others if needs[each]]
            for index, each in zip(asked, other_grads, strict=True):
                sums[index] = sums[index] if each is None else sums[index] + each
            totals = weights.reduce(large, grads, late.handed_out(), grad)
            reduced.update(((at, n), each) for n, each in totals.items())
            done = weights.originals(large)
            left.update(((at, n), each) for n, each in grads.items() if n not in done)
        # Only tracing tells which parameters get gradients.
        result["reduced"], result["unsharded"] = list(reduced), list(left)
        return [grad, *following, *next_stored, *sums, *reduced.values(), *left.values()]

    others = [TensorSpec.of(inputs.others[at]) for at in wanted]
    carry = [blocks.positions[last].template.specs[0], *prefetched, *stored, *others]
    inner = [each for each, found in zip(forward.block_inputs(ys), collected, strict=True) if found]
    further = [*ys, *inner]
    specs = _specs(carry, inputs, further)
    traced = trace_body(body, specs, "fsdp_block_backward")
    loop = Loop(
        traced,
        blocks.length,
        len(carry),
        len(inputs.xs) + len(further),
        prefetched=[
            *blocks.prefetched_xs(inputs, last),
            *(len(inputs.xs) + at for at in range(len(stored))),
        ],
        reverse=True,
    )
    return BackwardProgram(loop, result["reduced"], result["unsharded"])


def _seed_own_numbers(blocks: Blocks, at: int) -> None:
    """Let the block at this position draw the same random numbers in both loops, though backward
    runs the blocks of an iteration in reverse."""
    if len(blocks.positions) > 1:
        use_seed(1 + at)


def _differentiate(
    position: Position,
    replay: Replay,
    inputs: Inputs,
    at: int,
    x: Tensor,
    params: list[Tensor],
    late: LateProducts,
    saved: list[Tensor],
    needs: Sequence[bool],
    grad: Tensor,
) -> tuple[Tensor, dict[int, Tensor], list[Tensor | None]]:
    """Recompute the block at position ``at`` with unsharded ``params``, leaves of autograd, and
    ``saved`` activations; return the gradients of x, of the parameters by original (but for what
    ``late`` takes), and of its other arguments that need one."""
    own, others = inputs.blocks[at], [inputs.others[each] for each in position.others]
    need = [needs[each] for each in position.others]
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        others = _requiring_grad(others, need)
        with computing_late(late):
            y = replay(
                lambda: position.run(list(params), own, x, others), position.template.module, saved
            )
        late.start_with(y)
        trained = {at: each for at, each in enumerate(params) if each.requires_grad}
        asked = [each for each, wanted in zip(others, need, strict=True) if wanted]
        leaves = [x, *trained.values(), *asked]
        with position.template.unit.computing_with(params):  # for hooks that read the parameters
            found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    grad_x = torch.zeros_like(x) if found[0] is None else found[0]
    by_original = zip(trained, found[1:], strict=False)
    grads = {original: each for original, each in by_original if each is not None}
    return grad_x, grads, list(found[1 + len(trained) :])


def _gathered(
    blocks: Blocks,
    inputs: Inputs,
    prefetched: Sequence[Tensor],
    at: int,
    next_at: int,
    varying: Tensor,
    *,
    in_turn: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gather the large parameters of the block at position ``at``, and prefetch for the next one,
    at ``next_at`` of this or the next iteration; ``in_turn``, start each gather after the one
    before it has finished, the prefetch last. ``varying`` is as for ``cast_in_loop``, and there
    when an iteration begins, so that no gather waits for a block. Return all unsharded originals of
    this block, and the prefetched ones of the next block."""
    own, weights = inputs.blocks[at], blocks.positions[at].weights
    sent = dict(zip(weights.large, own.sent, strict=True))
    runs = weights.turns() if in_turn else [weights.gathered_late]
    now = [at for run in runs for at in run]
    own_now: list[Tensor] = []

    def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ready = cast_in_loop(tensor, dtype, varying)
        return ops.barrier_after_(own_now[-1:], [ready.clone()])[0] if in_turn else ready

    for run in runs:
        own_now += weights.gather(run, [sent[at] for at in run], cast)
    following = blocks.positions[next_at % len(blocks.positions)]
    next_sent = inputs.blocks[next_at % len(blocks.positions)].sent
    to_follow = [next_sent[at] for at in following.prefetched_sent]
    followed = following.weights.gather(following.weights.prefetched, to_follow, cast)
    found: dict[int, Tensor] = {}
    for params, tensors in (
        (weights.prefetched, prefetched),
        (now, own_now),
        (weights.small, own.small),
    ):
        found.update(zip(weights.originals(params), tensors, strict=True))
    return [found[original] for original in range(len(weights.group.originals))], followed


def _requiring_grad(others: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    pairs = zip(others, needs, strict=True)
    return [each.clone().requires_grad_() if need else each for each, need in pairs]


def _deduplicate(values: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return ``values`` with equal graphs only once, and the index of each value among these."""
    known: dict[tuple[bytes, TensorSpec], int] = {}
    keys = [(graph_hash(each), TensorSpec.of(each)) for each in values]
    indices = [known.setdefault(key, len(known)) for key in keys]
    return [values[indices.index(at)] for at in range(len(known))], indices


def _specs(
    carry: Sequence[TensorSpec], inputs: Inputs, further_xs: Sequence[Tensor]
) -> list[TensorSpec]:
    return [
        *carry,
        *map(TensorSpec.slice_of, inputs.xs),
        *map(TensorSpec.slice_of, further_xs),
        *map(TensorSpec.of, inputs.constants),
    ]
