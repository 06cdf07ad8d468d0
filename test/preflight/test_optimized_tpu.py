"""What the TPU compiler leaves of a training step, run with numbers, against plain torch on the
joined batch.

Each program of all ranks is compiled for the slice, as on a TPU; what the compiler leaves is
written anew for a CPU (``test.common.optimized``) and run on virtual chips. Products of float32 are
exact, so that a sum over other ranks, or of a number twice, exceeds the tolerance by far.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from test.common import chip_training, tensor_training
from test.common.chips import Done, Job, assert_right, job_of, run_jobs
from test.common.compare import assert_close
from test.common.optimized import EDITS, runnable, serialized, to_bytes
from test.common.parity import Case
from test.common.ranks import cached_outcome
from test.common.tpu_collectives import Texts, texts
from xla_fsdp.preflight.read.hlo import Instruction, Module
from xla_fsdp.preflight.rehearse.virtual_chips import VirtualChips
from xla_fsdp.preflight.trace.program import STATE

tpu = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install '.[preflight]'"),
]

ALL_LARGE: dict[str, Any] = {"gather_once_below": 1}  # so that the loop gathers and reduces all
ROWS: dict[str, Any] = {"shard_param_on_dim_0": True}
FP32_SUMS: dict[str, Any] = {"compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}

CASES: dict[str, tuple[str, Case]] = {
    "ordinary": ("v5e:2x2", Case("Net", clip=(0.3, 2.0), remat="inside")),
    "in place": ("v5e:2x2", Case("Net", in_place=True)),
    "batch norm": ("v5e:2x2", Case("BatchNormNet")),
    "bf16, summed in fp32": ("v5e:2x2", Case("Net", options=FP32_SUMS, tolerance=0.05)),
    "head and embedding": ("v5e:2x2", Case("TiedSignsNet", options=ROWS, computes_loss=True)),
    "rows are sent": ("v5e:2x2", Case("LargeSignsNet", options=ROWS)),
    "offloaded": (
        "v5e:2x2",
        Case("ScanNet", scan={**ALL_LARGE, "offload_activations": True}),
    ),
    "accumulated loop": ("v5e:2x2", Case("ScanNet", scan=ALL_LARGE, micro_batches=2)),
    "loop": ("v5e:2x4", Case("ScanNet", scan=ALL_LARGE)),
    "hybrid loop": ("v5e:2x4", Case("ScanNet", scan=ALL_LARGE, mesh=(2, 4))),
    "loop on three axes": ("v5p:2x2x2", Case("ScanNet", scan=ALL_LARGE)),
    "stacked, a replica per slice": (
        "v5e:2x2*2",
        Case("ScanNet", scan={**ALL_LARGE, "stacked": True}, mesh=(2, 4)),
    ),
}
FAULTS = {"group": "ordinary", "send": "loop"}
TENSOR = tensor_training.Case(
    "Llama", (("shard", 2), ("tensor", 2)), shard="wrapped", sequence=True, loss=True
)
STEPPED = "stacked in backward"
TOLERANCE = 0.05  # of sums of products in bf16


@cached_outcome
def results() -> dict[str, Done]:
    jobs = {name: job_of(*each, compiled=True) for name, each in CASES.items()}
    for fault, name in FAULTS.items():
        jobs[fault] = job_of(*CASES[name], compiled=True, fault=fault)
    jobs["tensor"] = Job("v5e:2x2", tensor_training.train, (TENSOR, None, True), compiled=True)
    jobs[STEPPED] = Job("v5e:2x2", chip_training.sharded, (STEPPED,), compiled=True)
    return run_jobs(jobs, timeout=3600)


@pytest.mark.parametrize("name", [pytest.param(name, marks=tpu) for name in CASES])
def test_compiled_steps_equal_those_of_plain_torch(name: str) -> None:
    assert_right(CASES[name][1], results()[name])


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=tpu) for fault in FAULTS])
def test_a_reduction_of_other_ranks_is_seen(fault: str) -> None:
    done = results()[fault]
    assert not done.error, done.error
    with pytest.raises(AssertionError):
        assert_right(CASES[FAULTS[fault]][1], done)


@pytest.mark.parametrize("name", [pytest.param("tensor", marks=tpu)])
def test_compiled_steps_in_tensor_sequence_and_loss_parallel(name: str) -> None:
    done = results()[name]
    assert not done.error, done.error
    tensor_training.assert_like_plain(TENSOR, done.ranks)


@pytest.mark.parametrize("way", [pytest.param(STEPPED, marks=tpu)])
def test_compiled_steps_in_backward(way: str) -> None:
    done = results()[way]
    assert not done.error, done.error
    expected = chip_training.plain(len(done.ranks), way)
    for rank in done.ranks:
        assert_close(rank, expected, what="state", atol=2e-6, of_largest=2e-4, smallest=1e-2)


# ---------------------------------------------------------------- larger programs
# Of a transformer in bf16, in which gathers run beside products. Their numbers are compared with
# those of the program that the compiler was given, on inputs that are others on each rank.

PROGRAMS = {
    "blocks": ("v5e:2x4", "fp32_reduce_scatter=1"),
    "loop": ("v5e:2x4", "scan=1", "depth=4"),
}


@dataclass(frozen=True)
class Request:
    """What virtual chips run for a rank."""

    hlo: bytes
    inputs: list[torch.Tensor]


def differences(name: str) -> list[float]:
    """Largest relative difference of the optimizer's state, which starts as zeros and so is made of
    gradients alone: of what the compiler left, and of that with one reduction of other ranks."""
    found, ranks = texts(*PROGRAMS[name]), range(8)
    left = runnable(found.after)
    programs = [found.program.hlo, serialized(left), serialized(EDITS["group"](left))]
    inputs = [random_inputs(found, rank) for rank in ranks]
    with VirtualChips(len(ranks)) as chips:
        results = [chips.execute([Request(hlo, each) for each in inputs]) for hlo in programs]
    given, *others = results
    states = [
        output
        for at, output in found.program.aliases
        if found.program.inputs[at].role == STATE and given[0][output].numel() > 1
    ]
    assert len(states) > 2 * 10
    assert all(bool(given[rank][at].any()) for rank in ranks for at in states)
    return [
        max(relative(each[rank][at], given[rank][at]) for rank in ranks for at in states)
        for each in others
    ]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of what is expected."""
    return float((found - expected).norm() / expected.norm())


