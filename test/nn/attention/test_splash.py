"""The TPU's attention kernel: its numbers in an interpreter, and its program without a TPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from test.common.attention import assert_like_plain, case, tensors, with_grads
from test.common.ranks import cached_outcome, run_on_ranks
from xla_fsdp.nn.attention import api, splash
from xla_fsdp.nn.attention.chunked import CHUNKED
from xla_fsdp.nn.attention.splash import _block, _padded
from xla_fsdp.xla import ops

LENGTH = 200  # two blocks with padding
# By case of test.common.attention: other sizes.
INTERPRETED: dict[str, dict[str, int]] = {
    "all": {"queries": LENGTH, "keys": LENGTH},
    "plain": {"queries": LENGTH, "keys": LENGTH},
    "short_keys": {"queries": LENGTH},
    "other_value_size": {},
}


def inputs(name: str) -> tuple[list[Tensor], dict[str, Any]]:
    sizes, options = case(name, **INTERPRETED[name])
    given = tensors(**sizes)
    if "segment_ids" in options:
        ids = torch.randint(0, 3, (2, LENGTH), generator=torch.Generator().manual_seed(5))
        options["segment_ids"] = ids.sort(-1).values
    return given, options


def interpreted(rank: int) -> dict[str, list[Tensor]]:
    """Results of the kernel on a CPU device."""
    import torch_xla

    def on_device(value: Any) -> Any:
        return value.to(torch_xla.device()) if isinstance(value, Tensor) else value

    found = {}
    kernel = splash.Splash(interpret=True)
    with mock.patch.object(api, "_implementation", return_value=kernel):
        for name in INTERPRETED:
            given, options = inputs(name)
            placed = {key: on_device(value) for key, value in options.items()}
            found[name] = with_grads(api.attention, list(map(on_device, given)), **placed)
    return found


@cached_outcome
def results() -> dict[str, list[Tensor]]:
    [found] = run_on_ranks(interpreted, 1, timeout=900, env={"JAX_PLATFORMS": "cpu"})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_numbers_of_the_kernel(name: str) -> None:
    pytest.importorskip("jax")
    given, options = inputs(name)
    assert_like_plain(results()[name], given, options, 5e-6)


@pytest.mark.parametrize(
    ("length", "block", "padded"),
    [
        (1, 128, 128),
        (128, 128, 128),
        (200, 128, 256),
        (1000, 512, 1024),
        (1100, 128, 1152),
        (8192, 512, 8192),
        (8300, 512, 8704),
        (131072, 512, 131072),
    ],
)
def test_blocks_pad_little(length: int, block: int, padded: int) -> None:
    assert (_block(length), _padded(length)) == (block, padded)


@pytest.mark.parametrize(
    ("dtype", "size", "has_jax", "problem"),
    [
        (torch.float16, 64, True, "it takes bfloat16 and float32, not torch.float16"),
        (torch.bfloat16, 512, True, "it takes heads of up to 256 elements, not 512"),
        (torch.bfloat16, 64, False, "JAX is not installed"),
    ],
)
def test_falls_back_with_one_line(
    dtype: torch.dtype, size: int, has_jax: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.RankRuntime, "has_kernels", lambda self: True)
    monkeypatch.setattr(splash, "has_jax", lambda: has_jax)
    query: Any = SimpleNamespace(device=torch.device("xla"), dtype=dtype, shape=(1, 2, 128, size))
    with pytest.warns(UserWarning, match=f"in chunks, without its kernel: {problem}"):
        assert api._implementation(query, query) is CHUNKED


def test_is_the_kernel_where_programs_are_for_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    query: Any = SimpleNamespace(
        device=torch.device("xla"), dtype=torch.bfloat16, shape=(1, 2, 128, 128)
    )
    monkeypatch.setattr(splash, "has_jax", lambda: True)
    for has_kernels, chosen in ((True, splash.SPLASH), (False, CHUNKED)):
        runtime = SimpleNamespace(has_kernels=lambda found=has_kernels: found)
        monkeypatch.setattr(ops, "runtime", lambda found=runtime: found)
        assert api._implementation(query, query) is chosen
