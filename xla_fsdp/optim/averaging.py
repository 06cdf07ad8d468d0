"""Replace the values of tensors by their averages over ranks.

Always true: small tensors of one dtype travel joined, large ones by themselves, so that nothing
large is copied; sums are taken of values that have been divided already, as in torch, in the
tensors' own dtype; every rank makes the same calls and ends with the same bits.
When to average is ``model_averagers``' business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from xla_fsdp.distributed.shard_layout import offsets
from xla_fsdp.distributed.xla import ops

JOINED_BELOW = 2**15

"""Tensors of fewer elements travel joined: below some 100 KB the start of a collective costs more
than its bytes."""


@torch.no_grad()
def average_in_place(tensors: Sequence[Tensor], groups: list[list[int]]) -> None:
    """Set every tensor to its average over the ranks of the caller's group.

    Args:
        tensors: floating-point, on the XLA device; the same shapes and dtypes on every rank.
        groups: lists of ranks, all of one size.
    """
    size = len(groups[0])
    if size == 1:
        return
    for together in _batches(tensors):
        if len(together) == 1:
            together[0].copy_(ops.all_reduce("sum", together[0] / size, groups))
            continue
        joined = torch.cat([tensor.reshape(-1) for tensor in together])
        average = ops.all_reduce("sum", joined / size, groups)
        numels = [tensor.numel() for tensor in together]
        for tensor, numel, start in zip(together, numels, offsets(numels), strict=True):
            tensor.copy_(ops.cut(average, 0, start, numel).reshape(tensor.shape))


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    small: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    large = []
    for tensor in tensors:
        if tensor.numel() >= JOINED_BELOW:
            large.append([tensor])
        elif tensor.numel():
            small[tensor.dtype].append(tensor)
    return [*small.values(), *large]
