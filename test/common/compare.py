"""Compare tensors by name: to the last bit, or within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def same(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> bool:
    """Return whether the names, dtypes and values are equal; ``found`` may be on a device."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name].cpu(), value)
        for name, value in expected.items()
    )


def assert_close(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    atol: float,
    rtol: float = 0.0,
    of_largest: float = 0.0,
    smallest: float = 1e-2,
    what: str = "value",
) -> None:
    """Assert equal names, shapes and dtypes, and values within a tolerance.

    Args:
        found: tensors on the host.
        expected: tensors of the same names.
        atol: error allowed everywhere.
        rtol: further error allowed, relative to the expected value.
        of_largest: further error allowed, relative to the expected tensor's largest value, for
            sums whose terms are larger than they are.
        smallest: counts as the largest value where that is smaller.
        what: the tensors are, for the message.
    """
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        own = found[name]
        assert (own.shape, own.dtype) == (value.shape, value.dtype), f"{what} of {name}"
        if not value.numel():
            continue
        error, size = (own.double() - value.double()).abs(), value.double().abs()
        allowed = atol + rtol * size + of_largest * size.max().clamp(min=smallest)
        worst = (error - allowed).argmax()
        assert (error <= allowed).all(), (
            f"{what} of {name}: {own.flatten()[worst]} in place of {value.flatten()[worst]}"
        )
