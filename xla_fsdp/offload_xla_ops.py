"""Values that wait in the memory of the host while a program goes on.

Words: a tensor is *placed* by an annotation in the program, which the TPU compiler turns into
copies that run beside compute, and a loop's stack of placed tensors into one that lies there.
Always true: values and gradients are those of programs without annotations. The CPU's programs have
none: its memory is the host's.
Which tensors wait there is decided in ``scan``.
"""

from __future__ import annotations

import torch_xla
from torch import Tensor

from xla_fsdp import xla_ops


def to_host(tensor: Tensor) -> Tensor:
    """``tensor``, in the host's memory; for loops to collect, and not to outlive the program."""
    return _placed(tensor, "pinned_host")


def to_device(tensor: Tensor) -> Tensor:
    """What ``to_host`` returned, or a slice of a stack of such, in the device's memory."""
    return _placed(tensor, "device")


def _placed(tensor: Tensor, where: str) -> Tensor:
    if xla_ops.runs_on_cpu():
        return tensor
    # Not by torch.ops.xla.place_to_host: its results are of a kind that cannot be given new values.
    [placed] = torch_xla._XLAC._xla_custom_call(
        [tensor],
        "annotate_device_placement",
        [tensor.shape],
        [tensor.dtype],
        True,  # has_side_effect: it is not to be taken for a copy that nobody needs
        "",
        0,
        {"_xla_buffer_placement": where},
    )
    return placed
