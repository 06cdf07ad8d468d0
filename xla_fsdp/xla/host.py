"""Copies to the host, exchange of bytes between ranks, and tensors offloaded to host memory.

Invariants: the device's random number state does not change, so that a job that saves checkpoints
draws the same random numbers as one that does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch_xla
from torch import Tensor

from xla_fsdp.xla import ops


def execute_pending() -> None:
    """Execute all pending operations, without advancing the device's random number state."""
    with _same_random_numbers():
        ops.sync()


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of any device to host memory; execute all pending operations first."""
    execute_pending()
    lazy = [t.detach() for t in tensors if t.device.type == "xla"]
    copies = iter(torch_xla._XLAC._xla_get_cpu_tensors(lazy) if lazy else [])
    return [next(copies) if t.device.type == "xla" else t.detach().clone() for t in tensors]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy XLA tensors that have been computed to host memory; nothing is executed."""
    if not tensors:
        return []
    return list(torch_xla._XLAC._xla_get_cpu_tensors(list(tensors)))


def exchange(data: bytes) -> list[bytes]:
    """Return the ``data`` of every rank of the job, in order; execute pending operations first.

    All ranks must call it.
    """
    with _same_random_numbers():
        ops.sync()
        return ops.runtime().exchange(data)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    before = ops.get_rng_state(ops.device())
    try:
        yield
    finally:
        ops.set_rng_state(before, ops.device())


def offload(tensor: Tensor) -> Tensor:
    """Return ``tensor`` annotated to lie in the host's memory.

    The TPU compiler makes copies of such annotations, which run beside compute, and puts a loop's
    stacked output of such tensors on the host. The result must not outlive the program.
    """
    return _annotated(tensor, "pinned_host")


def fetch(tensor: Tensor) -> Tensor:
    """Return an offloaded tensor, or a slice of stacked ones, in the device's memory."""
    return _annotated(tensor, "device")


def _annotated(tensor: Tensor, where: str) -> Tensor:
    if ops.runtime().device_type() == "CPU":  # a CPU device's memory is the host's
        return tensor
    # Not torch.ops.xla.place_to_host: its results cannot be given new values (``ops.release``).
    [annotated] = torch_xla._XLAC._xla_custom_call(
        [tensor],
        "annotate_device_placement",
        [tensor.shape],
        [tensor.dtype],
        True,  # has_side_effect, so that it is not removed as a useless copy
        "",
        0,
        {"_xla_buffer_placement": where},
    )
    return annotated
