"""Reading programs, topologies, limits and the command line, without waiting for the compiler."""

from __future__ import annotations

import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from test.common.example_report import report
from xla_fsdp.distributed.mesh import init_mesh
from xla_fsdp.distributed.topology import reduction_steps
from xla_fsdp.preflight import CompileError, PreflightWarning, Report, api, fastest, preflight
from xla_fsdp.preflight.__main__ import USAGE_EXIT_CODE, main
from xla_fsdp.preflight.api import describe_options, mesh_on
from xla_fsdp.preflight.compile.compiler import Compiled, compile_program
from xla_fsdp.preflight.read.estimate import estimate, timeline
from xla_fsdp.preflight.read.findings import (
    about_bytes,
    about_dtypes,
    about_estimates,
    about_host_memory,
    about_overlap,
    about_reductions,
)
from xla_fsdp.preflight.read.hlo import NO_ESTIMATE, Module
from xla_fsdp.preflight.read.liveness import fullest_moment, most_gathered
from xla_fsdp.preflight.read.report import Memory, StepTime, full_text, table
from xla_fsdp.preflight.read.traffic import Collective, collectives_of
from xla_fsdp.preflight.topologies import CHIPS, GIB, example, find_topology
from xla_fsdp.preflight.trace.program import PARAMETER, STATE, Input, Program, Traced

CONFIG = 'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
OPTIMIZED = f"""HloModule step, is_scheduled=true, replica_count=4

%add (x: bf16[], y: bf16[]) -> bf16[] {{
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}}

%start (p: bf16[8,128]) -> (bf16[8,128], bf16[32,128]) {{
  %p = bf16[8,128]{{1,0}} parameter(0)
  %gather.1 = bf16[32,128]{{1,0}} all-gather(%p), replica_groups={{}}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}, metadata={{op_name="all-gather.9"}}, {CONFIG}
  ROOT %call.1 = (bf16[8,128]{{1,0}}, bf16[32,128]{{1,0}}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}}

%middle (p: bf16[8,128], q: bf16[32,128]) -> (f32[32,128], bf16[8,128], bf16[32,128]) {{
  %p = bf16[8,128]{{1,0}} parameter(0)
  %q = bf16[32,128]{{1,0}} parameter(1)
  %gather.2 = bf16[32,128]{{1,0}} all-gather(%p), replica_groups={{}}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}, metadata={{op_name="all-gather.9"}}, {CONFIG}
  %product = f32[32,128]{{1,0}} convolution(%q, %q), dim_labels=bf_io->bf
  ROOT %all = (f32[32,128]{{1,0}}, bf16[8,128]{{1,0}}, bf16[32,128]{{1,0}}) tuple(%product, %p, %gather.2)
}}

%done (p: bf16[8,128], q: bf16[32,128]) -> bf16[32,128] {{
  %p = bf16[8,128]{{1,0}} parameter(0)
  %q = bf16[32,128]{{1,0}} parameter(1)
  %gather.3 = bf16[32,128]{{1,0}} all-gather(%p), replica_groups={{}}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}, metadata={{op_name="all-gather.9"}}, {CONFIG}
  ROOT %call.2 = bf16[32,128]{{1,0}} custom-call(%q, %gather.3), custom_call_target="AsyncCollectiveDone"
}}

%scatter (p: bf16[32,128]) -> bf16[16,128] {{
  %p = bf16[32,128]{{1,0}} parameter(0)
  %reduce = bf16[32,128]{{1,0}} all-reduce(%p), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice = bf16[16,128]{{1,0}} dynamic-slice(%reduce, %zero, %zero), dynamic_slice_sizes={{16,128}}
}}

%increment (x: s32[], y: s32[]) -> s32[] {{
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %sum = s32[] add(%x, %y)
}}

%body (state: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {{
  %state = (s32[], bf16[8,128]{{1,0}}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %value = bf16[8,128]{{1,0}} get-tuple-element(%state), index=1
  %moved = bf16[8,128]{{1,0}} collective-permute(%value), source_target_pairs={{{{0,1}}}}
  %one = s32[] constant(1)
  %counted = s32[] fusion(%count, %one), kind=kLoop, calls=%increment
  ROOT %next = (s32[], bf16[8,128]{{1,0}}) tuple(%counted, %moved)
}}

%condition (state: (s32[], bf16[8,128])) -> pred[] {{
  %state = (s32[], bf16[8,128]{{1,0}}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%count, %bound), direction=LT
}}

ENTRY %main (weight: bf16[8,128]) -> bf16[8,128] {{
  %weight = bf16[8,128]{{1,0}} parameter(0)
  %begun = (bf16[8,128]{{1,0}}, bf16[32,128]{{1,0:T(8,128)(2,1)}}) fusion(%weight), kind=kCustom, calls=%start
  %sent = bf16[8,128]{{1,0}} get-tuple-element(%begun), index=0
  %into = bf16[32,128]{{1,0:T(8,128)(2,1)}} get-tuple-element(%begun), index=1
  %computed = (f32[32,128]{{1,0:T(8,128)}}, bf16[8,128]{{1,0}}, bf16[32,128]{{1,0:T(8,128)(2,1)}}) fusion(%sent, %into), kind=kOutput, calls=%middle, backend_config={{"estimated_cycles":"1500000"}}
  %full = bf16[32,128]{{1,0:T(8,128)(2,1)}} fusion(%sent, %into), kind=kCustom, calls=%done
  %grad = bf16[16,128]{{1,0}} fusion(%full), kind=kCustom, calls=%scatter
  %whole = bf16[32,128]{{1,0}} all-reduce(%full), replica_groups=[1,4]<=[4], to_apply=%add, metadata={{op_name="reduce-scatter.7"}}
  %part = bf16[8,128]{{1,0}} slice(%whole), slice={{[0:8],[0:128]}}
  %zero = s32[] constant(0)
  %init = (s32[], bf16[8,128]{{1,0}}) tuple(%zero, %part)
  %loop = (s32[], bf16[8,128]{{1,0}}) while(%init), condition=%condition, body=%body
  ROOT %result = bf16[8,128]{{1,0}} get-tuple-element(%loop), index=1
}}
"""  # noqa: E501
FULL, SHARD = 32 * 128 * 2, 8 * 128 * 2


