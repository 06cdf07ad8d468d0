"""``attention``: scaled dot product attention with memory that is linear in the length."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.context_parallel import current_context
from xla_fsdp.distributed.higher_order import differentiable_once
from xla_fsdp.nn.attention import splash
from xla_fsdp.nn.attention.chunked import CHUNKED
from xla_fsdp.nn.attention.context import over_context
from xla_fsdp.nn.attention.options import SEES_NO_KEY, Implementation, Options, Pair, Tokens
from xla_fsdp.nn.remat_policy import checkpoint_name
from xla_fsdp.xla import ops

ATTENTION = "attention"
"""Name of the output and its statistics, for the ``remat`` of ``scan_blocks``."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    boundaries: Tensor | None = None,
) -> Tensor:
    """Return what ``torch.nn.functional.scaled_dot_product_attention`` returns, without a tensor of
    all scores: by JAX's splash attention kernel on a TPU and in preflight, in chunks elsewhere.

    Inside ``context_parallel`` tokens are this rank's part of a sequence, and see all of it.

    In scanned blocks, ``remat=["attention"]`` keeps the output and its statistics, and recomputes
    the rest.

    Args:
        query: [batch, heads, queries, size].
        key: [batch, key heads, keys, size]; each key head serves as many adjacent heads.
        value: [batch, key heads, keys, value size].
        is_causal: whether query i sees keys 0 to i alone.
        scale: factor of the products; 1 / sqrt(size) by default.
        soft_cap: c, if products s become c * tanh(s / c).
        window: w, if query i sees keys i - w + 1 to i + w - 1 alone (with ``is_causal``, to i).
        segment_ids: [batch, keys] integers; tokens see those of their own segment alone. Or two:
            those of queries, [batch, queries], which see keys of the same, [batch, keys].
        boundaries: [n] or [batch, n] integers, where segments begin, as cumulative lengths do; in
            place of ``segment_ids``.

    Returns:
        [batch, heads, queries, value size] in the query's dtype; zeros for a query that sees no
        key, as of torch's own function.

    Raises:
        ValueError: if shapes, dtypes or options do not fit.
    """
    query, key, value = _cast_by_autocast(query, key, value)
    segments = _as_pair(segment_ids)
    tokens = Tokens(query, key, value, segments)
    problems = list(_tensor_problems(tokens)) or [
        *_mask_problems(tokens, window, boundaries),
        *_segment_problems(tokens, boundaries),
        *_device_problems(tokens, boundaries),
    ]
    if soft_cap is not None and not soft_cap > 0:
        problems.append(f"soft_cap is {soft_cap}; give a number above 0, or None")
    if problems:
        raise ValueError("; ".join(problems))
    context = current_context()
    if boundaries is not None:
        length = key.shape[2]
        places = context.positions(length) if context else torch.arange(length, device=key.device)
        segments = _as_pair(_segments(boundaries, places, key.shape[0]))
    default = query.shape[-1] ** -0.5
    if scale not in (None, default):
        # Outside of the autograd function: blocks of one loop may differ in numbers of their
        # forward, such as this one, and not in those of a backward that is written by hand.
        query, default = query * float(scale), 1.0
    options = Options(is_causal, default, soft_cap, window)
    chosen = _implementation(query, value)
    if context is not None:
        chosen = over_context(context, chosen, options, query, key)
    ids = [each.to(torch.int32) for each in dict.fromkeys(segments or ())]  # one if it is both
    output, logsumexp = _Attention.apply(options, chosen, query, key, value, *ids)
    checkpoint_name(logsumexp, ATTENTION)
    output = checkpoint_name(output, ATTENTION)
    if len(ids) < 2:  # every query sees itself
        return output
    # Of the layout in which heads are joined: so the compiler does it in the product that follows.
    sees_one = (logsumexp[:, 0] > SEES_NO_KEY)[..., None, None]  # all heads see the same
    return torch.where(sees_one, output.transpose(1, 2), 0).transpose(1, 2)


