"""The autograd node of a streamed head: losses of rows, from rows and shards.

Words: see ``head_program``. Always true: it takes the rows and every shard parameter of the head's
unit, and gives each shard its gradient, as the unit's own nodes would; between forward and backward
it keeps the rows, a few numbers per row and one piece (all, if the plan says so). Gradients that
are not simply reduced (they are kept, or go through a user's hook) are handed to the unit, in full.

Runs a head that is a unit of its own: in pieces, if it has targets and is large.

Always true: only how losses of rows are computed is replaced (``turns``); all other calls are those
of any unit. What the loops compute is in ``head_program``, how autograd sees them in ``head_node``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xla_fsdp.distributed.xla.loop import Like
from xla_fsdp.fsdp.chunked import hooks as turns
from xla_fsdp.fsdp.chunked.head import LinearCrossEntropy
from xla_fsdp.fsdp.chunked.head_program import (
    BackwardLoop,
    ForwardLoop,
    Gradients,
    Plan,
    Sliced,
    Wanted,
    wanted_of,
)
from xla_fsdp.fsdp.chunked.hooks import Kept
from xla_fsdp.fsdp.chunked.weights import BIAS, WEIGHT, StreamedWeights
from xla_fsdp.fsdp.engine.autograd import mark_constants, on_device
from xla_fsdp.fsdp.engine.state import FSDPState, refuse_changed


@dataclass(frozen=True)
class Job:
    """One forward of a head.

    Args:
        unit: the head's.
        weights: how its parameters travel.
        plan: what the loops depend on.
        loops: those that are there already.
    """

    unit: FSDPState
    weights: StreamedWeights
    plan: Plan
    loops: Kept


def losses_of(job: Job, rows: Tensor, targets: Tensor) -> Tensor:
    """Of every row, [rows] float32.

    Args:
        job: what to run.
        rows: [rows, width], in the dtype of products.
        targets: [rows] int32.
    """
    shards = job.unit.group.shards
    if torch.is_grad_enabled() and any(each.requires_grad for each in (rows, *shards)):
        return _Losses.apply(job, rows, targets, *shards)
    alone = replace(job, plan=replace(job.plan, keeps=False))
    return _forward(alone, rows, targets)[0]


class _Losses(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx: Any, job: Job, rows: Tensor, targets: Tensor, *shards: Tensor) -> Tensor:
        losses, norm, gathered, bias = _forward(job, rows, targets)
        ctx.job, ctx.versions = job, job.unit.group.versions
        ctx.save_for_backward(rows, targets, norm, gathered, *bias)
        mark_constants(ctx, [losses], [True])
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, share: Tensor | None) -> tuple[Tensor | None, ...]:
        if share is None:
            return (None,) * len(ctx.needs_input_grad)
        rows, shards = _backward(ctx, share)
        return (None, rows, None, *shards)


def _forward(job: Job, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, list]:
    """Losses, norms, the last piece (or all), and the bias in pieces."""
    unit, weights, plan = job.unit, job.weights, job.plan
    with torch.no_grad():
        sliced = _sliced(job, turns.shards_for_forward(unit, [rows]))
        constant = [rows, targets]
        key = ("forward", plan, *map(Like.of, constant))
        loop = job.loops.get(key, lambda: ForwardLoop(plan, weights, sliced, constant))
        sums, gathered = loop.run(weights.gather(sliced.sent[0]), sliced, constant)
        losses, norm = plan.goal(targets).losses(sums)
        unit.context.forward_gate.hold([losses])
    return losses, norm, gathered, list(sliced.bias)


def _backward(ctx: Any, share: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
    job: Job = ctx.job
    unit = job.unit
    refuse_changed(ctx.versions, unit.group.versions)
    share, *shards = turns.start_backward(unit, share, *unit.group.shards)
    rows, targets, norm, gathered, *bias = ctx.saved_tensors
    ahead, sliced = [gathered], _sliced(job, shards, bias)
    if job.plan.keeps:
        ahead, sliced = [], replace(sliced, sent=gathered)
    constant = [rows, targets, norm, share]
    wanted = wanted_of(job.weights, rows=ctx.needs_input_grad[1], reduced=turns.reduces(unit))
    found = _loop_for(job, wanted, sliced, constant).run(ahead, sliced, constant)
    shard_grads = _of_shards(job, found, reduced=wanted.reduced)
    turns.end_backward(unit, found.rows, shard_grads)
    return None if found.rows is None else found.rows.to(rows.dtype), shard_grads


def _sliced(job: Job, shards: Sequence[Tensor], bias: Sequence[Tensor] | None = None) -> Sliced:
    """What the loops slice; ``bias`` if it was gathered already."""
    pieces = job.plan.pieces
    numbers = pieces.numbers(shards[0].device)
    found = job.weights.bias(shards, pieces) if bias is None else bias
    return Sliced(job.weights.sent(shards, pieces), numbers, found)


def _loop_for(job: Job, wanted: Wanted, sliced: Sliced, constant: Sequence[Tensor]) -> BackwardLoop:
    key = (
        "backward",
        job.plan,
        wanted,
        job.unit.group.reduction.predivide,
        *map(Like.of, constant),
    )
    return job.loops.get(key, lambda: BackwardLoop(job.plan, job.weights, wanted, sliced, constant))


def _of_shards(job: Job, found: Gradients, *, reduced: bool) -> list[Tensor | None]:
    """Gradients of the unit's shards."""
    weights, pieces = job.weights, job.plan.pieces
    whole: dict[str, Tensor] = {}
    if found.bias is not None:
        whole[BIAS] = weights.whole(found.bias, pieces).to(weights.dtype)
    if reduced:
        return weights.finished(found.weight, whole.get(BIAS))
    if found.weight is not None:
        whole[WEIGHT] = weights.whole(found.weight, pieces)
    return turns.by_unit(job.unit, weights, whole)


class HeadRunner:
    """See ``unit_host.Runner``. It keeps no module alive and can be copied with its host."""

    def __init__(self) -> None:
        self._loops = Kept()

    def run(self, unit: FSDPState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
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
        self,
        unit: FSDPState,
        head: LinearCrossEntropy,
        input: Any = None,
        target: Any = None,
        **_: Any,
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
