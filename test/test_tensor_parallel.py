"""Tensor, sequence and loss parallelism train as the plain model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test.ranks import cached_outcome, run_on_ranks
from test.tensor_training import Case, assert_close, reference, train


def alone(model: str, degree: int, **options: bool) -> Case:
    """Tensor parallelism and nothing else."""
    return Case(model, (("tensor", degree),), **options)


CASES = {
    f"{model}-{degree}-{'-'.join(options) or 'tensor'}": alone(
        model, degree, **dict.fromkeys(options, True)
    )
    for model in ("Gpt", "Llama")
    for degree in (2, 4)
    for options in ((), ("loss",), ("sequence", "loss"))
}


def train_cases(rank: int, names: list[str]) -> dict[str, Any]:
    return {name: train(rank, CASES[name]) for name in names}


@cached_outcome
def outcomes(num_ranks: int) -> list[dict[str, Any]]:
    names = [name for name, case in CASES.items() if case.num_ranks == num_ranks]
    return run_on_ranks(train_cases, num_ranks, names)


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_plain_model(name: str) -> None:
    expected = reference(CASES[name])
    for found in (each[name] for each in outcomes(CASES[name].num_ranks)):
        for what in ("losses", "norms"):
            assert_close(torch.tensor(found[what]), torch.tensor(expected[what]), what)
        assert set(found["state"]) == set(expected["state"])
        for key, value in expected["state"].items():
            assert_close(found["state"][key], value, key)
