"""Cross-entropy of logits whose classes are sharded over the ranks.

No rank holds the global logits. Ranks only all-reduce the maximum and sums over classes of each
row. On every rank the result is that of ``torch.nn.functional.cross_entropy`` of the global logits,
computed in fp32, in the dtype of the logits.

Source: vocabulary-parallel cross-entropy of Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from xla_fsdp.distributed.context_parallel import arguments_of_loss, mean_over_context
from xla_fsdp.distributed.higher_order import differentiable_once
from xla_fsdp.distributed.mesh import as_mesh
from xla_fsdp.distributed.mesh_axis import AxisComm

REDUCTIONS = ("none", "mean", "sum")


class _Heads(threading.local):
    """Axes of the layers whose outputs are sharded logits; per thread, as CPU ranks are threads."""

    def __init__(self) -> None:
        self.axes: WeakKeyDictionary[nn.Linear, AxisComm] = WeakKeyDictionary()


_heads = _Heads()


def remember_head(module: nn.Module, axis: AxisComm) -> None:
    """Tell ``loss_parallel`` that the outputs of ``module`` are sharded logits."""
    if isinstance(module, nn.Linear):
        _heads.axes[module] = axis


@contextmanager
def loss_parallel(mesh: Any = None) -> Iterator[None]:
    """Inside, ``F.cross_entropy`` and ``nn.CrossEntropyLoss`` take logits that are sharded along
    their classes, and targets that are equal on all ranks. Neither forward nor backward builds the
    global logits; ``backward()`` may be called inside or outside.

        plan["output"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        ...
        with loss_parallel():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    Args:
        mesh: mesh of the axis over which classes are sharded; all cross-entropies inside are then
            of sharded logits. By default, logits are sharded if their number of classes equals the
            local number of outputs of a layer with such a style as in the example.

    Raises:
        ValueError: if no mesh is given, and there is no such layer; inside, for ``nll_loss``,
            ``log_softmax`` and ``logsumexp`` of such logits, which would be those of a slice.
    """
    heads = [(head.out_features // axis.size, axis) for head, axis in _heads.axes.items()]
    if mesh is None and not heads:
        raise ValueError(
            "loss_parallel knows no logits that are cut over their classes: give the module that "
            "makes them ColwiseParallel(output_layouts=Shard(-1), use_local_output=False), or call "
            "loss_parallel(mesh['tensor'])"
        )
    with _CrossEntropyMode(None if mesh is None else AxisComm(as_mesh(mesh)), heads):
        yield


_OF_A_SLICE = {
    F.nll_loss,
    F.log_softmax,
    torch.log_softmax,
    Tensor.log_softmax,
    torch.logsumexp,
    Tensor.logsumexp,
}
"""Functions of all classes, of which a rank would compute that of its slice."""


class _CrossEntropyMode(TorchFunctionMode):
    """Replaces ``F.cross_entropy`` of sharded logits by ``parallel_cross_entropy``."""

    def __init__(self, axis: AxisComm | None, heads: list[tuple[int, AxisComm]]) -> None:
        super().__init__()
        # Without an axis, recognize sharded logits by the local number of classes of a head.
        self._axis, self._heads = axis, heads

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_A_SLICE:
            self._refuse_slice(func, *args, **kwargs)
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        axis = self._axis or self._axis_of(args[0] if args else kwargs["input"])
        if axis is None:
            return func(*args, **kwargs)
        return parallel_cross_entropy(axis=axis, **arguments_of_loss(func, args, kwargs))

    def _refuse_slice(
        self, func: Any, input: Tensor, target: Any = None, *more: Any, **kwargs: Any
    ) -> None:
        dim = min(1, input.dim() - 1) if func is F.nll_loss else kwargs.get("dim", target)
        if isinstance(dim, int) and self._is_cut(input.shape[dim], func):
            raise ValueError(
                f"{func.__name__} of logits that are cut over their classes would be that of this "
                f"rank's {input.shape[dim]} classes; loss_parallel takes F.cross_entropy. Call "
                f"that, with reduction='none' for the loss of each row; or make whole logits by "
                f"ColwiseParallel(output_layouts=Replicate())"
            )

    def _is_cut(self, size: int, func: Any) -> bool:
        # With a mesh there may be no head to know the classes by, but losses are of cut logits.
        by_mesh = self._axis is not None and func is F.nll_loss
        return by_mesh or any(local == size for local, axis in self._heads if axis.size > 1)

    def _axis_of(self, logits: Tensor) -> AxisComm | None:
        classes = logits.shape[1] if logits.dim() > 1 else logits.shape[0]
        return next((axis for local, axis in self._heads if local == classes), None)


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
    """Return ``F.cross_entropy`` of logits sharded along their class dim.

    Args:
        input: local logits, [classes], [rows, classes] or [rows, classes, ...]; ranks hold slices
            of the classes in the order of the axis.
        target: global class numbers, equal on all ranks; [], [rows] or [rows, ...], integers. The
            loss of one out of range is NaN.
        axis: the ranks over which classes are sharded.
        weight: weights of all classes, [global classes].
        ignore_index: target of rows that are ignored.
        reduction: "mean" (weighted, over rows that are not ignored), "sum" or "none".
        label_smoothing: part of the target that is spread over all classes, from 0 to 1.

    Returns:
        The loss in the dtype of ``input``, equal on all ranks; [], or the shape of ``target`` for
        reduction "none".

    Raises:
        ValueError: for targets that are probabilities, or arguments out of range.
    """
    _check(input, target, axis, weight, reduction, label_smoothing)
    logits = input.movedim(1, -1) if input.dim() > 1 else input
    rows = logits.reshape(-1, logits.shape[-1])
    goal = target.reshape(-1)
    counts = goal != ignore_index
    is_class = (goal >= 0) & (goal < rows.shape[-1] * axis.size)
    goal = torch.where(counts & is_class, goal, 0)
    share = counts.float()
    if weight is not None:
        share = torch.where(counts, weight.float().index_select(0, goal), 0.0)
    share = torch.where(counts & ~is_class, float("nan"), share)
    losses = _RowLosses.apply(rows, goal, share, weight, axis, label_smoothing)
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses.reshape(target.shape).to(input.dtype)
    total = losses.sum()
    if reduction == "mean":
        total = mean_over_context(total, share.sum())
    return total.to(input.dtype)


class _RowLosses(Function):
    """Loss of each row, [rows] float32. Forward: all-reduce of the maximum, then of sums over
    classes. Backward: no communication."""

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
        x, local = logits.float(), _LocalClasses(axis, logits, goal, weight)
        top = axis.all_reduce(x.amax(1), "max")
        sums = [(x - top[:, None]).exp().sum(1), torch.where(local.is_target, x, 0.0).sum(1)]
        if smoothing:
            sums.append((local.weights * x).sum(1))
        of_all = axis.all_reduce(torch.stack(sums))
        norm = top + of_all[0].log()
        ctx.save_for_backward(logits, goal, share, weight, norm)
        ctx.axis, ctx.smoothing = axis, smoothing
        losses = share * (norm - of_all[1])
        if not smoothing:
            return losses
        spread = (local.total_weight * norm - of_all[2]) / local.num_classes
        return (1 - smoothing) * losses + smoothing * spread

    @staticmethod
    @differentiable_once(
        "loss_parallel keeps no graph of its gradient. Compute this loss outside of loss_parallel "
        "from whole logits: ColwiseParallel(output_layouts=Replicate())"
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, goal, share, weight, norm = ctx.saved_tensors
        local = _LocalClasses(ctx.axis, logits, goal, weight)
        probabilities = (logits.float() - norm[:, None]).exp()
        result = share[:, None] * (probabilities - local.is_target.float())
        if ctx.smoothing:
            spread = (local.total_weight * probabilities - local.weights) / local.num_classes
            result = (1 - ctx.smoothing) * result + ctx.smoothing * spread
        result = (grad.float()[:, None] * result).to(logits.dtype)
        return result, None, None, None, None, None


class _LocalClasses:
    """The classes of this rank: whether each local logit is that of the row's target, [rows,
    classes] bool, and their weights, [1, classes]."""

    def __init__(self, axis: AxisComm, logits: Tensor, goal: Tensor, weight: Tensor | None) -> None:
        classes = logits.shape[1]
        self.num_classes = classes * axis.size
        # A comparison instead of a gather: XLA fuses it with its consumers. TPUs have no native
        # 64-bit integers.
        number = torch.arange(classes, dtype=torch.int32, device=logits.device)
        first = axis.local_rank_on_device.to(torch.int32) * classes if axis.size > 1 else 0
        self.is_target = number[None, :] == (goal.to(torch.int32) - first)[:, None]
        self.weights: Tensor | float = 1.0
        self.total_weight: Tensor | float = float(self.num_classes)
        if weight is not None:
            self.weights = axis.own_slice(weight.float(), 0)[None, :]
            self.total_weight = weight.float().sum()


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
