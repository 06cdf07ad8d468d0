"""Copies on the host, bytes between ranks, and tensors that wait in the host's memory.

Invariants: nothing here moves a device's random numbers on, so that a job that is saved now and
then draws the same ones as one that is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch_xla
from torch import Tensor

from xla_fsdp.distributed.xla import ops


def settle() -> None:
    """Run what has been traced, as ``sync`` does, without moving the device's random numbers on."""
    with _same_random_numbers():
        ops.sync()


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of any device to host memory, after running what has been traced."""
    settle()
    lazy = [t.detach() for t in tensors if t.device.type == "xla"]
    copies = iter(torch_xla._XLAC._xla_get_cpu_tensors(lazy) if lazy else [])
    return [next(copies) if t.device.type == "xla" else t.detach().clone() for t in tensors]


def exchange(data: bytes) -> list[bytes]:
    """Return the ``data`` of every rank of the job, in order, after running what has been traced.
    All ranks must call it."""
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
    """Return ``tensor`` annotated to lie in the host's memory, for loops to stack.

    The TPU compiler turns annotations into copies that run beside compute, and a loop's stack of
    such tensors into one on the host. The result must not outlive the program.
    """
    return _placed(tensor, "pinned_host")


def fetch(tensor: Tensor) -> Tensor:
    """Return an offloaded tensor, or a slice of a stack of such, in the device's memory."""
    return _placed(tensor, "device")


def _placed(tensor: Tensor, where: str) -> Tensor:
    if ops.runtime().device_type() == "CPU":  # whose memory is the host's
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
