"""Read the traced program that computes given tensors; nothing is compiled or executed."""

from __future__ import annotations

from collections.abc import Sequence

import torch_xla
from torch import Tensor


def lowered_hlo(tensors: Sequence[Tensor]) -> str:
    """Return the HLO text, before optimization, of the program that computes ``tensors``."""
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def program_of(tensors: Sequence[Tensor]) -> bytes:
    """Return the serialized HLO module, before optimization, that computes ``tensors``."""
    return torch_xla._XLAC._get_xla_tensors_hlo_proto(list(tensors))


def program_key(tensors: Sequence[Tensor]) -> bytes:
    """Return a hash of the graph that computes ``tensors``; equal ones have the same program."""
    return bytes(torch_xla._XLAC._get_graph_hash(list(tensors)))


def input_buffers(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the inputs of ``program_of(tensors)``, in the order of its parameters.

    Returns:
        ``buffer_id`` of each, and a tensor of the same shape and dtype.
    """
    _, values = torch_xla._XLAC._get_tensors_xla_device_data_node(list(tensors))
    return list(zip(torch_xla._XLAC._get_tensors_handle(values), values, strict=True))


def buffer_id(tensor: Tensor) -> int | None:
    """Return a number that identifies a tensor's device buffer; None if it has none yet."""
    try:
        return torch_xla._XLAC._get_tensors_handle([tensor])[0]
    except RuntimeError:  # the value has not been uploaded yet
        return None


def tensor_id(tensor: Tensor) -> int:
    """Return a number that identifies an XLA tensor; several Python objects may share one."""
    return torch_xla._XLAC._xla_get_tensor_id(tensor)
