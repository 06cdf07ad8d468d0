"""What the real TPU compiler makes of blocks that run as one loop, for any depth."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from test.common.ranks import cached_outcome, run_python
from test.common.tpu_reports import counts, reports
from test.common.tpu_steps import LENGTH

pytest.importorskip("libtpu", reason="the TPU compiler: pip install '.[preflight]'")
pytestmark = pytest.mark.slow

TARGET = "test.common.tpu_steps:build"
DEPTHS = (4, 24, 48)
BATCH, DEPTH, WIDTH = 8, 4, 1024
MIB = 2**20


def at_depths() -> dict[int, dict[str, Any]]:
    found = reports(TARGET, "--set", "scan=on", "--sweep", f"depth={','.join(map(str, DEPTHS))}")
    return {each["options"]["depth"]: each for each in found}


def test_collectives_do_not_grow_with_depth_and_code_by_the_optimizer_alone() -> None:
    found = at_depths()
    code = [found[depth]["memory"]["code"] for depth in DEPTHS]
    # AdamW updates every block's parameters by themselves; an unrolled block takes 12 MiB.
    assert code[-1] - code[0] <= 1.2 * MIB * (DEPTHS[-1] - DEPTHS[0])
    programs = {depth: len(found[depth]["timeline"]["spans"]) for depth in DEPTHS}
    assert len(set(programs.values())) == 1, programs
    assert all(counts(each)["all-reduce"] == 0 for each in found.values())


@cached_outcome
def wide() -> dict[str, Any]:
    """Four blocks whose matrices travel alone, of smaller ones padding is a tenth; and rows enough
    for what they compute to hide that."""
    sizes = (f"width={WIDTH}", f"depth={DEPTH}", f"rows={BATCH}")
    [found] = reports(
        TARGET, "--set", "scan=on", *(word for size in sizes for word in ("--set", size))
    )
    return found


def test_a_loop_sends_what_single_blocks_send() -> None:
    assert counts(wide())["all-reduce"] == 0
    assert wide()["wire_bytes"] <= 1.05 * wide()["minimum_wire_bytes"]


def test_large_gradients_of_a_loop_go_around_rings_that_compute_hides() -> None:
    found = wide()
    sent = {
        overlapped: sum(
            each["wire_bytes"]
            for each in found["traffic"]
            if each["kind"] == "collective-permute" and each["overlapped"] is overlapped
        )
        for overlapped in (True, False)
    }
    matrices = DEPTH * 12 * WIDTH**2 * 2  # bytes of blocks' gradients in bf16
    assert sent[True] >= 0.85 * matrices
    assert sent[False] == 0
    # What is left is the root's, which has nothing to hide under.
    reduced = sum(e["wire_bytes"] for e in found["traffic"] if e["kind"] == "reduce-scatter")
    assert reduced <= 0.1 * matrices


def test_ordinary_nesting_writes_nothing_that_it_does_not_compute(tmp_path: Path) -> None:
    done = run_python("-m", "test.common.tpu_schedules", str(tmp_path), "ordinary", timeout=900)
    assert done.returncode == 0, done.stderr
    [line] = (each for each in done.stdout.splitlines() if each.startswith("{"))
    found = json.loads(line)
    table = 50257 * 512 * 2  # bytes
    stacks = {8 * rows * 512 * 2 // 4 for rows in (512, 3 * 512, 4 * 512)}
    # Rows of the table are sent, and gradients of rows; pieces of the head have up to 8 MiB.
    assert found["sent"] <= 8 * MIB
    # No table without its padding, and no gradient of one that is padded afterwards.
    assert max(found["slice"] + found["pad"]) < table
    # A stack of shards is written once, and what a loop writes is not zeroed before: only the
    # table's gradient is, to add to.
    assert [size for size in found["broadcast"] if size >= min(stacks)][1:] == []
    assert not stacks & set(found["add"])


def test_large_gradients_are_computed_in_the_parts_that_rings_add(tmp_path: Path) -> None:
    done = run_python("-m", "test.common.tpu_schedules", str(tmp_path), "parts", timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["multiplied"]
    whole = 4 * 2048**2  # of the feed-forward's matrices; a ring has two ranks
    assert max(found) == whole // 2


@cached_outcome
def offloaded() -> dict[str, Any]:
    """``wide`` with the blocks' inputs on the host."""
    options = ("scan=on", "offload=on", f"width={WIDTH}", f"depth={DEPTH}", f"rows={BATCH}")
    [found] = reports(TARGET, *(word for each in options for word in ("--set", each)))
    return found