@pytest.fixture(scope="module")
def found() -> list[Collective]:
    return collectives_of(Module(OPTIMIZED))


def test_a_split_gather_counts_once_and_is_overlapped(found: list[Collective]) -> None:
    [gather] = [each for each in found if each.kind == "all-gather"]
    assert (gather.times, gather.group_size, gather.dtype) == (1, 4, "bf16")
    assert gather.overlapped
    assert gather.wire_bytes == 3 * SHARD
    assert gather.origin == "all-gather.9"


def test_an_all_reduce_that_its_own_fusion_slices_is_a_reduce_scatter(
    found: list[Collective],
) -> None:
    [scatter] = [each for each in found if each.kind == "reduce-scatter"]
    assert (scatter.group_size, scatter.wire_bytes) == (2, FULL // 2)
    assert not scatter.overlapped


def test_activations_of_tensor_parallelism_are_no_waste() -> None:
    [waste] = about_bytes(30_000_000, 10_000_000, activations=False)
    assert waste == "30 MB are sent in a step, 3.00 times the 10 MB that the parameters need"
    [told] = about_bytes(30_000_000, 10_000_000, activations=True)
    assert told.endswith(
        "the parameters need 10 MB; the rest is activations of tensor parallelism "
        "and their gradients"
    )


def test_less_traffic_than_the_parameters_take_is_explained() -> None:
    [told] = about_bytes(26_000_000, 38_000_000, activations=False)
    assert told.startswith("26 MB are sent in a step, less than the 38 MB of all parameters in the")
    assert not list(about_bytes(9_900_000, 10_000_000, activations=False))


def test_an_all_reduce_that_is_only_sliced_afterwards_is_a_full_one(
    found: list[Collective],
) -> None:
    [reduce] = [each for each in found if each.kind == "all-reduce"]
    assert reduce.only_sliced
    assert reduce.wire_bytes == 2 * FULL * 3 // 4
    large = Collective(**{**vars(reduce), "wire_bytes": 2_000_000, "unit": "wte: reduce-scatter"})
    [finding] = about_reductions([large])
    told = "gradients are reduced by a full all-reduce (`wte: reduce-scatter`), of which each rank"
    assert finding.startswith(told)


def test_traffic_of_which_no_unit_is_known_is_told(found: list[Collective]) -> None:
    [gather] = [each for each in found if each.kind == "collective-permute"]

    def sent(unit: str, megabytes: int) -> Collective:
        changed = {"unit": unit, "wire_bytes": megabytes * 10**6, "times": 1, "overlapped": False}
        return Collective(**{**vars(gather), **changed})

    units = [sent("a", 9), sent("b", 8), sent("c", 7), sent("d", 6)]
    [told] = about_overlap([*units, sent("", 70)])
    assert told == (
        "100 MB of collective-permute are not hidden under compute (`a` 9 MB, `b` 8 MB, `c` 7 MB, "
        "and 76 MB of units with less, or of which no name is left)"
    )
    [told] = about_overlap([sent("a", 9), sent("b", 0)])
    assert told.endswith("9 MB of collective-permute are not hidden under compute (`a` 9 MB)")
    [told] = about_overlap([sent("", 9)])
    assert told.endswith("not hidden under compute")


def test_what_a_loop_holds_counts_for_every_trip(found: list[Collective]) -> None:
    [permute] = [each for each in found if each.kind == "collective-permute"]
    assert (permute.times, permute.total_bytes) == (5, 5 * SHARD)


def test_what_the_compiler_cannot_estimate_counts_nothing_and_is_told() -> None:
    known = '"estimated_cycles":"1500000"'
    unknown = Module(OPTIMIZED.replace(known, f'"estimated_cycles":"{NO_ESTIMATE}"'))
    slice_ = find_topology("v5e:2x2")
    assert estimate([Module(OPTIMIZED)], [], 0, 0, slice_).compute == pytest.approx(1e-3)
    assert estimate([unknown], [], 0, 0, slice_).compute == 0
    [told] = about_estimates([unknown])
    assert told.startswith("the compiler cannot say how long 1 instruction(s) take (computed)")
    assert not list(about_estimates([Module(OPTIMIZED)]))
    kernel = OPTIMIZED.replace("AsyncCollectiveStart", "tpu_custom_call")
    [told] = about_estimates([Module(kernel)])
    assert told.startswith("the compiler cannot say how long 1 instruction(s) take (call.1)")


def test_offloading_travels_beside_compute_to_the_host_and_back() -> None:
    offloaded = 64_000_000  # 8 ms at 16 GB/s, there and back; a core of v3 has half of that
    for topology, seconds in (("v5e:2x2", 8e-3), ("v3:2x2", 16e-3)):
        time = estimate([Module(OPTIMIZED)], [], 10**9, offloaded, find_topology(topology))
        assert time.offloading == pytest.approx(seconds)
        assert time.compute < time.total == time.offloading
    none = estimate([Module(OPTIMIZED)], [], 10**9, 0, find_topology("v5e:2x2"))
    assert none.total == none.compute


KERNEL = """HloModule step, is_scheduled=true

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %attend = bf16[8,128]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUzvU","cost_estimate":{"flops":"394000000000","transcendentals":"0"}}}
}
"""  # noqa: E501


def test_kernels_take_as_long_as_the_operations_that_they_state() -> None:
    slice_ = find_topology("v5e:2x2")
    assert estimate([Module(KERNEL)], [], 0, 0, slice_).compute == pytest.approx(
        2e-3
    )  # 197 TFLOP/s
    assert not list(about_estimates([Module(KERNEL)]))


RENDEZVOUS = '_xla_host_transfer_rendezvous="all-reduce.7_1",_xla_megascale_target="{1,2}x{0:7}"'
SENT = f"""  %after = token[] after-all()
  %send = (bf16[8,128]{{1,0}}, u32[], token[]) send(%part, %after), channel_id=1, is_host_transfer=true, frontend_attributes={{{RENDEZVOUS},_xla_megascale_transfer_type="ALL_REDUCE"}}
  %meanwhile = bf16[8,128]{{1,0}} fusion(%part), kind=kLoop, calls=%scatter, backend_config={{"estimated_cycles":"5"}}
  %recv = (bf16[8,128]{{1,0}}, u32[], token[]) recv(%after), channel_id=2, frontend_attributes={{{RENDEZVOUS}}}
  %recv-done = (bf16[8,128]{{1,0}}, token[]) recv-done(%recv), channel_id=2
  %init ="""  # noqa: E501


def test_what_is_sent_between_slices_is_a_kind_of_its_own() -> None:
    def sent(source: str, kind: str = "all-reduce between slices") -> Collective:
        [one] = [each for each in collectives_of(Module(source)) if each.kind == kind]
        return one

    both = sent(OPTIMIZED.replace("  %init =", SENT))
    assert (both.group_size, both.dtype, both.wire_bytes) == (2, "bf16", SHARD)
    assert both.overlapped
    waiting = SENT.replace('"estimated_cycles":"5"', '"other":"5"')
    assert not sent(OPTIMIZED.replace("  %init =", waiting)).overlapped
    four = SENT.replace("{1,2}x", "{1:4}x")
    assert sent(OPTIMIZED.replace("  %init =", four)).wire_bytes == SHARD * 3 // 2
    ring = OPTIMIZED.replace("  %init =", SENT.replace("ALL_REDUCE", "ONE_TO_ONE"))
    one = sent(ring, "collective-permute between slices")
    assert one.wire_bytes == SHARD


@pytest.mark.parametrize(
    ("change", "times"),
    [
        (("one = s32[] constant(1)", "one = s32[] constant(2)"), 3),
        (("zero = s32[] constant(0)", "zero = s32[] constant(2)"), 3),
        (("fusion(%count, %one), kind=kLoop, calls=%increment", "add(%count, %one)"), 5),
        (("constant(5)", "constant(0)"), 0),
    ],
)
def test_trips_depend_on_where_a_counter_starts_and_what_is_added(
    change: tuple[str, str], times: int
) -> None:
    module = Module(OPTIMIZED.replace(*change))
    assert collectives_of(module)[-1].times == times
    assert module.unknown_trips == []


def test_a_loop_that_does_not_count_is_told() -> None:
    module = Module(OPTIMIZED.replace("add(%x, %y)\n}\n\n%body", "multiply(%x, %y)\n}\n\n%body"))
    assert [each.times for each in collectives_of(module)][-1] == 1
    assert module.unknown_trips == ["main/loop"]


def test_a_loop_without_a_known_bound_is_told() -> None:
    module = Module(OPTIMIZED.replace("direction=LT", "direction=NE"))
    assert [each.times for each in collectives_of(module)][-1] == 1
    assert module.unknown_trips == ["main/loop"]


def test_products_in_another_dtype_are_told() -> None:
    assert list(about_dtypes([Module(OPTIMIZED)], "bf16")) == []
    [finding] = about_dtypes([Module(OPTIMIZED)], "f32")
    assert finding.startswith("1 of 1 matrix products take bf16, not f32")


def test_a_gathered_parameter_lives_until_it_is_read_last() -> None:
    module = Module(OPTIMIZED)
    assert most_gathered(module) == FULL
    moment = fullest_moment(module)
    assert moment.by_purpose["gathered parameters"] >= FULL
    on_chip = Module(OPTIMIZED.replace("T(8,128)(2,1)}", "T(8,128)(2,1)S(1)}"))
    assert "gathered parameters" not in fullest_moment(on_chip).by_purpose
    assert most_gathered(on_chip) == FULL


def test_a_timeline_shows_what_is_held_and_on_its_way(found: list[Collective]) -> None:
    drawn = timeline(Module(OPTIMIZED), found, find_topology("v5e:2x2"))
    gather, scatter = (
        next(span for span in drawn.spans if span.kind == kind)
        for kind in ("all-gather", "reduce-scatter")
    )
    assert (gather.start, gather.end) == (0, pytest.approx(1e-3))  # 1,500,000 cycles of 1.5 GHz
    assert scatter.start == gather.end
    assert scatter.end - scatter.start == pytest.approx(FULL / 2 / 100e9)  # two links of 50 GB/s
    permute = drawn.spans[-1]
    assert (permute.times, permute.end) == (5, drawn.seconds)
    assert max(moment.gathered_parameters for moment in drawn.moments) == FULL
    assert [moment.seconds for moment in drawn.moments] == sorted(
        moment.seconds for moment in drawn.moments
    )


def test_text_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="0 entry computations"):
        Module("HloModule nothing\n")


