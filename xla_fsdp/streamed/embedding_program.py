"""The two loops that stream an embedding: what each round computes.

How they are laid out (one round is one piece; see ``scan_xla_ops`` for the words of loops):

forward    carried    rows found so far
           sliced     what is sent of the piece, the piece's number
           constant   row numbers
backward   sliced     the piece's number
           constant   row numbers, gradient of the rows
           collected  gradient of the piece, reduced over the ranks, or not where it is not to be
                      reduced yet

Always true: a row is taken from one piece only. Its gradient is summed in float32 on each rank.
Rounds do next to nothing but send, so nothing is gathered ahead of its round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xla_fsdp.scan_xla_ops import Like, Loop, trace_body
from xla_fsdp.streamed.pieces import Pieces
from xla_fsdp.streamed.weights import StreamedWeights


@dataclass(frozen=True)
class Plan:
    """What the loops depend on besides their inputs.

    Args:
        pieces: how the table is cut.
        padding: number of a row that gets no gradient, or -1.
    """

    pieces: Pieces
    padding: int


def forward_loop(plan: Plan, weights: StreamedWeights, numbers: Tensor) -> Loop:
    """From a start [n, width], pieces [pieces, rows, width] in the dtype that is sent, the pieces'
    numbers and row numbers [n] int32 to the rows; those that are none stay what they were."""
    pieces = plan.pieces

    def body(values: list[Tensor]) -> list[Tensor]:
        found, sent, number, wanted = values
        piece = weights.gather(sent)
        place, is_here = pieces.places(wanted, number)
        return [torch.where(is_here[:, None], piece[place], found)]

    likes = [
        Like((len(numbers), weights.width), weights.dtype),
        Like((pieces.rows, weights.width), weights.dtype),
        Like((1,), torch.int32),
        Like.of(numbers),
    ]
    return Loop(trace_body(body, likes, "fsdp_embedding_forward"), pieces.count, 1, 2)


def backward_loop(
    plan: Plan, weights: StreamedWeights, numbers: Tensor, grad: Tensor, *, reduced: bool
) -> Loop:
    """From the pieces' numbers, row numbers [n] int32 and the rows' gradients [n, width] to
    gradients of the pieces: [pieces, rows, width] if reduced, else [pieces, ranks * rows, width].
    """
    pieces = plan.pieces
    num_rows = weights.num_ranks * pieces.rows

    def body(values: list[Tensor]) -> list[Tensor]:
        number, wanted, grad = values
        place, is_here = pieces.places(wanted, number)
        counts = is_here & (wanted != plan.padding)
        share = torch.where(counts[:, None], grad.float(), 0.0)
        start = torch.zeros(num_rows, weights.width, dtype=torch.float32, device=grad.device)
        of_piece = start.index_add(0, place, share).to(weights.dtype)
        return [weights.reduce(of_piece) if reduced else of_piece]

    likes = [Like((1,), torch.int32), Like.of(numbers), Like.of(grad)]
    return Loop(trace_body(body, likes, "fsdp_embedding_backward"), pieces.count, 0, 1)
