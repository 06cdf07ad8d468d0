"""The benchmark of mixtures counts what experts compute and exchange in a compiled program."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from test.common.ranks import ROOT
from xla_fsdp.preflight.read.hlo import Module

EXPERTS, ROWS, WIDTH, INNER, TRIPS, RANKS, LENGTH = 2, 4, 8, 16, 3, 4, 16
SIZES = {"width": WIDTH, "choices": 2}
TEXT = """HloModule step, is_scheduled=true, num_partitions=8

%products (p0: bf16[2,4,8], p1: bf16[2,8,16]) -> bf16[2,4,16] {
  %p0 = bf16[2,4,8] parameter(0)
  %p1 = bf16[2,8,16] parameter(1)
  ROOT %dot.1 = bf16[2,4,16] convolution(%p0, %p1), window={size=2}, dim_labels=0bf_0io->0bf
}

%body (state: (s32[], bf16[2,4,8], bf16[2,8,16])) -> (s32[], bf16[2,4,8], bf16[2,8,16]) {
  %state = (s32[], bf16[2,4,8], bf16[2,8,16]) parameter(0)
  %at = s32[] get-tuple-element(%state), index=0
  %rows = bf16[2,4,8] get-tuple-element(%state), index=1
  %weight = bf16[2,8,16] get-tuple-element(%state), index=2
  %fused = bf16[2,4,16] fusion(%rows, %weight), kind=kOutput, calls=%products
  %tokens = bf16[8,8] bitcast(%rows)
  %sent = bf16[8,8] collective-permute(%tokens), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %shares = bf16[4,2] bitcast(%at)
  %all = bf16[4,2] all-to-all(%shares), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}
  %part = bf16[4,8] bitcast(%tokens)
  %whole = bf16[16,8] all-gather(%part), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}
  %parameter = bf16[32,8] all-gather(%part), channel_id=4, replica_groups={{0,1,2,3,4,5,6,7}}
  %ring = bf16[1,8,8] bitcast(%tokens)
  %sums = bf16[1,8,8] collective-permute(%ring), channel_id=5, source_target_pairs={{0,1},{1,0}}
  %one = s32[] constant(1)
  %later = s32[] add(%at, %one)
  ROOT %next = (s32[], bf16[2,4,8], bf16[2,8,16]) tuple(%later, %rows, %weight)
}

%condition (carry: (s32[], bf16[2,4,8], bf16[2,8,16])) -> pred[] {
  %carry = (s32[], bf16[2,4,8], bf16[2,8,16]) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %end = s32[] constant(3)
  ROOT %goes_on = pred[] compare(%number, %end), direction=LT
}

ENTRY %main (p: (s32[], bf16[2,4,8], bf16[2,8,16])) -> (s32[], bf16[2,4,8], bf16[2,8,16]) {
  %p = (s32[], bf16[2,4,8], bf16[2,8,16]) parameter(0)
  %query = bf16[8,8] constant({...})
  %projected = bf16[8,8] dot(%query, %query), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %grouped = bf16[8,16] custom-call(%query), custom_call_target="tpu_custom_call", \
metadata={op_name="call.1/jit_gmm_.2"}, backend_config={"cost_estimate":{"flops":"99"}}
  %scores = bf16[8,8] custom-call(%query), custom_call_target="tpu_custom_call", \
metadata={op_name="call.1/splash_attention.2"}, backend_config={"cost_estimate":{"flops":"77"}}
  ROOT %loop = (s32[], bf16[2,4,8], bf16[2,8,16]) while(%p), condition=%condition, body=%body
}
"""


@pytest.fixture
def mixtures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("mixtures")


def test_products_of_experts_are_counted(mixtures: ModuleType) -> None:
    """Batched ones by their shapes, and kernels by what they state, but no others."""
    batched = TRIPS * EXPERTS * 2 * ROWS * WIDTH * INNER
    assert mixtures.flops_of_experts(Module(TEXT), EXPERTS) == 99 + batched


def test_exchanged_tokens_are_counted(mixtures: ModuleType) -> None:
    """Not so gathered parameters, and sums of gradients around rings."""
    rows, weights = 8 * WIDTH * 2, 3 * (4 * 2 * 2) // 4
    tokens = 3 * 4 * WIDTH * 2
    found = mixtures.exchanged(Module(TEXT), LENGTH, SIZES, RANKS)
    assert found == TRIPS * (rows + weights + tokens)