@pytest.mark.parametrize("generation", CHIPS)
def test_every_generation_has_an_example_that_is_found(generation: str) -> None:
    found = find_topology(example(generation))
    assert len(found.coords) == len(set(found.coords)) == found.num_ranks


@pytest.mark.parametrize("generation", CHIPS)
def test_all_ranks_reduce_in_one_step_for_each_axis(generation: str) -> None:
    found = find_topology(example(generation))
    steps = reduction_steps([list(range(found.num_ranks))], found.coords)
    sizes = [*reversed(found.shape), *([found.chip.cores] if found.chip.cores > 1 else [])]
    assert [len(step[0]) for step in steps] == sizes


def test_slices_are_numbered_last_and_their_ranks_one_after_the_other() -> None:
    two = find_topology("v5e:2x4*2")
    assert (two.num_ranks, two.slice_name, two.slices) == (16, "v5e:2x4", 2)
    assert two.coords[7:9] == [(0, 1, 3, 0, 0), (0, 0, 0, 0, 1)]
    mesh = init_mesh((2, 8), ("replica", "shard"), coords=two.coords)
    assert mesh.groups("shard") == [list(range(8)), list(range(8, 16))]


def test_ranks_are_numbered_core_first_then_x() -> None:
    assert find_topology("v5e:4x2").coords[:5] == [
        (0, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 2, 0, 0, 0), (0, 3, 0, 0, 0), (0, 0, 1, 0, 0),
    ]  # fmt: skip
    assert find_topology("v3:2x2").coords[:2] == [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("cloud", "name"),
    [
        ("v5litepod-16", "v5e:4x4"),
        ("v5e-16", "v5e:4x4"),
        ("v6e-8", "v6e:2x4"),
        ("v6e-256", "v6e:16x16"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-128", "v5p:4x4x4"),
        ("v4-64", "v4:2x4x4"),
        ("v3-32", "v3:4x4"),
        ("v5litepod-16*2", "v5e:4x4*2"),
    ],
)
def test_the_names_of_cloud_are_taken(cloud: str, name: str) -> None:
    assert find_topology(cloud) == find_topology(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("v4-1024", r"several shapes; give one of v4:4x4x32, v4:4x8x16, v4:8x8x8"),
        *(
            (name, r"is no TPU topology; give one of v2:AxB \(such as v2:4x4\), .*whole hosts")
            for name in ("v5p-6", "v9-8", "v9:4x4", "v5e:3x3", "v5e:4x4*", "v5e:4x4*two")
        ),
        ("v5e:4x4x4", "along 2 axes"),
        ("v4:4x4", "along 3 axes"),
        ("v5e:", "along 2 axes"),
    ],
)
def test_other_names_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_topology(name)


