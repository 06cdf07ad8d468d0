"""Which rows go to which expert: tokens sorted by expert, with shapes that do not depend on it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xla_fsdp.distributed.higher_order import differentiable_once

ONCE = "routes of tokens to experts save no graph of their backward; use experts of plain torch"

Pairs = dict[int, tuple[Tensor, Tensor]]
"""For each product of rows with one weight, the two whose product is the weight's gradient."""


class Routes(NamedTuple):
    """Pairs of a token and one of its experts, as rows sorted by expert.

    Pairs are counted by choice, the first ones of all tokens before the second ones: so a TPU adds
    up a token's rows along a dim that is not tiled. Pairs without an expert are the last rows.
    """

    order: Tensor  # [rows] int32, the pair of each row; below 0 for none
    places: Tensor  # [pairs] int32, the row of each pair; below 0 for none
    sizes: Tensor  # [experts] int32, rows of each expert
    kept: Tensor | None  # [tokens, choices] bool, whether a pair has an expert; None if all have
    choices: int  # experts of a token
    total: int  # experts whose rows these may be; of those that have none here, rows are the last
    each: int | None = None  # rows of every expert, of a pair or of none; None if this varies
    # For rounds of rows with the same weights, by id: the weight, what stands for it, their pairs.
    joined: dict[int, tuple[Tensor, Tensor, Pairs]] | None = None

    @classmethod
    def of(cls, experts: Tensor, num_experts: int, capacity: float | None = None) -> Routes:
        """Sort the pairs of ``experts``, [tokens, choices] integers; equal ones stay in order.

        Args:
            experts: numbers from 0, of at least one token.
            num_experts: of which no other has rows.
            capacity: how many times its even share of the pairs an expert takes at most, first
                choices first, then earlier tokens first. Each then has so many rows, but no more
                than there are pairs; those of no pair are behind its others. None for no limit,
                and no such rows.

        Raises:
            ValueError: if ``experts`` has another shape or dtype, or ``capacity`` is not above 0.
        """
        check_capacity(capacity)
        routes = cls._sorted(experts, num_experts, None)
        if capacity is None:
            return routes
        each = math.ceil(min(capacity, num_experts) * experts.numel() / num_experts)
        starts = routes.sizes.cumsum(0, dtype=torch.int32) - routes.sizes
        numbers = experts.t().reshape(-1).to(torch.int32)
        within = routes.places - starts.index_select(0, numbers)
        places = torch.where(within < each, numbers * each + within, -1)
        within = torch.arange(each, dtype=torch.int32, device=starts.device)
        rows = (starts.unsqueeze(1) + within).flatten().clamp(max=experts.numel() - 1)
        is_of_pair = (within < routes.sizes.unsqueeze(1)).flatten()
        order = torch.where(is_of_pair, routes.order.index_select(0, rows), -1)
        even = cls.even(num_experts, each, starts.device)
        return even._replace(order=order, places=places, choices=experts.shape[1])

    @classmethod
    def kept_of(cls, experts: Tensor, num_experts: int, kept: Tensor, total: int) -> Routes:
        """Sort the pairs of ``experts`` for which ``kept``, [tokens, choices] bool, is true: those
        of ``num_experts`` out of ``total``."""
        routes = cls._sorted(torch.where(kept, experts, num_experts), num_experts, kept)
        return routes._replace(total=total)

    @classmethod
    def even(cls, num_experts: int, each: int, device: torch.device) -> Routes:
        """Return routes of sorted rows, of which every expert has ``each``."""
        rows = torch.arange(num_experts * each, dtype=torch.int32, device=device)
        sizes = torch.full((num_experts,), each, dtype=torch.int32, device=device)
        return cls(rows, rows, sizes, None, 1, num_experts, each)

    @classmethod
    def _sorted(cls, experts: Tensor, num_experts: int, kept: Tensor | None) -> Routes:
        if experts.dim() != 2 or not experts.numel() or experts.is_floating_point():
            raise ValueError(
                f"experts is {list(experts.shape)} of {experts.dtype}; give [tokens, choices] "
                f"integers of at least one token"
            )
        numbers = experts.t().reshape(-1).to(torch.int32)
        order = torch.argsort(numbers, stable=True).to(torch.int32)
        places = torch.argsort(order).to(torch.int32)
        each = torch.arange(num_experts, dtype=torch.int32, device=numbers.device)
        sizes = (numbers.unsqueeze(1) == each).sum(0, dtype=torch.int32)
        return cls(order, places, sizes, kept, experts.shape[1], num_experts)

    @property
    def num_tokens(self) -> int:
        return len(self.places) // self.choices

    def _check(self, name: str, given: Tensor, expected: tuple[int, int]) -> None:
        # Indices of rows wrap around, so that others would be taken without an error.
        if given.shape != expected:
            raise ValueError(
                f"{name} is {list(given.shape)}, not {list(expected)}, for {len(self.order)} rows "
                f"of {self.num_tokens} tokens with {self.choices} experts each"
            )

    def spread(self, tokens: Tensor) -> Tensor:
        """Return the row of each pair, [rows, width], out of ``tokens``, [tokens, width]; zeros in
        rows of none. ValueError if there are not as many tokens as have been routed."""
        self._check("tokens", tokens, (self.num_tokens, tokens.shape[-1]))
        return self._moved(tokens, self.choices, sums=False)

    def weights_of_rows(self, weights: Tensor) -> Tensor:
        """Return the weight of each row's pair, [rows, 1], out of those of all pairs, [tokens,
        choices]; 0 in rows of none. ValueError if the shape does not fit."""
        self._check("weights", weights, (self.num_tokens, self.choices))
        if self.kept is not None:
            weights = torch.where(self.kept, weights, 0.0)
        return self._moved(weights.t().reshape(-1, 1), 1, sums=False)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows: [tokens, width] of [rows, width], in their dtype.
        ValueError if the shape does not fit."""
        self._check("rows", rows, (len(self.order), rows.shape[-1]))
        return self._moved(rows, self.choices, sums=True)

    def _moved(self, rows: Tensor, copies: int, *, sums: bool) -> Tensor:
        index, inverse = (self.places, self.order) if sums else (self.order, self.places)
        found: Tensor = _Moved.apply(rows, index, inverse, copies, self.each is not None, sums)
        return found

    def rows_of_experts(self, values: Tensor) -> Tensor:
        """Return for each row what its expert has: [rows, width] out of [experts, width]."""
        # A product, as the gradient of an indexed table adds up rows one after the other.
        row = torch.arange(len(self.order), dtype=torch.int32, device=values.device).unsqueeze(1)
        ends = self.sizes.cumsum(0, dtype=torch.int32)
        is_of = (row >= ends - self.sizes) & (row < ends)
        return is_of.to(values.dtype) @ values


def check_capacity(capacity: float | None) -> None:
    """Raise ValueError if a capacity is no number above 0."""
    is_number = isinstance(capacity, (int, float)) and not isinstance(capacity, bool)
    if capacity is not None and not (is_number and capacity > 0):
        raise ValueError(f"capacity is {capacity!r}; give a number above 0, or None for no limit")


class _Moved(torch.autograd.Function):
    """Rows of a tensor of which each is taken ``copies`` times; or ``sums`` of so many rows. One is
    the gradient of the other.

    Row i is row ``index[i]`` of the copies, one after the other; ``inverse`` is the inverse
    permutation, by which backward takes rows of the gradient, where autograd's own adds them up one
    after the other. With ``gaps`` both may be below 0, where rows are zeros.
    """

    @staticmethod
    def forward(
        rows: Tensor, index: Tensor, inverse: Tensor, copies: int, gaps: bool, sums: bool
    ) -> Tensor:
        return _sum(rows, index, copies, gaps) if sums else _take(rows, index, gaps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, inverse, *ctx.how = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    @differentiable_once(ONCE)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [inverse], (copies, gaps, sums) = ctx.saved_tensors, ctx.how
        found = _take(grad, inverse, gaps) if sums else _sum(grad, inverse, copies, gaps)
        return found, None, None, None, None, None


def _take(rows: Tensor, index: Tensor, gaps: bool) -> Tensor:
    taken = rows.index_select(0, index % len(rows))
    return torch.where((index >= 0).unsqueeze(1), taken, 0.0) if gaps else taken


def _sum(rows: Tensor, index: Tensor, copies: int, gaps: bool) -> Tensor:
    taken = _take(rows, index, gaps)
    if copies == 1:
        return taken
    wide = torch.promote_types(rows.dtype, torch.float32)
    return taken.unflatten(0, (copies, -1)).sum(0, dtype=wide).to(rows.dtype)
