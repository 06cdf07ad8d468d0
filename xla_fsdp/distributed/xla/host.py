"""Values on the host: which functions hand them over, copies of tensors, and bytes between ranks.

Words: a *read* is a method of a tensor that computes it and gives its value to the host; to
*settle* is to run what has been traced.
Always true: what is traced is computed first, all at once, and the device's random numbers stay
where they are, so that a job that is looked at draws the same ones.
Reads by name are what ``cpu_rank_xla_ops`` and ``pretended_xla_ops`` stand in for.

Values that wait in the memory of the host while a program goes on.

Words: a tensor is *placed* by an annotation in the program, which the TPU compiler turns into
copies that run beside compute, and a loop's stack of placed tensors into one that lies there.
Always true: values and gradients are those of programs without annotations. The CPU's programs have
none: its memory is the host's.
Which tensors wait there is decided in ``scan``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.ops import (
    device,
    get_rng_state,
    index_of,
    run_in_progress,
    set_rng_state,
    sync,
    world_size,
)


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _moves_to_host(*args: Any, **kwargs: Any) -> bool:
    """Whether arguments of ``Tensor.to`` name the CPU."""
    targets = [*args[:1], kwargs.get("device"), kwargs.get("other")]
    return any(
        str(target.device if isinstance(target, Tensor) else target).startswith("cpu")
        for target in targets
        if target is not None
    )


READS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("item", "tolist", "numpy", "cpu", "__repr__"), _always),
    **dict.fromkeys(("__bool__", "__int__", "__float__"), _always),
    "to": _moves_to_host,
}

"""Methods of a tensor that compute it and hand its value to the host; each with a test of the
arguments of a call, as some do so only for some."""

HOST_COPIES = ("_xla_sync_multi", "_xla_get_cpu_tensors")

"""Functions of torch_xla that do the same for several tensors (``xm.save``, ``xm.mesh_reduce``)."""

EXCHANGE_MULTIPLE = 4096


def settle() -> None:
    """As ``sync``, and the device's random numbers stay where they are."""
    with _same_random_numbers():
        sync()


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory, of any tensors; what is traced is computed first, all at once."""
    settle()
    lazy = [t.detach() for t in tensors if t.device.type == "xla"]
    copies = iter(torch_xla._XLAC._xla_get_cpu_tensors(lazy) if lazy else [])
    return [next(copies) if t.device.type == "xla" else t.detach().clone() for t in tensors]


def exchange(data: bytes) -> list[bytes]:
    """The ``data`` of every rank of the job, in order. All ranks must call it; what is traced is
    computed first."""
    with _same_random_numbers():
        sync()
        if (run := run_in_progress()) is not None:
            return run.exchange(index_of(device()), data)
        if world_size() == 1:
            return [data]
        # Few lengths, as every other one is compiled anew.
        length = len(data).to_bytes(8, "little")
        padding = bytes(-(len(length) + len(data)) % EXCHANGE_MULTIPLE)
        said = xm.rendezvous("xla_fsdp.exchange", length + data + padding)
        return [each[8 : 8 + int.from_bytes(each[:8], "little")] for each in said]


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """A sync moves the device's random number chain on; a job that is saved now and then would not
    draw the numbers of one that is not."""
    before = get_rng_state(device())
    try:
        yield
    finally:
        set_rng_state(before, device())


def offload(tensor: Tensor) -> Tensor:
    """``tensor``, in the host's memory; for loops to collect, and not to outlive the program."""
    return _placed(tensor, "pinned_host")


def fetch(tensor: Tensor) -> Tensor:
    """What ``offload`` returned, or a slice of a stack of such, in the device's memory."""
    return _placed(tensor, "device")


def _placed(tensor: Tensor, where: str) -> Tensor:
    if ops.runs_on_cpu():
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
