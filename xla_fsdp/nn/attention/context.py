"""Attention to the whole of sequences that are cut over the ranks of a context axis.

Sources: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context" (https://arxiv.org/abs/2310.01889); Jacobs et al., "DeepSpeed Ulysses"
(https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xla_fsdp.distributed.context_parallel import ContextAxis
from xla_fsdp.nn.attention.chunked import CHUNKED, MASKED, Chunked
from xla_fsdp.nn.attention.options import Implementation, Options, Pair, Tokens


def over_context(
    axis: ContextAxis, product: Implementation, options: Options, query: Tensor, key: Tensor
) -> Implementation:
    """Return attention of this rank's tokens to those of all ranks of ``axis``.

    Args:
        axis: of the context; the tokens are its ``own`` of each sequence.
        product: attention between tokens that one rank has.
        options: of the call.
        query: [batch, heads, queries, size].
        key: [batch, key heads, keys, size].

    Raises:
        ValueError: if queries and keys are not parts of one sequence, or there are too few heads to
            exchange.
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries != keys or queries % 2:
        raise ValueError(
            f"in context_parallel attention is between the tokens of one sequence, of which each "
            f"rank has two equal chunks; found {queries} queries and {keys} keys on this rank. Cut "
            f"the inputs by buffers= of context_parallel"
        )
    heads_suffice = key.shape[1] % axis.size == 0
    if axis.method == "ring" or (axis.method == "auto" and not heads_suffice):
        if options.window is not None and product is not CHUNKED:
            warnings.warn(
                "attention with a window runs in chunks, without its kernel, where keys go around "
                "a ring: context_parallel(..., method='ulysses') has the kernel",
                stacklevel=3,
            )
        return _Ring(axis, product)
    if not heads_suffice:
        raise ValueError(
            f"context_parallel(method='ulysses') gives each of the {axis.size} ranks along "
            f"{axis.name!r} as many key heads, and there are {key.shape[1]}; use method='ring'"
        )
    return _HeadExchange(axis, product)


# ---------------------------------------------------------------- keys around a ring


_Half = Tensor | bool | None
"""Some of a rank's tokens: the second chunk if true, else the first; None for all. On the device,
[1] bool, where it depends on the rank."""


def _take(x: Tensor, second: _Half, dim: int = 2) -> Tensor:
    """Return the slice of these tokens."""
    if second is None:
        return x
    halves = x.chunk(2, dim)
    if isinstance(second, bool):
        return halves[second]
    return torch.where(second, halves[1], halves[0])


def _spread(x: Tensor, second: _Half, fill: float = 0.0) -> Tensor:
    """Undo ``_take``, with ``fill`` for other tokens."""
    if second is None:
        return x
    other = torch.full_like(x, fill)
    if isinstance(second, bool):
        halves = [other, x] if second else [x, other]
    else:
        halves = [torch.where(second, other, x), torch.where(second, x, other)]
    return torch.cat(halves, 2)


def _part(tokens: Tokens, queries: _Half, keys: _Half) -> Tokens:
    query, key, value, pair = tokens
    if pair is not None:
        pair = Pair(_take(pair.queries, queries, 1), _take(pair.keys, keys, 1))
    return Tokens(_take(query, queries), _take(key, keys), _take(value, keys), pair)


def _products(
    options: Options, step: int, from_later: Tensor
) -> list[tuple[_Half, _Half, Options]]:
    """Return the queries and keys between which there is attention in a step of the ring, in which
    this rank has the keys of the rank ``step`` before it.

    Under a causal mask the second chunk of a rank sees the first one of every other. Besides, first
    chunks see those of ranks before, and second chunks those of ranks behind. That is as much for
    every rank and step, and nothing in it is masked.
    """
    if step == 0 or not options.is_causal or options.window is not None:
        return [(None, None, options)]
    unmasked = replace(options, is_causal=False)
    return [(True, False, unmasked), (from_later, from_later, unmasked)]


