"""Tensor, sequence and loss parallelism train as the plain model does, alone and over sharded and
hybrid sharded models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from test.common.docs_snippets import snippets
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scenarios import make
from test.common.tensor_models import Llama
from test.common.tensor_training import Case, assert_like_plain, train

README = "the recipe of the documentation"
ALL = {"sequence": True, "loss": True}
FLAT = (("flatten_parameters", True),)
ROWS = (("shard_param_on_dim_0", True), ("reshard_after_forward", False))


def mesh(
    tensor: int, shard: int = 0, replica: int = 0, context: int = 0
) -> tuple[tuple[str, int], ...]:
    """Axes with a size, the outermost first."""
    sizes = {"replica": replica, "shard": shard, "context": context, "tensor": tensor}
    return tuple((name, size) for name, size in sizes.items() if size)


QUICK = {
    "Gpt sharded": Case("Gpt", mesh(2, 2), shard="wrapped", **ALL),
    README: Case("Llama", mesh(2, 2), shard="in_place", **ALL),
    "scanned": Case("FusedLlama", mesh(2, 2), shard="wrapped", scan=True, **ALL),
}
SLOW = {
    "scanned Llama": Case("Llama", mesh(2, 2), shard="wrapped", scan=True, **ALL),
    "attention": Case("FusedLlama", mesh(2, 2), shard="in_place", **ALL),
    "attention, 8 ranks": Case("FusedLlama", mesh(4, 2), shard="wrapped", scan=True, **ALL),
    "context": Case("FusedLlama", mesh(2, 1, context=2), shard="in_place", **ALL),
    "context, 8 ranks": Case(
        "FusedLlama", mesh(2, 2, context=2), shard="wrapped", scan=True, **ALL
    ),
    "scanned Gpt": Case("Gpt", mesh(2, 1), shard="wrapped", scan=True, **ALL),
    "scanned, 2 ranks": Case("Llama", mesh(2, 1), shard="wrapped", scan=True),
    "stacked": Case("Llama", mesh(2, 2), shard="wrapped", scan=True, stacked=True, **ALL),
    "stacked in place": Case("Gpt", mesh(2, 1), shard="in_place", scan=True, stacked=True, **ALL),
    **{
        f"{model} {degree} {' '.join(options)}": Case(
            model, mesh(degree), **dict.fromkeys(options, True)
        )
        for model in ("Gpt", "Llama")
        for degree in (2, 4)
        for options in ((), ("loss",), ("sequence",), ("sequence", "loss"))
    },
    "flat": Case("Gpt", mesh(2, 2), shard="wrapped", options=FLAT, **ALL),
    "rows": Case("Llama", mesh(2, 2), shard="wrapped", options=ROWS),
    "one shard": Case("Gpt", mesh(2, 1), shard="wrapped", **ALL),
    "2 x 4": Case("Gpt", mesh(4, 2), shard="wrapped", **ALL),
    "4 x 2": Case("Llama", mesh(2, 4), shard="in_place", **ALL),
    "replicas 4": Case("Gpt", mesh(2, 1, 2), shard="wrapped", **ALL),
    "replicas 8": Case("Llama", mesh(2, 2, 2), shard="wrapped", **ALL),
    "replicas 8 in place": Case("Gpt", mesh(2, 2, 2), shard="in_place", **ALL),
}


def train_cases(rank: int, cases: Mapping[str, Case]) -> dict[str, Any]:
    return {
        name: train(rank, case, recipe if name == README else None) for name, case in cases.items()
    }


def recipe() -> tuple[Any, Any]:
    """The mesh and the model that the page on tensor parallelism makes."""
    ways = [each.code for each in snippets() if each.path.stem == "tensor_parallel"]
    [code] = [each for each in ways if "parallelize_module(model, mesh" in each]
    space: dict[str, Any] = {"build_llama": lambda: make(Llama)}
    exec(code.partition("\nwith loss_parallel()")[0], space)
    return space["mesh"], space["model"]


@cached_outcome
def outcomes(num_ranks: int, *, slow: bool) -> list[dict[str, Any]]:
    cases = SLOW if slow else QUICK
    return run_on_ranks(
        train_cases,
        num_ranks,
        {name: case for name, case in cases.items() if case.num_ranks == num_ranks},
        timeout=900,
    )


@pytest.mark.parametrize("name", QUICK)
def test_training_is_that_of_the_plain_model(name: str) -> None:
    assert_like_plain(
        QUICK[name], [each[name] for each in outcomes(QUICK[name].num_ranks, slow=False)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_training_is_that_of_the_plain_model_on_every_mesh(name: str) -> None:
    assert_like_plain(
        SLOW[name], [each[name] for each in outcomes(SLOW[name].num_ranks, slow=True)]
    )
