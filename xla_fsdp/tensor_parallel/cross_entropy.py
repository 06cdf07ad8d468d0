"""Cross-entropy of logits whose classes are cut over the ranks; nobody ever has all of them.

Words: a rank's *own* classes are those of its slice; *rows* are the positions that have a target.
Always true: of the logits only numbers per row are sent: the greatest, and sums over classes.
Results are those of ``torch.nn.functional.cross_entropy`` of the whole logits, on every rank;
they are computed in fp32 and have the dtype of the logits.
Source: vocabulary-parallel cross-entropy of Megatron-LM (arXiv 1909.08053, section 3). When it is
used in place of torch's is decided by ``loss_parallel``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from xla_fsdp.distributed.mesh_axis import AxisComm

REDUCTIONS = ("none", "mean", "sum")


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    axis: AxisComm,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits cut along their class dim.

    Args:
        input: this rank's slice of the logits, [classes], [rows, classes] or [rows, classes, ...];
            ranks hold the classes in the order of their places.
        target: numbers of classes of the whole, equal on all ranks; [], [rows] or [rows, ...].
        axis: the ranks that share the classes.
        weight: of each class of the whole.
        ignore_index: target of rows that count for nothing.
        reduction: "mean" (over rows that count, by weight), "sum" or "none".
        label_smoothing: what part of the target is spread over all classes.

    Returns:
        The loss, equal on all ranks.

    Raises:
        ValueError: for targets that are probabilities, or arguments out of range.
    """
    _check(input, target, axis, weight, reduction, label_smoothing)
    logits = input.movedim(1, -1) if input.dim() > 1 else input
    rows = logits.reshape(-1, logits.shape[-1])
    goal = target.reshape(-1)
    counts = goal != ignore_index
    share = _share(counts, goal, weight)
    losses = _RowLosses.apply(
        rows, torch.where(counts, goal, 0), share, weight, axis, label_smoothing
    )
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses.reshape(target.shape).to(input.dtype)
    total = losses.sum()
    return (total / share.sum() if reduction == "mean" else total).to(input.dtype)


def _share(counts: Tensor, goal: Tensor, weight: Tensor | None) -> Tensor:
    """What each row counts for in the mean: the weight of its target."""
    if weight is None:
        return counts.float()
    of_target = weight.float().index_select(0, torch.where(counts, goal, 0))
    return torch.where(counts, of_target, 0.0)


class _RowLosses(Function):
    """Loss of every row. Forward: the greatest logit, then sums over classes, are all-reduced.
    Backward: no communication."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        goal: Tensor,
        share: Tensor,
        weight: Tensor | None,
        axis: AxisComm,
        smoothing: float,
    ) -> Tensor:
        x, own = logits.float(), _OwnClasses(axis, logits, goal, weight)
        top = axis.all_reduce(x.amax(1), "max")
        sums = [(x - top[:, None]).exp().sum(1), own.of_target(x)]
        if smoothing:
            sums.append((own.weights * x).sum(1))
        of_all = axis.all_reduce(torch.stack(sums))
        norm = top + of_all[0].log()
        ctx.save_for_backward(logits, goal, share, weight, norm)
        ctx.axis, ctx.smoothing = axis, smoothing
        losses = share * (norm - of_all[1])
        if not smoothing:
            return losses
        spread = (own.total_weight * norm - of_all[2]) / own.num_classes
        return (1 - smoothing) * losses + smoothing * spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, goal, share, weight, norm = ctx.saved_tensors
        own = _OwnClasses(ctx.axis, logits, goal, weight)
        probabilities = (logits.float() - norm[:, None]).exp()
        result = share[:, None] * (probabilities - own.is_target.float())
        if ctx.smoothing:
            spread = (own.total_weight * probabilities - own.weights) / own.num_classes
            result = (1 - ctx.smoothing) * result + ctx.smoothing * spread
        result = (grad.float()[:, None] * result).to(logits.dtype)
        return result, None, None, None, None, None


class _OwnClasses:
    """The classes of a rank's slice.

    Args:
        axis: the ranks that share the classes.
        logits: this rank's, [rows, classes].
        goal: target class of each row.
        weight: of each class of the whole.
    """

    def __init__(self, axis: AxisComm, logits: Tensor, goal: Tensor, weight: Tensor | None) -> None:
        own = logits.shape[1]
        self.num_classes = own * axis.size
        # Compared, not looked up: it is fused with what is computed of it. 32 bits, for a TPU.
        number = torch.arange(own, dtype=torch.int32, device=logits.device)
        first = axis.local_rank_on_device.to(torch.int32) * own if axis.size > 1 else 0
        self.is_target = number[None, :] == (goal.to(torch.int32) - first)[:, None]
        self.weights: Tensor | float = 1.0
        self.total_weight: Tensor | float = float(self.num_classes)
        if weight is not None:
            self.weights = axis.own_slice(weight.float(), 0)[None, :]
            self.total_weight = weight.float().sum()

    def of_target(self, x: Tensor) -> Tensor:
        """Each row's number in its target's class; 0 where that is another rank's."""
        return torch.where(self.is_target, x, 0.0).sum(1)


def _check(
    input: Tensor,
    target: Tensor,
    axis: AxisComm,
    weight: Tensor | None,
    reduction: str,
    smoothing: float,
) -> None:
    classes = input.shape[1] if input.dim() > 1 else input.shape[0]
    rows = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    problems = []
    if target.is_floating_point():
        problems.append("targets are probabilities; only numbers of classes are supported")
    elif tuple(target.shape) != tuple(rows):
        problems.append(
            f"logits of shape {tuple(input.shape)} need targets of shape {tuple(rows)}, not "
            f"{tuple(target.shape)}"
        )
    if weight is not None and tuple(weight.shape) != (classes * axis.size,):
        problems.append(
            f"weight has shape {tuple(weight.shape)}; expected one for each of the "
            f"{classes * axis.size} classes of all ranks"
        )
    if reduction not in REDUCTIONS:
        problems.append(f"reduction is {reduction!r}; expected one of {', '.join(REDUCTIONS)}")
    if not 0 <= smoothing <= 1:
        problems.append(f"label_smoothing is {smoothing}; expected a number from 0 to 1")
    if problems:
        raise ValueError("cross-entropy of logits cut over their classes: " + "; ".join(problems))
