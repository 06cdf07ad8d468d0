"""Round fp32 values to 16 bits at random, so that on average nothing is lost.

Always true: the result is one of the two neighbours of the value, the nearer one with the greater
probability, so that its mean is the value (exactly, for bf16, up to the 16 random bits used);
values that the 16-bit type has stay as they are, infinities and NaNs too. Where random bits come
from is left to ``noise``.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW_DTYPES = (torch.bfloat16,)

"""What can be rounded to stochastically. Not fp16: its range is narrower than that of fp32."""


def stochastic_round(value: Tensor, bits: Tensor) -> Tensor:
    """``value`` as bf16, rounded up with the probability of its distance from the lower neighbour.

    Args:
        value: fp32.
        bits: int32 of the same shape; of each the low 16 are used.

    Returns:
        A bf16 tensor.
    """
    # The lower half of an fp32 number is what bf16 cuts off: adding a random half carries into the
    # upper one with just the right probability, for either sign.
    as_bits = value.detach().view(torch.int32)
    rounded = (as_bits + (bits & 0xFFFF)) & ~0xFFFF
    exact = rounded.view(torch.float32).to(torch.bfloat16)
    return torch.where(torch.isfinite(value), exact, value.to(torch.bfloat16))
