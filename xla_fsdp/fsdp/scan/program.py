"""Trace the forward loop and the backward loop of identical blocks.

Each iteration runs one block. Terms are those of ``distributed.xla.loop``:

forward    carry      the block's input x, unsharded prefetched parameters (at first of block 0)
           xs         sent tensors of large parameters (prefetched ones: of the next block),
                      unsharded small parameters, tensors that differ between blocks
           constants  the other arguments, tensors that all blocks share
           ys         each block's input x and the activations that the policy saves; none without
                      backward
backward   carry      gradient of x, unsharded prefetched parameters (at first of the last block),
                      activations fetched from the host, gradients of the other arguments so far
           xs         as in forward, then forward's ys
           constants  as in forward
           ys         reduced gradients of large parameters, unsharded gradients of small ones
                      (reduced after the loop); all unsharded if they are not reduced yet

Invariant: only one block's parameters, and the prefetched ones of the next block, are unsharded at
a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import Loop, TensorSpec, cast_in_loop, graph_hash, trace_body
from xla_fsdp.fsdp.scan.remat_policy import ActivationStore, RematPolicy, Replay
from xla_fsdp.fsdp.scan.tracing import Template, only_tensor
from xla_fsdp.fsdp.scan.weights import BlockWeights


@dataclass(frozen=True)
class Inputs:
    """The inputs that both loops have in common, or one iteration's slices of them."""

    sent: list[Tensor]  # stacks of sent tensors, by large parameter; cast in the loop if necessary
    small: list[Tensor]  # stacks of unsharded small parameters, by original
    own: list[Tensor]  # stacks of tensors that differ between blocks
    others: list[Tensor]  # the tensor arguments except the first
    shared: list[Tensor]  # tensors that all blocks hold

    @property
    def xs(self) -> list[Tensor]:
        return [*self.sent, *self.small, *self.own]

    @property
    def constants(self) -> list[Tensor]:
        return [*self.others, *self.shared]

    def sliced(self, values: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
        """Split the values (xs, further xs, constants) of an iteration into the slices of these
        inputs and the further xs."""
        num_further = len(values) - len(self.xs) - len(self.constants)
        sliced = (self.sent, self.small, self.own)
        sizes = [*map(len, sliced), num_further, len(self.others)]
        sent, small, own, further, others, shared = split(values, sizes)
        return Inputs(sent, small, own, others, shared), further


@dataclass(frozen=True)
class Blocks:
    """Everything besides the inputs that both loops are built from."""

    template: Template  # the block that is traced
    weights: BlockWeights
    length: int  # number of blocks
    policy: RematPolicy
    store: ActivationStore

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
    def prefetched_xs(self) -> list[int]:
        """Indices of the xs that are sent one iteration early."""
        return [self.weights.large.index(at) for at in self.weights.prefetched]

    def run(self, params: list[Tensor], given: Inputs, x: Tensor, others: list[Tensor]) -> Tensor:
        """Run the block with unsharded parameters and the slices ``given``; return its output."""
        template = self.template
        own, shared = iter(given.own), iter(given.shared)
        held = [
            next(shared) if at in template.shared else next(own)
            for at in range(len(template.state.tensors))
        ]
        return only_tensor(template.run(params, held, [x, *others]), x)

    def as_leaves(self, params: list[Tensor]) -> list[Tensor]:
        """Copy parameters to new autograd leaves; frozen ones need no gradient."""
        pairs = zip(self.weights.group.params, self.template.trained, strict=True)
        needs = [need for param, need in pairs for _ in param.originals]
        return [each.clone().requires_grad_(need) for each, need in zip(params, needs, strict=True)]


@dataclass
class ForwardProgram:
    """The forward loop."""

    loop: Loop  # maps (x, prefetched, xs, constants) to (x, prefetched, ys)
    replay: Replay  # recomputes a block in backward
    # Among the ys: index of the block's input, then of each activation that the policy saves. Equal
    # ones are stored once.
    saved_at: list[int]


@dataclass
class BackwardProgram:
    """The backward loop."""

    loop: Loop
    reduced: list[int]  # parameters whose reduced gradients are the first ys
    unsharded: list[int]  # originals whose unsharded gradients are the remaining ys


def forward_program(blocks: Blocks, inputs: Inputs, needs: Sequence[bool] | None) -> ForwardProgram:
    """Trace an iteration of the forward loop. ``needs`` says which of the other arguments need
    gradients; it is None if there is no backward."""
    result: dict[str, Any] = {}
    prefetched = blocks.prefetched
    num_carry = 1 + len(prefetched)

    def body(values: list[Tensor]) -> list[Tensor]:
        x, given = values[0], values[1:num_carry]
        own, _ = inputs.sliced(values[num_carry:])
        # Start the prefetch only after the last other gather. Otherwise XLA starts all gathers
        # early, and none is left for the last matmul of the block to hide.
        params, following = _gathered(blocks.weights, given, own, follows_last=True)
        if needs is None:
            return [blocks.run(params, own, x, own.others), *following]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            params = blocks.as_leaves(params)
            others = _requiring_grad(own.others, needs)
        recorded = blocks.policy(
            lambda: blocks.run(params, own, x, others), blocks.template.module, x
        )
        result["replay"] = recorded.replay
        once, result["saved_at"] = _deduplicate([values[0], *recorded.kept])
        return [recorded.output, *following, *blocks.store.put(once)]

    specs = _specs([blocks.template.specs[0], *prefetched], inputs, [])
    traced = trace_body(body, specs, "fsdp_block_forward")  # calls body, which fills result
    loop = Loop(traced, blocks.length, num_carry, len(inputs.xs), prefetched=blocks.prefetched_xs)
    replay = result.get("replay", lambda run, module, kept: run())
    return ForwardProgram(loop, replay, result.get("saved_at", []))


def backward_program(
    blocks: Blocks,
    inputs: Inputs,
    forward: ForwardProgram,
    ys: Sequence[Tensor],
    needs: Sequence[bool],
    *,
    reduces: bool,
) -> BackwardProgram:
    """Trace an iteration of the backward loop for the ``ys`` of the forward loop. ``needs`` says
    which of the other arguments need gradients; with ``reduces``, the loop reduces gradients of
    large parameters over the ranks."""
    result: dict[str, list[int]] = {}
    weights, store = blocks.weights, blocks.store
    prefetched, stored = blocks.prefetched, store.carry_specs(ys)
    wanted = [other for other, need in zip(inputs.others, needs, strict=True) if need]

    def body(values: list[Tensor]) -> list[Tensor]:
        sizes = [1, len(prefetched), len(stored), len(wanted)]
        [grad], given, fetched, so_far, rest = split(values, sizes)
        own, slices = inputs.sliced(rest)
        once, next_stored = store.take(fetched, slices)
        x, *saved = (once[at] for at in forward.saved_at)
        params, following = _gathered(weights, given, own)
        grad_x, grads, other_grads = _differentiate(
            blocks, forward.replay, own, x, params, saved, needs, grad
        )
        sums = [a if b is None else a + b for a, b in zip(so_far, other_grads, strict=True)]
        large = weights.large if reduces else []
        reduced = weights.reduce(large, grads)
        done = weights.originals(large)
        left = {original: each for original, each in grads.items() if original not in done}
        # Only tracing tells which parameters get gradients.
        result["reduced"], result["unsharded"] = list(reduced), list(left)
        return [grad_x, *following, *next_stored, *sums, *reduced.values(), *left.values()]

    carry = [blocks.template.specs[0], *prefetched, *stored, *map(TensorSpec.of, wanted)]
    loop = Loop(
        trace_body(body, _specs(carry, inputs, ys), "fsdp_block_backward"),
        blocks.length,
        len(carry),
        len(inputs.xs) + len(ys),
        prefetched=[*blocks.prefetched_xs, *(len(inputs.xs) + at for at in range(len(stored)))],
        reverse=True,
    )
    return BackwardProgram(loop, result["reduced"], result["unsharded"])


def _differentiate(
    blocks: Blocks,
    replay: Replay,
    given: Inputs,
    x: Tensor,
    params: list[Tensor],
    saved: list[Tensor],
    needs: Sequence[bool],
    grad: Tensor,
) -> tuple[Tensor, dict[int, Tensor], list[Tensor | None]]:
    """Recompute the block with unsharded ``params`` and ``saved`` activations; differentiate it.

    Returns:
        The gradients of x, of the parameters by original, and of the other arguments that need one.
    """
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        params = blocks.as_leaves(params)
        others = _requiring_grad(given.others, needs)
        y = replay(
            lambda: blocks.run(list(params), given, x, others), blocks.template.module, saved
        )
        trained = {at: each for at, each in enumerate(params) if each.requires_grad}
        asked = [each for each, need in zip(others, needs, strict=True) if need]
        leaves = [x, *trained.values(), *asked]
        with blocks.template.unit.computing_with(params):  # for hooks that read the parameters
            found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    grad_x = torch.zeros_like(x) if found[0] is None else found[0]
    by_original = zip(trained, found[1:], strict=False)
    grads = {original: each for original, each in by_original if each is not None}
    return grad_x, grads, list(found[1 + len(trained) :])


def _gathered(
    weights: BlockWeights, prefetched: Sequence[Tensor], own: Inputs, *, follows_last: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Gather the large parameters of this iteration's block, and prefetch for the next block; with
    ``follows_last``, prefetch after the last other gather has finished.

    Returns:
        All unsharded originals of this block, and the prefetched ones of the next block.
    """
    sent = dict(zip(weights.large, own.sent, strict=True))
    now = [at for at in weights.large if at not in weights.prefetched]
    own_now = weights.gather(now, [sent[at] for at in now], cast_in_loop)
    to_follow = [sent[at] for at in weights.prefetched]
    if follows_last:
        to_follow = ops.after_(own_now[-1:], [each.clone() for each in to_follow])
    following = weights.gather(weights.prefetched, to_follow, cast_in_loop)
    found: dict[int, Tensor] = {}
    for params, tensors in (
        (weights.prefetched, prefetched),
        (now, own_now),
        (weights.small, own.small),
    ):
        found.update(zip(weights.originals(params), tensors, strict=True))
    return [found[original] for original in range(weights.group.num_originals)], following


def _requiring_grad(others: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    pairs = zip(others, needs, strict=True)
    return [each.clone().requires_grad_() if need else each for each, need in pairs]


def split(values: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Split ``values`` into lists of these sizes, and a last one with the rest."""
    rest, parts = list(values), []
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    return [*parts, rest]


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