def random_inputs(found: Texts, rank: int) -> list[torch.Tensor]:
    """Values for a rank, by what an input is."""
    generator = torch.Generator().manual_seed(rank)
    params = [
        each for each in Module(found.before).entry.instructions if each.opcode == "parameter"
    ]
    params.sort(key=lambda each: int(each.attributes))
    return [
        random_input(each, given.role, generator)
        for each, given in zip(params, found.program.inputs, strict=True)
    ]


def random_input(each: Instruction, role: str, generator: torch.Generator) -> torch.Tensor:
    """Zeros of an optimizer's state; tokens; small factors; weights around 0."""
    dtype = DTYPES[each.dtypes[0]]
    if role == STATE:
        return torch.zeros(each.sizes, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 512, each.sizes, generator=generator).to(dtype)
    if not each.sizes:
        return torch.empty((), dtype=dtype).uniform_(0.005, 0.01, generator=generator)
    return 0.05 * torch.randn(each.sizes, generator=generator).to(dtype)


DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "s64": torch.int64,
    "s32": torch.int32, "pred": torch.bool, "u8": torch.uint8,
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=tpu) for name in PROGRAMS])
def test_larger_compiled_programs_compute_what_was_traced(name: str) -> None:
    assert "AsyncCollectiveStart" in texts(*PROGRAMS[name]).after
    right, wrong = differences(name)
    assert right < TOLERANCE < wrong


# ---------------------------------------------------------------- without the compiler


def in_memory(array: np.ndarray[Any, Any], shape: str) -> list[int]:
    """Elements in the order of memory; padding is -1."""
    for step in to_bytes(shape):
        if step.order:
            array = array.transpose(step.order)
        elif step.changes_ends:
            ends = [(0, a - b) for b, a in zip(step.before, step.after, strict=True)]
            array = np.pad(array, ends, constant_values=-1)
        else:
            array = array.reshape(step.after)
    return array.tolist()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[2,3]{1,0}", [0, 1, 2, 3, 4, 5]),
        ("f32[2,3]{0,1}", [0, 3, 1, 4, 2, 5]),
        ("f32[2,4]{1,0:T(2,2)}", [0, 1, 4, 5, 2, 3, 6, 7]),
        ("bf16[2,4]{1,0:T(2,2)(2,1)S(1)}", [0, 4, 1, 5, 2, 6, 3, 7]),
        ("f32[3,3]{1,0:T(2,2)}", [0, 1, 3, 4, 2, -1, 5, -1, 6, 7, -1, -1, 8, -1, -1, -1]),
        ("f32[3]{0:T(4)}", [0, 1, 2, -1]),
    ],
)
def test_elements_lie_in_tiles(shape: str, expected: list[int]) -> None:
    sizes = tuple(int(size) for size in shape.partition("[")[2].partition("]")[0].split(","))
    assert in_memory(np.arange(np.prod(sizes)).reshape(sizes), shape) == expected


