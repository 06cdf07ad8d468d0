"""What a training step's program gathers, reduces and computes in, read from the program itself.

Two ranks; ``LinearNet`` is an input layer, two blocks of two linear layers each, and a head. Its
blocks and its head are units, and so is the rest, as the root.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.hlo import Instruction, Program
from test.common.parity import Case, batches, build, forward_backward, make_optimizer, shard
from test.common.ranks import FAST_COMPILE, cached_outcome, run_on_ranks

NO_BARRIERS = {"optimization_barrier_in_forward": False, "optimization_barrier_in_backward": False}
BF16 = {"compute_dtype": torch.bfloat16}
BASE = Case(model="LinearNet")
CASES = {
    "nested": BASE,
    "keeps_params": replace(BASE, options={"reshard_after_forward": False}),
    "no_barriers": replace(BASE, options=NO_BARRIERS),
    "flat": replace(BASE, options={"flatten_parameters": True}),
    "one_each": replace(
        BASE, options={"coalesce_all_gather_ops": False, "reduce_scatter_bucket_size_mb": 0}
    ),
    "remat": replace(BASE, remat="inside"),
    "remat_outside": replace(BASE, remat="outside"),
    "remat_flat": replace(BASE, remat="inside", options={"flatten_parameters": True}),
    "bf16": replace(BASE, options=BF16),
    "bf16_fp32_reduce": replace(BASE, options={**BF16, "fp32_reduce_scatter": True}),
    "bf16_remat": replace(BASE, remat="inside", options=BF16),
    "bf16_batch_norm": Case(model="BatchNormNet", options=BF16),
    "no_sync": replace(BASE, micro_batches=2, no_sync=True),
}
BLOCKS, LAYERS = 2, 2
INNER_UNITS = BLOCKS + 1  # and the head
UNITS = INNER_UNITS + 1  # and the root, which holds the input layer


def steady_step(rank: int, cases: dict[str, Case]) -> dict[str, str]:
    """HLO of the second training step of each case."""
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp.xla.graph import lowered_hlo

    device, programs = torch_xla.device(), {}
    for name, case in cases.items():
        model = shard(build(case), case, xr.world_size(), rank)
        optimizer = make_optimizer(case, model.parameters())
        x, y = (t.to(device) for t in batches(case, xr.world_size()))
        for step in range(2):
            torch_xla.sync()
            optimizer.zero_grad()
            forward_backward(model, case, x[step, :, rank], y[step, :, rank])
            optimizer.step()
        programs[name] = lowered_hlo(list(model.parameters()))
        torch_xla.sync()
    return programs


@cached_outcome
def programs() -> dict[str, Program]:
    texts = run_on_ranks(steady_step, 2, CASES)[0]
    return {name: Program(text) for name, text in texts.items()}


def collectives(name: str) -> Counter[tuple[str, str]]:
    """How many collectives of each kind and dtype a case's program has."""
    found = programs()[name].all("all-gather", "reduce-scatter", "all-reduce")
    return Counter((i.op, i.dtype) for i in found)


def test_inner_units_gather_twice_and_every_unit_reduces_once() -> None:
    expected = {("all-gather", "f32"): 2 * INNER_UNITS + 1, ("reduce-scatter", "f32"): UNITS}
    for name in ("nested", "no_barriers", "flat", "remat", "remat_outside", "remat_flat"):
        assert collectives(name) == expected, name


def test_a_unit_that_keeps_its_parameters_gathers_once() -> None:
    expected = {("all-gather", "f32"): UNITS, ("reduce-scatter", "f32"): UNITS}
    assert collectives("keeps_params") == expected


def test_one_collective_for_each_parameter_on_request() -> None:
    inner, root = 2 * LAYERS * BLOCKS + 2, 2  # a weight and a bias each
    expected = {("all-gather", "f32"): 2 * inner + root, ("reduce-scatter", "f32"): inner + root}
    assert collectives("one_each") == expected


