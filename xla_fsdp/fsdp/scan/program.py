"""The two loops that run identical blocks forward and backward: what each iteration computes.

One iteration is one block. In the words of ``distributed.xla.loop``:

forward    carry      the blocks' input x, the unsharded parameters that are prefetched (before the
                      loop: those of block 0)
           xs         what is sent of large parameters (of prefetched ones: the next block's),
                      unsharded small parameters, tensors that differ between blocks
           constants  the other arguments, tensors that all blocks share
           ys         each block's input x, and what the policy keeps of its activations; nothing
                      where there will be no backward
backward   carry      the gradient of x, prefetched parameters (before the loop: the last block's),
                      what the activation store carries, gradients of the other arguments so far
           xs         as in forward, then forward's ys
           constants  as in forward
           ys         gradients: of large parameters reduced over the ranks, of small ones
                      unsharded, to be reduced after the loop; all unsharded, where they are not to
                      be reduced yet

Invariant: an iteration gathers what its block needs, so that one block's parameters are unsharded
at a time, and of the next one those that are prefetched.
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

    # stacks by large parameter, in order, of what is sent or is to be cast for that
    sent: list[Tensor]
    small: list[Tensor]  # stacks by original of small parameters
    own: list[Tensor]  # stacks of tensors that differ between blocks
    others: list[Tensor]  # arguments but the first
    shared: list[Tensor]  # tensors that blocks share

    @property
    def xs(self) -> list[Tensor]:
        """Those that are sliced, in order."""
        return [*self.sent, *self.small, *self.own]

    @property
    def constants(self) -> list[Tensor]:
        """The rest."""
        return [*self.others, *self.shared]

    def sliced(self, values: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
        """Return the part of an iteration's (xs, further xs, constants), and the further xs."""
        num_further = len(values) - len(self.xs) - len(self.constants)
        sliced = (self.sent, self.small, self.own)
        sizes = [*map(len, sliced), num_further, len(self.others)]
        sent, small, own, further, others, shared = split(values, sizes)
        return Inputs(sent, small, own, others, shared), further


@dataclass(frozen=True)
class Blocks:
    """What both loops are made of besides their inputs."""

    template: Template  # the block that is traced
    weights: BlockWeights  # how its parameters come into the loop
    length: int  # number of blocks
    policy: RematPolicy  # which activations forward keeps for backward
    store: ActivationStore  # in which memory

    @property
    def prefetched(self) -> list[TensorSpec]:
        """Of the originals of prefetched parameters."""
        params = [self.weights.group.params[at] for at in self.weights.prefetched]
        return [
            TensorSpec(tuple(original.shape), param.compute_dtype or param.leaf.dtype)
            for param in params
            for original in param.originals
        ]

    @property
    def prefetched_xs(self) -> list[int]:
        """Which of the loops' xs are sent one iteration early."""
        return [self.weights.large.index(at) for at in self.weights.prefetched]

    def run(self, params: list[Tensor], given: Inputs, x: Tensor, others: list[Tensor]) -> Tensor:
        """Return what the block returns for ``x``; ``given`` has the tensors that it holds."""
        template = self.template
        own, shared = iter(given.own), iter(given.shared)
        held = [
            next(shared) if at in template.shared else next(own)
            for at in range(len(template.state.tensors))
        ]
        return only_tensor(template.run(params, held, [x, *others]), x)

    def as_leaves(self, params: list[Tensor]) -> list[Tensor]:
        """Return parameters as leaves of a graph of their own; frozen ones need no gradient."""
        pairs = zip(self.weights.group.params, self.template.trained, strict=True)
        needs = [need for param, need in pairs for _ in param.originals]
        return [each.clone().requires_grad_(need) for each, need in zip(params, needs, strict=True)]


@dataclass
class ForwardProgram:
    """The forward loop."""

    loop: Loop  # of (x, prefetched, ...) to (x, prefetched, ys)
    replay: Replay  # runs it again in backward
    places: list[int]  # where among the ys the block's input is, and what the policy keeps


@dataclass
class BackwardProgram:
    """The backward loop."""

    loop: Loop  # of (gradient, prefetched, gradients of others, ...) to the same and ys
    reduced: list[int]  # large parameters whose reduced gradients are the first ys, in order
    unsharded: list[int]  # originals whose unsharded gradients are the other ys


def forward_program(blocks: Blocks, inputs: Inputs, needs: Sequence[bool] | None) -> ForwardProgram:
    """Trace an iteration of the forward loop.

    Args:
        blocks: the blocks.
        inputs: what the loop will take.
        needs: which of the other arguments need gradients; None where there will be no backward.
    """
    result: dict[str, Any] = {}
    prefetched = blocks.prefetched
    num_carry = 1 + len(prefetched)

    def body(values: list[Tensor]) -> list[Tensor]:
        x, given = values[0], values[1:num_carry]
        own, _ = inputs.sliced(values[num_carry:])
        # One gather travels at a time: left to themselves, all would travel early, and the last
        # product of a block would hide none.
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
        once, result["places"] = _once_each([values[0], *recorded.kept])
        return [recorded.output, *following, *blocks.store.put(once)]

    specs = _specs([blocks.template.specs[0], *prefetched], inputs, [])
    traced = trace_body(body, specs, "fsdp_block_forward")  # calls body, which fills result
    loop = Loop(traced, blocks.length, num_carry, len(inputs.xs), prefetched=blocks.prefetched_xs)
    replay = result.get("replay", lambda run, module, kept: run())
    return ForwardProgram(loop, replay, result.get("places", []))


