"""``torch.histc`` on XLA, where torch_xla hands it to the host: so transformers counts the tokens
of each expert, for the losses that balance them. Importing this registers it."""

from __future__ import annotations

import torch
from torch import Tensor


def histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Return how many values are in each of ``bins`` equal intervals from ``min`` to ``max``, or
    from the least to the largest value if both are equal: [bins], in the dtype of the values."""
    flat = values.reshape(-1).float()
    low, high = (flat.min(), flat.max()) if min == max else (min, max)
    numbers = ((flat - low) * bins / (high - low)).floor()
    numbers = torch.where(flat == high, bins - 1, numbers)  # the last interval has both ends
    each = torch.arange(bins, dtype=numbers.dtype, device=values.device)
    return (numbers.unsqueeze(1) == each).sum(0).to(values.dtype)


_library = torch.library.Library("aten", "IMPL")
_library.impl("histc", histc, "XLA")