COMPILED = """
HloModule it, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%fused (p: f32[8]) -> bf16[8] {
  %p = f32[8]{0:T(8)} parameter(0)
  ROOT %twice = bf16[8]{0:T(8)} add(%p, %p), metadata={op_name="a{b"}
}

ENTRY %main (x: f32[8]) -> bf16[] {
  %x = f32[8]{0:T(8)} parameter(0)
  %zero = bf16[] constant(0)
  %begun = (f32[8]{0:T(8)S(1)}, f32[8]{0:T(8)}, u32[]{:S(2)}) copy-start(%x)
  %done = f32[8]{0:T(8)S(1)} copy-done(%begun)
  %f = bf16[8]{0:T(8)} fusion(%done), kind=kLoop, calls=%fused, backend_config={"a":"b"}
  ROOT %all = bf16[] reduce(%f, %zero), dimensions={0}, to_apply=%sum
}
"""


def test_what_is_computed_is_kept_and_how_is_left_out() -> None:
    lines = [line.strip() for line in runnable(COMPILED).splitlines() if " = " in line]
    assert lines[3:] == [
        "%p = f32[8] parameter(0)",
        "%twice.as.f32 = f32[8] add(%p, %p)",
        "ROOT %twice = bf16[8] convert(%twice.as.f32)",
        "%x = f32[8] parameter(0)",
        "%zero = bf16[] constant(0)",
        "%f = bf16[8] call(%x), to_apply=%fused",
        "%all.from.0 = f32[8] convert(%f)",
        "%all.from.1 = f32[] convert(%zero)",
        "%all.as.f32 = f32[] reduce(%all.from.0, %all.from.1), dimensions={0}, to_apply=%sum",
        "ROOT %all = bf16[] convert(%all.as.f32)",
    ]


BETWEEN_SLICES = """\
HloModule it, is_scheduled=true, replica_count=2

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(8)} parameter(0)
  %token = token[] after-all()
  %within = f32[8]{0:T(8)} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  %send = (f32[8]{0:T(8)}, u32[], token[]) send(%within, %token), HOW
  %recv = (f32[8]{0:T(8)}, u32[], token[]) recv(%token), HOW
  %sent = token[] send-done(%send), is_host_transfer=true
  %got = (f32[8]{0:T(8)}, token[]) recv-done(%recv), is_host_transfer=true
  ROOT %it = f32[8]{0:T(8)} get-tuple-element(%got), index=0
}
""".replace(
    "HOW",
    'frontend_attributes={_xla_host_transfer_rendezvous="a",_xla_megascale_reduce_operation="SUM",'
    '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}',
)


def test_sums_between_slices_become_collectives() -> None:
    entry = runnable(BETWEEN_SLICES, slices=2).partition("ENTRY")[2]
    assert [line.strip() for line in entry.splitlines() if " = " in line] == [
        "%x = f32[8] parameter(0)",
        "%within = f32[8] collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
        "%got.sum = f32[8] all-reduce(%within), replica_groups={{0,2},{1,3}}, to_apply=%f32.sum",
        "%got = (f32[8]) tuple(%got.sum)",
        "ROOT %it = f32[8] get-tuple-element(%got), index=0",
    ]
    with pytest.raises(
        ValueError, match=r"send sends ALL_REDUCE MAX \{1,2\}x\{0:1\}, which is not"
    ):
        runnable(BETWEEN_SLICES.replace('"SUM"', '"MAX"'), slices=2)


def test_calls_of_the_compiler_that_are_not_known_are_named() -> None:
    text = COMPILED.replace(
        "fusion(%done), kind=kLoop, calls=%fused", 'custom-call(%done), custom_call_target="Secret"'
    )
    with pytest.raises(ValueError, match="f calls Secret, which is not known here"):
        runnable(text)
