"""One rank of many, on a machine that has none of them: traced, never executed.

Words: a *hollow* tensor is zeros on the device that take no memory.
What a step would run is taken as it is traced; wherever torch_xla would execute it, the caller of
``pretended_rank`` is asked first. What becomes of the programs is ``preflight``'s business.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.utils.dlpack import from_dlpack

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.host import HOST_COPIES, READS


@contextlib.contextmanager
def pretended_rank(
    rank: int, coords: Sequence[Sequence[int]], instead_of_running: Callable[[], None]
) -> Iterator[None]:
    """Inside, the caller is ``rank`` of as many as there are ``coords``, and nothing is executed:
    wherever a sync or a read would run the traced program, ``instead_of_running()`` is called
    first. It must leave nothing pending."""

    def first(original: Callable[..., Any], runs: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if runs(*args, **kwargs) and (not isinstance(value, Tensor) or ops.is_pending(value)):
                instead_of_running()
            return original(value, *args, **kwargs)

        return call

    def step_marker(*args: Any, **kwargs: Any) -> None:
        instead_of_running()

    with contextlib.ExitStack() as stack:
        replace = stack.enter_context
        replace(mock.patch.multiple(xr, _WORLD_SIZE=len(coords), _ORDINAL=rank))
        places = [list(place) for place in coords]
        replace(mock.patch.object(ops.torus_coords, "pretended", places, create=True))
        replace(mock.patch.object(torch_xla._XLAC, "_xla_step_marker", step_marker))
        for name in HOST_COPIES:
            call = first(getattr(torch_xla._XLAC, name), lambda *args, **kwargs: True)
            replace(mock.patch.object(torch_xla._XLAC, name, call))
        for name, runs in READS.items():
            replace(mock.patch.object(Tensor, name, first(getattr(Tensor, name), runs)))
        yield


PAGE = 4096


class HollowTensors:
    """Makes hollow tensors: device buffers over pages that nobody has written to, which the system
    only counts. Each is a buffer of its own, over the same pages, and reads as zeros."""

    def __init__(self) -> None:
        self._zeros = torch.empty(0, dtype=torch.uint8)
        # They are kept: the last reference to one would be given up by a thread of the device, and
        # whoever looks at all tensors meanwhile would find it half gone.
        self._views: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One on the caller's device, which must be the CPU's."""
        if dtype.itemsize == 1 and dtype.is_floating_point:  # those of 8 bits: unknown to DLPack
            return ops.upload(torch.zeros(tuple(shape), dtype=dtype))
        kind = tuple(shape), dtype
        if kind not in self._views:
            self._views[kind] = self._view(*kind)
        return from_dlpack(self._views[kind])

    def _view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self._zeros):
            self._zeros = _untouched(nbytes)
        return self._zeros[:nbytes].view(dtype).view(shape)


def _untouched(nbytes: int) -> Tensor:
    """Zeros from the system, bytes [nbytes]; ``torch.zeros`` would write them."""
    pages = torch.from_numpy(np.zeros(nbytes + PAGE, np.uint8))
    start = -pages.data_ptr() % PAGE  # a device buffer begins where vectors may
    return pages[start : start + nbytes]
