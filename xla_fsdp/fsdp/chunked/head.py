"""``LinearCrossEntropy``: a head with its loss, in place of an nn.Linear.

Words: *rows* are the positions that have a target. Always true: parameters, their names and state
dicts are those of ``nn.Linear``; the loss is that of ``torch.nn.functional.cross_entropy`` of the
logits in float32. How losses of rows are computed is replaced (``instead``) where an FSDP unit
streams the weight (see ``head_runner``); what is here knows nothing of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.fsdp.chunked.hooks import compute_of

REDUCTIONS = ("mean", "sum", "none")


class LinearCrossEntropy(nn.Linear):
    """A linear layer whose outputs are logits of classes, together with their cross-entropy.

    Called with targets it returns the loss. As a unit of its own under FSDP it then never holds the
    whole weight, nor all logits: a loop gathers a piece of every rank's shard, computes the logits
    of those classes and adds them to a running softmax; backward gathers each piece again, computes
    its logits again and reduces its gradient to the shards at once. Called without targets it
    returns the logits, as ``nn.Linear`` does, of which it is a subclass: state dicts of both are
    interchangeable.

    Sources: online softmax (Milakov and Gimelshein, arXiv 1805.02867); cut cross-entropy (Wijmans
    et al., arXiv 2411.09009). The price: backward computes the logits once more, a fourth product
    beside the three that a head needs anyway.

    Args:
        in_features: width of what comes in.
        num_classes: number of classes, ``out_features`` of the layer.
        bias: whether logits have one.
        ignore_index: target of rows that count for nothing.
        label_smoothing: what part of the target is spread over all classes, from 0 to 1.
        reduction: "mean" over rows that count (NaN if none does, as in torch), "sum" or "none".
        pieces: in how many to stream, at most; None for pieces of up to 16 MiB, weight and logits
            together. A head that is one piece is gathered whole, like any unit.
        device: where parameters are.
        dtype: of parameters.

    Raises:
        ValueError: for options out of range.
    """

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
        """A head with the very parameters of ``linear``, to put in its place in a model, before
        anything is wrapped. Ties to other modules stay.

        Args:
            linear: the layer; of transformers' causal language models, ``model.lm_head``.
            options: see the class.

        Raises:
            TypeError: if it is no ``nn.Linear``, or one with a forward of its own, which would be
                lost.
            ValueError: if its weight is sharded already, or for options out of range.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(
                f"from_linear takes an nn.Linear, got {type(linear).__name__}; make the head "
                f"before the model is wrapped"
            )
        if type(linear).forward not in (nn.Linear.forward, LinearCrossEntropy.forward):
            raise TypeError(
                f"{type(linear).__name__} has a forward of its own, which a LinearCrossEntropy "
                f"would not run; keep it as it is"
            )
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        if linear.weight.shape != (linear.out_features, linear.in_features):
            raise ValueError(
                f"the layer's weight has shape {tuple(linear.weight.shape)}, not "
                f"{(linear.out_features, linear.in_features)}: it is sharded. Make the head of the "
                f"plain model's layer, then shard the head"
            )
        head = cls(*sizes, device="meta", dtype=linear.weight.dtype, **options)
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss; without a target, the logits.

        Args:
            input: [..., in_features].
            target: classes, [...], integers. One that is neither a class nor ``ignore_index`` makes
                the loss NaN.

        Returns:
            The loss, [] or for reduction "none" [...], float32; or logits [..., num_classes].

        Raises:
            TypeError: if targets are no integers.
            ValueError: if shapes do not match, or tensor parallelism has cut the classes.
        """
        if target is None:
            return super().forward(input)
        self._check(input, target)
        rows = input.reshape(-1, self.in_features)
        goal = target.reshape(-1).to(torch.int64)
        counts = goal != self.ignore_index
        is_class = (goal >= 0) & (goal < self.out_features)
        compute = compute_of(self, self._losses)
        losses = compute(rows, torch.where(counts & is_class, goal, 0))
        losses = torch.where(is_class, losses, float("nan"))
        return self._reduced(torch.where(counts, losses, 0.0), counts, target.shape)

    def extra_repr(self) -> str:
        """The layer's, and the options."""
        return (
            f"{super().extra_repr()}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}, reduction={self.reduction!r}, "
            f"pieces={self.pieces}"
        )

    def _losses(self, rows: Tensor, goal: Tensor) -> Tensor:
        logits = super().forward(rows).float()
        return F.cross_entropy(logits, goal, reduction="none", label_smoothing=self.label_smoothing)

    def _reduced(self, losses: Tensor, counts: Tensor, shape: torch.Size) -> Tensor:
        if self.reduction == "none":
            return losses.reshape(shape)
        total = losses.sum()
        return total if self.reduction == "sum" else total / counts.float().sum()

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
    if pieces is not None and (not isinstance(pieces, int) or pieces < 1):
        problems.append(f"pieces is {pieces!r}; expected a number from 1, or None")
    if problems:
        raise ValueError("LinearCrossEntropy: " + "; ".join(problems))
