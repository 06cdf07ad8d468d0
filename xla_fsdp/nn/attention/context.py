"""Attention to the whole of sequences that are cut over the ranks of a context axis.

Sources: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context" (https://arxiv.org/abs/2310.01889); Jacobs et al., "DeepSpeed Ulysses"
(https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

import enum
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


class _Some(enum.Enum):
    """Some of the tokens that a rank has."""

    ALL = enum.auto()
    FIRST = enum.auto()  # chunk
    SECOND = enum.auto()
    EITHER = enum.auto()  # the second one if the keys come from a later rank, else the first


@dataclass(frozen=True)
class _Step:
    """A step of the ring, in which this rank has the keys of the rank ``number`` before it.

    Args:
        options: of the whole attention.
        number: 0 to the number of ranks - 1.
        from_later: whether that is a rank with a higher number, [1] bool on the device.
        tokens: this rank's queries, and those keys.
    """

    options: Options
    number: int
    from_later: Tensor
    tokens: Tokens

    def products(self) -> Iterator[tuple[_Some, _Some, Options]]:
        """Yield the queries and keys between which there is attention.

        Under a causal mask the second chunk of a rank sees the first one of every other. Besides,
        first chunks see those of ranks before, and second chunks those of ranks behind. That is as
        much for every rank and step, and nothing in it is masked.
        """
        if self.number == 0 or not self.options.is_causal or self.options.window is not None:
            yield _Some.ALL, _Some.ALL, self.options
            return
        unmasked = replace(self.options, is_causal=False)
        yield _Some.SECOND, _Some.FIRST, unmasked
        yield _Some.EITHER, _Some.EITHER, unmasked

    def given(self, queries: _Some, keys: _Some) -> Tokens:
        """Return the tokens of a product."""
        query, key, value, pair = self.tokens
        if pair is not None:
            pair = Pair(self.take(pair.queries, queries, 1), self.take(pair.keys, keys, 1))
        return Tokens(self.take(query, queries), self.take(key, keys), self.take(value, keys), pair)

    def take(self, x: Tensor, tokens: _Some, dim: int = 2) -> Tensor:
        """Return the slice of these tokens."""
        if tokens is _Some.ALL:
            return x
        first, second = x.chunk(2, dim)
        if tokens is _Some.EITHER:
            return torch.where(self.from_later, second, first)
        return first if tokens is _Some.FIRST else second

    def spread(self, x: Tensor, tokens: _Some, fill: float = 0.0) -> Tensor:
        """Undo ``take``, with ``fill`` for other tokens."""
        if tokens is _Some.ALL:
            return x
        other = torch.full_like(x, fill)
        if tokens is _Some.EITHER:
            halves = [
                torch.where(self.from_later, other, x),
                torch.where(self.from_later, x, other),
            ]
        else:
            halves = [x, other] if tokens is _Some.FIRST else [other, x]
        return torch.cat(halves, 2)


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
        for step in self._steps(options, tokens):
            for queries, keys, masks in step.products():
                product = self._product(options, step)
                found, sums = product.forward(masks, step.given(queries, keys))
                output, logsumexp = _merged(
                    (output, logsumexp),
                    (step.spread(found.to(wide), queries), step.spread(sums, queries, MASKED)),
                )
        return output.to(query.dtype), logsumexp

    def backward(
        self, options: Options, tokens: Tokens, output: Tensor, logsumexp: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _ = tokens
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_q, grad_k, grad_v = (torch.zeros_like(e, dtype=wide) for e in (query, key, value))
        for step in self._steps(options, tokens):
            if step.number:
                grad_k, grad_v = self.axis.send(grad_k), self.axis.send(grad_v)
            for queries, keys, masks in step.products():
                results = (step.take(each, queries) for each in (output, logsumexp, grad))
                product = self._product(options, step)
                found = product.backward(masks, step.given(queries, keys), *results)
                grad_q = grad_q + step.spread(found[0].to(wide), queries)
                grad_k = grad_k + step.spread(found[1].to(wide), keys)
                grad_v = grad_v + step.spread(found[2].to(wide), keys)
        grad_k, grad_v = self.axis.send(grad_k), self.axis.send(grad_v)  # home
        return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype)

    def _steps(self, options: Options, tokens: Tokens) -> Iterator[_Step]:
        rank, rotate = self.axis.local_rank_on_device, self.axis.send
        query, key, value, segments = tokens
        for number in range(self.axis.size):
            if number:
                key, value = rotate(key), rotate(value)
                segments = segments and segments._replace(keys=rotate(segments.keys))
            yield _Step(options, number, rank < number, Tokens(query, key, value, segments))

    def _product(self, options: Options, step: _Step) -> Implementation:
        if options.window is None:
            return self.product
        # The kernel's masks are constants, and how far chunks are apart depends on the rank.
        length = step.tokens.query.shape[2]
        own, its = self.axis.positions(length), self.axis.positions(length, before=step.number)
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
