"""Mixtures of transformers train as with transformers' own eager experts, in every recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from test.common.compare import assert_close
from test.common.mixtures import KINDS, STEPS, Mix, Trained, mixture, train_on_ranks, train_plain
from test.common.ranks import cached_outcome
from test.common.scenarios import make
from xla_fsdp.recipe.experts import compute, register
from xla_fsdp.recipe.options import NAMES

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="experts of transformers 4 are modules of their own"
)

TOLERANCE = 1e-5
BF16 = {"compute_dtype": "bfloat16"}
QUICK = (Mix("gpt_oss_alike"),)  # with transposed weights and biases
SLOW = tuple(Mix(model, recipe) for model in KINDS for recipe in NAMES)


@cached_outcome
def quick() -> list[list[Trained]]:
    return train_on_ranks(QUICK, 3)


@pytest.mark.parametrize("number", range(len(QUICK)), ids=lambda number: QUICK[number].model)
def test_the_leanest_program_trains_as_with_eager_experts(number: int) -> None:
    check(QUICK[number], quick()[number])


@cached_outcome
def in_full(num_ranks: int) -> list[list[Trained]]:
    return train_on_ranks(SLOW, num_ranks, timeout=1700)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("number", range(len(SLOW)), ids=lambda n: f"{SLOW[n].model}-{SLOW[n].recipe}")
def test_every_recipe_trains_as_with_eager_experts(number: int, num_ranks: int) -> None:
    check(SLOW[number], in_full(num_ranks)[number])


def check(mix: Mix, found: list[Trained]) -> None:
    """Losses, all gradients and the state of three steps are those of the plain model."""
    plain, first = train_plain(mix.model, len(found)), found[0]
    lines = "\n".join(first.lines)
    assert "  experts: grouped products, as eager reads the device" in first.lines, lines
    assert first.losses == pytest.approx(plain.losses, rel=TOLERANCE), lines
    for step in range(STEPS):
        # Of later steps those of other parameters, by rounding, than the plain model has.
        smallest = 0.3 if step else 0.0
        limits: Any = {"atol": 1e-6, "of_largest": TOLERANCE, "smallest": smallest}
        own, expected = first.gradients(step), plain.gradients(step)
        assert_close(own, expected, what=f"gradient {step}", **limits)
    assert_close(first.states[-1], plain.states[-1], atol=1e-6, of_largest=TOLERANCE)
    if mix.recipe != "plain":
        assert first.replays, lines
