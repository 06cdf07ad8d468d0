"""``xla_fsdp.attention`` in models of transformers: ``attn_implementation`` of theirs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.context_parallel import current_context
from xla_fsdp.nn.attention.api import attention
from xla_fsdp.xla import ops
from xla_fsdp.xla.kernels import has_jax

NAME = "xla_fsdp"
WHERE_LONG = "xla_fsdp_where_long"
LONG = 512
"""Tokens of one block of the kernel, and of one chunk: fewer have few scores."""


def register() -> None:
    """Let transformers' models take ``attn_implementation="xla_fsdp"`` and
    ``"xla_fsdp_where_long"``."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(WHERE_LONG, attend_where_long)
    AttentionMaskInterface.register(WHERE_LONG, mask_where_long)


def is_sdpa_replaced() -> bool:
    """Return whether "sdpa" is what the user, or another package, has put in its place."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return found != (sdpa_attention_forward, sdpa_mask)


def attend_where_long(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as the mask says, which is of ``mask_where_long`` or of another maker."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    is_known = isinstance(attention_mask, Seen)
    if options.get("segment_ids") is not None and not is_known:  # "sdpa" would ignore them
        raise ValueError(
            f"{type(module).__name__} is given segment_ids, which need {LONG} tokens, no cache and "
            f"no other mask; give position_ids that start from 0 in each text"
        )
    chosen: Any = attend if is_known else sdpa_attention_forward
    result: tuple[Tensor, None] = chosen(module, query, key, value, attention_mask, **options)
    return result


def mask_where_long(*, q_length: int, kv_length: int, device: Any, **others: Any) -> Any:
    """Return ``mask`` where ``attention`` is to be computed without all scores; else a mask for
    "sdpa"."""
    from transformers.masking_utils import sdpa_mask

    # Tensors without values are of a trial, whose texts are short.
    is_long = q_length >= LONG or torch.device(device).type == "meta"
    has_kernel = has_jax() or not ops.runtime().has_kernels()
    if (q_length == kv_length and is_long and has_kernel) or current_context() is not None:
        return mask(**others)
    lengths: dict[str, Any] = {"q_length": q_length, "kv_length": kv_length}
    return sdpa_mask(**lengths, device=device, **others)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    segment_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' own functions do.

    Returns:
        [batch, length, heads, size], and no weights.

    Raises:
        ValueError: if the model asks for what ``attention`` cannot do.
    """
    name = type(module).__name__
    unknown = [key for key in _unknown(type(module).__module__) if others.get(key) is not None]
    _refuse(name, dropout, attention_mask, unknown)
    if isinstance(attention_mask, Seen):
        seen = attention_mask
    else:  # of models that ask for no mask
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        seen = Seen(attention_mask, None, bool(causal), sliding_window)
    if segment_ids is not None and not (seen.padding is None and seen.documents is None):
        raise ValueError(
            f"{name} is given segment_ids and padding or packed position_ids; give segment_ids "
            f"alone, with a segment of its own for padding"
        )
    if seen.is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{name} has {query.shape[2]} queries for {key.shape[2]} keys, as in generation with a "
            f"cache. Generate with use_cache=False, or after "
            f'model.set_attn_implementation("sdpa")'
        )
    output = attention(
        query,
        key,
        value,
        is_causal=seen.is_causal,
        scale=scaling,
        soft_cap=softcap,
        window=seen.window,
        segment_ids=_segments(query, seen) if segment_ids is None else segment_ids,
    )
    return output.transpose(1, 2).contiguous(), None


@functools.cache
def _unknown(module: str) -> frozenset[str]:
    """Return what the functions that a model of this Python module may call compute with, by
    another name or none, and ``attend`` does not."""
    from transformers import AttentionInterface

    registered = AttentionInterface().values()
    others = [each for each in registered if each.__module__.startswith("transformers.")]
    others.append(getattr(sys.modules.get(module), "eager_attention_forward", attend))
    taken = {name for each in others for name in inspect.signature(each).parameters}
    return frozenset(taken - inspect.signature(attend).parameters.keys() - {"kwargs"})


