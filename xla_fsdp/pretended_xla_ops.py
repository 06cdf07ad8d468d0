"""One rank of many, on a machine that has none of them: traced, never executed.

What a step would run is taken as it is traced; wherever torch_xla would execute it, the caller of
``pretended_rank`` is asked first. What becomes of the programs is ``preflight``'s business.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch_xla
import torch_xla.runtime as xr
from torch import Tensor

from . import xla_ops


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
            if runs(*args, **kwargs) and (
                not isinstance(value, Tensor) or xla_ops.is_pending(value)
            ):
                instead_of_running()
            return original(value, *args, **kwargs)

        return call

    def step_marker(*args: Any, **kwargs: Any) -> None:
        instead_of_running()

    with contextlib.ExitStack() as stack:
        replace = stack.enter_context
        replace(mock.patch.multiple(xr, _WORLD_SIZE=len(coords), _ORDINAL=rank))
        places = [list(place) for place in coords]
        replace(mock.patch.object(xla_ops.torus_coords, "pretended", places, create=True))
        replace(mock.patch.object(torch_xla._XLAC, "_xla_step_marker", step_marker))
        for name in xla_ops.HOST_COPIES:
            call = first(getattr(torch_xla._XLAC, name), lambda *args, **kwargs: True)
            replace(mock.patch.object(torch_xla._XLAC, name, call))
        for name, runs in xla_ops.READS.items():
            replace(mock.patch.object(Tensor, name, first(getattr(Tensor, name), runs)))
        yield
