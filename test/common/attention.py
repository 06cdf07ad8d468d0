"""Attention with all scores in memory, and ways to call it, for comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from test.common.compare import assert_close

BATCH, HEADS, LENGTH, SIZE = 2, 4, 50, 8

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"is_causal": True, "scale": 0.7},
    "soft_cap": {"is_causal": True, "soft_cap": 1.5},
    "soft_cap_of_all": {"soft_cap": 0.5},
    "window": {"is_causal": True, "window": 7},
    "window_both_sides": {"window": 7},
    "window_of_one": {"is_causal": True, "window": 1},
    "wide_window": {"is_causal": True, "window": 1000},
    "segments": {"segment_ids": "random"},
    "causal_segments": {"is_causal": True, "segment_ids": "sorted"},
    "boundaries": {"is_causal": True, "boundaries": [0, 3, 20, 49, 50]},
    "boundaries_of_each": {"boundaries": [[0, 10], [0, 31]]},
    "all": {"is_causal": True, "scale": 0.5, "soft_cap": 2.0, "window": 9, "segment_ids": "sorted"},
    "one_group": {"is_causal": True, "key_heads": 1},
    "no_groups": {"is_causal": True, "key_heads": HEADS},
    "short_queries": {"is_causal": True, "queries": 20},
    "short_keys": {"is_causal": True, "keys": 20},
    "cross": {"queries": 13},
    "other_value_size": {"is_causal": True, "value_size": 5},
}


def tensors(
    dtype: torch.dtype = torch.float32,
    *,
    queries: int = LENGTH,
    keys: int = LENGTH,
    key_heads: int = 2,
    size: int = SIZE,
    value_size: int = 0,
) -> list[Tensor]:
    """Return query, key, value and a gradient of the output."""
    draw = torch.Generator().manual_seed(3)
    shapes = [
        (BATCH, HEADS, queries, size),
        (BATCH, key_heads, keys, size),
        (BATCH, key_heads, keys, value_size or size),
        (BATCH, HEADS, queries, value_size or size),
    ]
    return [torch.randn(*shape, generator=draw).to(dtype) for shape in shapes]


def case(name: str, **sizes: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the sizes of the tensors and the options of a case."""
    given = copy.deepcopy(CASES[name])
    names = ("queries", "keys", "key_heads", "value_size")
    sizes = sizes | {each: given.pop(each) for each in names if each in given}
    length = sizes.get("keys", LENGTH)
    ids = torch.randint(0, 3, (BATCH, length), generator=torch.Generator().manual_seed(5))
    if kind := given.get("segment_ids"):
        given["segment_ids"] = ids if kind == "random" else ids.sort(-1).values
    if "boundaries" in given:
        given["boundaries"] = torch.tensor(given["boundaries"])
    return sizes, given


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    segment_ids: Tensor | None = None,
    boundaries: Tensor | None = None,
) -> Tensor:
    """Return what ``attention`` should."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    i = torch.arange(query.shape[2]).unsqueeze(-1)
    j = torch.arange(key.shape[2])
    seen = torch.ones(len(i), len(j), dtype=torch.bool)
    seen &= (j <= i) if is_causal else seen
    seen &= (i - j).abs() < window if window is not None else seen
    if boundaries is not None:
        segment_ids = (j.unsqueeze(-1) >= boundaries.unsqueeze(-2)).sum(-1)
        segment_ids = segment_ids.expand(query.shape[0], -1)
    if segment_ids is not None:
        seen = seen & (segment_ids.unsqueeze(-1) == segment_ids.unsqueeze(-2)).unsqueeze(1)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


def with_grads(compute: Callable[..., Tensor], given: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the output, and the gradients of query, key and value, on the host."""
    *leaves, grad = [each.detach() for each in given]
    leaves = [each.requires_grad_() for each in leaves]
    output = compute(*leaves, **options)
    output.backward(grad)
    return [each.detach().cpu() for each in (output, *(leaf.grad for leaf in leaves))]


def assert_like_plain(
    found: list[Tensor], given: list[Tensor], options: dict[str, Any], tolerance: float
) -> None:
    """Compare with plain attention in float64 of the same values."""
    expected = with_grads(plain, [each.double() for each in given], **options)
    names = ("output", "query", "key", "value")
    assert_close(
        {name: each.double() for name, each in zip(names, found, strict=True)},
        dict(zip(names, expected, strict=True)),
        what="attention",
        atol=1e-6,
        of_largest=tolerance,
        smallest=0.0,
    )
