"""What optimizers cost on a TPU, by its real compiler: ZeRO-1 against torch_xla's own in the same
run, and the memory that steps inside backward save."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from test.common.tpu_reports import reports

pytest.importorskip("libtpu", reason="the TPU compiler: pip install '.[preflight]'")
pytestmark = pytest.mark.slow

ZERO, DEEP = "test.common.tpu_optimizers:zero", "test.common.tpu_optimizers:deep"
DEPTH, WIDTH, RANKS = 10, 4096, 4  # of ``deep``, on v5e:2x2
SHARD = 4 * WIDTH**2 // RANKS  # bytes of one parameter's, in float32
SHARDS = DEPTH * SHARD  # of all of a rank's parameters, or of their gradients


def pick(found: list[dict[str, Any]], topology: str = "v5e:2x2", **options: Any) -> dict[str, Any]:
    [one] = [
        each
        for each in found
        if each["topology"] == topology and options.items() <= each["options"].items()
    ]
    return one


def zero_reports() -> list[dict[str, Any]]:
    topologies = ("--topology", "v5e:2x2", "--topology", "v5e:4x4")
    return reports(ZERO, *topologies, "--sweep", "kind=ours,upstream")


def low_reports() -> list[dict[str, Any]]:
    kinds = ("--sweep", "kind=ours,upstream,upstream_default")
    return reports(ZERO, "--topology", "v5e:2x2", "--set", "low=on", *kinds)


def wire_bytes(found: dict[str, Any]) -> Counter[str]:
    by_kind: Counter[str] = Counter()
    for each in found["traffic"]:
        by_kind[each["kind"]] += each["wire_bytes"]
    return by_kind


def held(found: dict[str, Any]) -> int:
    """Bytes beside parameters and optimizer state, code too."""
    return sum(found["memory"][part] for part in ("outputs", "activations", "scratch", "code"))


def assert_not_worse(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["peak_bytes"] < theirs["peak_bytes"]
    for part in ("parameters", "optimizer_state"):
        assert ours["memory"][part] <= theirs["memory"][part], part
    assert held(ours) <= 1.02 * held(theirs)  # of these small blocks half is code
    assert ours["wire_bytes"] < theirs["wire_bytes"]
    assert ours["blocking_bytes"] <= theirs["blocking_bytes"]


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:4x4"])
def test_zero_needs_less_than_torch_xlas(topology: str) -> None:
    found = zero_reports()
    ours, theirs = (pick(found, topology, kind=kind) for kind in ("ours", "upstream"))
    assert_not_worse(ours, theirs)
    # Theirs keeps a copy of every slice, and reduces vectors by a full all-reduce.
    assert ours["memory"]["parameters"] < theirs["memory"]["parameters"]
    assert wire_bytes(ours)["all-reduce"] == 0 < wire_bytes(theirs)["all-reduce"]


def test_over_a_whole_torus_it_sends_a_third_less() -> None:
    found = zero_reports()
    ours, theirs = (pick(found, "v5e:4x4", kind=kind) for kind in ("ours", "upstream"))
    assert ours["wire_bytes"] <= 0.7 * theirs["wire_bytes"]


def test_masters_over_bf16_need_no_more_and_travel_in_bf16() -> None:
    found = low_reports()
    ours = pick(found, kind="ours")
    assert_not_worse(ours, pick(found, kind="upstream"))
    assert {each["dtype"] for each in ours["traffic"]} == {"bf16"}
    # As it comes, theirs gathers by a padded all-reduce.
    assert ours["wire_bytes"] <= 0.7 * pick(found, kind="upstream_default")["wire_bytes"]


def deep_reports() -> list[dict[str, Any]]:
    sweeps = ("--sweep", "in_backward=on,off", "--sweep", "sync_between=on,off")
    return reports(DEEP, "--topology", "v5e:2x2", *sweeps)


def test_a_step_inside_backward_keeps_no_gradients() -> None:
    found = deep_reports()
    after, inside = (pick(found, in_backward=on, sync_between=True) for on in (False, True))
    assert after["memory"]["outputs"] >= SHARDS
    assert inside["memory"]["outputs"] < 0.01 * SHARDS
    assert inside["memory"]["gradients"] == 0


def test_what_the_fullest_program_does_not_take_is_in_memory_too() -> None:
    """Where backward ends a program, it does not read the momentum."""
    found = pick(deep_reports(), in_backward=False, sync_between=True)
    assert found["memory"]["optimizer_state"] == SHARDS


def test_a_step_inside_backward_needs_less_where_backward_ends_a_program() -> None:
    found = deep_reports()
    after, inside = (pick(found, in_backward=on, sync_between=True) for on in (False, True))
    assert inside["peak_bytes"] <= 0.9 * after["peak_bytes"]


def test_in_one_program_with_backward_a_step_needs_no_more() -> None:
    found = deep_reports()
    after, inside = (pick(found, in_backward=on, sync_between=False) for on in (False, True))
    assert inside["peak_bytes"] <= after["peak_bytes"]


def test_what_a_gather_of_forward_made_of_shards_is_not_kept_for_backward() -> None:
    found = pick(deep_reports(), in_backward=False, sync_between=False)
    # In float32 as they travel, or in bf16.
    copies = [each for each in found["largest"] if each["nbytes"] in (SHARD, SHARD // 2)]
    assert len(copies) <= 2


def test_a_gather_for_backward_waits_for_no_step() -> None:
    """A layer's gradient needs no parameters of the layer, so XLA could gather these for the layer
    before it once they are stepped, and nothing would hide the one or the other."""
    for on in (False, True):
        found = pick(deep_reports(), in_backward=on, sync_between=False)
        gathers = [each for each in found["traffic"] if each["kind"] == "all-gather"]
        blocking = sum(each["wire_bytes"] for each in gathers if not each["overlapped"])
        assert blocking <= 0.2 * sum(each["wire_bytes"] for each in gathers)


def test_in_one_program_with_backward_it_sends_the_same() -> None:
    found = deep_reports()
    after, inside = (pick(found, in_backward=on, sync_between=False) for on in (False, True))
    assert inside["wire_bytes"] == after["wire_bytes"]
