"""What the real TPU compiler makes of a small transformer's step, on two topologies.

One command for all programs, so these tests run the command line as well. Blocks are units,
rematerialized, and compute in bf16.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from test.common.tpu_reports import counts, reports
from test.common.tpu_steps import VOCABULARY, WIDTH

pytest.importorskip("libtpu", reason="the TPU compiler: pip install '.[preflight]'")
pytestmark = pytest.mark.slow

TARGET = "test.common.tpu_steps:build"
# Operands of a block's collectives: large matrices (on 16 ranks one of the four is small), and what
# is joined.
OPERANDS = {"v5e:4x4": 3 + 1, "v4:2x2x2": 4 + 1}
TORI = tuple(OPERANDS)
BLOCK = 2 * (12 * WIDTH**2 + 13 * WIDTH)  # bytes of its full parameters in bf16
ROOT = 2 * 2 * VOCABULARY * WIDTH


def report(topology: str, depth: int) -> dict[str, Any]:
    arguments = [word for name in TORI for word in ("--topology", name)]
    found = reports(TARGET, *arguments, "--sweep", "depth=1,3")
    [one] = [
        each for each in found if (each["topology"], each["options"]["depth"]) == (topology, depth)
    ]
    return one


def added(topology: str, kind: str) -> int:
    """Collectives of a kind that two more blocks bring."""
    return counts(report(topology, 3))[kind] - counts(report(topology, 1))[kind]


@pytest.mark.parametrize("topology", TORI)
def test_gradients_are_reduced_axis_by_axis_and_never_by_an_all_reduce(topology: str) -> None:
    for depth in (1, 3):
        found = report(topology, depth)
        assert counts(found)["all-reduce"] == 0
        assert not any("all-reduce" in finding for finding in found["findings"])
    axes = len(topology.partition(":")[2].split("x"))
    assert added(topology, "reduce-scatter") == 2 * axes * OPERANDS[topology]


@pytest.mark.parametrize("topology", TORI)
def test_every_block_is_gathered_for_forward_and_again_for_backward(topology: str) -> None:
    assert added(topology, "all-gather") == 2 * 2 * OPERANDS[topology]


@pytest.mark.parametrize("topology", TORI)
def test_full_parameters_do_not_outlive_their_unit(topology: str) -> None:
    for depth in (1, 3):
        # The root's, and those of the unit that computes and the one that is gathered ahead.
        assert report(topology, depth)["full_parameters"] <= 1.2 * (ROOT + 2 * BLOCK)


@pytest.mark.parametrize("topology", TORI)
def test_everything_travels_in_bf16_and_hardly_more_than_necessary(topology: str) -> None:
    found = report(topology, 3)
    assert {each["dtype"] for each in found["traffic"]} == {"bf16"}
    assert found["wire_bytes"] <= 1.1 * found["minimum_wire_bytes"]  # biases and norms are padded
    assert not any("matrix products" in finding for finding in found["findings"])


def test_parameters_and_optimizer_state_are_updated_in_place() -> None:
    memory = report("v5e:4x4", 3)["memory"]
    assert memory["optimizer_state"] == 2 * memory["parameters"]
    assert memory["outputs"] <= 1024  # the loss, in a tile


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_exchange_shards_alone(replicas: int) -> None:
    found = reports(TARGET, "--topology", "v5e:4x4", "--set", "depth=3", "--sweep", "replicas=2,4")
    [one] = [each for each in found if each["options"]["replicas"] == replicas]
    shards = 16 // replicas
    sent: Counter[str] = Counter()
    for each in one["traffic"]:
        sent[each["kind"]] += each["wire_bytes"]
    # Of a gradient of n bytes: its reduce-scatter in a ring, and the all-reduce of the shard.
    gradients = sent["reduce-scatter"] * shards / (shards - 1)
    assert sent["all-reduce"] == pytest.approx(
        2 * (replicas - 1) / replicas * gradients / shards, rel=1e-3
    )
    assert set(sent) == {"all-gather", "reduce-scatter", "all-reduce"}
    between = {each["group_size"] for each in one["traffic"] if each["kind"] == "all-reduce"}
    assert between == {replicas}
    assert {each["dtype"] for each in one["traffic"]} == {"bf16"}
    assert one["wire_bytes"] <= 1.1 * one["minimum_wire_bytes"]


def test_without_barriers_and_torus_the_difference_shows() -> None:
    arguments = ("--set", "depth=3", "--set", "barriers=off", "--set", "one_step=on")
    [found] = reports(TARGET, *arguments)
    usual = report("v5e:4x4", 3)
    assert counts(found)["all-gather"] < counts(usual)["all-gather"]
    assert found["full_parameters"] > usual["full_parameters"]
    assert counts(found)["all-reduce"] > 0


def wide() -> list[dict[str, Any]]:
    """Reports on two and on four blocks whose matrices are large."""
    return reports(TARGET, "--set", "width=1024", "--sweep", "depth=2,4")


def test_equal_blocks_share_their_code() -> None:
    small, large = (each["memory"]["code"] for each in wide())
    assert large - small <= 2 * 3 * 2**20  # a block's own takes 12 MiB


MESH = ("--mesh", "replica=2,shard=8")


def test_replicas_add_an_all_reduce_of_shards_alone() -> None:
    [found] = reports(TARGET, "--set", "depth=3", *MESH)
    sizes = {(each["kind"], each["group_size"]) for each in found["traffic"]}
    assert ("all-gather", 8) in sizes
    assert {size for kind, size in sizes if kind == "all-reduce"} == {2}
    assert found["options"] == {"mesh": "replica 2 x shard 8", "depth": 3}
    assert found["warnings"] == []
    assert not any("all-reduce" in finding for finding in found["findings"])
    assert found["wire_bytes"] <= 1.1 * found["minimum_wire_bytes"]


def test_several_slices_are_one_job_with_replicas_across_them() -> None:
    [found] = reports(TARGET, "--topology", "v5e:2x4*2", "--set", "depth=1", *MESH)
    assert found["num_ranks"] == 16
    sizes = {(each["kind"], each["group_size"]) for each in found["traffic"]}
    assert {size for kind, size in sizes if kind == "all-gather"} == {8}
    assert ("all-reduce between slices", 2) in sizes
    assert "all-reduce" not in dict(sizes)
    assert found["wire_bytes"] <= 1.1 * found["minimum_wire_bytes"]


def test_fp32_reductions_leave_gathers_and_products_in_bf16() -> None:
    options = ("--set", "depth=4", "--set", "width=1024", "--set", "fp32_reduce_scatter=on")
    [found] = reports(TARGET, *options)
    dtypes = {(each["kind"], each["dtype"]) for each in found["traffic"]}
    assert {dtype for kind, dtype in dtypes if kind != "all-gather"} == {"f32"}
    assert {dtype for kind, dtype in dtypes if kind == "all-gather"} == {"bf16"}
    assert not any("matrix products" in finding for finding in found["findings"])
    assert found["wire_bytes"] <= 1.05 * found["minimum_wire_bytes"]