def test_offloaded_inputs_of_blocks_lie_in_the_hosts_memory() -> None:
    found, inputs = offloaded(), DEPTH * BATCH * LENGTH * WIDTH * 2
    assert found["offloaded_bytes"] == inputs
    assert wide()["offloaded_bytes"] == 0
    assert found["wire_bytes"] == wide()["wire_bytes"]
    # The compiler's schedule hides the gather of one matrix of each block with or without
    # this: with 2 and 8 rows it blocks here, with 32 rows where nothing is offloaded.
    assert found["blocking_bytes"] <= wide()["blocking_bytes"] + DEPTH * WIDTH**2 * 2
    assert any("go to the host's memory" in each for each in found["findings"])


def test_a_sync_between_forward_and_backward_is_told_where_activations_are_offloaded() -> None:
    options = ("--set", "scan=on", "--set", "offload=on", "--set", "cut=on")
    done = run_python("-m", "xla_fsdp.preflight", TARGET, *options)
    assert done.returncode == 1
    assert "leave out the sync between them" in done.stderr


def test_of_a_program_that_is_refused_all_the_same_is_known() -> None:
    """But for its code, which is not counted where the compiler decides."""
    fits = wide()
    buffers = fits["peak_bytes"] - fits["memory"]["code"]
    limit = buffers // MIB - 16
    [refused] = reports(
        TARGET,
        *("--set", "scan=on", "--set", f"width={WIDTH}", "--set", f"depth={DEPTH}"),
        f"--flags=--xla_tpu_max_hbm_size_mib={limit}",
        fits=False,
    )
    assert (fits["fits"], refused["fits"]) == (True, False)
    assert 0 < refused["memory"]["too_large_by"] <= 20 * MIB
    assert refused["wire_bytes"] == pytest.approx(fits["wire_bytes"], rel=0.1)
    assert refused["memory"]["code"] == 0 < fits["memory"]["code"]


ODD = 3413, 50257  # ffn and vocabulary that nothing divides
TILED = 3456, 50688  # the next ones of which 8 ranks have whole tiles


def llama(ffn: int, vocabulary: int, width: int) -> dict[str, Any]:
    sizes = {"width": width, "heads": width // 64, "kv_heads": 1, "blocks": 4}
    options = {**sizes, "ffn": ffn, "vocabulary": vocabulary, "lean": "on"}
    given = (word for name, value in options.items() for word in ("--set", f"{name}={value}"))
    [found] = reports("examples.llm.llama:step", "--topology", "v5e:2x4", *given)
    return found


def random_sizes(seed: int) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Sizes that nothing divides, those of whole tiles, and a width of some lanes and a half."""
    pick = random.Random(seed)
    odd = pick.randrange(2049, 4096, 2), pick.randrange(30_001, 60_000, 2)
    return odd, (-(-odd[0] // 128) * 128, -(-odd[1] // 512) * 512), 64 * pick.randrange(15, 22, 2)


@pytest.mark.parametrize(
    ("odd", "tiled", "width"), [(ODD, TILED, 1280), random_sizes(0), random_sizes(1)]
)
def test_sizes_that_nothing_divides_cost_what_whole_tiles_would(
    odd: tuple[int, int], tiled: tuple[int, int], width: int
) -> None:
    found, expected = llama(*odd, width), llama(*tiled, width)
    assert found["memory"]["code"] <= 30 * MIB
    assert found["step_time"]["compute"] <= 1.1 * expected["step_time"]["compute"]
    assert found["peak_bytes"] <= 1.02 * expected["peak_bytes"]
    assert found["memory"]["parameters"] <= 1.02 * expected["memory"]["parameters"]
