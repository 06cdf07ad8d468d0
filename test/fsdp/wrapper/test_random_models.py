"""N ranks against the plain model, for random modules, options and ways to train.

Recipes are the same in every run. Those of one number of ranks share a launch; the first that fail
are shrunk, and each is printed, and written, as a script of its own.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from test.common import random_models
from test.common.random_models import Branch, Leaf, Plan, Recipe
from test.common.random_recipes import Verdict, draw, judge, script, shrink, verdicts
from test.common.ranks import cached_outcome, run_python

_LINEAR = Plan("Linear", number=2)
_AGAIN = Plan("Shared")
# Recipes that once failed.
FOUND = [
    # A module that a unit shares with a unit inside it, and with the root.
    Recipe(
        Plan(
            "Chain",
            (
                _LINEAR,
                Plan(
                    "Residual",
                    (
                        _AGAIN,
                        Plan("Chain", (_AGAIN, Plan("Conv"), _AGAIN), unit=True, remat=remat),
                        _AGAIN,
                    ),
                    unit=True,
                    remat=remat,
                ),
                _AGAIN,
            ),
        ),
        options={"reshard_after_forward": remat != "inside"},
    )
    for remat in ("", "inside", "outside")
] + [
    # A registered method that calls its own module, in a region that is recomputed.
    Recipe(
        Plan("Chain", (Plan("Method", (Plan("Linear", unit=True),)),), remat="outside"),
        door="fully_shard",
        options={"reshard_after_forward": False},
    ),
]
QUICK = 300
SLOW = 5000
CHUNK = 250  # recipes of a launch, whose programs stay in memory
SHRUNK = 3  # failures; each takes a minute
REFUSED_AT_MOST = 0.2


@cached_outcome
def quick() -> list[tuple[Recipe, Verdict]]:
    """The recipes of the quick suite, a third of them on three ranks, and what became of them."""
    drawn = [draw(seed) for seed in range(QUICK)]
    on_ranks = [
        dataclasses.replace(recipe, ranks=3 if seed % 3 == 0 else 2)
        for seed, recipe in enumerate(drawn)
    ]
    recipes = on_ranks + FOUND
    return list(zip(recipes, verdicts(recipes), strict=True))


def _expect_no_failure(judged: Sequence[tuple[Recipe, Verdict]], folder: Path) -> None:
    failures = [each for each in judged if each[1].is_failure]
    if failures:
        raise AssertionError(_report(failures, len(judged), folder))


def _report(failures: list[tuple[Recipe, Verdict]], count: int, folder: Path) -> str:
    """How many of each sort failed, and scripts of the first ones, which are written, too."""
    sorts = collections.Counter(verdict.sort for _, verdict in failures)
    first = {verdict.sort: (recipe, verdict) for recipe, verdict in reversed(failures)}
    scripts = []
    for number, (recipe, verdict) in enumerate(shrink(list(first.values())[:SHRUNK])):
        path = folder / f"failure_{number}.py"
        path.write_text(script(recipe, verdict))
        scripts.append(f"---- {path}\n{path.read_text()}")
    return f"{len(failures)} of {count} fail: {dict(sorts)}\n" + "\n".join(scripts)


def test_random_models(tmp_path: Path) -> None:
    _expect_no_failure(quick(), tmp_path)


def test_few_are_refused() -> None:
    refused = [verdict.what for _, verdict in quick() if verdict.kind == "refused"]
    counts = collections.Counter(refused)
    assert len(refused) <= REFUSED_AT_MOST * QUICK, counts


def test_recipes_are_worth_running() -> None:
    right = [recipe for recipe, verdict in quick() if verdict.kind == "right"]
    kinds = collections.Counter(kind for each in right for kind in {p.kind for p in each.plans()})
    classes = {
        each.__name__ for base in (Leaf, Branch) for each in base.__subclasses__()
    }  # fmt: skip
    assert classes <= kinds.keys()
    assert min(kinds.values()) >= 2, kinds
    units = [sum(plan.unit for plan in recipe.plans()) for recipe in right]
    assert sum(units) / len(units) > 1
    for feature in ("scan", "remat", "frozen", "dtype"):
        assert sum(any(getattr(p, feature) for p in each.plans()) for each in right) > 5, feature
    assert sum(each.penalty for each in right) > 5
    assert sum(each.forwards > 1 for each in right) > 5
    assert sum(each.door == "fully_shard" for each in right) > 20


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(SLOW // CHUNK))
def test_many_random_models(chunk: int, tmp_path: Path) -> None:
    start = QUICK + chunk * CHUNK
    recipes = [
        dataclasses.replace(draw(seed), ranks=(2, 3, 2, 4)[chunk % 4])
        for seed in range(start, start + CHUNK)
    ]
    _expect_no_failure(list(zip(recipes, verdicts(recipes), strict=True)), tmp_path)


# ---------------------------------------------------------------- of the generator itself


def test_a_script_runs_alone(tmp_path: Path) -> None:
    """As what is printed of a failure has to."""
    recipe = Recipe(Plan("Pairs", (Plan("OfPair", (_LINEAR,), unit=True),), number=7))
    path = tmp_path / "script.py"
    path.write_text(script(recipe, Verdict("wrong", "as an example")))
    done = run_python(str(path), cwd=tmp_path, env={"PYTHONPATH": str(_root())})
    assert done.stdout.strip() == "as the plain model", done.stderr
    assert "BatchNorm(" not in path.read_text()


def _root() -> Path:
    return Path(random_models.__file__).resolve().parents[2]


def test_failures_are_shrunk() -> None:
    """To the parts without which they do not fail; here, by a rule in the place of ranks."""

    def judge_all(recipes: Sequence[Recipe]) -> list[Verdict]:
        return [
            Verdict("wrong" if any(p.kind == "View" and p.unit for p in each.plans()) else "right")
            for each in recipes
        ]

    view = Plan("View", number=7, unit=True, remat="inside")
    plan = Plan("Residual", (_LINEAR, Plan("Chain", (view, Plan("Conv")), unit=True)), unit=True)
    recipe = Recipe(plan, width=7, options={"flatten_parameters": True}, penalty=True, forwards=2)
    ((shrunk, verdict),) = shrink([(recipe, Verdict("wrong"))], judge_all)
    assert shrunk == Recipe(Plan("View", number=7, unit=True), width=4, steps=1)
    assert verdict.kind == "wrong"


def test_what_differs_is_told() -> None:
    recipe = Recipe(_LINEAR)
    plain = random_models.train_plain(recipe)
    other = random_models.train_plain(dataclasses.replace(recipe, plan=Plan("LayerNorm")))
    assert "body" in random_models.first_difference(recipe, other["state"], plain["state"], {})
    off = {**plain["state"], "head.bias": plain["state"]["head.bias"] + 1e-3}
    assert random_models.first_difference(recipe, off, plain["state"], {}).startswith("head.bias: ")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("raises: Traceback\nValueError: of a new sort", "raises"),
        ("aborts: ended with exit code -6", "aborts"),
        ("raises: Traceback\nRuntimeError: x was used (by mul) before block 1", "refused"),
    ],
)
def test_only_known_messages_are_refusals(text: str, kind: str) -> None:
    recipe = Recipe(Plan("Blocks", (_LINEAR,), scan="full"))
    assert judge(recipe, text).kind == kind
    assert judge(Recipe(_LINEAR), text).is_failure
