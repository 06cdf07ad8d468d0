"""Programs for a TPU, run with numbers on virtual chips, against plain torch on the joined batch.

Beside the usual cases there are two mistakes made on purpose, which show that a case can fail.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common import chip_training, tensor_training
from test.common.chip_recipes import draw_on_chips, topology_of, verdicts_on_chips
from test.common.chips import Done, Job, assert_right, job_of, run_jobs, skip_without_chips
from test.common.compare import assert_close
from test.common.parity import Case
from test.common.random_recipes import script, shrink
from test.common.ranks import cached_outcome, run_python, run_warm
from test.common.replicas import assert_same_state, largest_error, values
from test.common.replicas import train_plain as train_plain_replica
from xla_fsdp.preflight import RehearsalError
from xla_fsdp.preflight.rehearse.rehearsal import Needs, RankStep, Table, check_fits
from xla_fsdp.preflight.rehearse.run_child import WITHOUT_EFFECT
from xla_fsdp.preflight.rehearse.virtual_chips import same_program
from xla_fsdp.preflight.topologies import GIB

BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
ROWS: dict[str, Any] = {"shard_param_on_dim_0": True}
ALL_LARGE: dict[str, Any] = {"gather_once_below": 1}  # so that the loop gathers and reduces all

QUICK: dict[str, tuple[str, Case]] = {
    "nested": ("v5e:2x2", Case("Net", clip=(0.3, 2.0), optimizer="adamw", tolerance=1e-3)),
    "loop": ("v5e:2x4", Case("ScanNet", scan=ALL_LARGE)),
    "hybrid stacked bf16": (
        "v5e:2x2*2",
        Case(
            "ScanNet",
            scan={**ALL_LARGE, "stacked": True},
            mesh=(2, 4),
            options=BF16,
            tolerance=0.05,
        ),
    ),
    "streamed ends": ("v5e:2x4", Case("SignsToLossNet", options=ROWS, computes_loss=True)),
}
BROKEN = {"broken ring": "ring", "stale input": "stale"}
NODES = ("nodes", "more nodes")


@cached_outcome
def quick() -> dict[str, Done]:
    jobs = {name: job_of(*each) for name, each in QUICK.items()}
    jobs.update({name: job_of(*QUICK["loop"], fault=fault) for name, fault in BROKEN.items()})
    jobs.update({name: Job("v5e:2x2", chip_training.unequal_nodes) for name in NODES})
    return run_jobs(jobs)


@pytest.mark.parametrize("name", QUICK)
def test_training_equals_that_of_plain_torch(name: str) -> None:
    assert_right(QUICK[name][1], quick()[name])


@pytest.mark.parametrize("name", ["loop", "nested"])
def test_reductions_go_around_rings_in_loops_alone_and_steps_settle_on_one_program(
    name: str,
) -> None:
    done = quick()[name]
    assert ("collective-permute" in done.programs[-1]) == (name == "loop")
    assert done.runs[-2:] == (done.runs[-1],) * 2


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_seen(name: str) -> None:
    done = quick()[name]
    assert not done.error, done.error
    with pytest.raises(AssertionError):
        assert_right(QUICK["loop"][1], done)


def test_ranks_number_autograd_s_nodes_alike_whatever_ran_before() -> None:
    before, after = (quick()[name] for name in NODES)
    assert (before.error, after.error) == ("", "")
    assert len(set(before.ranks)) == len(set(after.ranks)) == 1
    assert after.ranks[0] == before.ranks[0] + len(before.ranks) - 1


# ---------------------------------------------------------------- the command


@cached_outcome
def rehearsed(
    fault: str, way: str = "ordinary", steps: int = 2
) -> tuple[int, list[str], list[str]]:
    """Exit code, and lines of output and of errors."""
    skip_without_chips()
    run = ("-m", "xla_fsdp.preflight", "test.common.rehearsed:build_step", "--run", str(steps))
    mesh = () if way == "in_loop" else ("--mesh", "replica=2,shard=2")  # loops step no replicas
    chosen = () if way == "ordinary" else ("--set", f"way={way}")
    done = run_warm(*run, "--topology", "v5e:2x2", *mesh, "--set", f"fault={fault}", *chosen)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def test_steps_are_printed_beside_those_of_the_plain_model() -> None:
    code, lines, errors = rehearsed("none")
    assert (code, errors) == (0, [])
    head, needs, names, *rows = lines
    assert head == "v5e:2x2 mesh=replica 2 x shard 2 fault=none"
    pattern = (
        r"2 step\(s\) of 4 ranks on this machine: needs about [\d.]+ of [\d.]+ GiB of memory, "
    )
    assert re.fullmatch(pattern + r"and \d+ (s|min)", needs)
    assert names.split() == (
        ["step", "loss", "plain", "grad", "norm", "plain", "finite", "ranks", "agree", "seconds"]
    )
    assert len(rows) == 2
    for number, row in enumerate(rows, 1):
        step, loss, plain, norm, plain_norm, *sound, _ = row.split()
        assert (step, sound) == (str(number), ["yes", "yes"])
        assert float(loss) == pytest.approx(float(plain), rel=1e-4)
        assert float(norm) == pytest.approx(float(plain_norm), rel=1e-4)


def test_ranks_run_where_the_plain_model_fails() -> None:
    code, lines, errors = rehearsed("plain", steps=1)
    assert (code, errors) == (0, [])
    said = (
        "the plain model raised ValueError: view size is not compatible; the ranks run without it"
    )
    assert lines[2] == said
    _, loss, norm, finite, agree, _ = lines[4].split()
    assert (finite, agree) == ("yes", "yes")
    assert float(loss) > 0
    assert float(norm) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "has_norm"), [("in_backward", True), ("in_loop", False), ("compiled", False)]
)
def test_steps_that_optimizers_make_elsewhere_are_compared(way: str, has_norm: bool) -> None:
    code, lines, errors = rehearsed("none", way, steps=4)
    assert (code, errors) == (0, [])
    for row in lines[3:]:
        _, loss, plain, norm, plain_norm, *sound, _ = row.split()
        assert sound == ["yes", "yes"]
        assert float(loss) == pytest.approx(float(plain), rel=1e-4)
        assert norm == "-" or float(norm) == pytest.approx(float(plain_norm), rel=1e-4)
    assert (norm != "-") == has_norm
    assert len(lines) == 7


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in_backward", "compiled"])
def test_what_such_steps_leave_different_is_told(way: str) -> None:
    code, lines, _ = rehearsed("apart", way)
    assert code == 1
    assert lines[4].split()[5:7] == ["yes", "no"]


@pytest.mark.slow
def test_what_is_not_finite_is_told() -> None:
    code, lines, _ = rehearsed("infinite")
    assert code == 1
    assert lines[3].split()[5:7] == ["no", "yes"]
    assert "      the loss is not finite on ranks [1]" in lines
    assert any(
        re.fullmatch(r"      the gradient of .* is not finite on ranks \[0, .*\]", line)
        for line in lines
    )


@pytest.mark.slow
def test_devices_made_where_a_module_is_imported_are_refused(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "import torch_xla\ndevice = torch_xla.device()\nit = print\n"
    )
    run = ("-m", "xla_fsdp.preflight", "early:it", "--topology", "v5e:2x2", "--run", "1")
    done = run_python(*run, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"})
    assert done.returncode == 1
    assert "a rehearsal of 4 ranks wants as many CPU devices" in done.stderr


@pytest.mark.slow
def test_a_backward_pass_before_there_are_devices_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "import torch\n"
        "torch.ones((), requires_grad=True).square().backward()\n"
        "from test.common.rehearsed import build_step\n"
    )
    skip_without_chips()
    run = ("-m", "xla_fsdp.preflight", "early:build_step", "--topology", "v5e:2x2", "--run", "2")
    done = run_python(*run, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"})
    assert (done.returncode, done.stderr) == (0, "")
    for row in done.stdout.splitlines()[3:]:
        _, loss, plain, norm, plain_norm, *sound, _ = row.split()
        assert sound == ["yes", "yes"]
        assert float(loss) == pytest.approx(float(plain), rel=1e-4)
        assert float(norm) == pytest.approx(float(plain_norm), rel=1e-4)


@pytest.mark.slow
def test_what_differs_between_ranks_is_told() -> None:
    code, lines, _ = rehearsed("apart")
    assert code == 1
    assert lines[3].split()[5:7] == ["yes", "yes"]
    assert lines[4].split()[5:7] == ["yes", "no"]
    pattern = r"must be the same on ranks that hold copies, and differs: \[\d\], \[\d\]"
    assert all(re.search(pattern, line) for line in lines[5:])


@pytest.mark.slow
def test_what_a_rank_raises_is_told_in_one_line() -> None:
    code, _, errors = rehearsed("raises")
    assert code == 1
    start = "xla_fsdp.preflight: v5e:2x2 mesh=replica 2 x shard 2 fault=raises: RankError: "
    assert errors == [
        f"{start}rank 1 raised ValueError: no batch is left (--traceback shows where)"
    ]


def test_a_table_tells_where_numbers_are_not_finite_and_who_differs() -> None:
    lines: list[str] = []
    table = Table(2, [], lines.append)
    shard = {("weight", (0,)): "a", ("steps", ()): "1"}
    table.add(0, 0, RankStep(1.0, 4.0, (), shard))
    assert lines == []
    table.add(0, 1, RankStep(2.0, 5.0, ("the loss",), {**shard, ("weight", (0,)): "b"}))
    [result] = table.results
    assert (result.loss, result.grad_norm, result.is_sound) == (1.5, 3.0, False)
    assert lines[2:] == [
        "      the loss is not finite on ranks [1]",
        "      weight must be the same on ranks that hold copies, and differs: [0], [1]",
    ]
    table.add(1, 0, RankStep(None, None, (), shard))
    table.add(1, 1, RankStep(None, None, (), {("weight", (1,)): "b", ("steps", ()): "1"}))
    assert table.results[1].is_sound
    assert lines[-1].split()[:5] == ["2", "-", "-", "yes", "yes"]
    table.add(2, 0, RankStep(1.0, None, (), {}))
    table.add(2, 1, RankStep(1.0, None, (), {}))
    assert lines[-1].split()[:5] == ["3", "1", "-", "yes", "-"]


def test_of_many_problems_the_first_are_told_and_the_loss_before_all() -> None:
    lines: list[str] = []
    table = Table(2, [], lines.append)
    weights = tuple(f"weight {number}" for number in range(9))
    table.add(0, 0, RankStep(1.0, 1.0, weights, {}))
    table.add(0, 1, RankStep(math.nan, 1.0, ("the loss",), {}))
    assert len(table.results[0].not_finite) == 10
    assert lines[2] == "      the loss is not finite on ranks [1]"
    assert lines[6:] == ["      weight 3 is not finite on ranks [0]", "      and 5 more"]


def test_what_does_not_fit_is_refused_beforehand() -> None:
    needs = Needs(memory=20 * GIB, available=16 * GIB, compile_seconds=5, step_seconds=100)
    assert needs.text(3) == "needs about 20.0 of 16.0 GiB of memory, and 5 min"
    with pytest.raises(RehearsalError, match=r"3 step\(s\) on v5e:4x4: needs .*does not fit"):
        check_fits("v5e:4x4", needs, 3)
    check_fits("v5e:4x4", dataclasses.replace(needs, available=21 * GIB), 3)


def test_ranks_whose_programs_differ_are_named() -> None:
    assert same_program([b"a", b"a"]) == b"a"
    pattern = r"traced 2 different programs: ranks \[0, 2\]; ranks \[1\]\. On a TPU"
    with pytest.raises(RuntimeError, match=pattern):
        same_program([b"a", b"b", b"a"])


def test_the_only_call_left_out_says_where_a_value_lies() -> None:
    assert WITHOUT_EFFECT == ("annotate_device_placement",)


# ---------------------------------------------------------------- every way, everywhere

WAYS: dict[str, Case] = {
    "ordinary": Case("Net", remat="inside"),
    "kept": Case("Net", options={"reshard_after_forward": False}),
    "flat": Case("Net", options={"flatten_parameters": True}),
    "in place": Case("Net", in_place=True, clip=(0.3, 2.0)),
    "in place along dim 1": Case("Net", in_place=True, dim=1),
    "frozen": Case("FrozenNet"),
    "batch norm": Case("BatchNormNet"),
    "unit runs twice": Case("TwiceNet"),
    "loop": Case("ScanNet", scan=ALL_LARGE, clip=(0.3, 2.0)),
    "loop, small parameters once": Case("ScanNet", scan={}),
    "stacked": Case("ScanNet", scan={**ALL_LARGE, "stacked": True}),
    "offloaded": Case("ScanNet", scan={**ALL_LARGE, "offload_activations": True}),
    "accumulated": Case("ScanNet", scan=ALL_LARGE, micro_batches=2),
    "no_sync": Case("Net", micro_batches=3, no_sync=True),
    "head and embedding": Case("TiedSignsNet", options=ROWS, computes_loss=True),
    "wide head": Case("WideHeadNet", computes_loss=True),
    "wide embedding": Case("WideSignsNet"),
    "rows are sent": Case("LargeSignsNet", options=ROWS),
    "bf16": Case("ScanNet", scan=ALL_LARGE, options=BF16, tolerance=0.05),
    "bf16, reduced in fp32": Case(
        "Net", options={**BF16, "fp32_reduce_scatter": True}, tolerance=0.05
    ),
    "gradient penalty": Case("Net", penalty="added", tolerance=1e-4),
}
PLACES = ("v5e:2x4", "v5p:2x2x2", "v5e:2x2*2")
LARGE = {
    (topology, way): WAYS[way]
    for topology, ways in {
        "v5e:4x4": ("ordinary", "loop", "stacked", "head and embedding"),
        "v5p:4x4x4": ("loop",),
    }.items()
    for way in ways
}
HYBRID = {
    "2 x 4": ("v5e:2x4", dataclasses.replace(WAYS["loop"], mesh=(2, 4))),
    "4 x 2": ("v5p:2x2x2", dataclasses.replace(WAYS["ordinary"], mesh=(4, 2))),
    "a replica per slice": ("v5e:2x2*2", dataclasses.replace(WAYS["stacked"], mesh=(2, 4))),
    "no_sync": ("v5e:2x4", dataclasses.replace(WAYS["no_sync"], mesh=(2, 4))),
}
TENSOR = {
    f"{model} {mesh} {shard} {more}": tensor_training.Case(
        model, mesh, shard=shard, sequence=more != "", loss=more == "sequence, loss"
    )
    for model, mesh, shard, more in (
        ("Gpt", (("tensor", 4),), "", ""),
        ("Llama", (("tensor", 4),), "", "sequence, loss"),
        ("Llama", (("shard", 2), ("tensor", 4)), "wrapped", "sequence, loss"),
        ("Gpt", (("shard", 4), ("tensor", 2)), "in_place", "sequence"),
        ("Gpt", (("replica", 2), ("shard", 2), ("tensor", 2)), "wrapped", "sequence, loss"),
    )
}
SLICES = {4: "v5e:2x2", 8: "v5e:2x4"}
SHARDED = (
    "in backward", "stacked in backward", "scaler", "experts", "replayed", "stacked replayed",
    "replayed in backward",
)  # fmt: skip


@cached_outcome
def everywhere(topology: str) -> dict[str, Done]:
    return run_jobs({way: job_of(topology, case) for way, case in WAYS.items()}, timeout=1800)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "way"), [*itertools.product(PLACES, WAYS)])
def test_every_way_to_train_on_every_slice(topology: str, way: str) -> None:
    assert_right(WAYS[way], everywhere(topology)[way])


@pytest.mark.slow
@pytest.mark.parametrize("topology", PLACES)
def test_calls_that_say_where_values_lie_are_in_offloaded_programs_alone(topology: str) -> None:
    done = everywhere(topology)
    with_calls = {way for way, each in done.items() if WITHOUT_EFFECT[0] in each.programs[-1]}
    assert with_calls == {"offloaded"}


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "way"), LARGE)
def test_large_slices(topology: str, way: str) -> None:
    [done] = run_jobs({"it": job_of(topology, LARGE[topology, way])}, timeout=1800).values()
    assert_right(LARGE[topology, way], done)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ordinary", "loop"])
def test_ranks_that_lie_anywhere(way: str) -> None:
    [done] = run_jobs({"it": job_of("v5e:2x4", WAYS[way], shuffled=True)}).values()
    assert_right(WAYS[way], done)
    assert "collective-permute" not in done.programs[-1]


@cached_outcome
def others() -> dict[str, Done]:
    jobs = {name: job_of(*each) for name, each in HYBRID.items()}
    for name, tensor_case in TENSOR.items():
        args = (tensor_case, None, True)
        jobs[name] = Job(SLICES[tensor_case.num_ranks], tensor_training.train, args)
    for way in SHARDED:
        jobs[way] = Job("v5e:2x2", chip_training.sharded, (way,))
    for seeds in ("equal", "different"):
        jobs[f"{seeds} seeds"] = Job("v5e:2x2", chip_training.dropout, (seeds,))
    jobs["zero"] = Job("v5e:2x4", chip_training.zero)
    jobs["post-local"] = Job("v5e:2x2", chip_training.post_local_sgd)
    return run_jobs(jobs, timeout=1800)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_sharding(name: str) -> None:
    assert_right(HYBRID[name][1], others()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR)
def test_tensor_sequence_and_loss_parallelism(name: str) -> None:
    done = others()[name]
    assert not done.error, done.error
    tensor_training.assert_like_plain(TENSOR[name], done.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("way", SHARDED)
def test_other_steps_of_sharded_models(way: str) -> None:
    done = others()[way]
    assert not done.error, done.error
    expected = chip_training.plain(len(done.ranks), way)
    for rank in done.ranks:
        assert_close(rank, expected, what="state", atol=2e-6, of_largest=2e-4, smallest=1e-2)


def test_some_experts_have_no_token_on_some_ranks_and_others_on_others() -> None:
    inputs = [chip_training.labelled(0, rank)[0] for rank in range(4)]
    chosen = [set(chip_training.chosen_experts(x).tolist()) for x in inputs]
    assert any(len(each) < 4 for each in chosen)
    assert len(set(map(frozenset, chosen))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seeds", ["equal", "different"])
def test_dropout_draws_as_ranks_are_seeded(seeds: str) -> None:
    done = others()[f"{seeds} seeds"]
    assert not done.error, done.error
    outputs = [[step["output"] for step in rank] for rank in done.ranks]
    same = [torch.equal(a[0] != 0, outputs[0][0] != 0) for a in outputs[1:]]
    assert same == [seeds == "equal"] * 3
    assert not torch.equal(outputs[0][0] != 0, outputs[0][1] != 0)
    for step, weight in enumerate(chip_training.expected_weights(done.ranks)):
        assert all(torch.allclose(rank[step]["weight"], weight) for rank in done.ranks)


@pytest.mark.slow
def test_an_optimizer_divided_over_the_ranks() -> None:
    done = others()["zero"]
    assert not done.error, done.error
    model, optimizer, norms = train_plain_replica(8, chip_training.adamw, clip=0.1)
    assert_same_state(done.ranks[0]["state"], optimizer.state_dict(), 1e-5)
    for rank in done.ranks:
        assert largest_error(rank["params"], values(model)) <= 2e-4
        assert rank["norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.slow
def test_averages_after_local_steps_are_two_programs() -> None:
    done = others()["post-local"]
    assert not done.error, done.error
    expected = chip_training.plain_local_sgd(4)
    for found, wanted in zip(done.ranks, expected, strict=True):
        for step, params in enumerate(found):
            assert largest_error(params, wanted[step]) <= 1e-6
    assert len(done.programs) == 1  # of the other kind of step no rank needs another


# ---------------------------------------------------------------- random models

RECIPES, TOGETHER = 200, 25


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, RECIPES, TOGETHER))
def test_random_models_on_random_slices(first: int, tmp_path: Path) -> None:
    recipes = {seed: draw_on_chips(seed) for seed in range(first, first + TOGETHER)}
    judged = dict(zip(recipes, verdicts_on_chips([*recipes.values()]), strict=True))
    for seed, verdict in judged.items():
        why = f" ({verdict.what})" if verdict.kind == "refused" else ""
        print(f"seed {seed} on {topology_of(recipes[seed])}: {verdict.kind}{why}")
    failing = [seed for seed, verdict in judged.items() if verdict.is_failure]
    chosen = [(recipes[seed], judged[seed]) for seed in failing]
    smallest = shrink(chosen, verdicts_on_chips) if chosen else []
    for seed, each in zip(failing, smallest, strict=True):
        (tmp_path / f"{seed}.py").write_text(script(*each))
        print(f"{tmp_path}/{seed}.py: {each[1].kind}: {each[1].what}\n{each[0]}")
    assert not failing, f"seeds {failing}"
