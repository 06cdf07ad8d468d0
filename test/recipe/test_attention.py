"""Causal language models whose recipe computes attention without all scores, on two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from test.common.recipes import VOCABULARY, language_model
from test.common.scenarios import Scenarios, make, message
from xla_fsdp.recipe.attention import LONG
from xla_fsdp.recipe.causal_lm import why_all_scores

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="attention goes by name from transformers 5 on"
)

scenarios = Scenarios(__name__)
LENGTH = LONG + 128
STEPS = 2
llama = partial(language_model, "Llama", False, max_position_embeddings=LENGTH)


def tokens(rank: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, VOCABULARY, (2, length), generator=generator)


def with_mask(starts: int, ends: int, rank: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Padding before ``starts`` and from ``ends`` on; it counts in the loss, as any token."""
    places = torch.arange(length)
    seen = ((places >= starts) & (places < ends)).long()
    return {"attention_mask": torch.stack([seen, torch.ones_like(seen)])}


def packed(rank: int) -> dict[str, Tensor]:
    length = 200 + rank
    places = torch.cat([torch.arange(length), torch.arange(LENGTH - length)])
    return {"position_ids": places.expand(2, -1)}


def four_dims(rank: int) -> dict[str, Tensor]:
    return {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()}


INPUTS: dict[str, Any] = {
    "plain": lambda rank: {},
    "padded right": partial(with_mask, 0, 300),
    "padded left": partial(with_mask, 550, LENGTH),
    "packed": packed,
    "four dims": four_dims,
}


def train(model: Any, optimizer: Any, inputs: dict[str, Tensor]) -> Tensor:
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Found(NamedTuple):
    losses: list[float]
    updates: dict[str, Tensor]  # of SGD with a rate of 1: minus the sum of gradients
    attention: bool
    scan: Any
    replays: int


def train_on_rank(build: Any, batches: list[dict[str, Tensor]], *, replay: bool = False) -> Found:
    """Train by ``parallelize``."""
    import torch_xla

    from xla_fsdp import full_state_dict, parallelize

    model = make(build)
    start = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, recipe = parallelize(model, optimizer)
    step: Any = partial(train, model, optimizer)
    if replay:
        step = compiled = recipe.compile(lambda inputs: train(model, optimizer, inputs))
    device = torch_xla.device()
    losses = [step({name: each.to(device) for name, each in one.items()}) for one in batches]
    end = full_state_dict(model)
    updates = {name: end[name].cpu() - each for name, each in start.items()}
    replays = compiled.replays if replay else 0
    return Found([each.item() for each in losses], updates, recipe.attention, recipe.scan, replays)


def assert_like_plain(build: Any, own: list[Found], batches: list[list[dict[str, Tensor]]]) -> None:
    """Compare with the plain model on the batches of all ranks."""
    model = make(build).train()
    model.config.use_cache = False
    start = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for of_ranks in zip(*batches, strict=True):
        parts = [model(**one, labels=one["input_ids"]).loss / len(batches) for one in of_ranks]
        losses.append(sum(parts))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    means = [sum(each) / len(own) for each in zip(*(one.losses for one in own), strict=True)]
    assert means == pytest.approx([each.item() for each in losses], rel=1e-5)
    for name, end in model.state_dict().items():
        expected = end - start[name]
        most = expected.abs().max().item()
        assert most > 0, name
        # Norms start from 1, of which float32 knows the last 6e-8 only.
        allowed = 2e-4 * most + 5e-7
        torch.testing.assert_close(own[0].updates[name], expected, rtol=0, atol=allowed)


