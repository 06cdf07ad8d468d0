"""Attention in torch operations, one chunk of keys after the other; for devices without a kernel.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
(https://arxiv.org/abs/2307.08691), algorithms 1 and 2, with chunks of keys and whole ranges of
queries. Backward computes scores again from the log-sum-exp, so that memory is linear in the
length. Products and sums are float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xla_fsdp.nn.attention.options import Options, Pair, Tokens

KEYS_PER_CHUNK = 512

# Finite, as exp(-inf - -inf) is not a number: where a query sees no key of its first chunks. What
# these chunks add is multiplied by exp(MASKED - score) = 0 at its first visible key.
MASKED = -1e30


@dataclass(frozen=True)
class Chunked:
    """Attention of tokens at these positions of a sequence, [queries] and [keys]; of consecutive
    ones from 0 by default."""

    positions: Pair | None = None

    def forward(self, options: Options, tokens: Tokens) -> tuple[Tensor, Tensor]:
        query, key, value, _ = tokens
        q = _grouped(query, key) * options.scale
        output = q.new_zeros(*q.shape[:-1], value.shape[-1])
        greatest, total = q.new_full(q.shape[:-1], MASKED), q.new_zeros(q.shape[:-1])
        for keys, rows in self._chunks(options, tokens):
            scores, _ = self._scores(options, q, tokens, keys, rows)
            before = greatest[..., rows]
            now = torch.maximum(before, scores.amax(-1))
            weights, shrink = torch.exp(scores - now.unsqueeze(-1)), torch.exp(before - now)
            added = _mixed(weights, _wide(value[:, :, keys]))
            output[..., rows, :] = output[..., rows, :] * shrink.unsqueeze(-1) + added
            total[..., rows] = total[..., rows] * shrink + weights.sum(-1)
            greatest[..., rows] = now
        output = output / total.unsqueeze(-1)
        return output.flatten(1, 2).to(query.dtype), (greatest + total.log()).flatten(1, 2)

    def backward(
        self, options: Options, tokens: Tokens, output: Tensor, logsumexp: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _ = tokens
        q, grad = _grouped(query, key) * options.scale, _grouped(grad, key)
        logsumexp = logsumexp.unflatten(1, q.shape[1:3]).unsqueeze(-1)
        from_sum = (grad * _grouped(output, key)).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(q)
        grad_k, grad_v = torch.zeros_like(_wide(key)), torch.zeros_like(_wide(value))
        for keys, rows in self._chunks(options, tokens):
            scores, slopes = self._scores(options, q, tokens, keys, rows)
            weights, g = torch.exp(scores - logsumexp[..., rows, :]), grad[..., rows, :]
            grad_v[:, :, keys] = _sums(weights, g)
            grad_weights = _mixed(g, _wide(value[:, :, keys]).mT)
            grad_scores = weights * (grad_weights - from_sum[..., rows, :])
            if slopes is not None:
                grad_scores = grad_scores * slopes
            grad_q[..., rows, :] += _mixed(grad_scores, _wide(key[:, :, keys]))
            grad_k[:, :, keys] = _sums(grad_scores, q[..., rows, :])
        grad_query = (grad_q * options.scale).flatten(1, 2)
        return grad_query.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype)

    def _chunks(self, options: Options, tokens: Tokens) -> Iterator[tuple[slice, slice]]:
        """Yield the slices of keys, each with that of the queries that may see some of them."""
        num_queries, num_keys = tokens.query.shape[2], tokens.key.shape[2]
        for start in range(0, num_keys, KEYS_PER_CHUNK):
            keys, rows = range(start, min(start + KEYS_PER_CHUNK, num_keys)), range(num_queries)
            if self.positions is None:
                rows = options.queries_of(keys, num_queries)
            if rows:
                yield slice(keys.start, keys.stop), slice(rows.start, rows.stop)

    def _scores(
        self, options: Options, q: Tensor, tokens: Tokens, keys: slice, rows: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scores [batch, key heads, heads of each, rows, keys], and, if they are capped,
        their derivatives with respect to the products."""
        scores = _mixed(q[..., rows, :], _wide(tokens.key[:, :, keys]).mT)
        slopes = None
        if options.soft_cap is not None:
            bent = torch.tanh(scores / options.soft_cap)
            scores, slopes = bent * options.soft_cap, 1 - bent * bent
        for hidden in self._hidden(options, tokens, keys, rows):
            scores = scores.masked_fill(hidden, MASKED)
        return scores, slopes

    def _hidden(
        self, options: Options, tokens: Tokens, keys: slice, rows: slice
    ) -> Iterator[Tensor]:
        """Yield masks of the scores that do not count."""
        query, key, _, segments = tokens
        if self.positions is not None or not options.sees_whole(query.shape[2], key.shape[2]):
            if self.positions is not None:
                i, j = self.positions.queries[rows], self.positions.keys[keys]
            else:
                i = torch.arange(rows.start, rows.stop, device=query.device)
                j = torch.arange(keys.start, keys.stop, device=query.device)
            i = i.unsqueeze(-1)
            if options.is_causal:
                yield i < j
            if options.window is not None:
                yield (i - j).abs() >= options.window
        if segments is not None:
            mine, its = segments.queries[:, rows], segments.keys[:, keys]
            yield (mine.unsqueeze(-1) != its.unsqueeze(1))[:, None, None]


CHUNKED = Chunked()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """Return [batch, heads, ...] as [batch, key heads, heads of each, ...], wide."""
    return _wide(tensor).unflatten(1, (key.shape[1], -1))


# Not einsum, which torch_xla keeps as one operation, whose products nobody counts.
def _mixed(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return [batch, key heads, heads of each, rows, n] @ [batch, key heads, n, m]."""
    return (rows.flatten(2, 3) @ matrix).unflatten(2, rows.shape[2:4])


def _sums(weights: Tensor, rows: Tensor) -> Tensor:
    """Return [batch, key heads, n, m], summed over the heads of each and the rows of two tensors
    [batch, key heads, heads of each, rows, n or m]."""
    return weights.flatten(2, 3).mT @ rows.flatten(2, 3)
