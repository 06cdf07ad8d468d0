"""What the ranks of a training job do together, and the values that this gives.

Always true: every rank makes the same calls; programs are the same ones at every call, so that
nothing is compiled after the first.
"""

from __future__ import annotations

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn

from place import Place


def this_place() -> Place:
    """Of the calling rank."""
    return Place(xr.global_ordinal(), xr.world_size(), torch_xla.device())


def zeros(place: Place, *shape: int) -> Tensor:
    """Zeros to add to, stored on the device. Without the sync they would be a constant of the first
    step's graph, which would then be compiled apart from that of the later steps."""
    created = torch.zeros(shape, device=place.device)
    torch_xla.sync()
    return created


def summed(values: Tensor) -> Tensor:
    """The sum over all ranks, as a part of what is being traced."""
    return xm.all_reduce(xm.REDUCE_SUM, [values])[0]


def global_means(*values: Tensor) -> list[float]:
    """The average of each scalar over all ranks. Waits for the device."""
    stacked = torch.stack([value.float() for value in values])
    return read(xm.all_reduce(xm.REDUCE_SUM, [stacked], scale=1 / xr.world_size())[0])


def read(values: Tensor) -> list[float]:
    """Values that collectives computed. Without the sync, reading them would run their part of the
    graph alone, and the next step would contain it again and be compiled anew."""
    torch_xla.sync()
    return values.tolist()


def average_statistics(model: nn.Module) -> None:
    """Give all ranks the average of their BatchNorm statistics, which each took of its own images.

    Otherwise the model would be a slightly different one on each rank, and the merged one rank 0's.
    """
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if statistics:
        xm.all_reduce(xm.REDUCE_SUM, statistics, scale=1 / xr.world_size())
    torch_xla.sync()
