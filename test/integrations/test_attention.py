"""transformers' models with ``attn_implementation="xla_fsdp"`` against their own attention."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from test.common.attention import assert_like_plain, plain, tensors, with_grads
from test.common.ranks import run_on_ranks
from test.common.scenarios import message

transformers = pytest.importorskip("transformers")

from xla_fsdp.integrations import UntestedVersionError, attention  # noqa: E402
from xla_fsdp.recipe.attention import attend, mask  # noqa: E402

if transformers.__version__ < "5":
    pytest.skip("models take it by name from transformers 5 on", allow_module_level=True)

LENGTH = 24
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma2": ("Gemma2", {"sliding_window": 5, "attn_logit_softcapping": 0.7}),
    "gemma3": (
        "Gemma3",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def model(name: str, implementation: str, **options: Any) -> Any:
    kind, own = MODELS[name]
    config_class = getattr(
        transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    )
    config = config_class(**SIZES, **own, **options)
    config._attn_implementation = implementation
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for value in made.parameters():
            # As drawn, what tokens see hardly changes what they predict.
            value.mul_(5 if value.dim() > 1 else 1)
    return made.train()


def trained(
    name: str, implementation: str, device: Any = "cpu", **inputs: Any
) -> tuple[Tensor, list[Tensor]]:
    """The loss of a batch, and its gradients, on the host."""
    made = model(name, implementation).to(device)
    ids = torch.randint(0, 40, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids
    if "attention_mask" in inputs:
        labels = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    given = {"input_ids": ids, "labels": labels, **inputs}
    loss = made(**{key: each.to(device) for key, each in given.items()}, use_cache=False).loss
    loss.backward()
    return loss.detach().cpu(), [each.grad.cpu() for each in made.parameters()]


def packed(*lengths: int) -> Tensor:
    """Positions of sequences of these lengths, [1, length]."""
    return torch.cat([torch.arange(each) for each in lengths])[None]


@pytest.fixture(autouse=True)
def registered() -> None:
    attention.register()
    attention.register()


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_like_eager(name: str, kind: str) -> None:
    inputs: dict[str, Any] = {}
    if kind == "padded":
        inputs["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.int64)
        inputs["attention_mask"][1, 17:] = 0
    if kind == "packed":
        inputs["position_ids"] = packed(10, 3, LENGTH - 13)
    found, expected = trained(name, "xla_fsdp", **inputs), trained(name, "eager", **inputs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


# Bidirectional windows, windows that attention is not told of, and keys of a padded encoder.
OTHERS: dict[str, dict[str, Any]] = {
    "ModernBertModel": {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2},
    "PhimoeForCausalLM": {**SIZES, "num_local_experts": 2, "sliding_window": 3},
    "BartModel": {
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        "vocab_size": 40,
        "d_model": 32,
    },
}
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)


@pytest.mark.parametrize("name", OTHERS)
def test_sees_what_the_mask_leaves(name: str) -> None:
    ids = torch.randint(1, 40, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    seen = torch.arange(LENGTH) < torch.tensor([[LENGTH], [17]])
    inputs = {"input_ids": ids, "attention_mask": seen}
    if name == "BartModel":
        inputs["decoder_input_ids"] = ids

    def found(implementation: str) -> Tensor:
        made_by = getattr(transformers, name)
        config = made_by.config_class(**OTHERS[name], **TOKENS)
        config._attn_implementation = implementation
        with torch.random.fork_rng():
            torch.manual_seed(3)
            made = made_by(config).eval()
        result = made(**inputs)[0]
        return result if name == "BartModel" else result[seen]

    torch.testing.assert_close(found("xla_fsdp"), found("eager"), atol=1e-5, rtol=1e-4)


def test_models_with_attention_of_their_own_fail() -> None:
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=4)
    config._attn_implementation = "xla_fsdp"
    with pytest.raises(TypeError, match="Seen"):
        transformers.BloomForCausalLM(config)(torch.ones(1, 4, dtype=torch.int64))


def test_segments_are_given_by_name() -> None:
    inputs = {"position_ids": packed(10, LENGTH - 10)}
    ids = (torch.arange(LENGTH) >= 10).long().expand(2, -1)
    # A cache keeps transformers from looking for packed sequences.
    found = trained_with_segments(ids, **inputs)
    torch.testing.assert_close(found, trained("llama", "eager", **inputs)[0])


def trained_with_segments(segment_ids: Tensor, **inputs: Any) -> Tensor:
    made = model("llama", "xla_fsdp")
    ids = torch.randint(0, 40, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    output = made(input_ids=ids, labels=ids, use_cache=True, segment_ids=segment_ids, **inputs)
    return output.loss.detach()


def test_refuses_what_would_be_another_result() -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="set the dropout of attention to 0 in the config"):
        model("llama", "xla_fsdp", attention_dropout=0.1)(ids)
    with pytest.raises(ValueError, match=r"takes padding \[batch, length\] alone"):
        model("llama", "xla_fsdp")(ids, attention_mask=torch.ones(1, 1, 4, 4))
    made = model("llama", "xla_fsdp").eval()
    with pytest.raises(ValueError, match="Generate with use_cache=False"):
        made.generate(ids, max_new_tokens=3, do_sample=False)
    made.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)


def test_refuses_what_other_functions_compute_with() -> None:
    options = {**SIZES, "num_local_experts": 2, "sliding_window": 4}
    config = transformers.GptOssConfig(**options, **TOKENS)
    config._attn_implementation = "xla_fsdp"
    with pytest.raises(ValueError, match="computes attention with s_aux"):
        transformers.GptOssForCausalLM(config)(torch.ones(1, 4, dtype=torch.int64))
    # A name that only the eager function in the model's own file has.
    file = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    own = object.__new__(file.Inkling2FullAttention)
    query, key, value, _ = tensors()
    with pytest.raises(ValueError, match="computes attention with sinks"):
        attend(own, query, key, value, None, sinks=torch.ones(1))


def test_short_texts_refuse_segments() -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="segment_ids, which need 512 tokens"):
        model("llama", "xla_fsdp_where_long")(ids, segment_ids=ids)


def test_transformers_4_is_refused() -> None:
    older = mock.patch.object(attention, "version", return_value="4.57.6")
    with older, pytest.raises(UntestedVersionError, match=r"transformers 4\.57\.6 is installed"):
        attention.register()


def test_refuses_masks_that_it_does_not_know() -> None:
    from transformers.masking_utils import causal_mask_function, chunked_overlay, or_masks

    other = or_masks(causal_mask_function, chunked_overlay(2, torch.zeros(1)))
    with pytest.raises(ValueError, match="masks attention by or_masks, chunked_overlay"):
        mask(mask_function=other)


def on_xla(rank: int) -> dict[str, Any]:
    """What torch's function does on a rank after ``replace_sdpa``, and a model by name."""
    import warnings

    import torch.nn.functional as F
    import torch_xla

    from xla_fsdp.nn.attention import api

    attention.replace_sdpa()
    attention.replace_sdpa()
    query, key, value, grad = (
        each.to(torch_xla.device()) for each in tensors(queries=600, keys=600)
    )
    calls: list[Tensor] = []
    named = mock.patch.object(api, "checkpoint_name", lambda each, name: calls.append(each) or each)

    def compute(*given: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(*given, **options)

    with named, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        long = with_grads(compute, [query, key, value, grad], is_causal=True, enable_gqa=True)
        own = len(calls)
        mask = torch.ones(600, 600, dtype=torch.bool, device=query.device).tril()
        compute(query, key, value, attn_mask=mask, enable_gqa=True)
        compute(query[0], key[0], value[0], enable_gqa=True)
        host = compute(*(each[:, :, :9].cpu() for each in (query, key, value)), enable_gqa=True)
        large = query[:, :, :1].expand(-1, -1, 131072, -1)
        refused = message(lambda: compute(large, large, large, dropout_p=0.1))
    attention.register()
    return {
        "packed": trained("llama", "xla_fsdp", query.device, position_ids=packed(5, 3, 16)),
        "long": long,
        "calls": (own, len(calls)),
        "told": [str(each.message) for each in told],
        "host": host,
        "refused": refused,
    }


def test_both_on_xla() -> None:
    [found] = run_on_ranks(on_xla, 1)
    expected = trained("llama", "eager", position_ids=packed(5, 3, 16))
    torch.testing.assert_close(found["packed"], expected, atol=1e-4, rtol=1e-3)
    given = tensors(queries=600, keys=600)
    assert_like_plain(found["long"], given, {"is_causal": True}, 2e-6)
    assert found["calls"] == (2, 2)
    masked, dims = found["told"]
    assert masked.endswith("leave it out, with is_causal=True if the mask is causal")
    assert "are not of one batch" in dims
    assert found["refused"].startswith(
        "ValueError: attention would compute all scores at once, 512 GiB for 131072 queries"
    )
    host = [each[:, :, :9] for each in given[:3]]
    torch.testing.assert_close(found["host"], plain(*host))
