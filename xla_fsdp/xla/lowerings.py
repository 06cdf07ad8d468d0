"""Operators that torch_xla hands to the host or makes too much of. Importing registers them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Return how many values are in each of ``bins`` equal intervals from ``min`` to ``max``, or
    from the least to the largest value if both are equal: [bins], in the dtype of the values.

    torch_xla computes it on the host. By it transformers counts the tokens of each expert, for the
    losses that balance them.
    """
    flat = values.reshape(-1).float()
    low, high = (flat.min(), flat.max()) if min == max else (min, max)
    numbers = ((flat - low) * bins / (high - low)).floor()
    numbers = torch.where(flat == high, bins - 1, numbers)  # the last interval has both ends
    each = torch.arange(bins, dtype=numbers.dtype, device=values.device)
    return (numbers.unsqueeze(1) == each).sum(0).to(values.dtype)


def slice_backward(
    grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """Return the gradient of a tensor of ``sizes`` out of that of its slice: zeros around it.

    torch_xla pads a mask, too, and selects by it between the gradient and zeros; a TPU keeps these
    masks in memory. Halves of rotary embeddings are such slices.
    """
    if step != 1:
        return torch.slice_scatter(grad.new_zeros(sizes), grad, dim, start, end, step)
    size, dim = sizes[dim], dim % len(sizes)
    before = min(max(start + size if start < 0 else start, 0), size)
    padding = [0, 0] * (len(sizes) - dim - 1) + [before, size - before - grad.shape[dim]]
    return torch.constant_pad_nd(grad, padding)


_library = torch.library.Library("aten", "IMPL")
_library.impl("histc", histc, "XLA")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
    _library.impl("slice_backward", slice_backward, "XLA")