@dataclass(frozen=True)
class _Ring:
    """Keys and values, with their segments and in backward their gradients, visit all ranks."""

    axis: ContextAxis
    product: Implementation

    def forward(self, options: Options, tokens: Tokens) -> tuple[Tensor, Tensor]:
        query, _, value, _ = tokens
        wide = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=wide)
        logsumexp = query.new_full(query.shape[:-1], MASKED, dtype=wide)
        for step, from_later, here in self._steps(tokens):
            for queries, keys, masks in _products(options, step, from_later):
                product = self._product(options, step, query.shape[2])
                found, sums = product.forward(masks, _part(here, queries, keys))
                output, logsumexp = _merged(
                    (output, logsumexp),
                    (_spread(found.to(wide), queries), _spread(sums, queries, MASKED)),
                )
        return output.to(query.dtype), logsumexp

    def backward(
        self, options: Options, tokens: Tokens, output: Tensor, logsumexp: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _ = tokens
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_q, grad_k, grad_v = (torch.zeros_like(e, dtype=wide) for e in (query, key, value))
        for step, from_later, here in self._steps(tokens):
            if step:
                grad_k, grad_v = self.axis.send(grad_k), self.axis.send(grad_v)
            for queries, keys, masks in _products(options, step, from_later):
                product = self._product(options, step, query.shape[2])
                results = (_take(each, queries) for each in (output, logsumexp, grad))
                found = product.backward(masks, _part(here, queries, keys), *results)
                grad_q = grad_q + _spread(found[0].to(wide), queries)
                grad_k = grad_k + _spread(found[1].to(wide), keys)
                grad_v = grad_v + _spread(found[2].to(wide), keys)
        grad_k, grad_v = self.axis.send(grad_k), self.axis.send(grad_v)  # home
        return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype)

    def _steps(self, tokens: Tokens) -> Iterator[tuple[int, Tensor, Tokens]]:
        """Yield steps of the ring, each with whether its keys are of a rank with a higher number,
        [1] bool on the device, and with this rank's queries and those keys."""
        rank, rotate = self.axis.local_rank_on_device, self.axis.send
        query, key, value, segments = tokens
        for step in range(self.axis.size):
            if step:
                key, value = rotate(key), rotate(value)
                segments = segments and segments._replace(keys=rotate(segments.keys))
            yield step, rank < step, Tokens(query, key, value, segments)

    def _product(self, options: Options, step: int, length: int) -> Implementation:
        if options.window is None:
            return self.product
        # The kernel's masks are constants, and how far chunks are apart depends on the rank.
        own, its = self.axis.positions(length), self.axis.positions(length, before=step)
        return Chunked(Pair(own, its))


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the keys of both."""
    top = torch.maximum(one[1], other[1])
    weights = [torch.exp(each[1] - top) for each in (one, other)]
    total = weights[0] + weights[1]
    shares = [(each / total).unsqueeze(-1) for each in weights]
    return one[0] * shares[0] + other[0] * shares[1], top + total.log()


# ---------------------------------------------------------------- heads for tokens


@dataclass(frozen=True)
class _HeadExchange:
    """Each rank gives its tokens of all heads for all tokens of some heads, and back."""

    axis: ContextAxis
    product: Implementation

    def forward(self, options: Options, tokens: Tokens) -> tuple[Tensor, Tensor]:
        output, logsumexp = self.product.forward(options, self._whole(tokens))
        return self._back(output), self._back(logsumexp)

    def backward(
        self, options: Options, tokens: Tokens, output: Tensor, logsumexp: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        whole = self._whole(tokens)
        results = map(self._there, (output, logsumexp, grad))
        grad_q, grad_k, grad_v = map(self._back, self.product.backward(options, whole, *results))
        return grad_q, grad_k, grad_v

    def _there(self, x: Tensor) -> Tensor:
        """Turn [batch, heads, own tokens, ...] into [batch, own heads, tokens, ...]."""
        return self.axis.in_order(self.axis.all_to_all(x, split_dim=1, concat_dim=2), 2)

    def _back(self, x: Tensor) -> Tensor:
        return self.axis.all_to_all(self.axis.by_rank(x, 2), split_dim=2, concat_dim=1)

    def _whole(self, tokens: Tokens) -> Tokens:
        query, key, value = map(self._there, tokens[:3])
        ids = tokens.segments
        return Tokens(query, key, value, ids and Pair(*(self.axis.whole(each, 1) for each in ids)))
