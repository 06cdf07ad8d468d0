"""Give every rank the values that the first one has, before a unit is made of them.

Always true: results are bit for bit the first rank's, whatever the others held (NaN, too); one
unit's tensors at a time are on the device. Every rank must hold tensors of the same shapes and
dtypes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from xla_fsdp import xla_ops
from xla_fsdp.collectives import Collectives, LocalCollectives

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: sums of integers and zeros change no bit, also those of NaN and -0."""


@torch.no_grad()
def broadcast_(tensors: Sequence[Tensor], among: Collectives, device: torch.device) -> None:
    """Copy the values of ``among``'s first rank into ``tensors`` (on any device), in place. Without
    communication every rank is taken to hold them already."""
    if isinstance(among, LocalCollectives):
        return
    by_width: dict[torch.dtype, list[int]] = defaultdict(list)
    host = [tensor.detach().cpu().contiguous() for tensor in tensors]
    bits = [_as_integers(tensor) for tensor in host]
    for index, each in enumerate(bits):
        by_width[each.dtype].append(index)
    for indices in by_width.values():
        own = [bits[index] for index in indices]
        sent = [(each if among.rank == 0 else torch.zeros_like(each)).to(device) for each in own]
        for index, received in zip(
            indices, xla_ops.to_host(among.all_reduce_shards(sent)), strict=True
        ):
            tensors[index].copy_(received.view(host[index].dtype).reshape(host[index].shape))


def _as_integers(tensor: Tensor) -> Tensor:
    """The same bits, [n]."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])