def batches_of(name: str, rank: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": tokens(rank), **INPUTS[name](rank)}] * STEPS


@scenarios.add
def trained(rank: int) -> dict[str, Found]:
    return {name: train_on_rank(llama, batches_of(name, rank)) for name in INPUTS}


@pytest.mark.parametrize("name", INPUTS)
def test_trains_as_the_plain_model(name: str) -> None:
    own = [scenarios.result("trained", rank)[name] for rank in range(2)]
    assert_like_plain(llama, own, [batches_of(name, rank) for rank in range(2)])
    assert [each.attention for each in own] == [True, True]


def of_two_lengths(rank: int) -> list[dict[str, Tensor]]:
    """Long and short texts by turns, each padded in another way."""
    found = []
    for at in range(8):
        length = (LENGTH, 64)[at % 2]
        padding = (at * 5, length - at * 3) if at % 4 < 2 else (0, length - 7 * at - rank)
        mask = with_mask(*padding, rank, length)
        found.append({"input_ids": tokens(rank + 2 * at, length), **mask})
    return found


@scenarios.add
def replayed(rank: int) -> Found:
    return train_on_rank(llama, of_two_lengths(rank), replay=True)


def test_replays_with_masks_that_vary() -> None:
    own = [scenarios.result("replayed", rank) for rank in range(2)]
    assert_like_plain(llama, own, [of_two_lengths(rank) for rank in range(2)])
    assert [each.replays for each in own] == [4, 4]  # of eight steps, each length is traced twice


# Attention of layer n is divided by n.
scaled = partial(
    language_model,
    "GPT2LMHead",
    False,
    n_positions=LENGTH,
    scale_attn_by_inverse_layer_idx=True,
)


@scenarios.add
def of_other_scales(rank: int) -> Found:
    return train_on_rank(scaled, batches_of("padded right", rank))


def test_layers_with_other_scales_run_as_one_loop() -> None:
    own = [scenarios.result("of_other_scales", rank) for rank in range(2)]
    assert_like_plain(scaled, own, [batches_of("padded right", rank) for rank in range(2)])
    assert own[0].attention
    assert own[0].scan


@scenarios.add
def programs(rank: int) -> dict[str, Any]:
    """Whether the program of a loss has a tensor of all scores."""
    import torch_xla

    from xla_fsdp import Recipe, parallelize

    device, found = torch_xla.device(), {}
    for wanted in (None, False):
        recipe = Recipe("lean", attention=wanted, scan=False, compile_step=False)
        model, _, _ = parallelize(make(llama), None, recipe)
        ids = tokens(rank).to(device)
        loss = model(ids, labels=ids).loss
        text = torch_xla._XLAC._get_xla_tensors_hlo([loss])
        found[str(wanted)] = f"{LENGTH},{LENGTH}]" in text
        torch_xla.sync()
    return found


def test_there_is_no_tensor_of_all_scores() -> None:
    found = scenarios.result("programs")
    assert found["None"] is False
    assert found["False"] is True


# ---------------------------------------------------------------- which models


@scenarios.add
def reports(rank: int) -> dict[str, Any]:
    from xla_fsdp import Recipe, parallelize

    def report(model: Any, recipe: Any = "lean") -> list[str]:
        _, _, done = parallelize(model, None, recipe)
        lines = done._report
        return [each.strip() for each in lines if each.strip().startswith("attention")]

    eager = partial(llama, attn_implementation="eager")
    return {
        "llama": report(make(llama)),
        "plain": report(make(llama), "plain"),
        "eager": report(make(eager)),
        "dropout": report(make(partial(llama, attention_dropout=0.1))),
        "bloom": report(make(bloom)),
        "t5": report(make(partial(language_model, "T5", True))),
        "forced": message(lambda: report(make(eager), Recipe(attention=True))),
    }


def test_a_function_put_in_the_place_of_sdpa_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def of_user(*args: Any, **options: Any) -> Any:
        raise AssertionError

    assert why_all_scores(make(llama)) == ""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", of_user)
    assert "another function than its own" in why_all_scores(make(llama))


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


def test_models_that_cannot_say_why() -> None:
    found = scenarios.result("reports")
    assert found["llama"] == [f"attention: without all scores from {LONG} tokens on"]
    assert found["plain"] == []
    assert 'attn_implementation="eager", not "sdpa"' in found["eager"][0]
    assert "set the dropout of attention to 0" in found["dropout"][0]
    assert "BloomForCausalLM" in found["bloom"][0]
    assert found["t5"] == []
    assert "the recipe sets attention, which LlamaForCausalLM does not allow" in found["forced"]
