"""N ranks against the plain model, for modules and options that hypothesis makes up.

All recipes of one number of ranks run in one launch; they are the same in every run.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from test.common.parity import assert_same, join
from test.common.random_models import Plan, Recipe, recipes
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.training import train_plain, train_sharded

_LINEAR = Plan("linear", number=2)
_AGAIN = Plan("shared", number=0)
# Recipes that once failed; on two ranks.
FOUND = [
    # A module that a unit shares with a unit inside it, and with the root.
    Recipe(
        Plan(
            "chain",
            (
                _LINEAR,
                Plan(
                    "residual",
                    (
                        _AGAIN,
                        Plan("chain", (_AGAIN, Plan("conv"), _AGAIN), unit=True, remat=remat),
                        _AGAIN,
                    ),
                    unit=True,
                    remat=remat,
                ),
                _AGAIN,
            ),
        ),
        options={"reshard_after_forward": remat != "inside", "flatten_parameters": False},
    )
    for remat in ("", "inside", "outside")
]
COUNT = 6
SPACING = 8  # hypothesis varies what it has just drawn; these are far enough apart


@cached_outcome
def drawn(num_ranks: int) -> list[Recipe]:
    """The recipes for this number of ranks."""
    found: list[Recipe] = []

    @seed(num_ranks)
    @settings(
        max_examples=COUNT * SPACING,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes())
    def note(recipe: Recipe) -> None:
        found.append(recipe)

    note()
    return [*found[SPACING - 1 :: SPACING], *(FOUND if num_ranks == 2 else [])]


@cached_outcome
def sharded(num_ranks: int) -> list[list[Any]]:
    """What each rank holds after each recipe, or the error's text."""
    return run_on_ranks(_train_all, num_ranks, drawn(num_ranks), timeout=900)


def _train_all(rank: int, recipes: list[Recipe]) -> list[Any]:
    return [_attempt(recipe, rank) for recipe in recipes]


def _attempt(recipe: Recipe, rank: int) -> Any:
    """What fails on one rank fails on all, so that the next recipe can run."""
    try:
        return train_sharded(recipe, rank)
    except Exception:
        return traceback.format_exc()


def _compare(num_ranks: int, index: int) -> None:
    recipe = drawn(num_ranks)[index]
    ranks = [rank[index] for rank in sharded(num_ranks)]
    failed = [found for found in ranks if isinstance(found, str)]
    assert not failed, f"{recipe} raises:\n{failed[0]}"
    found, expected = join(ranks), train_plain(recipe, num_ranks)
    if recipe.options["flatten_parameters"]:
        found.grads, expected.grads = {}, {}  # of flat parameters there is no one for each name
    try:
        # A small sum of large 16-bit terms is as wrong as the terms are.
        smallest = 0.2 if recipe.tolerance > 0.01 else 0.01
        assert_same(found, expected, recipe.tolerance, smallest)
    except AssertionError as difference:
        raise AssertionError(f"{recipe}: {difference}") from None


@pytest.mark.parametrize("index", range(COUNT))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parity(num_ranks: int, index: int) -> None:
    _compare(num_ranks, index)


@pytest.mark.parametrize("index", range(COUNT, COUNT + len(FOUND)))
def test_parity_of_what_once_failed(index: int) -> None:
    _compare(2, index)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(COUNT))
@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_parity_in_full(num_ranks: int, index: int) -> None:
    _compare(num_ranks, index)


def test_recipes_are_worth_running() -> None:
    drawn_kinds = {plan.kind for n in (2, 3) for recipe in drawn(n) for plan in recipe.plans()}
    units = [sum(plan.unit for plan in recipe.plans()) for n in (2, 3) for recipe in drawn(n)]
    assert len(drawn_kinds) > 20
    assert sum(units) / len(units) > 1.5
    assert drawn(2) != drawn(3)
