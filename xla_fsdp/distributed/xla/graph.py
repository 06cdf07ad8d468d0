"""Read what has been traced: the program that computes some tensors, and what it takes.

Words: a program's *inputs* are device buffers, which tensors of one shape and dtype stand for; two
Python objects may stand for one tensor. Always true: nothing is compiled or executed.
What becomes of programs is the business of ``preflight``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch_xla
from torch import Tensor


def lowered_hlo(tensors: Sequence[Tensor]) -> str:
    """HLO text, before optimization, of the program that computes ``tensors``."""
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def program_of(tensors: Sequence[Tensor]) -> bytes:
    """The serialized HLO module, before optimization, of the program that computes ``tensors``."""
    return torch_xla._XLAC._get_xla_tensors_hlo_proto(list(tensors))


def input_buffers(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """The device buffers that ``program_of(tensors)`` takes, in the order of its parameters: an
    identity, and a tensor of the same shape and dtype."""
    _, values = torch_xla._XLAC._get_tensors_xla_device_data_node(list(tensors))
    return list(zip(torch_xla._XLAC._get_tensors_handle(values), values, strict=True))


def buffer_id(tensor: Tensor) -> int | None:
    """Identity of a tensor's device buffer; None if it has none yet, as values that have only been
    announced for the device."""
    try:
        return torch_xla._XLAC._get_tensors_handle([tensor])[0]
    except RuntimeError:
        return None


def tensor_id(tensor: Tensor) -> int:
    """The same for Python objects that stand for one XLA tensor."""
    return torch_xla._XLAC._xla_get_tensor_id(tensor)
