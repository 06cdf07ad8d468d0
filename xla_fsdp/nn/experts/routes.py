"""Which rows go to which expert: tokens sorted by expert, with shapes that do not depend on it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xla_fsdp.distributed.higher_order import differentiable_once

ONCE = "routes of tokens to experts save no graph of their backward; use experts of plain torch"


class Routes(NamedTuple):
    """Pairs of a token and one of its experts, as rows sorted by expert.

    Pairs are counted by choice, the first ones of all tokens before the second ones: so a TPU adds
    up a token's rows along a dim that is not tiled. Pairs without an expert are the last rows.
    """

    order: Tensor  # [rows] int32, the pair of each row
    places: Tensor  # [rows] int32, the row of each pair
    sizes: Tensor  # [experts] int32, rows of each expert
    kept: Tensor | None  # [tokens, choices] bool, whether a pair has an expert; None if all have
    choices: int  # experts of a token

    @classmethod
    def of(cls, experts: Tensor, num_experts: int, capacity: float | None = None) -> Routes:
        """Sort the pairs of ``experts``, [tokens, choices] integers; equal ones stay in order.

        Args:
            experts: numbers from 0.
            num_experts: of which no other has rows.
            capacity: how many times its even share of the pairs an expert takes at most, first
                choices first, then earlier tokens first. None for no limit.
        """
        if capacity is None:
            return cls._sorted(experts, num_experts, None)
        limit = math.ceil(capacity * experts.numel() / num_experts)
        first = cls._sorted(experts, num_experts, None)
        starts = first.sizes.cumsum(0, dtype=torch.int32) - first.sizes
        before = starts.index_select(0, experts.t().reshape(-1))
        kept = (first.places - before < limit).unflatten(0, (experts.shape[1], -1)).t()
        return cls.kept_of(experts, num_experts, kept)

    @classmethod
    def kept_of(cls, experts: Tensor, num_experts: int, kept: Tensor) -> Routes:
        """Sort the pairs of ``experts`` for which ``kept``, [tokens, choices] bool, is true."""
        return cls._sorted(torch.where(kept, experts, num_experts), num_experts, kept)

    @classmethod
    def even(cls, num_experts: int, each: int, device: torch.device) -> Routes:
        """Return routes of sorted rows, of which every expert has ``each``."""
        rows = torch.arange(num_experts * each, dtype=torch.int32, device=device)
        sizes = torch.full((num_experts,), each, dtype=torch.int32, device=device)
        return cls(rows, rows, sizes, None, 1)

    @classmethod
    def _sorted(cls, experts: Tensor, num_experts: int, kept: Tensor | None) -> Routes:
        numbers = experts.t().reshape(-1).to(torch.int32)
        order = torch.argsort(numbers, stable=True).to(torch.int32)
        places = torch.argsort(order).to(torch.int32)
        each = torch.arange(num_experts, dtype=torch.int32, device=numbers.device)
        sizes = (numbers.unsqueeze(1) == each).sum(0, dtype=torch.int32)
        return cls(order, places, sizes, kept, experts.shape[1])

    def spread(self, tokens: Tensor) -> Tensor:
        """Return the row of each pair, [rows, width], out of ``tokens``, [tokens, width]."""
        result: Tensor = _Taken.apply(tokens, self.order, self.places, self.choices)
        return result

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of each token's rows times their weights.

        Args:
            rows: [rows, width].
            weights: [tokens, choices].

        Returns:
            [tokens, width] in the wider dtype of both.
        """
        if self.kept is not None:
            weights = torch.where(self.kept, weights, 0.0)
        pairs = _Taken.apply(rows, self.places, self.order, 1).unflatten(0, (self.choices, -1))
        return (pairs * weights.t().unsqueeze(-1)).sum(0)

    def rows_of_experts(self, values: Tensor) -> Tensor:
        """Return for each row what its expert has: [rows, width] out of [experts, width]."""
        # A product, as the gradient of an indexed table adds up rows one after the other.
        row = torch.arange(len(self.order), dtype=torch.int32, device=values.device).unsqueeze(1)
        ends = self.sizes.cumsum(0, dtype=torch.int32)
        is_of = (row >= ends - self.sizes) & (row < ends)
        return is_of.to(values.dtype) @ values


class _Taken(torch.autograd.Function):
    """Rows of a tensor of which each is taken ``copies`` times.

    Row i is row ``index[i]`` of the copies, one after the other; ``inverse`` is the inverse
    permutation, by which backward takes rows of the gradient, where autograd's own adds them up one
    after the other.
    """

    @staticmethod
    def forward(rows: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        return rows.index_select(0, index if copies == 1 else index % len(rows))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, inverse, ctx.copies = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    @differentiable_once(ONCE)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [inverse] = ctx.saved_tensors
        taken = grad.index_select(0, inverse)
        if ctx.copies > 1:
            wide = torch.promote_types(grad.dtype, torch.float32)
            taken = taken.unflatten(0, (ctx.copies, -1)).sum(0, dtype=wide).to(grad.dtype)
        return taken, None, None, None