class _Attention(torch.autograd.Function):
    """Map (query, key, value) to the output and the log-sum-exp of each query's scores."""

    @staticmethod
    def forward(
        options: Options,
        chosen: Implementation,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return chosen.forward(options, Tokens(query, key, value, _pair(ids)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options, ctx.chosen, query, key, value, *ids = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, *output, *ids)

    @staticmethod
    @differentiable_once(
        "attention saves no graph of its backward. Use scaled_dot_product_attention of torch, in a "
        "model of transformers by Recipe(attention=False)"
    )
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, *ids = ctx.saved_tensors
        tokens = Tokens(query, key, value, _pair(ids))
        grads = ctx.chosen.backward(ctx.options, tokens, output, logsumexp, grad)
        return (None, None, *grads, *(None for _ in ids))


def _implementation(query: Tensor, value: Tensor) -> Implementation:
    if query.device.type != "xla" or not ops.runtime().has_kernels():
        return CHUNKED
    if problem := splash.problem(query, value):
        warnings.warn(f"attention runs in chunks, without its kernel: {problem}", stacklevel=3)
        return CHUNKED
    return splash.SPLASH


def _cast_by_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast does for torch's own function."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [each if each.dtype is torch.float64 else each.to(dtype) for each in tensors]


def _segments(boundaries: Tensor, places: Tensor, batch: int) -> Tensor:
    """Return segment ids [batch, keys] of tokens at these places, from where segments begin."""
    each = (places.unsqueeze(-1) >= boundaries.unsqueeze(-2)).sum(-1)
    return each.expand(batch, -1)


def _pair(ids: Sequence[Tensor]) -> Pair | None:
    return Pair(ids[0], ids[-1]) if ids else None


def _as_pair(segment_ids: Tensor | tuple[Tensor, Tensor] | None) -> Pair | None:
    return _pair([segment_ids] if isinstance(segment_ids, Tensor) else segment_ids or ())


# ---------------------------------------------------------------- arguments


def _tensor_problems(tokens: Tokens) -> Iterator[str]:
    shapes = [list(each.shape) for each in tokens[:3]]
    if any(len(each) != 4 or 0 in each for each in shapes):
        yield (
            f"query, key and value are {shapes[0]}, {shapes[1]} and {shapes[2]}; give tensors "
            f"[batch, heads, length, size] that are not empty"
        )
        return
    dtypes = {each.dtype for each in tokens[:3]}
    if len(dtypes) > 1 or not tokens.query.is_floating_point():
        yield f"dtypes are {', '.join(sorted(map(str, dtypes)))}; give one floating dtype"
    (batch, heads, _, size), key_heads = shapes[0], shapes[1][1]
    if shapes[1][:3] != shapes[2][:3] or shapes[1][0] != batch or shapes[1][3] != size:
        yield (
            f"query {shapes[0]}, key {shapes[1]} and value {shapes[2]} do not fit: key and value "
            f"have the query's batch, the key its size, the value the key's heads and length"
        )
    elif heads % key_heads:
        yield f"{heads} heads cannot share {key_heads} key heads: give a divisor"


def _mask_problems(tokens: Tokens, window: int | None, boundaries: Tensor | None) -> Iterator[str]:
    query, key, _, segments = tokens
    queries, keys = query.shape[2], key.shape[2]
    one = segments is not None and segments.queries is segments.keys
    given = {"window": window, "segment_ids": one or None, "boundaries": boundaries}
    named = [name for name, each in given.items() if each is not None]
    if named and queries != keys:
        more = ", or segment_ids of queries and of keys" if one else ""
        yield (
            f"there are {queries} queries and {keys} keys; with {' and '.join(named)}, give as "
            f"many queries as keys{more}"
        )
    if window is not None and not (isinstance(window, int) and window > 0):
        yield f"window is {window}; give an integer of at least 1, or None"
    if segments is not None and boundaries is not None:
        yield "both segment_ids and boundaries are given; give one"


def _segment_problems(tokens: Tokens, boundaries: Tensor | None) -> Iterator[str]:
    query, key, _, segments = tokens
    batch, ids = key.shape[0], dict[str, tuple[Tensor, int]]()
    if segments is not None:
        ids["keys"] = segments.keys, key.shape[2]
        if segments.queries is not segments.keys:
            ids["queries"] = segments.queries, query.shape[2]
    for what, (each, length) in ids.items():
        if list(each.shape) != [batch, length]:
            shape = list(each.shape)
            yield f"segment_ids are {shape}, not [batch, {what}] = [{batch}, {length}]"
        if each.dtype is torch.bool:
            # Many are a cumsum of bools, which on XLA is no count, but whether any came before.
            yield "segment_ids are bools; give integers, also to cumsum: ends.int().cumsum(-1)"
        elif each.is_floating_point():
            yield f"segment_ids are {each.dtype}; give integers"
    if boundaries is not None:
        shape, numel = list(boundaries.shape), boundaries.numel()
        if shape not in ([numel], [batch, numel // batch]):
            yield f"boundaries are {shape}, not [n] or [{batch}, n]"
        if boundaries.is_floating_point():
            yield f"boundaries are {boundaries.dtype}; give integers"


def _device_problems(tokens: Tokens, boundaries: Tensor | None) -> Iterator[str]:
    query, key, value, segments = tokens
    tensors = {"query": query, "key": key, "value": value, "boundaries": boundaries}
    tensors["segment_ids"] = segments and segments.keys
    places = {name: each.device for name, each in tensors.items() if each is not None}
    if len(set(places.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in places.items())
        yield f"tensors are on several devices ({found}); move all to that of the query"
