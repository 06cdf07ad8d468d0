"""``LinearCrossEntropy``: a linear layer with its loss; its weight is never unsharded under FSDP.

Invariants: parameters, their names and state dicts are those of ``nn.Linear``; the loss is that of
``torch.nn.functional.cross_entropy`` of the logits in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp.distributed.context_parallel import mean_over_context
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.nn.chunked.head_loops import HeadCall
from xla_fsdp.nn.chunked.hooks import ChunkedModule, Compute, compute_of, pieces_problems
from xla_fsdp.nn.chunked.weights import ChunkedWeights
from xla_fsdp.nn.forward_weight import weights_are_whole
from xla_fsdp.xla.loop import LoopCache

REDUCTIONS = ("mean", "sum", "none")


class LinearCrossEntropy(nn.Linear, ChunkedModule):
    """A linear layer whose outputs are logits of classes, together with their cross-entropy.

    Called with targets it returns the loss. As a unit of its own under FSDP it then never holds the
    unsharded weight, nor all logits: a loop gathers one piece of every rank's shard, computes the
    logits of those classes and adds them to a running softmax; backward gathers each piece again,
    recomputes its logits and immediately reduces its gradient to the shards. Recomputing the logits
    is a fourth matmul, where a head otherwise needs three. Called without targets it returns the
    logits, like ``nn.Linear``. State dicts of both classes are interchangeable.

    Sources: online softmax (Milakov and Gimelshein, arXiv 1805.02867); cut cross-entropy (Wijmans
    et al., arXiv 2411.09009).

    Args:
        in_features: width of the input.
        num_classes: number of classes, ``out_features`` of the layer.
        bias: whether logits have a bias.
        ignore_index: target of rows that are ignored.
        label_smoothing: part of the target that is spread over all classes, from 0 to 1.
        reduction: "mean" over rows that are not ignored (NaN if all are, as in torch), "sum" or
            "none".
        pieces: maximum number of pieces in which to gather the weight; None for pieces of up to 16
            MiB, or an eighth of the weight if that is more, weight and logits together, or of
            ``in_features`` classes. A head of one piece is gathered like any unit.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: for options out of range.
    """

    _fsdp_unsharded = "its whole weight, and all logits"
    _fsdp_without_reshard = "keeps the pieces for backward"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        pieces: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_options(label_smoothing, reduction, pieces)
        super().__init__(in_features, num_classes, bias, device=device, dtype=dtype)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.pieces = pieces

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> LinearCrossEntropy:
        """Make a head that shares the parameters of ``linear``, to replace it in a model before any
        module is wrapped. Ties to other modules are preserved.

        Args:
            linear: the layer; for causal language models of transformers, ``model.lm_head``.
            options: see the class.

        Raises:
            TypeError: if it is not an ``nn.Linear``, or has a forward of its own, which would be
                lost.
            ValueError: if its weight is sharded already, or for options out of range.
        """
        cls._check_source(linear, nn.Linear, "out_features", "in_features")
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        head = cls(*sizes, device="meta", dtype=linear.weight.dtype, **options)
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the loss; without a target, the logits.

        Args:
            input: [..., in_features].
            target: classes, [...], integers. The loss is NaN for a target that is neither a class
                nor ``ignore_index``.

        Returns:
            The loss, [] or for reduction "none" [...], float32; or logits [..., num_classes].

        Raises:
            TypeError: if targets are not integers.
            ValueError: if shapes do not match, or tensor parallelism has sharded the weight.
        """
        if target is None:
            return super().forward(input)
        self._check(input, target)
        hidden = input.reshape(-1, self.in_features)
        goal = target.reshape(-1).to(torch.int64)
        counts = goal != self.ignore_index
        is_class = (goal >= 0) & (goal < self.out_features)
        compute = compute_of(self, self._losses)
        losses = compute(hidden, torch.where(counts & is_class, goal, 0))
        losses = torch.where(is_class, losses, float("nan"))
        return self._reduced(torch.where(counts, losses, 0.0), counts, target.shape)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}, reduction={self.reduction!r}, "
            f"pieces={self.pieces}"
        )

    def _fsdp_why_unsharded(self) -> str:
        if type(self).forward is not LinearCrossEntropy.forward:
            return f"{type(self).__name__} has a forward of its own"
        return ""

    def _fsdp_compute_for(
        self, unit: FSDPState, loops: LoopCache, input: Any = None, target: Any = None, **_: Any
    ) -> Compute | None:
        if not isinstance(input, Tensor) or not isinstance(target, Tensor):
            return None
        weights = ChunkedWeights(unit.group, rings=True)
        autocast = torch.is_autocast_enabled("xla")
        dtype = torch.get_autocast_dtype("xla") if autocast else weights.dtype
        chunks = weights.cut(self.pieces, input.numel() // weights.width, dtype)
        keeps = not unit.settings.reshards_after_forward
        call = HeadCall(unit, weights, loops, chunks, self.label_smoothing, dtype, keeps)
        return call.losses if chunks.count > 1 and not weights_are_whole() else None

    def _losses(self, hidden: Tensor, goal: Tensor) -> Tensor:
        logits = super().forward(hidden).float()
        return F.cross_entropy(logits, goal, reduction="none", label_smoothing=self.label_smoothing)

    def _reduced(self, losses: Tensor, counts: Tensor, shape: torch.Size) -> Tensor:
        if self.reduction == "none":
            return losses.reshape(shape)
        total = losses.sum()
        if self.reduction == "sum":
            return total
        return mean_over_context(total, counts.float().sum())

    def _check(self, input: Tensor, target: Tensor) -> None:
        name = type(self).__name__
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise TypeError(
                f"targets of {name} are {target.dtype}; give classes, as integers. Probabilities "
                f"are not supported: call it without targets and compute the loss of its logits"
            )
        problems = []
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            problems.append(
                f"the input has shape {tuple(input.shape)}; its last dim should be in_features, "
                f"which is {self.in_features}"
            )
        if target.shape != input.shape[:-1]:
            problems.append(
                f"targets have shape {tuple(target.shape)}; an input of shape "
                f"{tuple(input.shape)} wants one target per row: {tuple(input.shape[:-1])}"
            )
        placement = placement_in(self, "weight")
        if placement is not None and placement.dim is not None:
            problems.append(
                f"its weight is cut over axis {placement.axis!r} of a mesh; call it without "
                f"targets and use tensor_parallel.loss_parallel"
            )
        if problems:
            raise ValueError(f"{name}: " + "; ".join(problems))


def _check_options(smoothing: float, reduction: str, pieces: int | None) -> None:
    problems = []
    if not 0 <= smoothing <= 1:
        problems.append(f"label_smoothing is {smoothing}; expected a number from 0 to 1")
    if reduction not in REDUCTIONS:
        problems.append(f"reduction is {reduction!r}; expected one of {', '.join(REDUCTIONS)}")
    problems += pieces_problems(pieces)
    if problems:
        raise ValueError("LinearCrossEntropy: " + "; ".join(problems))
