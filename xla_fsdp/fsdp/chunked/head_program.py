"""The two loops that stream a head: what each round computes.

How they are laid out (one round is one piece; see ``loop_xla_ops`` for the words of loops):

forward    carried    sums per row so far, the gathered piece (first that of piece 0)
           sliced     what is sent of the next piece, the piece's number, its bias if there is one
           constant   rows, targets
           collected  the gathered piece, where all are kept
backward   carried    the gathered piece (first of the last one), gradient of the rows in float32
           sliced     as in forward
           constant   as in forward, then norms and what each row's loss counts for
           collected  gradient of the piece's weight, reduced over the ranks, or not where it is not
                      to be reduced yet; that of its bias, not reduced

Where gathered pieces are kept, backward slices these in place of what is sent, and carries none.
Always true: a round's piece was gathered in the round before, so that it travels under compute; the
last round of a loop gathers its own piece once more, which after forward is the first of backward.
Products are computed in one dtype, everything else of a row in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xla_fsdp.distributed.xla.loop import Like, Loop, trace_body
from xla_fsdp.fsdp.chunked.chunks import Pieces
from xla_fsdp.fsdp.chunked.softmax import Goal, logits_of
from xla_fsdp.fsdp.chunked.weights import BIAS, WEIGHT, StreamedWeights


@dataclass(frozen=True)
class Plan:
    """What both loops depend on besides their inputs.

    Args:
        pieces: how the classes are cut.
        smoothing: of labels.
        dtype: of products.
        keeps: whether forward keeps the gathered pieces for backward.
    """

    pieces: Pieces
    smoothing: float
    dtype: torch.dtype
    keeps: bool

    def goal(self, targets: Tensor) -> Goal:
        """What logits are compared with."""
        return Goal(targets, self.pieces.num_classes, self.smoothing)


@dataclass(frozen=True)
class Wanted:
    """What backward is to compute.

    Args:
        rows: the gradient of the rows.
        weight: that of the weight.
        bias: that of the bias.
        reduced: reduce that of the weight over the ranks.
    """

    rows: bool
    weight: bool
    bias: bool
    reduced: bool


@dataclass
class Gradients:
    """What the backward loop found.

    Args:
        rows: gradient of the rows, float32.
        weight: of the weight's pieces: [pieces, rows, width] if reduced, else [pieces,
            ranks * rows, width].
        bias: [pieces, ranks * rows].
    """

    rows: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class Sliced:
    """What the loops slice.

    Args:
        sent: [pieces, rows, width]; [pieces, ranks * rows, width] of pieces that were kept.
        numbers: [pieces, 1] int32.
        bias: [pieces, ranks * rows] or nothing.
    """

    sent: Tensor
    numbers: Tensor
    bias: Sequence[Tensor]

    @property
    def stacks(self) -> list[Tensor]:
        """In the order of the loops' inputs."""
        return [self.sent, self.numbers, *self.bias]


