"""The two loops that run identical blocks forward and backward: what each round computes.

How they are laid out (one round is one block; see ``loop_xla_ops`` for the words of loops, and
``weights`` for small, large, ahead and sent):

forward    carried    the stream x, full parameters ahead (gathered before the loop for block 0)
           sliced     what is sent of large parameters (of the one ahead: the next block's), full
                      small parameters, tensors that differ between blocks
           constant   the other arguments, tensors that all blocks share
           collected  each block's input x, and what the policy keeps of its activations;
                      nothing where there will be no backward
backward   carried    gradient of the stream, full parameters ahead (first of the last block), what
                      ``keeping`` carries, gradients of the other arguments so far
           sliced     as in forward, then what forward collected
           constant   as in forward
           collected  gradients: of large parameters reduced over the ranks, of small ones full, to
                      be reduced after the loop; or all full, where they are not to be reduced yet

Always true: a round gathers what its block needs itself, so one block's parameters are alive at a
time (and the next one's that travel ahead).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.loop import Body, Like, Loop, identity, trace_body
from xla_fsdp.fsdp.scan.offload import Keeping
from xla_fsdp.fsdp.scan.remat_policy import Policy, Replay
from xla_fsdp.fsdp.scan.template import Template, only_tensor
from xla_fsdp.fsdp.scan.weights import BlockWeights


@dataclass(frozen=True)
class Inputs:
    """What both loops take, in values (stacks) or in likenesses.

    Args:
        sent: stacks by large parameter, in order, of what is sent or is to be cast for that.
        small: stacks by member of small parameters.
        own: stacks of tensors that differ between blocks.
        others: arguments but the stream.
        shared: tensors that blocks share.
    """

    sent: list[Tensor]
    small: list[Tensor]
    own: list[Tensor]
    others: list[Tensor]
    shared: list[Tensor]

    @property
    def sliced(self) -> list[Tensor]:
        """Stacks, in the order of the loops' inputs."""
        return [*self.sent, *self.small, *self.own]

    @property
    def constant(self) -> list[Tensor]:
        """The rest."""
        return [*self.others, *self.shared]

    def of_round(self, values: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
        """A round's part of what these became, and what follows in ``values``."""
        sent, rest = _split(values, len(self.sent))
        small, rest = _split(rest, len(self.small))
        own, rest = _split(rest, len(self.own))
        further, constant = _split(rest, len(rest) - len(self.constant))
        others, shared = _split(constant, len(self.others))
        return Inputs(sent, small, own, others, shared), further


@dataclass
class ForwardProgram:
    """The forward loop.

    Args:
        loop: of (x, ahead, ...) to (x, ahead, collected).
        body: a round.
        replay: how backward runs it again.
        places: where among what is collected the block's input is, and what the policy keeps.
    """

    loop: Loop
    body: Body
    replay: Replay
    places: list[int]


@dataclass
class BackwardProgram:
    """The backward loop.

    Args:
        loop: of (gradient, ahead, gradients of others, ...) to the same and what is collected.
        body: a round.
        reduced: large parameters whose reduced gradients are collected first, in order.
        full: then, members whose full gradients are.
    """

    loop: Loop
    body: Body
    reduced: list[int]
    full: list[int]


def forward_program(
    template: Template,
    weights: BlockWeights,
    inputs: Inputs,
    length: int,
    policy: Policy,
    keeping: Keeping,
    needs: Sequence[bool] | None,
) -> ForwardProgram:
    """Trace a round of the forward loop.

    Args:
        template: the block.
        weights: how its parameters travel.
        inputs: what the loop will take.
        length: number of blocks.
        policy: what to keep for backward.
        keeping: where.
        needs: which of the other arguments need gradients; None where there will be no backward.
    """
    result: dict[str, Any] = {}
    stream = template.likes[0]
    ahead = _ahead(template, weights)

    def body(values: list[Tensor]) -> list[Tensor]:
        x, given = values[0], values[1 : 1 + len(ahead)]
        own, _ = inputs.of_round(values[1 + len(ahead) :])
        # One gather travels at a time; left to itself, the last product of a block hides none.
        full, following = _gathered(weights, given, own, follows_last=True)

        others = own.others

        def run() -> Tensor:
            returned = template.run(full, _tensors(template, own), [x, *others])
            return only_tensor(returned, x)

        if needs is None:
            return [run(), *following]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            full = _leaves(full, template)
            others = _asked(others, needs)
        recorded = policy.record(run, template.module, x)
        result["replay"] = recorded.replay
        once, result["places"] = _once_each([values[0], *recorded.kept])
        return [recorded.output, *following, *keeping.collected(once)]

    traced = trace_body(body, _likes([stream, *ahead], inputs, []), "fsdp_block_forward")
    loop = Loop(traced, length, 1 + len(ahead), len(inputs.sliced), ahead=_sent_ahead(weights))
    replay = result.get("replay", lambda run, module, kept: run())
    return ForwardProgram(loop, traced, replay, result.get("places", []))


def backward_program(
    template: Template,
    weights: BlockWeights,
    inputs: Inputs,
    length: int,
    forward: ForwardProgram,
    collected: Sequence[Tensor],
    keeping: Keeping,
    needs: Sequence[bool],
    *,
    reduces: bool,
) -> BackwardProgram:
    """Trace a round of the backward loop.

    Args:
        template: the block.
        weights: how its parameters travel.
        inputs: what both loops take.
        length: number of blocks.
        forward: the other loop.
        collected: what it collected.
        keeping: where that waits.
        needs: which of the other arguments need gradients.
        reduces: whether gradients are reduced over the ranks.
    """
    result: dict[str, list[int]] = {}
    stream = template.likes[0]
    ahead = _ahead(template, weights)
    held = keeping.carried(collected)
    wanted = [other for other, need in zip(inputs.others, needs, strict=True) if need]

    def body(values: list[Tensor]) -> list[Tensor]:
        grad, rest = values[0], values[1:]
        given, rest = _split(rest, len(ahead))
        carried, rest = _split(rest, len(held))
        so_far, rest = _split(rest, len(wanted))
        own, found = inputs.of_round(rest)
        once, next_held = keeping.of_round(carried, found)
        x, *kept = (once[at] for at in forward.places)
        full, following = _gathered(weights, given, own)
        grad_x, grads, other_grads = _differentiated(
            template, forward.replay, (x, full, own, kept, needs), grad
        )
        sums = [a if b is None else a + b for a, b in zip(so_far, other_grads, strict=True)]
        large = weights.large if reduces else []
        reduced = weights.reduce(large, grads)
        done = weights.members(large)
        left = {member: each for member, each in grads.items() if member not in done}
        result["reduced"], result["full"] = list(reduced), list(left)
        return [grad_x, *following, *next_held, *sums, *reduced.values(), *left.values()]

    likes = _likes([stream, *ahead, *held, *wanted], inputs, collected)
    traced = trace_body(body, likes, "fsdp_block_backward")
    loop = Loop(
        traced,
        length,
        1 + len(ahead) + len(held) + len(wanted),
        len(inputs.sliced) + len(collected),
        ahead=[*_sent_ahead(weights), *(len(inputs.sliced) + at for at in range(len(held)))],
        backwards=True,
    )
    return BackwardProgram(loop, traced, result["reduced"], result["full"])


def _differentiated(
    template: Template,
    replay: Replay,
    of: tuple[Tensor, list[Tensor], Inputs, list[Tensor], Sequence[bool]],
    grad: Tensor,
) -> tuple[Tensor, dict[int, Tensor], list[Tensor | None]]:
    """Run the block again and differentiate it: gradients of its input, of parameters by member,
    and of other arguments.

    Args:
        template: the block.
        replay: how to run it again.
        of: its input, full parameters, the rest of what the round was given, what was kept, and
            which of the other arguments need gradients.
        grad: of what it returns.
    """
    x, full, own, kept, needs = of
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        full = _leaves(full, template)
        others = _asked(own.others, needs)

        def run() -> Tensor:
            returned = template.run(list(full), _tensors(template, own), [x, *others])
            return only_tensor(returned, x)

        y = replay(run, template.module, kept)
        trained = {at: each for at, each in enumerate(full) if each.requires_grad}
        asked = [each for each, need in zip(others, needs, strict=True) if need]
        leaves = [x, *trained.values(), *asked]
        found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    grad_x = torch.zeros_like(x) if found[0] is None else found[0]
    by_member = zip(trained, found[1:], strict=False)
    grads = {member: each for member, each in by_member if each is not None}
    return grad_x, grads, list(found[1 + len(trained) :])


def _gathered(
    weights: BlockWeights, ahead: Sequence[Tensor], own: Inputs, *, follows_last: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """All full parameters of a round's block, and those ahead of the next one; these once the last
    of the others is there, if it ``follows_last``."""
    sent = dict(zip(weights.large, own.sent, strict=True))
    now = [at for at in weights.large if at not in weights.ahead]
    own_now = weights.gather_in_round(now, [sent[at] for at in now])
    to_follow = [sent[at] for at in weights.ahead]
    if follows_last:
        to_follow = ops.after_(own_now[-1:], [each.clone() for each in to_follow])
    following = weights.gather_in_round(weights.ahead, to_follow)
    found: dict[int, Tensor] = {}
    for params, tensors in (
        (weights.ahead, ahead),
        (now, own_now),
        (weights.small, own.small),
    ):
        found.update(zip(weights.members(params), tensors, strict=True))
    return [found[member] for member in range(weights.num_members)], following


def _leaves(full: list[Tensor], template: Template) -> list[Tensor]:
    """Parameters as leaves of a graph of their own; frozen ones need no gradient."""
    pairs = zip(template.unit.group.params, template.trained, strict=True)
    needs = [need for param, need in pairs for _ in param.members]
    return [each.clone().requires_grad_(need) for each, need in zip(full, needs, strict=True)]


def _asked(others: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Other arguments, as leaves of a graph of their own where they need gradients."""
    pairs = zip(others, needs, strict=True)
    return [each.clone().requires_grad_() if need else each for each, need in pairs]


def _split(values: Sequence[Tensor], at: int) -> tuple[list[Tensor], list[Tensor]]:
    return list(values[:at]), list(values[at:])


def _once_each(values: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """``values`` without those that are computed alike, and where each is among them."""
    known: dict[tuple[bytes, Like], int] = {}
    keys = [(identity(each), Like.of(each)) for each in values]
    places = [known.setdefault(key, len(known)) for key in keys]
    return [values[places.index(at)] for at in range(len(known))], places


def _tensors(template: Template, own: Inputs) -> list[Tensor]:
    """In the place of the block's own tensors."""
    mine, shared = iter(own.own), iter(own.shared)
    return [
        next(shared) if at in template.shared else next(mine)
        for at in range(len(template.state.tensors))
    ]


def _ahead(template: Template, weights: BlockWeights) -> list[Like]:
    group = weights.group
    return [
        Like(tuple(member.shape), group.params[at].compute_dtype or group.params[at].leaf.dtype)
        for at in weights.ahead
        for member in group.params[at].members
    ]


def _sent_ahead(weights: BlockWeights) -> list[int]:
    return [weights.large.index(at) for at in weights.ahead]


def _likes(
    carried: Sequence[Tensor | Like], inputs: Inputs, collected: Sequence[Tensor]
) -> list[Like]:
    return [
        *(each if isinstance(each, Like) else Like.of(each) for each in carried),
        *map(Like.slice_of, inputs.sliced),
        *map(Like.slice_of, collected),
        *map(Like.of, inputs.constant),
    ]


def gradients(
    program: BackwardProgram, collected: Sequence[Tensor], *, reduced: bool
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """What the backward loop collected: stacks of reduced gradients by parameter, if they are
    ``reduced`` ones that it did not step with, and of full ones by member."""
    found = dict(zip(program.reduced if reduced else [], collected, strict=False))
    return found, dict(zip(program.full, collected[len(found) :], strict=True))
