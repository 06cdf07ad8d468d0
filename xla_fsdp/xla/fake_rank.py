"""Fake ranks of a TPU job: programs are traced as one of its ranks and never executed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.utils.dlpack import from_dlpack

from xla_fsdp.xla import hooks, ops
from xla_fsdp.xla.kernels import for_tpu

PAGE = 4096


class AbsentTpu(ops.RankRuntime):
    """Ranks of a TPU job in a process without a TPU.

    Args:
        coords: coordinates of every rank on the torus.
    """

    def __init__(self, coords: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._coords = [list(each) for each in coords]

    def device_type(self) -> str:
        return "TPU"

    def torus_coords(self) -> list[list[int]]:
        return self._coords

    @contextlib.contextmanager
    def in_use(self, rank: int | None) -> Iterator[None]:
        """Let the process have this runtime inside the block, on ``rank`` or on all ranks."""
        world: dict[str, Any] = {"_WORLD_SIZE": len(self._coords), "_ORDINAL": rank}
        ops.let_backward_reach_devices()
        hooks.install()
        with (
            mock.patch.multiple(xr, **world),
            mock.patch.object(xm, "xla_rendezvous", _rendezvous),
            ops.using_runtime(self),
        ):
            yield


def _rendezvous(
    payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
) -> list[bytes]:
    """``xm.xla_rendezvous``, which ``xm.rendezvous`` and ``xm.mesh_reduce`` call, without programs
    of its own: they would hold one rank's payload as a constant."""
    ops.sync()
    return ops.runtime().exchange(payload)


@contextlib.contextmanager
def fake_rank(
    coords: Sequence[Sequence[int]], before_running: Callable[[], None]
) -> Iterator[None]:
    """Make the caller rank 0 of a TPU job, and execute nothing, inside the block.

    Args:
        coords: coordinates of every rank on the torus.
        before_running: called where a sync or a read would execute pending operations; no tensor
            may be pending when it returns.
    """
    with _FakeTpu(coords, before_running).in_use(0), for_tpu():
        try:
            yield
        finally:
            ops.discard_unfinished(ops.index_of(ops.device()))


class _FakeTpu(AbsentTpu):
    def __init__(self, coords: Sequence[Sequence[int]], before_running: Callable[[], None]) -> None:
        super().__init__(coords)
        self._before_running = before_running

    def exchange(self, data: bytes) -> list[bytes]:
        return [data] * len(self._coords)

    def executes(self) -> bool:
        return False

    def before_read(self, tensors: Sequence[Any]) -> None:
        if any(map(ops.is_pending, tensors)):
            # Where an operator reads that the host computes, tensors are made without it.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize, False):
                self._before_running()

    def sync(self, on: str, mark: Callable[[bool], None], wait: bool) -> None:
        self._before_running()


class ZeroPages:
    """Makes tensors of zeros that take no memory.

    Each is a device buffer of its own. All lie over the same pages, which are never written to, so
    that the system allocates none.
    """

    def __init__(self) -> None:
        self._zeros = torch.empty(0, dtype=torch.uint8)
        # Never freed: a thread of the device would drop the last reference, and who lists all
        # tensors (gc.get_objects) meanwhile would find one half destroyed.
        self._views: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros on the caller's device, which must be a CPU device."""
        if dtype.itemsize == 1 and dtype.is_floating_point:  # unknown to DLPack
            return ops.upload(torch.zeros(tuple(shape), dtype=dtype))
        kind = tuple(shape), dtype
        if kind not in self._views:
            self._views[kind] = self._view(*kind)
        return from_dlpack(self._views[kind])

    def _view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self._zeros):
            self._zeros = _unwritten(nbytes)
        return self._zeros[:nbytes].view(dtype).view(shape)


def _unwritten(nbytes: int) -> Tensor:
    """Return zeros, uint8 [nbytes], of fresh pages; ``torch.zeros`` would write to them."""
    pages = torch.from_numpy(np.zeros(nbytes + PAGE, np.uint8))
    start = -pages.data_ptr() % PAGE  # device buffers must be aligned
    return pages[start : start + nbytes]
