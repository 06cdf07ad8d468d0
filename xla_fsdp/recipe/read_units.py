"""Units whose parameters a forward reads, and which it does not call.

Lists of equal modules become units, as the blocks of a transformer do. Some models only read the
weights of such modules (SAM's ``point_embed``), which a first forward shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch

from xla_fsdp.fsdp.engine.module_state import named_fsdp_modules
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.shard_tensor import ShardUsedError
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel
from xla_fsdp.nn.activation_checkpoint import unbound_forward


def gather_what_is_read(model: XlaFullyShardedDataParallel, tell: Callable[[str], None]) -> None:
    """Let forwards of ``model`` gather the parameters of units that they read and do not call, for
    as long as they run.

    Forwards are run again, with one more such unit, until one ends without ``ShardUsedError``.

    Args:
        model: all of it, with its units.
        tell: called with a line about each such unit.
    """
    inner = unbound_forward(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_read_units.run(self, partial(inner, self, *args, **kwargs))

    vars(model)["_fsdp_read_units"] = _ReadUnits(tell)
    model.forward = MethodType(forward, model)


class _ReadUnits:
    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._read: list[FSDPState] = []
        self._is_known = False  # whether a forward has ended

    def __deepcopy__(self, memo: dict[int, Any]) -> _ReadUnits:
        copied = _ReadUnits(self._tell)
        copied._read, copied._is_known = copy.deepcopy(self._read, memo), self._is_known
        return copied

    def run(self, model: XlaFullyShardedDataParallel, forward: Callable[[], Any]) -> Any:
        """Run a forward of the model."""
        if not self._is_known:
            return self._first(model, forward)
        with self._gathered():
            return forward()

    def _first(self, model: XlaFullyShardedDataParallel, run: Callable[[], Any]) -> Any:
        before = [buffer.detach().clone() for buffer in model.buffers()]
        while True:
            try:
                with self._gathered():
                    result = run()
                self._is_known = True
                return result
            except ShardUsedError as error:
                units = _list_of(model, error.param)
                if not units or units[0] in self._read:
                    raise
                name = error.param.originals[0].names[0]
            # Not in the handler, whose traceback keeps tensors of the forward alive.
            self._read += units
            self._tell(f"{name} is read by the model, which does not call its module")
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        for unit in self._read:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._read:
                unit.reshard()


def _list_of(model: XlaFullyShardedDataParallel, param: FSDPParam) -> list[FSDPState]:
    """Return the units of the list with the module that has ``param``, which are stacked together;
    none if it is no unit of a list."""
    units = {name: each._fsdp_module_state.unit for name, each in named_fsdp_modules(model)}
    own = next((name for name, unit in units.items() if param in unit.group.params), "")
    place, _, number = own.rpartition(".")
    if not number.isdecimal():
        return []
    return [unit for name, unit in units.items() if name.rpartition(".")[0] == place]
