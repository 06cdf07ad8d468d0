"""Give every rank the values that the first one has, before a unit is made of them.

Always true: results are bit for bit the first rank's, whatever the others held (NaN, too); one
unit's tensors at a time are on the device. Every rank must hold tensors of the same shapes and
dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xla_fsdp.distributed.buckets import operands_for
from xla_fsdp.distributed.collectives import Collectives, LocalCollectives
from xla_fsdp.distributed.xla.host import to_host

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

"""By bytes of an element: sums of integers and zeros change no bit, also those of NaN and -0."""


@torch.no_grad()
def broadcast_(tensors: Sequence[Tensor], among: Collectives, device: torch.device) -> None:
    """Copy the values of ``among``'s first rank into ``tensors`` (on any device), in place. Without
    communication every rank is taken to hold them already."""
    if isinstance(among, LocalCollectives):
        return
    host = [tensor.detach().cpu().contiguous() for tensor in tensors]
    bits = [_as_integers(tensor) for tensor in host]
    for operand in operands_for(dict(enumerate(bits))):
        joined = operand.join(bits)
        sent = (joined if among.rank == 0 else torch.zeros_like(joined)).to(device)
        [received] = to_host([among.all_reduce_operand(sent)])
        for at, own in zip(operand.numbers, operand.apart(received), strict=True):
            tensors[at].copy_(own.view(host[at].dtype).reshape(host[at].shape))


def _as_integers(tensor: Tensor) -> Tensor:
    """The same bits, [n]."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])