def test_no_sync_reduces_only_at_the_end() -> None:
    found = collectives("no_sync")
    assert found["reduce-scatter", "f32"] == UNITS
    assert found["all-gather", "f32"] == 2 * (2 * INNER_UNITS + 1)


@pytest.mark.parametrize("name", ["bf16", "bf16_remat", "bf16_fp32_reduce"])
def test_low_precision_is_real(name: str) -> None:
    reduce_dtype = "f32" if name == "bf16_fp32_reduce" else "bf16"
    expected = {
        ("all-gather", "bf16"): 2 * INNER_UNITS + 1,
        ("reduce-scatter", reduce_dtype): UNITS,
    }
    assert collectives(name) == expected
    assert {dot.dtype for dot in programs()[name].all("dot")} == {"bf16"}


def test_batch_norm_is_gathered_and_reduced_in_its_own_dtype() -> None:
    assert collectives("bf16_batch_norm") == {
        ("all-gather", "bf16"): 2 * INNER_UNITS + 1,
        ("all-gather", "f32"): 2 * BLOCKS,
        ("reduce-scatter", "bf16"): UNITS,
        ("reduce-scatter", "f32"): BLOCKS,
    }


@pytest.mark.parametrize("name", CASES)
def test_operands_are_whole_tiles(name: str) -> None:
    # A TPU reduces 1-D or ragged operands by a full all-reduce.
    program = programs()[name]
    for collective in program.all("all-gather", "reduce-scatter"):
        operand = program.instructions[collective.operands[0]]
        *stacked, rows, width = min(operand.shape, collective.shape)
        # A dim of ranks to scatter: rows that the compiler makes the fastest dim cannot be.
        assert stacked == ([1] if collective.op == "reduce-scatter" else [])
        assert rows % 8 == 0
        assert width == 128


def _reshapes(instruction: Instruction) -> bool:
    """Whether values pass through unchanged: how a weight gets from its gather to its product."""
    return instruction.op in ("reshape", "transpose", "slice", "convert", "concatenate", "pad")


@pytest.mark.parametrize("name", ["nested", "no_barriers", "flat", "remat", "remat_outside"])
def test_backward_computes_with_what_it_gathered_itself(name: str) -> None:
    """If anything saved in forward kept a full parameter, the first gather would feed the products
    of the backward, too."""
    program = programs()[name]
    products: Counter[str] = Counter()
    for dot in program.all("dot"):
        sources = {source.name for source in program.sources(dot, _reshapes)}
        products.update(s for s in sources if program.instructions[s].op == "all-gather")
    recomputed = LAYERS if name.startswith("remat") else 0
    root, head = 1, 1  # the input needs no gradient; a head's backward is one product
    expected = [LAYERS, LAYERS + recomputed] * BLOCKS + [head, head] + [root]
    assert sorted(products.values()) == sorted(expected)


def _is_behind_barrier(program: Program, gather: Instruction) -> bool:
    def passes(instruction: Instruction) -> bool:
        return instruction.op != "opt-barrier"

    return any(s.op == "opt-barrier" for s in program.sources(gather, passes))


@pytest.mark.parametrize("name", ["nested", "flat", "keeps_params", "remat", "bf16"])
def test_every_gather_stands_behind_a_barrier(name: str) -> None:
    program = programs()[name]
    assert all(_is_behind_barrier(program, gather) for gather in program.all("all-gather"))


def test_no_barriers_means_none() -> None:
    assert programs()["no_barriers"].all("opt-barrier") == []


def test_second_gather_survives_optimization(tmp_path: Path) -> None:
    """The same counts in the program that XLA has optimized for this machine."""
    flags = f"{FAST_COMPILE} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    run_on_ranks(steady_step, 2, {"nested": BASE}, env={"XLA_FLAGS": flags})
    dumps = tmp_path.glob("*after_optimizations.txt")
    counts: list[Any] = [
        len(Program(dump.read_text()).all("all-gather", "all-gather-start")) for dump in dumps
    ]
    assert max(counts) == 2 * INNER_UNITS + 1
