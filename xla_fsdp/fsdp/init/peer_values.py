"""Compare the values of parameters between ranks, before each rank keeps its own part of them.

Ranks that build their models with different random numbers would train a mixture of them. CPU ranks
share one generator, and a device's is not seeded by ``torch.manual_seed``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.collectives import Communication
from xla_fsdp.distributed.cpu_ranks import SHARDING
from xla_fsdp.fsdp.engine.param import known_shard
from xla_fsdp.fsdp.engine.shard_tensor import is_sharded
from xla_fsdp.xla import ops

CHECKED_VALUES = 4096
"""Number of the first, and of the last, values of a host tensor that are compared: enough to detect
different seeds, also of rows that were appended."""


EQUAL_IF = {
    "cpu": "if they call torch.manual_seed(0) before they build",
    "xla": "if they all call torch_xla.manual_seed(0) before they build, as torch.manual_seed does "
    "not seed a device",
}


def note_values(params: Sequence[Any], communication: Communication) -> Callable[[], None]:
    """Compute checksums, of 32 bits, of those ``ManagedParam``s that all ranks hold and that are
    not sharded; those of device tensors in the next program.

    Returns:
        A function to call when that was executed. On CPU ranks it lets their next common program
        fail if checksums differ; elsewhere it raises RuntimeError.
    """
    if not ops.runtime().compares_values():
        return lambda: None
    alike = [each for each in params if not (each.placement and each.placement.is_of_experts)]
    plain = [each for each in alike if not (is_sharded(each.param) or known_shard(each.param))]
    values = [(each.name, each.param.detach()) for each in plain]
    on_host = {name: _of_host_tensor(t) for name, t in values if t.device.type == "cpu"}
    on_device = {name: _of_device_tensor(t) for name, t in values if t.device.type == "xla"}
    if ops.runtime().compares_facts():
        _expect(on_host, "cpu")
        return partial(_expect_of_device, on_device)
    if not (on_host or on_device):
        return lambda: None
    host = torch.tensor([*on_host.values()], dtype=torch.int32).to(ops.device())
    own = torch.cat([host, *(each.reshape(1) for each in on_device.values())])
    of_all_ranks = communication.everyone.all_gather(own.unsqueeze(0))
    return partial(_compare, [*on_host, *on_device], len(on_host), of_all_ranks)


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


def _expect_of_device(sums: Mapping[str, Tensor]) -> None:
    numbers = torch.stack([*sums.values()]).tolist() if sums else []
    _expect(dict(zip(sums, numbers, strict=True)), "xla")


def _expect(sums: Mapping[str, int], device: str) -> None:
    """Note checksums as what all ranks must have."""
    if sums:
        told = ", ".join(f"{name} with checksum {n % 2**32:08x}" for name, n in sums.items())
        fact = f"{SHARDING}{told} (equal on all ranks {EQUAL_IF[device]})"
        ops.runtime().expect_on_all_ranks(lambda: fact)


def _compare(all_names: Sequence[str], num_on_host: int, of_all_ranks: Tensor) -> None:
    by_rank = of_all_ranks.cpu()
    wrong = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
    if wrong:
        names = [all_names[at] for at in wrong]
        raise RuntimeError(
            f"{', '.join(names[:3])}{' and others' if names[3:] else ''} have not the same values "
            f"on all ranks, and each rank would keep its part of another model. They are equal "
            f"{EQUAL_IF['cpu' if wrong[0] < num_on_host else 'xla']}; or pass "
            f"sync_module_states=True"
        )