def test_what_is_no_topology_or_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="topology is None; give a name such as 'v5e:4x4'"):
        find_topology(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mesh is 7; give .* such as {'replica': 2, 'shard': 8}"):
        mesh_on(find_topology("v5e:4x4"), 7)  # type: ignore[arg-type]


def test_the_compiler_is_ended_when_it_takes_too_much_memory(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    program = Program(b"", (), ())
    for kept in (r"smaller$", r"smaller \(kept from an earlier run, in .*\.json\.gz\)$"):
        with pytest.raises(
            CompileError, match=rf"more than the 0\.0 GiB of host memory.*make the program {kept}"
        ):
            compile_program(
                program, find_topology("v5e:2x2"), max_host_mem=2**20, cache_dir=tmp_path
            )
    assert len([*tmp_path.iterdir()]) == 1


def test_a_program_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    with pytest.raises(CompileError, match="refused the program"):
        compile_program(Program(b"nonsense", (), ()), find_topology("v5e:2x2"), cache_dir=tmp_path)


def test_without_the_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"pip install '\.\[preflight\]' in a clone"):
        compile_program(Program(b"", (), ()), find_topology("v5e:2x2"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["json:dumps", "--run", "3", "--json", "x"], "nor writes a report; leave out --json"),
        (["json:dumps", "--run", "3", "--flags=--a"], "nor writes a report; leave out --flags"),
        (["json:dumps", "--run", "3", "--set", "plain=4"], "plain cannot be set"),
        (["json:dumps", "--sweep", "topology=a,b"], "gives or takes it; use --topology"),
        (["json:dumps", "--html", "no_such_directory/x.html"], "expected a file in an existing"),
        (["json:dumps", "--json", "test"], "test cannot be written"),
        (["json:dumps", "--sweep", "indent=1,2", "--set", "indent=3"], "given more than once"),
        (["json"], "not of the form module:function"),
        (["no_such_module:f"], "cannot import 'no_such_module'"),
        (["json:nothing"], "has no function 'nothing'"),
        (["json:dumps", "--topology", "v9:1"], "is no TPU topology"),
        (["json:dumps", "--sweep", "batch"], "not of the form option=value"),
        (["json:dumps", "--mesh", "shard"], "not of the form option=value"),
        (["json:dumps", "--mesh", "shard=x"], "not of the form axis=size,axis=size"),
        (["json:dumps", "--mesh", "a=2,a=4"], "axis=size,axis=size, each axis once"),
        (["json:dumps", "--mesh", "a=2,b=4"], "2 x 4 = 8 ranks, but the job has 16"),
        (["platform:uname", "--set", "batch=2"], "uname() cannot be called with batch"),
    ],
)
def test_wrong_usage_is_told(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == USAGE_EXIT_CODE
    assert reason in capsys.readouterr().err


def test_an_interruption_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xla_fsdp.preflight.__main__._load", interrupted)
    assert main(["json:dumps", "--run", "3"]) == 130
    assert capsys.readouterr().err == "xla_fsdp.preflight: interrupted\n"


def test_a_run_that_fails_leaves_its_error_in_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails_for_large_batches(*_: Any, **options: Any) -> Report:
        if options["batch"] > 2:
            raise ValueError("no room for <this>")
        return report()

    monkeypatch.setattr("xla_fsdp.preflight.__main__.preflight", fails_for_large_batches)
    monkeypatch.setattr("xla_fsdp.preflight.__main__.check_options", lambda *_: None)
    files = ["--json", str(tmp_path / "all.json"), "--html", str(tmp_path / "all.html")]
    assert main(["json:dumps", "--sweep", "batch=2,4", "--topology", "v5e-16", *files]) == 1
    made, failed = json.loads((tmp_path / "all.json").read_text())
    assert made["fits"]
    assert failed == {
        "topology": "v5e-16",
        "options": {"batch": 4},
        "error": "ValueError: no room for <this>",
    }
    text = (tmp_path / "all.html").read_text()
    assert "v5e-16 batch=4</span>: ValueError: no room for &lt;this&gt;" in text
    assert all(each in text for each in ("json:dumps", str(datetime.date.today()), "xla_fsdp "))


def test_a_report_in_full() -> None:
    lines = full_text(report())
    assert "v5e:4x4, 16 ranks batch=2" in lines
    assert "fits, with 16,339 left of 16,384" in lines
    assert "3 MB (minimum 2), 1 MB blocking" in lines
    assert "Estimated step: 30.0 ms" in lines
    assert "- <something> to look at" in lines


def test_warnings_are_on_top_and_below_a_table() -> None:
    warned = report(warnings=("one step",))
    assert full_text(warned).splitlines()[1] == "WARNING: v5e:4x4: one step"
    assert table([warned, warned]).splitlines()[4:] == ["WARNING: v5e:4x4: one step"]


def fast(milliseconds: float, **options: Any) -> Report:
    seconds = milliseconds / 1e3
    time = StepTime(seconds, seconds, 0.0, 0.0, 0.0, 10**12, 1 / milliseconds)
    return report(step_time=time, **options)


def test_the_fastest_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Memory(*[GIB] * 9, capacity=8 * GIB)
    reports = {
        "ring": fast(30.0, options={"method": "ring"}),
        "ulysses": fast(20.0, options={"method": "ulysses"}),
        "both": fast(10.0, options={"method": "both"}, memory=small),
    }
    assert table(list(reports.values())).splitlines()[-1] == (
        "Fastest that fits: v5e:4x4, 16 ranks method=ulysses, 20.0 ms by estimate"
    )
    assert "Fastest" not in table([reports["ring"]])

    def said(build_step: Any, *, method: str, topology: str) -> Report:
        if method == "none":
            raise ValueError("no heads")
        return reports[method]

    monkeypatch.setattr(api, "preflight", said)
    choose = partial(fastest, lambda method: None, topology="v5e:4x4")
    with pytest.warns(PreflightWarning, match="method=none: no heads"):
        assert choose({"method": ["none", *reports]}).options == {"method": "ulysses"}
    with pytest.raises(ValueError, match="none of 1 configurations fits: method=both lacks 1,024"):
        choose({"method": ["both"]})
    with (
        pytest.warns(PreflightWarning, match="no heads"),
        pytest.raises(ValueError, match="no heads"),
    ):
        choose({"method": ["none"]})


def test_a_mesh_must_have_the_ranks_of_the_slice() -> None:
    mesh = init_mesh((2, 4), ("replica", "shard"), world_size=8)
    with pytest.raises(ValueError, match="lays out 8 ranks, but v5e:4x4 has 16"):
        preflight(lambda mesh: None, topology="v5e:4x4", mesh=mesh)
    assert describe_options({"mesh": mesh, "batch": 2}) == {
        "mesh": "replica 2 x shard 4", "batch": 2,
    }  # fmt: skip


def test_a_report_of_what_does_not_fit() -> None:
    small = Memory(*[GIB] * 9, capacity=8 * GIB)
    lines = full_text(report(memory=small))
    assert "does NOT fit: short of 1,024 of 8,192" in lines
    assert table([report(memory=small)]).splitlines()[1].split()[2] == "NO"


def test_what_the_host_has_no_memory_for_does_not_fit() -> None:
    def offloading(nbytes: int, **options: Any) -> Report:
        told = tuple(about_host_memory(nbytes, 4 * GIB))
        return report(offloaded_bytes=nbytes, host_capacity=4 * GIB, warnings=told, **options)

    too_much = offloading(5 * GIB)
    assert not too_much.fits
    assert "HBM per rank (MiB), fits" in full_text(too_much)
    assert "  beside it, in the host's memory, which is too small  " in full_text(too_much)
    assert table([too_much]).splitlines()[1].split()[2] == "NO"
    told = "WARNING: v5e:4x4: 5,120 MiB of activations per rank go to the host's memory, which has "
    for text in (full_text(too_much), table([too_much])):
        assert f"{told}4,096 MiB for each" in text
    too_large = offloading(5 * GIB, memory=Memory(*[GIB] * 9, capacity=8 * GIB))
    assert too_large.shortage == "1,024 MiB and 1,024 MiB of the host's memory"
    enough = offloading(4 * GIB)
    assert enough.fits
    assert not enough.warnings


def test_what_the_compiler_refused_does_not_fit() -> None:
    refused = Memory(*[GIB] * 9, capacity=10 * GIB, too_large_by=GIB // 2)
    lines = full_text(report(memory=refused))
    assert "does NOT fit: short of 512 of 10,240 (the compiler refused it" in lines
    assert refused.peak == 9 * GIB


def test_json_holds_derived_figures() -> None:
    found = json.loads(report().to_json())
    assert (found["fits"], found["wire_bytes"], found["blocking_bytes"]) == (True, 3e6, 1e6)
    assert found["peak_bytes"] == 45 * 2**20
    assert found["memory"]["code"] == 9 * 2**20


# ---------------------------------------------------------------- steps of several programs


def two_programs(*, too_large_by: int = 0) -> Report:
    """Backward needs 800 bytes beside the optimizer's state, which only the step, of 500, takes."""
    state, shards = Input(STATE, 300), Input(PARAMETER, 100)
    backward = Program(b"", (shards,), (), others={STATE: 300, "data": 7})
    step = Program(b"", (shards, state), ())
    facts = (OPTIMIZED, 0, too_large_by, 1.0, 1.0, 0)
    compiled = (Compiled(100, 0, 700, 0, *facts), Compiled(400, 0, 100, 0, OPTIMIZED, *facts[1:]))
    slice_ = find_topology("v5e:2x2")
    return api.report_on(Traced((backward, step)), compiled, slice_, {})


def test_memory_counts_what_a_program_does_not_take() -> None:
    found = two_programs().memory
    assert (found.parameters, found.optimizer_state, found.data) == (100, 300, 7)
    assert found.peak == 100 + 300 + 7 + 700


def test_a_refused_program_lacks_room_for_that_too() -> None:
    assert two_programs(too_large_by=50).memory.too_large_by == 50 + 307
