"""Operators that are not lowered as torch_xla does it: their numbers and their programs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from test.common.ranks import cached_outcome, run_on_ranks

SIZES = (3, 5, 4)
SLICES = {
    "first": (slice(None, 2),),
    "last": (slice(None), slice(2, None)),
    "from_the_end": (slice(None), slice(-3, -1)),
    "inner": (slice(None), slice(1, 4), slice(2, 3)),
    "beyond": (slice(1, 99),),
    "all": (slice(None), slice(0, 5)),
    "empty": (slice(None), slice(4, 2)),
    "behind": (slice(None), slice(7, 9)),
    "steps": (slice(None), slice(0, 5, 2)),
    "steps_within": (slice(None), slice(1, 4, 2), slice(None, None, 3)),
}


def gradient(name: str, device: torch.device | str) -> Tensor:
    values = torch.arange(60.0, device=device).view(SIZES).requires_grad_()
    found = values[SLICES[name]]
    weights = torch.arange(1.0, found.numel() + 1, device=device).view(found.shape)
    [grad] = torch.autograd.grad((found * found * weights).sum(), values)
    return grad


def on_a_rank(rank: int) -> tuple[dict[str, Tensor], str]:
    import torch_xla

    device = torch_xla.device()
    text = torch_xla._XLAC._get_xla_tensors_hlo([gradient("inner", device)])
    return {name: gradient(name, device).cpu() for name in SLICES}, text


@cached_outcome
def outcome() -> tuple[dict[str, Tensor], str]:
    [found] = run_on_ranks(on_a_rank, 1)
    return found


@pytest.mark.parametrize("name", SLICES)
def test_gradients_of_slices(name: str) -> None:
    assert torch.equal(outcome()[0][name], gradient(name, "cpu"))


def test_gradients_of_slices_need_no_masks() -> None:
    text = outcome()[1]
    assert " pad(" in text
    assert "pred[" not in text
