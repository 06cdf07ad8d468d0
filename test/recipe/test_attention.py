"""Causal language models whose recipe computes attention without all scores, on two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from test.common.recipes import VOCABULARY, language_model
from test.common.scenarios import Scenarios, make, message
from xla_fsdp.recipe.attention import LONG

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="attention goes by name from transformers 5 on"
)

scenarios = Scenarios(__name__)
LENGTH = LONG + 128
STEPS = 2
llama = partial(language_model, "Llama", False, max_position_embeddings=LENGTH)


def tokens(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)


def with_mask(starts: int, ends: int, rank: int) -> dict[str, Tensor]:
    """Padding before ``starts`` and from ``ends`` on; it counts in the loss, as any token."""
    places = torch.arange(LENGTH)
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


def train(model: Any, optimizer: Any, batches: Any, device: Any) -> list[float]:
    losses = []
    for inputs in batches:
        given = {name: each.to(device) for name, each in inputs.items()}
        loss = model(**given, labels=given["input_ids"]).loss
        losses.append(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.item() for each in losses]


@scenarios.add
def trained(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import parallelize

    found: dict[str, Any] = {}
    for name, inputs in INPUTS.items():
        model = make(llama)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, recipe = parallelize(model, optimizer)
        batches = [{"input_ids": tokens(rank), **inputs(rank)}] * STEPS
        found[name] = train(model, optimizer, batches, torch_xla.device()), recipe.attention
    return found


@pytest.mark.parametrize("name", INPUTS)
def test_trains_as_the_plain_model(name: str) -> None:
    own = [scenarios.result("trained", rank)[name] for rank in range(2)]
    model = make(llama).train()
    model.config.use_cache = False
    inputs = [{"input_ids": tokens(rank), **INPUTS[name](rank)} for rank in range(2)]
    both = {key: torch.cat([each[key] for each in inputs]) for key in inputs[0]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = train(model, optimizer, [both] * STEPS, "cpu")
    assert [chosen for _, chosen in own] == [True, True]
    means = [sum(each) / 2 for each in zip(*(losses for losses, _ in own), strict=True)]
    assert means == pytest.approx(expected, rel=1e-5)


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
