"""``xla_fsdp.attention`` in models of others: by a name in transformers, or in place of torch's.

Call ``register()`` or ``replace_sdpa()`` once per process, in the main thread (before ``launch``,
on CPU). Calling them again does nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import version

import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.integrations import UntestedVersionError, require
from xla_fsdp.nn.attention.api import attention
from xla_fsdp.recipe import attention as by_name
from xla_fsdp.recipe.attention import NAME
from xla_fsdp.xla.ops import surround

MOST_SCORES = 96 * 2**30  # bytes: the memory of the largest chip, a v5p


def register() -> None:
    """Let transformers' models take ``attn_implementation="xla_fsdp"``, or
    ``"xla_fsdp_where_long"``: that from ``LONG`` tokens on, and "sdpa" for fewer, with a cache, for
    masks that are tensors, and on a TPU without JAX.

    Besides what a model asks for (grouped heads, scale, soft cap, sliding window), padding in
    ``attention_mask`` and packed ``position_ids`` become segments; other segments are given to the
    model as ``segment_ids``, [batch, length].

    Raises:
        UntestedVersionError: for untested versions of transformers.
    """
    require("transformers")
    if (found := version("transformers")).startswith("4."):
        raise UntestedVersionError(
            f'transformers {found} is installed, and attn_implementation="{NAME}" needs 5, which '
            f"says in another way what tokens see (and needs Python 3.11); replace_sdpa() works "
            f'with this one, for models loaded with "sdpa"'
        )
    by_name.register()


# ---------------------------------------------------------------- models that call torch


def replace_sdpa() -> None:
    """Let ``torch.nn.functional.scaled_dot_product_attention`` be ``xla_fsdp.attention`` for XLA
    tensors, where that can do what is asked; elsewhere it stays what it is, with a warning, or a
    ValueError where no chip would hold its scores.

    Models must look the function up when they run (``F.scaled_dot_product_attention``).
    """
    surround((F, "scaled_dot_product_attention", _sdpa))


def _sdpa(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.device.type == "xla":
        problem = _problem(query, key, attn_mask, dropout_p)
        if problem is None:
            return attention(query, key, value, is_causal=is_causal, scale=scale)
        _refuse_too_many_scores(query, key, problem)
        warnings.warn(f"attention computes all scores at once: {problem}", stacklevel=3)
    return original(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _refuse_too_many_scores(query: Tensor, key: Tensor, problem: str) -> None:
    nbytes = query.shape[:-1].numel() * key.shape[-2] * query.element_size()
    if nbytes > MOST_SCORES:
        raise ValueError(
            f"attention would compute all scores at once, {nbytes / 2**30:,.0f} GiB for "
            f"{query.shape[-2]} queries and {key.shape[-2]} keys, which no chip holds: {problem}"
        )


def _problem(query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout: float) -> str | None:
    if attn_mask is not None:
        return "it is given attn_mask; leave it out, with is_causal=True if the mask is causal"
    if dropout:
        return f"it drops weights (dropout_p = {dropout}); set it to 0"
    if query.dim() != 4 or query.shape[0] != key.shape[0]:
        return (
            f"query {list(query.shape)} and key {list(key.shape)} are not of one batch, [batch, "
            f"heads, length, size]"
        )
    return None
