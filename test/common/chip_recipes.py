"""Random models on virtual chips: ``random_recipes`` with another place to run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from test.common.chips import Job, run_jobs
from test.common.random_models import Recipe
from test.common.random_recipes import ABORTED, Verdict, attempt, draw, judge
from test.common.ranks import ChildError

TOPOLOGIES = {4: ("v5e:2x2", "v6e:2x2", "v5p:2x2x1"), 8: ("v5e:2x4", "v5e:2x2*2", "v5p:2x2x2")}


def draw_on_chips(seed: int) -> Recipe:
    """The recipe of a seed, on as many ranks as a slice has."""
    return replace(draw(seed), ranks=4 if seed % 3 else 8)


def verdicts_on_chips(recipes: Sequence[Recipe]) -> list[Verdict]:
    """Run all on slices of their number of ranks, and judge all."""
    recipes = [each if each.ranks in TOPOLOGIES else replace(each, ranks=4) for each in recipes]
    outcomes = _outcomes(recipes) if recipes else []
    return [judge(*each) for each in zip(recipes, outcomes, strict=True)]


def _outcomes(recipes: Sequence[Recipe]) -> list[Any]:
    jobs = {str(at): Job(topology_of(each), attempt, (each,)) for at, each in enumerate(recipes)}
    try:
        found = run_jobs(jobs, timeout=1500)
    except ChildError as error:
        if len(recipes) == 1:
            return [f"{ABORTED}{error}"]
        return [outcome for each in recipes for outcome in _outcomes([each])]
    return [_outcome(found[name].ranks, found[name].error) for name in jobs]


def _outcome(ranks: list[Any], error: str) -> Any:
    failed = [rank for rank in ranks if isinstance(rank, str)]
    if error:
        return f"raises: {error}"
    return failed[0] if failed else ranks


def topology_of(recipe: Recipe) -> str:
    """One of those with its number of ranks; the same in every run."""
    return random.Random(repr(recipe)).choice(TOPOLOGIES[recipe.ranks])