class ForwardLoop:
    """From rows and targets to sums per row.

    Args:
        plan: what it depends on.
        weights: how they travel.
        sliced: what ``run`` will take, in shapes and dtypes.
        constant: the same.
    """

    def __init__(
        self, plan: Plan, weights: StreamedWeights, sliced: Sliced, constant: Sequence[Tensor]
    ) -> None:
        self._plan = plan
        num_sums = plan.goal(constant[1]).num_sums
        sums = Like((len(constant[0]),), torch.float32)

        def body(values: list[Tensor]) -> list[Tensor]:
            so_far, (piece, sent, number, *bias) = values[:num_sums], values[num_sums:-2]
            rows, targets = values[-2:]
            following = weights.gather(sent)
            logits, classes = _logits(plan, rows, piece, number, bias)
            sums = plan.goal(targets).sums(so_far, logits, classes)
            return [*sums, following, piece] if plan.keeps else [*sums, following]

        likes = [*[sums] * num_sums, *_likes(plan, weights, sliced, constant)]
        self._loop = Loop(
            trace_body(body, likes, "fsdp_head_forward"),
            plan.pieces.count,
            num_sums + 1,
            len(sliced.stacks),
            ahead=[0],
        )

    def run(
        self, first: Tensor, sliced: Sliced, constant: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Sums per row, and what backward takes: the last piece, or all.

        Args:
            first: the first piece, gathered.
            sliced: pieces.
            constant: rows and targets.
        """
        start = self._plan.goal(constant[1]).no_sums()
        found = self._loop.run([*start, first, *sliced.stacks, *constant], None)
        return found[: len(start)], found[-1]


class BackwardLoop:
    """From what each row's loss counts for to gradients.

    Args:
        plan: what it depends on.
        weights: how they travel.
        wanted: which gradients.
        sliced: what ``run`` will take, in shapes and dtypes.
        constant: the same.
    """

    def __init__(
        self,
        plan: Plan,
        weights: StreamedWeights,
        wanted: Wanted,
        sliced: Sliced,
        constant: Sequence[Tensor],
    ) -> None:
        self._plan, self._wanted = plan, wanted
        ahead = 0 if plan.keeps else 1
        carried = ahead + wanted.rows

        def body(values: list[Tensor]) -> list[Tensor]:
            gathered, so_far = values[:ahead], values[ahead:carried]
            sent, number, *bias = values[carried:-4]
            rows, targets, norm, share = values[-4:]
            following = [weights.gather(sent) for _ in gathered]
            [piece] = gathered or [sent]
            logits, classes = _logits(plan, rows, piece, number, bias)
            exact = plan.goal(targets).gradient(logits, classes, norm, share)
            grad = exact.to(plan.dtype)
            found = [*following, *(each + (grad @ piece.to(plan.dtype)) for each in so_far)]
            if wanted.weight:
                of_piece = (grad.t() @ rows).to(weights.dtype)
                found.append(weights.reduce(of_piece) if wanted.reduced else of_piece)
            return [*found, exact.sum(0)] if wanted.bias else found

        like_rows = [Like(tuple(constant[0].shape), torch.float32)] if wanted.rows else []
        likes = _likes(plan, weights, sliced, constant)
        self._loop = Loop(
            trace_body(body, [*likes[:ahead], *like_rows, *likes[1:]], "fsdp_head_backward"),
            plan.pieces.count,
            carried,
            len(sliced.stacks),
            ahead=range(ahead),
            backwards=True,
        )

    def run(self, ahead: Sequence[Tensor], sliced: Sliced, constant: Sequence[Tensor]) -> Gradients:
        """The gradients that are wanted.

        Args:
            ahead: the last piece, gathered, unless all are kept.
            sliced: pieces.
            constant: rows, targets, norms and what each row's loss counts for.
        """
        wanted = self._wanted
        start = [torch.zeros_like(constant[0], dtype=torch.float32)] if wanted.rows else []
        values = self._loop.run([*ahead, *start, *sliced.stacks, *constant], None)
        found = iter(values[len(ahead) :])
        return Gradients(
            *(next(found) if each else None for each in (wanted.rows, wanted.weight, wanted.bias))
        )


def wanted_of(weights: StreamedWeights, *, rows: bool, reduced: bool) -> Wanted:
    """What backward computes for parameters as they are now."""
    return Wanted(rows, weights.trains(WEIGHT), weights.trains(BIAS), reduced)


def _logits(
    plan: Plan, rows: Tensor, piece: Tensor, number: Tensor, bias: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Of a piece, with its classes."""
    of_piece = bias[0].to(plan.dtype) if bias else None
    logits = logits_of(rows, piece.to(plan.dtype), of_piece)
    return logits, plan.pieces.classes(number)


def _likes(
    plan: Plan, weights: StreamedWeights, sliced: Sliced, constant: Sequence[Tensor]
) -> list[Like]:
    """Of the gathered piece, and of what follows the carried tensors."""
    gathered = (weights.num_ranks * plan.pieces.rows, weights.width)
    return [
        Like(gathered, weights.dtype),
        *map(Like.slice_of, sliced.stacks),
        *map(Like.of, constant),
    ]
