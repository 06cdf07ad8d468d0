"""The TPU's kernels of grouped products: their numbers in an interpreter, and when they run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from test.common.compare import assert_close
from test.common.experts import Case, by_loop, by_routes
from test.common.ranks import cached_outcome, run_on_ranks
from xla_fsdp.nn.experts import api, megablox
from xla_fsdp.nn.experts.megablox import BLOCK_BYTES, HEIGHTS, height_of, width_of
from xla_fsdp.nn.experts.segments import SEGMENTS
from xla_fsdp.xla import ops

# Rows of several tiles, which end within experts, and widths of no whole lanes.
INTERPRETED = {
    "plain": Case(tokens=70, width=130, inner=40, chosen=(0, 1, 2, 4, 5)),
    "transposed_bias": Case(tokens=33, width=40, transposed=False, bias=True),
    "capacity": Case(tokens=50, capacity=0.6),
    "all_to_one": Case(choices=1, chosen=(4,)),
}


def interpreted(rank: int) -> dict[str, dict[str, Tensor]]:
    """Results of the kernels on a CPU device."""
    import torch_xla

    kernel = megablox.implementation(interpret=True)
    device = torch_xla.device()  # started before any backward
    with mock.patch.object(api, "_implementation", return_value=kernel):
        return {name: by_routes(case, device) for name, case in INTERPRETED.items()}


@cached_outcome
def results() -> dict[str, dict[str, Tensor]]:
    [found] = run_on_ranks(interpreted, 1, timeout=900, env={"JAX_PLATFORMS": "cpu"})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_numbers_of_the_kernels(name: str) -> None:
    pytest.importorskip("jax")
    assert_close(results()[name], by_loop(INTERPRETED[name]), atol=1e-6, of_largest=5e-6)


@pytest.mark.parametrize(
    ("rows", "experts", "height"),
    [
        (32_768, 8, 256),  # Mixtral 8x7B, 16,384 tokens of a chip: 1,792 rows again
        (131_072, 128, 64),  # Qwen3-30B-A3B, the same
        (4096, 8, 64),
        (1_000_000, 8, 512),
        (14, 6, 64),
        (4096, 1, 512),
    ],
)
def test_few_rows_are_computed_twice(rows: int, experts: int, height: int) -> None:
    assert height_of(rows, experts) == height
    again = (experts - 1) * height / rows
    assert again <= 0.1 or height == HEIGHTS[-1]


@pytest.mark.parametrize(
    ("size", "most", "width"),
    [
        (1024, 4096, 1024),
        (7168, 1024, 1024),
        (14336, 2048, 2048),
        (1408, 1024, 768),  # of 1,024 it would be padded by 640
        (2880, 1024, 1024),
        (300, 128, 128),
        (40, 128, 40),
    ],
)
def test_tiles_pad_little(size: int, most: int, width: int) -> None:
    assert width_of(size, most) == width


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("inner", "outputs"), [(4096, 28672), (14336, 4096), (2048, 1536)])
def test_tiles_fit_into_vector_memory(inner: int, outputs: int, itemsize: int) -> None:
    most = BLOCK_BYTES // itemsize
    for height in HEIGHTS:
        depth = width_of(inner, most // height)
        width = width_of(outputs, most // depth)
        operands = height * depth + depth * width + height * width
        assert 2 * operands * itemsize + 4 * height * width <= 16 * 2**20


@pytest.mark.parametrize(
    ("dtype", "has_jax", "problem"),
    [
        (torch.float16, True, "it takes bfloat16 and float32, not torch.float16"),
        (torch.bfloat16, False, "JAX is not installed"),
    ],
)
def test_falls_back_with_one_line(
    dtype: torch.dtype, has_jax: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.RankRuntime, "has_kernels", lambda self: True)
    monkeypatch.setattr(megablox, "has_jax", lambda: has_jax)
    rows: Any = SimpleNamespace(device=torch.device("xla"), dtype=dtype)
    with pytest.warns(UserWarning, match=f"in segments, without their kernel: {problem}"):
        assert api._implementation(rows) is SEGMENTS


def test_are_the_kernels_where_programs_are_for_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = SimpleNamespace(device=torch.device("xla"), dtype=torch.bfloat16)
    monkeypatch.setattr(megablox, "has_jax", lambda: True)
    for has_kernels, chosen in ((True, megablox.MEGABLOX), (False, SEGMENTS)):
        runtime = SimpleNamespace(has_kernels=lambda found=has_kernels: found)
        monkeypatch.setattr(ops, "runtime", lambda found=runtime: found)
        assert api._implementation(rows) is chosen
