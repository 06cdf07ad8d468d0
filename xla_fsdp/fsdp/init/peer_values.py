"""Compare the values of parameters between ranks, before each rank keeps its own part of them.

Ranks that build their models with different random numbers would train a mixture of them. CPU ranks
share one generator, and a device's is not seeded by ``torch.manual_seed``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from xla_fsdp.distributed.collectives import Communication
from xla_fsdp.distributed.cpu_ranks import SHARDING
from xla_fsdp.xla import ops

CHECKED_VALUES = 4096
"""Number of the first, and of the last, values of a host tensor that are compared: enough to detect
different seeds, also of rows that were appended."""


@dataclass(frozen=True)
class _Checksums:
    """Checksums of parameters, of 32 bits; those on the host come first."""

    names: list[str]
    on_host: list[int]
    on_device: list[Tensor]

    def what_to_do(self, at: int) -> str:
        if at < len(self.on_host):
            return "if they call torch.manual_seed(0) before they build"
        return (
            "if they all call torch_xla.manual_seed(0) before they build, as torch.manual_seed "
            "does not seed a device"
        )


def note_values(params: Mapping[str, Tensor], communication: Communication) -> Callable[[], None]:
    """Compute checksums of parameters, by name, those of device tensors in the next program.

    Returns:
        A function to call when that was executed. On CPU ranks it lets their next common program
        fail if checksums differ; elsewhere it raises RuntimeError.
    """
    if not ops.runtime().compares_values():
        return lambda: None
    sums = _checksums(params)
    if not sums.names:
        return lambda: None
    if ops.runtime().compares_facts():
        if sums.on_host:
            _expect(sums, 0, sums.on_host)
        return partial(_expect_of_device, sums)
    host = torch.tensor(sums.on_host, dtype=torch.int32).to(ops.device())
    own = torch.cat([host, *(each.reshape(1) for each in sums.on_device)])
    return partial(_compare, sums, communication.everyone.all_gather(own.unsqueeze(0)))


def _checksums(params: Mapping[str, Tensor]) -> _Checksums:
    on_host = {name: each for name, each in params.items() if each.device.type == "cpu"}
    on_device = {name: each for name, each in params.items() if each.device.type == "xla"}
    return _Checksums(
        [*on_host, *on_device],
        [_of_host_tensor(each) for each in on_host.values()],
        [_of_device_tensor(each) for each in on_device.values()],
    )


def _of_host_tensor(tensor: Tensor) -> int:
    if tensor.numel() > 2 * CHECKED_VALUES or not tensor.dim():
        flat = tensor.reshape(-1)
        tensor = torch.cat([flat[:CHECKED_VALUES], flat[-CHECKED_VALUES:]])
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data) - 2**31


def _of_device_tensor(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        tensor = ops.bitcast(tensor.float(), torch.int32)
    return tensor.sum(dtype=torch.int32)


def _expect_of_device(sums: _Checksums) -> None:
    if sums.on_device:
        _expect(sums, len(sums.on_host), torch.stack(sums.on_device).tolist())


def _expect(sums: _Checksums, first: int, numbers: Sequence[int]) -> None:
    """Note checksums, those from number ``first`` on, as what all ranks must have."""
    pairs = zip(sums.names[first:], numbers, strict=False)
    sharded = ", ".join(f"{name} with checksum {each % 2**32:08x}" for name, each in pairs)
    fact = f"{SHARDING}{sharded} (equal on all ranks {sums.what_to_do(first)})"
    ops.runtime().expect_on_all_ranks(lambda: fact)


def _compare(sums: _Checksums, of_all_ranks: Tensor) -> None:
    by_rank = of_all_ranks.cpu()
    wrong = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
    if wrong:
        names = [sums.names[at] for at in wrong]
        raise RuntimeError(
            f"{', '.join(names[:3])}{' and others' if names[3:] else ''} have not the same values "
            f"on all ranks, and each rank would keep its part of another model. They are equal "
            f"{sums.what_to_do(wrong[0])}; or pass sync_module_states=True"
        )