_INSTEAD = 'load the model with "sdpa", or give parallelize a Recipe(attention=False)'


def _refuse(
    name: str, dropout: float, attention_mask: Seen | Tensor | None, unknown: list[str]
) -> None:
    if unknown:
        raise ValueError(
            f"{name} computes attention with {', '.join(sorted(unknown))}, which attention without "
            f"all scores does not know; {_INSTEAD}"
        )
    if dropout:
        raise ValueError(
            f"{name} drops attention weights (p = {dropout}), which attention without all scores "
            f"does not do; set the dropout of attention to 0 in the config (attention_dropout, or "
            f"attention_probs_dropout_prob), {_INSTEAD}"
        )
    if isinstance(attention_mask, Tensor) and attention_mask.dim() != 2:
        raise ValueError(
            f"{name} is given a mask of {list(attention_mask.shape)}, and attn_implementation="
            f'"{NAME}" takes padding [batch, length] alone; give segment_ids, or load the model '
            f'with "sdpa"'
        )


def _segments(query: Tensor, seen: Seen) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return what ``attention`` takes for segments. Padded keys are seen by no query, also by none
    at the same place."""
    if seen.padding is None:
        return seen.documents
    keys = seen.padding.to(torch.int32)
    return keys.new_ones(query.shape[0], query.shape[2]), keys


# ---------------------------------------------------------------- masks of transformers


class Seen(NamedTuple):
    """Which tokens see which, as the mask that a model hands to ``attend``.

    Not a tensor, and never None: a model that computes attention by itself then fails, where
    without a mask it would see too much.
    """

    padding: Tensor | None  # [batch, keys], false or 0 for keys that nothing sees
    documents: Tensor | None  # [batch, length] int32, ids of packed texts; then without padding
    is_causal: bool
    window: int | None  # as that of ``attention``


def mask(
    *,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Seen:
    """Return what padding, packed sequences and positions leave to be seen; inside
    ``context_parallel``, where positions of one sequence jump, without packed sequences.

    Raises:
        ValueError: if the mask is made of more than these.
    """
    parts = dict(_parts(mask_function))
    unknown = [name for name in parts if name not in _KNOWN]
    if unknown:
        raise ValueError(
            f"the model masks attention by {', '.join(unknown)}, which attn_implementation="
            f'"{NAME}" does not know; load it with "sdpa" or "eager"'
        )
    positions = parts.get("remap_positions_for_packed_sequence", {}).get("position_ids")
    is_causal = mask_function is None or "causal_mask_function" in parts
    window = _window(parts, is_causal)
    if positions is not None and current_context() is None:
        return Seen(None, _documents(positions), is_causal, window)
    return Seen(attention_mask, None, is_causal, window)


def _documents(positions: Tensor) -> Tensor:
    """Return segment ids of packed sequences, each of which has consecutive positions."""
    # Not those that transformers has found: a cumsum of bools, which on XLA is no count.
    starts = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    return starts.to(torch.int32).cumsum(-1)


def _window(parts: dict[str, dict[str, Any]], is_causal: bool) -> int | None:
    """Return how many tokens a query sees before it (and, if not causal, after it), and itself."""
    before = parts.get("sliding_window_overlay", {}).get("sliding_window")
    beside = parts.get("sliding_window_bidirectional_overlay", {}).get("sliding_window")
    if before is not None and not is_causal:
        raise ValueError(
            f"the model masks attention by a window before each token without a causal mask, "
            f'which attn_implementation="{NAME}" does not know; load it with "sdpa" or "eager"'
        )
    widths = [before, None if beside is None else beside + 1]  # without the token itself
    return min((int(each) for each in widths if each is not None), default=None)


_KNOWN = (
    "and_masks",
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)


def _parts(function: Callable[..., Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names of the functions of transformers that made ``function``, each with the values
    it was made from."""
    if function is None:
        return
    values = dict(inspect.getclosurevars(function).nonlocals)
    yield function.__qualname__.partition(".")[0], values
    inner = [values.get("mask_function"), *values.get("mask_functions", ())]
    for each in inner:
        yield from _parts(each)
