"""Forwards of a model that show what only a forward can show, and are run again without it.

Blocks that were to be a loop may not be one. And a model may read the weights of units which it
never calls, as lists of equal modules become units (SAM's ``point_embed``).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
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
from xla_fsdp.recipe.plan import Plan
from xla_fsdp.scan import blocks_one_by_one
from xla_fsdp.scan.block_scan import scans_in
from xla_fsdp.scan.errors import REFUSALS


def watch_forwards(model: XlaFullyShardedDataParallel, plan: Plan) -> None:
    """Run forwards of ``model`` again that raise what another way of running them would not.

    Units that are read are gathered from then on for as long as a forward runs. Loops that cannot
    be are gone from then on, unless the recipe sets them; forwards without gradients, as those of
    an evaluation that leaves blocks out, run blocks one by one for themselves.
    """
    inner = unbound_forward(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_forwards.run(self, partial(inner, self, *args, **kwargs))

    vars(model)["_fsdp_forwards"] = _Forwards(plan)
    model.forward = MethodType(forward, model)


class _Forwards:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._needs_loops = bool(plan.recipe.scan) or isinstance(plan.recipe.remat, tuple)
        self._read: list[FSDPState] = []  # units that are read and not called
        self._is_known = False  # whether a forward has ended, which shows all of these

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forwards:
        copied = _Forwards(self._plan)
        copied._read, copied._is_known = copy.deepcopy(self._read, memo), self._is_known
        return copied

    def run(self, model: XlaFullyShardedDataParallel, forward: Callable[[], Any]) -> Any:
        """Run a forward of the model."""
        may_loop = self._plan.has("scan") and not self._needs_loops
        if self._is_known and not may_loop:
            return self._attempt(forward)
        before = [buffer.detach().clone() for buffer in model.buffers()]
        no_loop = ""
        while True:
            try:
                result = self._attempt(forward, one_by_one=bool(no_loop))
                break
            except ShardUsedError as error:
                units = [] if self._is_known else _list_of(model, error.param)
                if not units or units[0] in self._read:
                    raise
                name = error.param.originals[0].names[0]
                self._read += units
                why = f"{name} is read by the model, which does not call its module"
                self._plan.leave_out_late("units", "", why)
            except REFUSALS as error:
                if no_loop or not may_loop:
                    raise
                no_loop = str(error).splitlines()[0]
            # Not in a handler: the error's traceback would keep tensors of the loop, which have no
            # values, where an operator that falls back to the host computes all that are alive.
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
        self._is_known = True
        if no_loop and torch.is_grad_enabled():
            for scan in scans_in(model):
                scan.remove()
            self._plan.give_up_loops(no_loop)
        return result

    def _attempt(self, forward: Callable[[], Any], *, one_by_one: bool = False) -> Any:
        for unit in self._read:
            unit.unshard()
        try:
            with blocks_one_by_one() if one_by_one else contextlib.nullcontext():
                return forward()
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
