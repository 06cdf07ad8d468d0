"""What the TPU compiler may not change of a collective: its ranks, its dtype, and its place in the
order.

Before the compiler, the program is run with numbers (``test_rehearsal``). Here its collectives are
followed through the compiler's passes by the names that it keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec

import pytest

from test.common.tpu_collectives import (
    REDUCTIONS,
    Found,
    Groups,
    collectives,
    covers_once,
    groups_of,
    rings,
    texts,
)
from xla_fsdp.preflight.read.findings import about_dtypes
from xla_fsdp.preflight.read.hlo import Instruction, Module
from xla_fsdp.preflight.topologies import find_topology

tpu = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install '.[preflight]'"),
]
PROGRAMS = {
    "blocks": ("v5e:2x4", "fp32_reduce_scatter=1"),
    "loop": ("v5e:2x4", "scan=1", "depth=4", "width=512"),
    "hybrid loop": ("v5e:2x4", "scan=1", "replicas=2"),
    "three axes": ("v5p:2x2x2", "scan=1"),
}


def modules(name: str) -> tuple[Module, Module, int]:
    found = texts(*PROGRAMS[name])
    return Module(found.before), Module(found.after), find_topology(PROGRAMS[name][0]).num_ranks


@pytest.mark.parametrize("name", [pytest.param(name, marks=tpu) for name in PROGRAMS])
def test_each_collective_is_left_once_with_its_groups_and_its_dtype(name: str) -> None:
    before, after, num_ranks = modules(name)
    asked, left = (facts(collectives(each, num_ranks)) for each in (before, after))
    assert {name: each for name, each in left.items() if each != asked.get(name)} == {}
    assert left.keys() == asked.keys()


def facts(found: Iterable[Found]) -> dict[str, set[tuple[Groups, str]]]:
    """Groups and dtype by torch_xla's name; what the compiler split is there once."""
    by_name: dict[str, set[tuple[Groups, str]]] = defaultdict(set)
    for each in found:
        by_name[each.origin].add((each.groups, each.dtype))
    return by_name


@pytest.mark.parametrize("name", [pytest.param(name, marks=tpu) for name in PROGRAMS])
def test_every_rank_is_in_one_group_of_each_collective_and_in_one_ring(name: str) -> None:
    _, after, num_ranks = modules(name)
    for each in collectives(after, num_ranks):
        if each.kind == "collective-permute":
            cycles = rings(each.groups)
            assert cycles is not None, each
            assert sorted(rank for ring in cycles for rank in ring) == list(range(num_ranks)), each
            assert len({len(ring) for ring in cycles}) == 1, each
        else:
            assert covers_once(each.groups, num_ranks), each


@pytest.mark.parametrize("name", [pytest.param(name, marks=tpu) for name in PROGRAMS])
def test_gradients_are_reduced_in_the_dtype_that_the_options_say(name: str) -> None:
    _, after, num_ranks = modules(name)
    found = {each.dtype for each in collectives(after, num_ranks) if each.kind in REDUCTIONS}
    assert found == {"f32" if "fp32_reduce_scatter=1" in PROGRAMS[name] else "bf16"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=tpu) for name in PROGRAMS])
def test_products_are_in_bf16(name: str) -> None:
    _, after, _ = modules(name)
    assert list(about_dtypes([after], "bf16")) == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=tpu) for name in PROGRAMS])
def test_no_collective_depends_on_a_rank_s_data(name: str) -> None:
    """All ranks run one program, whose loops have known trips, so that the order is one as well."""
    _, after, _ = modules(name)
    list(after.executions)
    assert after.unknown_trips == []
    assert not [
        each.name
        for execution in after.executions
        for each in execution.computation.instructions
        if each.opcode == "conditional"
    ]


# ---------------------------------------------------------------- without the compiler


def instruction(attributes: str) -> Instruction:
    return Instruction("it", "f32[8]", "all-reduce", ("x",), attributes, False)


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, to_apply=%add", {(0, 1), (2, 3)}),
        ("replica_groups=[2,2]<=[4], to_apply=%add", {(0, 1), (2, 3)}),
        ("replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add", {(0, 2), (1, 3)}),
        ("replica_groups={}, to_apply=%add", {(0, 1, 2, 3)}),
        ("source_target_pairs={{0,1},{1,0}}", {(0, 1), (1, 0)}),
    ],
)
def test_groups_are_read(attributes: str, groups: set[tuple[int, ...]]) -> None:
    assert groups_of(instruction(attributes), 4) == groups


def test_what_covers_ranks_twice_or_closes_no_ring_is_seen() -> None:
    assert covers_once(frozenset({(0, 1), (2, 3)}), 4)
    assert not covers_once(frozenset({(0, 1), (1, 3)}), 4)
    assert not covers_once(frozenset({(0, 1, 2), (3,)}), 4)
    assert rings(frozenset({(0, 1), (1, 0), (2, 3), (3, 2)})) == [[0, 1], [2, 3]]
    assert rings(frozenset({(0, 1), (1, 2)})) is None
