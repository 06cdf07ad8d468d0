"""Attention in chunks against plain attention, on plain CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from test.common.attention import CASES, LENGTH, assert_like_plain, case, tensors, with_grads
from xla_fsdp import attention
from xla_fsdp.nn.attention import chunked


@pytest.mark.parametrize("keys_per_chunk", [512, 16, 7])
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, keys_per_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "KEYS_PER_CHUNK", keys_per_chunk)
    sizes, options = case(name)
    given = tensors(**sizes)
    assert_like_plain(with_grads(attention, given, **options), given, options, 2e-6)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_bf16_sums_are_wide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "KEYS_PER_CHUNK", 16)
    sizes, options = case(name)
    given = tensors(torch.bfloat16, **sizes)
    found = with_grads(attention, given, **options)
    assert {each.dtype for each in found} == {torch.bfloat16}
    assert_like_plain(found, given, options, 0.01)


@pytest.mark.parametrize("is_causal", [True, False])
def test_means_what_torch_does(is_causal: bool) -> None:
    query, key, value, _ = tensors(queries=20)
    expected = F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    found = attention(query, key, value, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(found, expected)


def test_saves_nothing_of_the_size_of_all_scores() -> None:
    query, key, value, _ = (each.requires_grad_() for each in tensors())
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, id):
        output = attention(query, key, value, is_causal=True)
    statistics = query.shape[0] * query.shape[1] * query.shape[2]
    given = query.numel() + key.numel() + value.numel()
    assert sum(each.numel() for each in saved) == given + output.numel() + statistics


def test_masked_chunks_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "KEYS_PER_CHUNK", 10)
    rows: list[int] = []
    plain = chunked.Chunked._scores

    def scores(*args: Any) -> Any:
        rows.append(args[-1].stop - args[-1].start)
        return plain(*args)

    monkeypatch.setattr(chunked.Chunked, "_scores", scores)
    query, key, value, _ = tensors()
    attention(query, key, value, is_causal=True)
    assert rows == [50, 40, 30, 20, 10]
    rows.clear()
    attention(query, key, value, is_causal=True, window=5)
    assert rows == [14, 14, 14, 14, 10]


def test_follows_autocast() -> None:
    query, key, value, _ = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(query, key.bfloat16(), value).dtype is torch.bfloat16


def test_keys_of_another_sequence_are_padded() -> None:
    given = tensors(queries=20)
    seen = torch.arange(LENGTH) < torch.tensor([[50], [31]])
    ids_of_both = torch.ones(2, 20, dtype=torch.int64), seen.int()
    found = with_grads(attention, given, segment_ids=ids_of_both)
    query, key, value, _ = given
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen[:, None, None], enable_gqa=True
    )
    torch.testing.assert_close(found[0], expected)
    assert not found[2][1, :, 31:].any()


def test_shapes_without_values() -> None:
    given = [each.to("meta") for each in tensors()[:3]]
    assert attention(*given, is_causal=True, window=3).shape == given[0].shape


def test_cannot_be_differentiated_twice() -> None:
    query, key, value, _ = (each.requires_grad_() for each in tensors())
    [grad] = torch.autograd.grad(attention(query, key, value).sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="scaled_dot_product_attention"):
        grad.sum().backward()


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


WRONG: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "heads": ({"key_heads": 3}, {}, "4 heads cannot share 3 key heads"),
    "window": ({}, {"window": 0}, "window is 0; give an integer of at least 1"),
    "part of a window": ({}, {"window": 2.5}, "window is 2.5; give an integer"),
    "soft_cap": ({}, {"soft_cap": 0.0}, "soft_cap is 0.0; give a number above 0"),
    "window of others": ({"queries": 9}, {"window": 3}, "with window, give as many queries"),
    "segments": ({}, {"segment_ids": ids(2, 3)}, "segment_ids are .2, 3., not .batch, keys"),
    "one of two": ({"queries": 9}, {"segment_ids": ids(2, 50)}, "or segment_ids of queries and of"),
    "places": ({}, {"segment_ids": ids(2, 50).to("meta")}, "query on cpu, .* segment_ids on meta"),
    "one boundary": ({}, {"boundaries": torch.tensor(3)}, r"boundaries are \[\], not"),
    "boundaries": ({}, {"boundaries": ids(3, 3)}, r"boundaries are \[3, 3\], not \[n\] or"),
    "floats": ({}, {"segment_ids": torch.zeros(2, 50)}, "give integers"),
    "bools": (
        {},
        {"segment_ids": ids(2, 50) == 0},
        "segment_ids are bools; give integers, also to",
    ),
    "both": ({}, {"segment_ids": ids(2, 50), "boundaries": ids(2)}, "both .* are given; give one"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    sizes, options, message = WRONG[name]
    query, key, value, _ = tensors(**sizes)
    with pytest.raises(ValueError, match=message):
        attention(query, key, value, **options)


def test_wrong_tensors() -> None:
    query, key, value, _ = tensors()
    with pytest.raises(ValueError, match="that are not empty"):
        attention(query[0], key[0], value[0])
    with pytest.raises(ValueError, match="give one floating dtype"):
        attention(query, key, value.bfloat16())
    with pytest.raises(ValueError, match="do not fit"):
        attention(query, key[..., :4], value)
