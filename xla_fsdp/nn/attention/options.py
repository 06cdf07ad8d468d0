"""What attention computes, apart from its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Options:
    """How scores are computed from products of queries and keys, and which are masked."""

    is_causal: bool
    scale: float
    soft_cap: float | None = None
    window: int | None = None

    def sees_whole(self, num_queries: int, num_keys: int) -> bool:
        """Return whether no query is masked from a key by its position."""
        beyond_window = self.window is not None and self.window < max(num_queries, num_keys)
        return not self.is_causal and not beyond_window

    def queries_of(self, keys: range, num_queries: int) -> range:
        """Return the queries that may see some of these keys, which are not empty."""
        before, after = keys.start, keys.stop - 1
        first = before if self.is_causal else 0
        last = num_queries
        if self.window is not None:
            first = max(first, before - self.window + 1)
            last = min(last, after + self.window)
        return range(min(first, last), last)


class Pair(NamedTuple):
    """Numbers of tokens, int32: of their segments, or of where they lie in the sequence."""

    queries: Tensor
    keys: Tensor


class Tokens(NamedTuple):
    """What attention is between."""

    query: Tensor  # [batch, heads, queries, size]
    key: Tensor  # [batch, key heads, keys, size]
    value: Tensor  # [batch, key heads, keys, value size]
    segments: Pair | None  # [batch, queries], [batch, keys]


SEES_NO_KEY = -1e29
"""A log-sum-exp below this is of a query that sees no key."""


class Implementation(Protocol):
    """A way to compute attention and its gradients."""

    def forward(self, options: Options, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the output, [batch, heads, queries, value size] in the query's dtype, and the
        log-sum-exp of the scores, [batch, heads, queries] float32, or float64 for float64.

        What a query without any visible key gets is not defined, but its log-sum-exp is below
        ``SEES_NO_KEY``.
        """

    def backward(
        self, options: Options, tokens: Tokens, output: Tensor, logsumexp: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value in their dtypes, from that of the output.
        Output and log-sum-exp may be those of more keys: then what these keys add."""
