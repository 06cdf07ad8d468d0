"""``tune`` with a stand-in for the TPU compiler: what is compiled, chosen, kept and told."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from test.common.example_report import report
from test.common.ranks import ROOT
from test.common.tuning import MIB, Cost, FakeCompiler
from xla_fsdp import Recipe
from xla_fsdp.preflight import CompileError, Tuned, tune
from xla_fsdp.preflight.__main__ import USAGE_EXIT_CODE, main
from xla_fsdp.preflight.api import traced_on
from xla_fsdp.preflight.compile import compiler
from xla_fsdp.preflight.read.html import tuned_page
from xla_fsdp.preflight.search import trials
from xla_fsdp.preflight.search.candidates import (
    RECIPES,
    Way,
    batch_sizes,
    data_ranks,
    meshes,
    recipe_of,
    recipe_text,
)
from xla_fsdp.preflight.search.prediction import Figures, figures_at
from xla_fsdp.preflight.search.tuned import Candidate
from xla_fsdp.preflight.topologies import CHIPS, find_topology
from xla_fsdp.preflight.trace.program import Program

pytest.importorskip("libtpu", reason="keys of the cache hold its version")

FULL = 32
LEAN, FAST, PLAIN = Recipe("lean"), Recipe("fast"), Recipe("plain")
COSTS = {
    # 16,125 MiB of a v5e can be used.
    "lean": Cost(mib_per_layer_and_sample=50, ms_per_layer_and_sample=1.2, is_loop=True),
    "fast": Cost(mib_per_layer_and_sample=100, is_loop=True),
    "plain": Cost(mib_per_layer_and_sample=400),
}

NOTHING_RUNS = "Nothing that was compiled in full runs on v5e:4x4; see why above."

Search = Callable[..., tuple[Tuned, FakeCompiler]]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Search:
    def found(
        costs: Callable[[Recipe], Cost] = lambda recipe: COSTS[recipe.name],
        seconds: int = 0,
        together: int = 1,
        **options: Any,
    ) -> tuple[Tuned, FakeCompiler]:
        fake = FakeCompiler(costs, seconds, together)
        fake.install(monkeypatch)
        given = {"choices": {"recipe": [LEAN, FAST, PLAIN]}, "tried_meshes": [{"shard": 16}]}
        options = {"jobs": 1, "cache_dir": tmp_path / "cache", **given, **options}
        return tune(fake.build_step, topology="v5e:4x4", **options), fake

    return found


# ---------------------------------------------------------------- what is chosen


def test_the_fastest_that_fits_is_found_and_compiled_in_full(search: Search) -> None:
    tuned, _ = search()
    # lean: 1000 + 32 * (100 + 50 * 6) = 13,800 at batch 6, 17,000 at 8; fast: 17,000 at 4.
    best = tuned.best
    assert best is not None
    assert best.report is not None
    # fast at 3: 16 * 3 / (10 + 96) = 453 samples/s; lean at 6: 16 * 6 / (10 + 230.4) = 399
    assert (best.way.recipe.name, best.batch) == ("fast", 3)
    assert best.rate == pytest.approx(16 * 3 / 0.106, rel=1e-3)
    assert best.report.memory.peak == 13_800 * MIB
    names = [each.way.recipe.name for each in tuned.ranking()]
    assert names == ["fast", "lean", "plain"]


def test_the_search_agrees_with_trying_everything(search: Search) -> None:
    batches = [1, 2, 3, 4, 5, 6]
    tuned, fake = search(choices={"recipe": [LEAN, FAST, PLAIN], "batch": batches})
    usable = tuned.capacity / MIB
    rates = {
        (name, batch): 16 * batch / cost.ms(FULL, batch) * 1e3
        for name, cost in COSTS.items()
        for batch in batches
        if cost.mib(FULL, batch) <= usable
    }
    assert tuned.best is not None
    assert (tuned.best.way.recipe.name, tuned.best.batch) == max(rates, key=lambda k: rates[k])
    for each in tuned.candidates:
        cost = COSTS[each.way.recipe.name]
        assert each.figures is not None
        assert each.figures.needed == pytest.approx(cost.mib(FULL, each.batch) * MIB, rel=1e-4)
        assert each.figures.seconds == pytest.approx(cost.ms(FULL, each.batch) / 1e3, rel=1e-4)
    assert len(fake.compiled) < len(batches) * len(COSTS)


def test_what_the_host_has_no_memory_for_is_not_chosen(search: Search) -> None:
    batches = [1, 2, 4, 6]
    # v5e's host has 45,776 MiB for each chip: enough for 32 * 2 * 700, not for twice that.
    costs = Cost(is_loop=True, ms_fixed=20_000, host_mib_per_layer_and_sample=700)
    tuned, fake = search(lambda recipe: costs, choices={"recipe": [LEAN], "batch": batches})
    assert tuned.best is not None
    assert tuned.best.batch == 2
    assert "4: lacks 43,824 MiB of the host's memory" in tuned.text()
    assert fake.compiled == [("lean", 32, 1), ("lean", 32, 2)]


def test_loops_are_compiled_in_full_and_others_at_two_depths(search: Search) -> None:
    _, fake = search(choices={"recipe": [LEAN, PLAIN], "batch": [1, 2, 4]})
    # lean fits at 4 and is fastest there; plain needs 17,000 MiB at batch 1.
    assert fake.compiled == [("lean", 32, 1), ("lean", 32, 2), ("plain", 4, 1), ("plain", 8, 1),
                          ("lean", 32, 4)]  # fmt: skip


def test_a_shallow_model_is_compiled_as_it_is(search: Search) -> None:
    _, fake = search(choices={"recipe": [PLAIN], "batch": [1, 2], "depth": [8]})
    assert fake.compiled == [("plain", 8, 1), ("plain", 8, 2)]


def test_a_winner_that_does_not_hold_gives_way_to_the_next(search: Search) -> None:
    class Bent(Cost):
        def mib(self, depth: int, batch: int) -> float:  # grows faster than the line
            return 1000 + 30 * batch**3

    def costs(recipe: Recipe) -> Cost:
        return Bent(is_loop=True)

    batches = [1, 2, 4, 6, 8, 10]
    tuned, fake = search(costs, choices={"recipe": [LEAN], "batch": batches})
    # By the first two, 8 needs 2,500 MiB, and by 4 6,280; it needs 16,360. 6 needs 7,480.
    assert tuned.best is not None
    assert tuned.best.batch == 6
    assert tuned.best.figures is not None
    assert tuned.best.figures.needed == 7_480 * MIB
    assert ("lean", 32, 8) in fake.compiled


def test_batches_beside_the_winner_are_compiled_where_larger_ones_are_slower(
    search: Search,
) -> None:
    class Bent(Cost):
        def ms(self, depth: int, batch: int) -> float:  # for each sample least at 4
            return 100 + 20 * batch + batch**3

    costs = Bent(is_loop=True, mib_per_layer_and_sample=10)
    choices = {"recipe": [LEAN], "batch": [1, 2, 3, 4, 6, 8]}
    tuned, fake = search(lambda recipe: costs, choices=choices)
    # 8 is predicted to be best by 1 and 2, and by 4, which is twice as many; 4 then by 8.
    assert fake.compiled == [("lean", 32, each) for each in (1, 2, 4, 8, 6)]
    assert tuned.best is not None
    assert tuned.best.batch == 4


def test_a_line_through_small_batches_is_not_believed_far_beyond_them(search: Search) -> None:
    class Bent(Cost):
        def ms(self, depth: int, batch: int) -> float:  # batch 2 takes less than all others
            return 100 + 50 * batch - 40 * (batch == 2)

    costs = Bent(is_loop=True, mib_per_layer_and_sample=1)
    choices = {"recipe": [LEAN], "batch": [1, 2, 3, 4, 8, 16, 32, 64]}
    tuned, fake = search(lambda recipe: costs, choices=choices)
    # By 1 and 2 a sample takes 12 ms of 64; by 2 and 4, which takes 300 ms, 70.
    assert fake.compiled[:3] == [("lean", 32, each) for each in (1, 2, 4)]
    assert tuned.best is not None
    assert tuned.best.batch == 64


def test_times_of_a_program_that_is_refused_predict_nothing(search: Search) -> None:
    class Bent(Cost):
        def mib(self, depth: int, batch: int) -> float:
            return 1000 + 300 * batch**3

    batches = [1, 2, 3, 4]
    tuned, fake = search(
        lambda recipe: Bent(is_loop=True, mib_of_chip=16_125),
        choices={"recipe": [LEAN], "batch": batches},
    )
    # By 4, which is refused, 3 would take longer for each sample than 2.
    assert fake.compiled == [("lean", 32, each) for each in (1, 2, 4, 3)]
    assert tuned.best is not None
    assert tuned.best.batch == 3
    refused = max(tuned.candidates, key=lambda each: each.batch)
    assert tuned.reason(refused) == "lacks 4,075 MiB"


def test_the_fastest_two_are_tried_on_other_meshes(search: Search) -> None:
    def costs(recipe: Recipe) -> Cost:
        axes = dict(recipe.mesh or ())
        if "tensor" in axes:
            return Cost(raises="no layer is cut")
        slower = 0.9 if axes.get("replica") == 2 else 1.0
        cost = COSTS[recipe.name]
        return Cost(
            ms_per_layer_and_sample=slower * cost.ms_per_layer_and_sample,
            mib_per_layer_and_sample=cost.mib_per_layer_and_sample,
            is_loop=cost.is_loop,
        )

    tuned, _ = search(costs, tried_meshes=None)
    assert tuned.recipe == Recipe("fast", mesh={"replica": 2, "shard": 8})
    tried = {(each.way.recipe.name, each.way.recipe.mesh) for each in tuned.candidates}
    assert len(tried) == 3 + 2 * (len(meshes(16)) - 1)
    assert not any(name == "plain" and mesh for name, mesh in tried)
    failed = [each for each in tuned.ranking() if each.failed]
    assert len(failed) == 2 * 3
    assert {each.failed for each in failed} == {"ValueError: no layer is cut"}


def test_a_recipe_with_a_mesh_keeps_it(search: Search) -> None:
    recipe = Recipe("lean", mesh={"replica": 4, "shard": 4})
    tuned, _ = search(choices={"recipe": [recipe]}, tried_meshes=None)
    assert {each.way.recipe for each in tuned.candidates} == {recipe}


@pytest.mark.parametrize("mesh", [None, {"replica": 2, "shard": 8}])
def test_a_recipe_is_read_as_the_table_writes_it(
    mesh: dict[str, int] | None, tmp_path: Path
) -> None:
    for each in RECIPES:
        recipe = dataclasses.replace(each, mesh=mesh)
        assert recipe_of(recipe_text(recipe)) == recipe
        assert recipe_of(recipe) is recipe
    file = tmp_path / "my own.json"
    FAST.save(file)
    assert recipe_of(f"{file} remat=none scan=off") == Recipe("fast", remat="none", scan=False)
    assert recipe_of(str(file)) == FAST
    for text, problem in {
        "lean rematt=none": "rematt=none is neither a field of a recipe",
        "leaner remat=none": "there is no recipe 'leaner'",
        "lean foo=4": "foo=4 is neither a field of a recipe",
        "lean scan=perhaps": "scan is 'perhaps'; give True, False or None",
    }.items():
        with pytest.raises(ValueError, match=problem):
            recipe_of(text)


def test_layers_are_not_swept(search: Search) -> None:
    with pytest.raises(ValueError, match="depth is the number of layers, and cannot be swept"):
        search(choices={"recipe": [LEAN], "depth": [16, 32]})
    with pytest.raises(ValueError, match="build_step has no parameter 'layers' for its number"):
        search(depth_option="layers")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"choices": {"batch": [2, "x"]}}, "batch is 'x'; give whole numbers, 1 or more"),
        ({"choices": {"batch": [0]}}, "batch is 0"),
        ({"choices": {"batch": []}}, "batch: there is no value to try"),
        ({"batch": 2}, r"batch: a search chooses these; .* choices={'batch': \[2\]}"),
        ({"depth": True}, "depth is True"),
        ({"tried_meshes": [{"shard": 16}, {"foo": 16}]}, "'foo': 16} has an axis foo; name its"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_traced(
    search: Search, options: dict[str, Any], problem: str
) -> None:
    def costs(recipe: Recipe) -> Cost:
        raise AssertionError("the search has begun")

    with pytest.raises(ValueError, match=problem):
        search(costs, **options)


def test_other_options_are_swept(search: Search) -> None:
    tuned, _ = search(choices={"recipe": [LEAN], "length": [50, 100]})
    assert tuned.ranking()[0].way.options == (("length", 50),)
    assert tuned.ranking()[1].failed == "the same program as lean shard=16 length=50"


def test_batches_are_tried_between_doubled_ones() -> None:
    assert list(itertools.islice(batch_sizes(2), 8)) == [2, 4, 6, 8, 12, 16, 24, 32]


def test_ranks_along_tensor_and_context_share_samples() -> None:
    assert data_ranks(Recipe(mesh={"replica": 2, "shard": 2, "tensor": 4}), 16) == 4
    assert data_ranks(Recipe(mesh={"shard": 8, "context": 2}), 16) == 8
    assert data_ranks(Recipe(), 16) == 16


@pytest.mark.parametrize("ranks", [4, 16, 256])
def test_meshes_hold_all_ranks_once(ranks: int) -> None:
    none, *others = meshes(ranks)
    assert none is None
    products = [each.get("replica", 1) * each["shard"] * each.get("tensor", 1) for each in others]
    assert set(products) == {ranks}
    assert len({json.dumps(each) for each in others}) == len(others)


# ---------------------------------------------------------------- failures, budget, cache, jobs


def test_what_fails_is_told_and_the_search_goes_on(search: Search) -> None:
    def costs(recipe: Recipe) -> Cost:
        if recipe.remat == "none":
            return Cost(refused="no such layout")
        failures = {"plain": Cost(raises="gradients are gone"), "fast": Cost(refused="killed")}
        return failures.get(recipe.name, COSTS["lean"])

    recipes = [FAST, PLAIN, Recipe("lean", remat="none"), LEAN]
    tuned, _ = search(costs, choices={"recipe": recipes})
    assert tuned.recipe == Recipe("lean", mesh={"shard": 16})
    failed = {each.way.recipe: each.failed for each in tuned.candidates}
    *others, _ = (dataclasses.replace(each, mesh={"shard": 16}) for each in recipes)
    assert [failed[each] for each in others] == [
        "the TPU compiler ended with exit code -9",
        "ValueError: gradients are gone",
        "the TPU compiler refused the program: JaxRuntimeError: no such layout",
    ]
    told = tuned.text()
    assert "\nValueError: gradients are gone:\n  plain shard=16\n" in told
    assert "\nthe TPU compiler ended with exit code -9:\n  fast shard=16\n" in told


def test_a_winner_that_cannot_be_compiled_in_full_is_told(search: Search) -> None:
    def costs(recipe: Recipe) -> Cost:
        deep = Cost(refused="killed", refused_from=FULL, mib_per_layer=1)
        return deep if recipe.name == "plain" else COSTS["lean"]

    tuned, fake = search(costs, choices={"recipe": [PLAIN, LEAN], "batch": [1, 2, 4]})
    assert tuned.recipe.name == "lean"
    [plain] = [each for each in tuned.ranking() if each.way.recipe.name == "plain"]
    assert plain.failed == "batch 4: the TPU compiler ended with exit code -9"
    assert [each for each in fake.compiled if each[:2] == ("plain", 32)] == [("plain", 32, 4)]


def test_a_larger_batch_that_fails_is_told(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_report = trials.compiled_report

    def second_killed(traced: Any, topology: Any, options: Any, told: Any, **how: Any) -> Any:
        if options["batch"] == 2:
            raise CompileError("the TPU compiler was killed")
        return compiled_report(traced, topology, options, told, **how)

    monkeypatch.setattr(trials, "compiled_report", second_killed)
    tuned, _ = search(choices={"recipe": [LEAN], "batch": [1, 2, 4]})
    assert tuned.best is not None
    assert tuned.best.batch == 1
    assert "\nOther batches of it: 2: the TPU compiler was killed\n" in tuned.text()


def test_nothing_that_fits_is_an_answer(search: Search) -> None:
    tuned, _ = search(lambda recipe: Cost(mib_fixed=20_000, is_loop=True))
    assert tuned.best is None
    assert "lacks" in tuned.text()
    with pytest.raises(ValueError, match="there is no best recipe for v5e:4x4"):
        tuned.save("nowhere.json")


@pytest.mark.parametrize("recipes", [[LEAN, FAST, PLAIN], [FAST]])
def test_a_step_that_raises_every_way_is_told_once(search: Search, recipes: list[Recipe]) -> None:
    tuned, fake = search(lambda recipe: Cost(raises="no such file"), choices={"recipe": recipes})
    assert fake.compiled == []
    ways = [f"  {each.name} shard=16" for each in recipes]
    assert tuned.text().splitlines() == [
        "ValueError: no such file:",
        *ways,
        "",
        NOTHING_RUNS,
    ]
    assert "no such file" in tuned_page(tuned)


def test_ways_that_fail_for_several_reasons_are_told(search: Search) -> None:
    tuned, _ = search(lambda recipe: Cost(raises=f"no {recipe.name}"))
    reasons = "".join(f"ValueError: no {each}:\n  {each} shard=16\n\n" for each in COSTS)
    assert tuned.text() == reasons + NOTHING_RUNS


def test_a_second_search_compiles_nothing_and_an_interrupted_one_goes_on(
    search: Search, tmp_path: Path
) -> None:
    def costs(recipe: Recipe) -> Cost:
        return Cost(refused="no such layout") if recipe.name == "fast" else COSTS[recipe.name]

    first, fake = search(costs, budget=100, seconds=30)
    begun = len(fake.compiled)
    second, fake = search(costs)
    rest = len(fake.compiled)
    third, fake = search(costs)
    assert fake.compiled == []
    assert begun > 0
    assert rest > 0
    _, fake = search(costs, cache_dir=tmp_path / "another")
    assert len(fake.compiled) == begun + rest
    assert first.recipe == Recipe("lean", mesh={"shard": 16})
    assert third.candidates[-1] == second.candidates[-1]
    [told] = [each.failed for each in third.candidates if each.failed]
    assert "no such layout (kept from an earlier run, in " in told


def test_a_limit_of_memory_that_was_too_low_may_be_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[int] = []

    def compile_it(program: Any, topology: Any, flags: str, limit: int, progress: Any) -> None:
        limits.append(limit)
        raise compiler._FailsAgainError("too much", limit)

    monkeypatch.setattr(compiler, "_compile", compile_it)
    program, slice_ = Program(b"", (), ()), find_topology("v5e:2x2")
    for limit in (10, 10, 5, 20):
        with pytest.raises(CompileError, match="too much"):
            compiler.compile_program(program, slice_, max_host_mem=limit, cache_dir=tmp_path)
    assert limits == [10, 20]


def test_the_budget_ends_the_search(search: Search) -> None:
    tuned, fake = search(budget=100, seconds=30)
    # From 60 on "fast" is compiled until 75, and then lean at a larger batch until 100.
    assert fake.compiled == [("lean", 32, 1), ("lean", 32, 2)]
    assert fake.now <= 101
    assert tuned.best is not None
    assert (tuned.best.way.recipe.name, tuned.best.batch) == ("lean", 2)
    reasons = {each.way.recipe.name: tuned.reason(each) for each in tuned.candidates[-2:]}
    assert set(reasons.values()) == {"the search ended before it was compiled"}
    assert f"\n{reasons['fast']}:\n  fast shard=16\n  plain shard=16\n" in tuned.text()
    larger = [each for each in tuned.candidates if each.batch == 4]
    assert [tuned.reason(each) for each in larger] == [
        "the search ended before it was compiled in full"
    ]
    [faster] = [each for each in tuned.text().splitlines() if each.startswith("Predicted to be")]
    assert faster.startswith("Predicted to be faster: lean shard=16, batch 6, 39,933 tokens/s")
    assert "tokens/s. The search ended before it was compiled in full; the same command" in faster


def test_time_for_the_fastest_is_not_kept_once_it_is_compiled(search: Search) -> None:
    recipes = [LEAN, FAST, Recipe("lean", remat="none")]
    _, fake = search(choices={"recipe": recipes, "batch": [1]}, budget=100, seconds=30)
    assert fake.compiled == [("lean", 32, 1), ("fast", 32, 1), ("lean", 32, 1)]  # until 90


def test_nothing_is_known_if_the_budget_ends_first(search: Search) -> None:
    tuned, fake = search(budget=20, seconds=60)
    assert fake.compiled == []
    assert fake.now <= 21
    assert tuned.best is None
    assert tuned.text().startswith("the search ended before it was compiled:\n  ")
    assert tuned.text().endswith(NOTHING_RUNS)


def test_what_fails_before_the_budget_ends_is_not_said_to_be_too_large(search: Search) -> None:
    def costs(recipe: Recipe) -> Cost:
        return Cost(refused="no such layout") if recipe.name == "lean" else COSTS[recipe.name]

    tuned, _ = search(costs, budget=100, seconds=60)
    assert tuned.best is None
    assert "JaxRuntimeError: no such layout:\n  lean shard=16\n" in tuned.text()
    assert "the search ended before it was compiled:\n  " in tuned.text()
    assert tuned.text().endswith(NOTHING_RUNS)


@pytest.mark.parametrize("jobs", [1, 3])
def test_as_many_are_compiled_at_once_as_jobs(search: Search, jobs: int) -> None:
    tuned, fake = search(jobs=jobs, together=jobs)
    assert fake.most_at_once == jobs
    assert tuned.recipe.name == "fast"


@pytest.mark.parametrize(
    ("gib", "cpus", "jobs"), [(23, 2, 1), (23, 16, 2), (100, 8, 4), (5, 64, 1), (100, None, 1)]
)
def test_memory_and_processors_limit_jobs(
    monkeypatch: pytest.MonkeyPatch, gib: int, cpus: int | None, jobs: int
) -> None:
    monkeypatch.setattr(trials, "available_memory", lambda: gib * 2**30)
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    assert trials.jobs_that_fit(10 * 2**30) == jobs


# ---------------------------------------------------------------- prediction, table, command line


def test_prediction_is_a_line_through_the_nearest_two() -> None:
    known = {
        4: Figures(8, 4, 0, 1, 2, 6),
        8: Figures(16, 4, 2, 3, 4, 8),
        32: Figures(100, 5, 2, 3, 4, 8),
    }
    assert figures_at(known, 8) == known[8]
    assert figures_at(known, 6) == Figures(12, 4, 1, 2, 3, 7)
    assert figures_at(known, 20).needed == 58
    assert figures_at(known, 56).needed == 184
    assert figures_at(known, 1) == Figures(2, 4, 0, 0, 0.5, 4.5)  # nothing is below 0
    assert Figures(0, 3, 2, 5, 0, 0).seconds == 7
    assert Figures(0, 3, 2, 5, 6, 0).seconds == 8


def test_losers_are_told_where_they_lose(search: Search) -> None:
    tuned, _ = search()
    [best, lean, plain] = tuned.ranking()
    assert tuned.reason(best) == ""
    assert tuned.reason(lean) == "13.4% more time for each sample, of it most in compute"
    assert tuned.reason(plain) == "lacks 875 MiB"
    rows = tuned.text().splitlines()
    assert rows[1].split()[:3] == ["fast", "shard=16", "3"]
    assert "45,283 tokens" in rows[1]  # 100 tokens each
    assert "Fastest that fits: fast shard=16, batch 3, 45,283 tokens/s by estimate" in rows
    # fast at 4: 1000 + 32 * 500 MiB = 17,000
    assert "Other batches of it: 1: 38,095 tokens/s; 2: 43,243 tokens/s; 4: lacks 875 MiB" in rows
    assert "HBM per rank (MiB), fits" in tuned.text()


def test_what_is_waited_for_is_told() -> None:
    best = Candidate(Way(LEAN), 1, Figures(0, 1, 0, 0, 0, 0), 16.0, report())
    offloaded = Candidate(Way(FAST), 1, Figures(0, 1, 0, 0.5, 3, 1), 16 / 3)
    overlapped = Candidate(Way(PLAIN), 1, Figures(0, 1, 0, 2, 1, 1), 8.0)
    blocking = Candidate(Way(PLAIN), 2, Figures(0, 1, 3, 0.1, 2, 1), 16 / 5)
    tuned = Tuned("v5e:4x4", CHIPS["v5e"], (best, offloaded, overlapped, blocking))
    told = "more time for each sample, of it most in waiting for"
    assert tuned.reason(offloaded) == f"200.0% {told} the host's memory"
    assert tuned.reason(overlapped) == f"100.0% {told} collectives"
    assert tuned.reason(blocking) == f"400.0% {told} collectives"


def test_the_page_plots_memory_against_the_rate(search: Search) -> None:
    tuned, _ = search()
    page = tuned_page(tuned)
    drawn = [each for each in tuned.candidates if each.figures]
    shown = [each for each in drawn if each.figures.needed <= 1.5 * tuned.capacity]  # type: ignore[union-attr]
    assert page.count("<circle") == len(shown) > 3
    assert page.count('r="9"') == 1
    too_large = [each for each in shown if not each.fits(tuned.chip)]
    assert page.count('stroke-dasharray="3 2"') == len(too_large) > 1
    assert "tokens/s" in page
    assert "lacks 875 MiB" in page


def no_recipe(batch: int) -> None:
    """A step that cannot be tuned."""


def nothing_at_all() -> None:
    """Another one."""


def both(recipe: Recipe, batch: int, depth: int = 2, length: int = 1) -> None:
    """A step that can."""
    raise AssertionError("the search has begun")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no_recipe", "--tune"], "cannot be called with recipe, batch: got an unexpected keyword "
         "argument 'recipe'; a search gives it a recipe, to hand to parallelize(model, "),
        (["nothing_at_all", "--tune"], "and a batch, the samples of each rank"),
        (["no_recipe", "--budget", "3m"], "--budget: these are of a search; add --tune"),
        (["no_recipe", "--tune", "--run", "3"], "give one of them"),
        (["no_recipe", "--tune", "--topology", "v5e:2x2", "--topology", "v5e:4x4"], "give one"),
        (["both", "--tune", "--mesh", "shard=5"], "5 = 5 ranks, but the job has 16"),
        (["both", "--tune", "--mesh", "shard=4,foo=4"], "has an axis foo; name its axes out of "
         "replica, shard, tensor, context\n"),
        (["both", "--tune", "--sweep", "batch=1,x"], "batch is 'x'; give whole numbers, 1 or more"),
        (["both", "--tune", "--sweep", "batch=0"], "batch is 0; give whole numbers, 1 or more\n"),
        (["both", "--tune", "--sweep", "batch=1.5"], "batch is 1.5; give whole numbers"),
        (["both", "--tune", "--set", "batch=on"], "batch is True; give whole numbers"),
        (["both", "--tune", "--set", "depth=x"], "depth is 'x'; give whole numbers"),
        (["both", "--tune", "--set", "length=x"], "length is 'x'; give whole numbers"),
        (["both", "--tune", "--sweep", "recipe=leen"], "there is no recipe 'leen'"),
        (["both", "--tune", "--sweep", "recipe=5"], "there is no recipe '5'"),
        (["no_recipe", "--tune", "--set", "jobs=3"], "jobs cannot be set"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{__name__}:{arguments[0]}", *arguments[1:]]) == USAGE_EXIT_CODE
    assert reason in capsys.readouterr().err


def test_the_command_writes_the_recipe_and_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeCompiler(lambda recipe: COSTS[recipe.name])
    fake.install(monkeypatch)
    monkeypatch.setattr("xla_fsdp.preflight.__main__._load", lambda target: fake.build_step)
    best, page, figures = (tmp_path / each for each in ("best.json", "page.html", "all.json"))
    command = ["train:build_step", "--tune", "--budget", "30m", "--recipe_file", str(best)]
    command += ["--html", str(page), "--json", str(figures), "--cache_dir", str(tmp_path)]
    command += ["--sweep", "recipe=lean,fast", "--sweep", "batch=1,2,4", "--set", "depth=16"]
    assert main([*command, "--mesh", "replica=2,shard=8"]) == 0
    assert Recipe.load(best) == Recipe("fast", mesh={"replica": 2, "shard": 8})
    assert f"The recipe is in {best}; train with batch=4" in capsys.readouterr().out
    assert "<circle" in page.read_text()
    assert json.loads(figures.read_text())["best"]["options"]["batch"] == 4


def test_an_interrupted_search_writes_what_it_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeCompiler(lambda recipe: COSTS[recipe.name])
    fake.install(monkeypatch)

    def build_step(recipe: Recipe, batch: int = 1) -> Any:
        if recipe.name == "fast":
            raise KeyboardInterrupt
        return fake.build_step(recipe, batch)

    monkeypatch.setattr("xla_fsdp.preflight.__main__._load", lambda target: build_step)
    best, figures = tmp_path / "best.json", tmp_path / "all.json"
    command = ["train:build_step", "--tune", "--mesh", "shard=16", "--cache_dir", str(tmp_path)]
    command += ["--sweep", "recipe=lean,fast", "--sweep", "batch=1,2", "--jobs", "1"]
    assert main([*command, "--recipe_file", str(best), "--json", str(figures)]) == 130
    shown = capsys.readouterr()
    assert "the search ended before it was compiled:\n  fast shard=16\n" in shown.out
    assert f"The recipe is in {best}; train with batch=2" in shown.out
    assert "interrupted" in shown.err
    assert Recipe.load(best) == Recipe("lean", mesh={"shard": 16})
    assert json.loads(figures.read_text())["best"]["options"]["batch"] == 2


def test_files_that_may_not_be_written_are_told_before_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    path = tmp_path / "best.json"
    command = [f"{__name__}:both", "--tune", "--recipe_file", str(path)]
    assert main(command) == USAGE_EXIT_CODE
    assert f"{path} cannot be written: there is no permission" in capsys.readouterr().err


def test_a_step_that_changes_the_working_directory_changes_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    target = "xla_fsdp.preflight.trace.tracing.trace_step"
    monkeypatch.setattr(target, lambda build, coords: build())
    for _ in range(2):  # a relative path leads to the same folder
        traced_on(find_topology("v5e:2x2"), os.chdir, {"path": "data"})
    assert Path.cwd() == tmp_path


def test_a_compiler_that_is_killed_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(killed))
    program, slice_ = Program(b"", (), ()), find_topology("v5e:2x2")
    with pytest.raises(CompileError, match="was killed, as the system does when memory runs out"):
        compiler.compile_program(program, slice_, cache_dir=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize("request_made", ["None", "'wait'"])
def test_a_compiler_ends_with_the_search_that_was_killed(tmp_path: Path, request_made: str) -> None:
    (tmp_path / "waiting.py").write_text(
        "import time\n"
        "from xla_fsdp.preflight.compile.child import serve\n"
        "serve({'wait': lambda: time.sleep(600)})\n"
    )
    search = (
        "import os, time\n"
        "from xla_fsdp.preflight.compile.child import Child\n"
        "child = Child('the child', 'waiting', {**os.environ})\n"
        "print(child.process.pid, child.folder, flush=True)\n"
        f"child.ask({request_made}) if {request_made} else time.sleep(600)\n"
    )
    command, paths = [sys.executable, "-c", search], os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, folder = parent.stdout.readline().split()
        time.sleep(1.0)  # until it computes
        parent.kill()
    limit = time.monotonic() + 120
    while Path(f"/proc/{child}/cmdline").exists() and time.monotonic() < limit:
        time.sleep(0.1)
    assert not Path(folder).exists()


@pytest.mark.parametrize("word", ["30", "m", "0m", "xm", "infh"])
def test_what_is_no_time_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["x:y", "--tune", "--budget", word])
    assert "is no time such as 90s, 30m or 2h" in capsys.readouterr().err


def test_the_usual_recipes_differ() -> None:
    assert len(set(RECIPES)) == len(RECIPES)
