"""Runs a head that is a unit of its own: in pieces, if it has targets and is large.

Always true: the head's forward itself runs, with its hooks and checks; only how losses of rows are
computed is replaced. ``checkpoint_module`` recomputes nothing then, as loops keep no activations.
All other calls are those of any unit. What the loops compute is in ``program``, how autograd sees
them in ``node``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from xla_fsdp.backward import running_units
from xla_fsdp.graph_nodes import on_device
from xla_fsdp.remat import regions_run_once
from xla_fsdp.streamed_head.head import LinearCrossEntropy, computing_by
from xla_fsdp.streamed_head.node import Job, Loops, losses_of
from xla_fsdp.streamed_head.program import Plan
from xla_fsdp.streamed_head.weights import HeadWeights, why_whole
from xla_fsdp.tree import map_tensors
from xla_fsdp.unit import Unit


class HeadRunner:
    """See ``unit_host.Runner``. It keeps no module alive and can be copied with its host."""

    def __init__(self) -> None:
        self._loops = Loops()

    def run(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The head's call.

        Raises:
            ValueError: for inputs in host memory, or of another dtype than the weight's.
        """
        head = cast(LinearCrossEntropy, unit.group.params[0].members[0].owners[0].module)
        job = self._job(unit, head, *args, **kwargs)
        if job is None:
            return unit.run(forward, args, kwargs)
        unit.backward.abandon()
        unit.refuse_run()
        unit.reshard()
        given = map_tensors(unit.cast_input, (args, kwargs))
        with regions_run_once(), computing_by(head, partial(_losses, job)):
            loss = forward(*given[0], **given[1])
        if not running_units():
            unit.backward.forward_gate.clear()
        return map_tensors(unit.cast_output, loss)

    def _job(
        self, unit: Unit, head: LinearCrossEntropy, input: Any = None, target: Any = None, **_: Any
    ) -> Job | None:
        """For these arguments of the head's forward; None if there is nothing to stream: no
        targets, or all classes in one piece."""
        if not isinstance(input, Tensor) or not isinstance(target, Tensor):
            return None
        weights = HeadWeights(unit.group)
        autocast = torch.is_autocast_enabled("xla")
        dtype = torch.get_autocast_dtype("xla") if autocast else weights.dtype
        pieces = weights.cut(head.pieces, input.numel() // weights.width, dtype)
        keeps = not unit.settings.reshards_after_forward
        plan = Plan(pieces, head.label_smoothing, dtype, keeps)
        return Job(unit, weights, plan, self._loops) if pieces.count > 1 else None


def _losses(job: Job, rows: Tensor, goal: Tensor) -> Tensor:
    dtype = job.plan.dtype
    if torch.is_autocast_enabled("xla"):
        rows = rows.to(dtype)
    _check(rows, goal, dtype)
    return losses_of(job, rows, goal.to(torch.int32))


def runner_for(unit: Unit, module: nn.Module) -> HeadRunner | None:
    """What runs ``module``, the one host of ``unit``; None if that runs as any other."""
    if not isinstance(module, LinearCrossEntropy) or module.pieces == 1:
        return None
    why = why_whole(unit.group)
    if type(module).forward is not LinearCrossEntropy.forward:
        why = f"{type(module).__name__} has a forward of its own"
    if why:
        warnings.warn(
            f"LinearCrossEntropy will hold its whole weight, and all logits: {why}. With pieces=1 "
            f"that is what it is meant to do",
            stacklevel=5,
        )
        return None
    if unit.settings.keeps_larger:
        warnings.warn(
            "LinearCrossEntropy gathers a piece of its weight at a time, from all ranks: a number "
            "for reshard_after_forward is ignored; False keeps the pieces for backward",
            stacklevel=5,
        )
    return HeadRunner()


def _check(rows: Tensor, goal: Tensor, dtype: torch.dtype) -> None:
    problems = [
        f"the {what} is in host memory; move it to the XLA device"
        for what, tensor in (("input", rows), ("target", goal))
        if not on_device(tensor)
    ]
    if rows.dtype != dtype:
        problems.append(
            f"the input is {rows.dtype}, and the weight is gathered as {dtype}; cast the input, or "
            f"give the unit a compute_dtype"
        )
    if problems:
        raise ValueError("LinearCrossEntropy: " + "; ".join(problems))