def backward_program(
    blocks: Blocks,
    inputs: Inputs,
    forward: ForwardProgram,
    ys: Sequence[Tensor],
    needs: Sequence[bool],
    *,
    reduces: bool,
) -> BackwardProgram:
    """Trace an iteration of the backward loop.

    Args:
        blocks: the blocks.
        inputs: what both loops take.
        forward: the other loop.
        ys: of that.
        needs: which of the other arguments need gradients.
        reduces: whether gradients are reduced over the ranks.
    """
    result: dict[str, list[int]] = {}
    weights, store = blocks.weights, blocks.store
    prefetched, stored = blocks.prefetched, store.carry_specs(ys)
    wanted = [other for other, need in zip(inputs.others, needs, strict=True) if need]

    def body(values: list[Tensor]) -> list[Tensor]:
        sizes = [1, len(prefetched), len(stored), len(wanted)]
        [grad], given, carried, so_far, rest = split(values, sizes)
        own, slices = inputs.sliced(rest)
        once, next_carried = store.take(carried, slices)
        x, *kept = (once[at] for at in forward.places)
        params, following = _gathered(weights, given, own)
        grad_x, grads, other_grads = _differentiate(
            blocks, forward.replay, own, x, params, kept, needs, grad
        )
        sums = [a if b is None else a + b for a, b in zip(so_far, other_grads, strict=True)]
        large = weights.large if reduces else []
        reduced = weights.reduce(large, grads)
        done = weights.originals(large)
        left = {original: each for original, each in grads.items() if original not in done}
        # Which parameters have gradients is only known now.
        result["reduced"], result["unsharded"] = list(reduced), list(left)
        return [grad_x, *following, *next_carried, *sums, *reduced.values(), *left.values()]

    carry = [
        blocks.template.specs[0], *prefetched, *stored, *map(TensorSpec.of, wanted)
    ]  # fmt: skip
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
    kept: list[Tensor],
    needs: Sequence[bool],
    grad: Tensor,
) -> tuple[Tensor, dict[int, Tensor], list[Tensor | None]]:
    """Run the block again and differentiate it.

    Args:
        blocks: the blocks.
        replay: runs one again.
        given: the iteration's slices.
        x: its input.
        params: its unsharded parameters.
        kept: its activations that were kept.
        needs: which of the other arguments need gradients.
        grad: of what it returns.

    Returns:
        Gradients of its input, by original, and of the other arguments that need them.
    """
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        params = blocks.as_leaves(params)
        others = _requiring_grad(given.others, needs)
        y = replay(lambda: blocks.run(list(params), given, x, others), blocks.template.module, kept)
        trained = {at: each for at, each in enumerate(params) if each.requires_grad}
        asked = [each for each, need in zip(others, needs, strict=True) if need]
        leaves = [x, *trained.values(), *asked]
        found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    grad_x = torch.zeros_like(x) if found[0] is None else found[0]
    by_member = zip(trained, found[1:], strict=False)
    grads = {original: each for original, each in by_member if each is not None}
    return grad_x, grads, list(found[1 + len(trained) :])


def _gathered(
    weights: BlockWeights,
    prefetched: Sequence[Tensor],
    own: Inputs,
    *,
    follows_last: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gather in an iteration.

    Args:
        weights: the block's parameters.
        prefetched: those that the iteration before has gathered.
        own: the iteration's slices.
        follows_last: gather what is prefetched once the last of the others is there.

    Returns:
        All unsharded parameters of the block, and what is prefetched for the next one.
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
    """Cut ``values`` into parts of these sizes, and the rest."""
    rest, parts = list(values), []
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    return [*parts, rest]


def _once_each(values: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """``values`` without those that are computed alike, and where each is among them."""
    known: dict[tuple[bytes, TensorSpec], int] = {}
    keys = [(graph_hash(each), TensorSpec.of(each)) for each in values]
    places = [known.setdefault(key, len(known)) for key in keys]
    return [values[places.index(at)] for at in range(len(known))], places


def _specs(
    carry: Sequence[TensorSpec], inputs: Inputs, further_xs: Sequence[Tensor]
) -> list[TensorSpec]:
    return [
        *carry,
        *map(TensorSpec.slice_of, inputs.xs),
        *map(TensorSpec.slice_of, further_xs),
        *map(TensorSpec.of, inputs.constants),
    ]
