"""Runs a head that is a unit of its own: in pieces, if it has targets and is large.

Always true: only how losses of rows are computed is replaced (``turns``); all other calls are those
of any unit. What the loops compute is in ``head_program``, how autograd sees them in ``head_node``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from xla_fsdp.graph_nodes import on_device
from xla_fsdp.streamed import turns
from xla_fsdp.streamed.head import LinearCrossEntropy
from xla_fsdp.streamed.head_node import Job, losses_of
from xla_fsdp.streamed.head_program import Plan
from xla_fsdp.streamed.kept import Kept
from xla_fsdp.streamed.weights import StreamedWeights
from xla_fsdp.unit import Unit


class HeadRunner:
    """See ``unit_host.Runner``. It keeps no module alive and can be copied with its host."""

    def __init__(self) -> None:
        self._loops = Kept()

    def run(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The head's call.

        Raises:
            ValueError: for inputs in host memory, or of another dtype than the weight's.
        """
        head = cast(LinearCrossEntropy, turns.module_of(unit))
        job = self._job(unit, head, *args, **kwargs)
        if job is None:
            return unit.run(forward, args, kwargs)
        return turns.run(unit, partial(_losses, job), forward, args, kwargs)

    def _job(
        self, unit: Unit, head: LinearCrossEntropy, input: Any = None, target: Any = None, **_: Any
    ) -> Job | None:
        """For these arguments of the head's forward; None if there is nothing to stream: no
        targets, or all classes in one piece."""
        if not isinstance(input, Tensor) or not isinstance(target, Tensor):
            return None
        weights = StreamedWeights(unit.group, rings=True)
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


def why_not(head: LinearCrossEntropy) -> str:
    """What about the module keeps it from being streamed; empty if nothing does."""
    if type(head).forward is not LinearCrossEntropy.forward:
        return f"{type(head).__name__} has a forward of its own"
    return ""


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
