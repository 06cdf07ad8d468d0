"""``LinearCrossEntropy``: a linear layer with its loss; its weight is never unsharded under FSDP.

Invariants: parameters, their names and state dicts are those of ``nn.Linear``; the loss is that of
``torch.nn.functional.cross_entropy`` of the logits in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp.distributed.context_parallel import mean_over_context
from xla_fsdp.distributed.higher_order import differentiable_once
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.fsdp.engine.autograd import mark_constants, on_device
from xla_fsdp.fsdp.engine.state import FSDPState, refuse_changed
from xla_fsdp.nn.chunked.head_loops import HeadConfig, NeededGrads, backward_loop, forward_loop
from xla_fsdp.nn.chunked.hooks import (
    ChunkedModule,
    Compute,
    compute_of,
    end_backward,
    pieces_problems,
    shards_for_forward,
    start_backward,
)
from xla_fsdp.nn.chunked.weights import BIAS, WEIGHT, ChunkedWeights
from xla_fsdp.nn.forward_weight import weights_are_whole
from xla_fsdp.xla.loop import LoopCache, TensorSpec

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
        config = HeadConfig(chunks, self.label_smoothing, dtype, keeps)
        in_loop = chunks.count > 1 and not weights_are_whole()
        return HeadCall(unit, weights, config, loops).losses if in_loop else None

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


# ---------------------------------------------------------------- as a unit of its own


@dataclass(frozen=True)
class HeadCall:
    """One forward of a head."""

    unit: FSDPState
    weights: ChunkedWeights
    config: HeadConfig
    loops: LoopCache

    def losses(self, hidden: Tensor, goal: Tensor) -> Tensor:
        """Return the losses, [rows] float32, of hidden states, [rows, width], and classes, [rows]
        int64."""
        if torch.is_autocast_enabled("xla"):
            hidden = hidden.to(self.config.dtype)
        self._check(hidden, goal)
        targets, shards = goal.to(torch.int32), self.unit.group.shards
        if torch.is_grad_enabled() and any(each.requires_grad for each in (hidden, *shards)):
            return _Losses.apply(self, hidden, targets, *shards)
        alone = replace(self, config=replace(self.config, keeps_chunks=False))
        return alone.forward(hidden, targets)[0]

    def _check(self, hidden: Tensor, goal: Tensor) -> None:
        dtype = self.config.dtype
        problems = [
            f"the {what} is in host memory; move it to the XLA device"
            for what, tensor in (("input", hidden), ("target", goal))
            if not on_device(tensor)
        ]
        if hidden.dtype != dtype:
            problems.append(
                f"the input is {hidden.dtype}, and the weight is gathered as {dtype}; cast the "
                f"input, or give the unit a compute_dtype"
            )
        if problems:
            raise ValueError("LinearCrossEntropy: " + "; ".join(problems))

    def forward(
        self, hidden: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return losses and norms, [rows] float32 each, the last gathered chunk (all of them if
        ``config.keeps_chunks``), and the bias in chunks."""
        weights, config = self.weights, self.config
        with torch.no_grad():
            shards = shards_for_forward(self.unit, [hidden])
            numbers = config.chunks.numbers(shards[0].device)
            bias = weights.bias(shards, config.chunks)
            xs = [weights.sent(shards, config.chunks), numbers, *bias]
            loop = self.loops.get(
                ("forward", config, TensorSpec.of(hidden), TensorSpec.of(targets)),
                lambda: forward_loop(config, weights, xs, hidden, targets),
            )
            cross_entropy = config.cross_entropy(targets)
            start, first = cross_entropy.no_sums(), weights.gather(xs[0][0])
            results = loop.run([*start, first, *xs, hidden, targets], None)
            losses, norm = cross_entropy.losses(results[: len(start)])
            self.unit.schedule.after_loop([losses])
        return losses, norm, results[-1], bias

    def backward(
        self, saved: Sequence[Tensor], share: Tensor, *, needs_hidden: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return gradients of the hidden states, if these need one, and of the unit's shards, from
        that of the losses, [rows], and from hidden states, targets and the results of ``forward``
        except losses."""
        weights, config = self.weights, self.config
        share, *shards = start_backward(self.unit, share, *self.unit.group.shards)
        hidden, targets, norm, gathered, *bias = saved
        numbers = config.chunks.numbers(shards[0].device)
        sent = gathered if config.keeps_chunks else weights.sent(shards, config.chunks)
        first = [] if config.keeps_chunks else [gathered]
        xs, constants = [sent, numbers, *bias], [hidden, targets, norm, share]
        needed = NeededGrads(
            needs_hidden, weights.trains(WEIGHT), weights.trains(BIAS), self.unit.reduces_plainly
        )
        predivide = self.unit.group.reduction.predivide  # a constant of the program
        loop = self.loops.get(
            ("backward", config, needed, predivide, *map(TensorSpec.of, constants)),
            lambda: backward_loop(config, weights, needed, xs, constants),
        )
        start = [torch.zeros_like(hidden, dtype=torch.float32)] if needs_hidden else []
        results = iter(loop.run([*first, *start, *xs, *constants], None)[len(first) :])
        of_hidden = next(results) if needs_hidden else None
        of_weight = next(results) if needed.weight else None
        of_bias = next(results) if needed.bias else None
        of_shards = self._shard_grads(of_weight, of_bias, reduced=needed.reduced)
        end_backward(self.unit, of_hidden, of_shards)
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_shards

    def _shard_grads(
        self, weight: Tensor | None, bias: Tensor | None, *, reduced: bool
    ) -> list[Tensor | None]:
        """Return the gradients of the unit's shards from those of the bias, [chunks, ranks * rows],
        and of the weight, [chunks, rows, width] if the loop has ``reduced`` it, else of all ranks'
        rows."""
        weights, chunks = self.weights, self.config.chunks
        unsharded: dict[str, Tensor] = {}
        if bias is not None:
            unsharded[BIAS] = weights.in_order(bias, chunks).to(weights.dtype)
        if reduced:
            return weights.finished(weight, unsharded.get(BIAS))
        if weight is not None:
            unsharded[WEIGHT] = weights.in_order(weight, chunks)
        return weights.reduce_by_unit(self.unit, unsharded)


class _Losses(torch.autograd.Function):
    """Map (hidden states, targets, shards) to losses."""

    @staticmethod
    def forward(
        ctx: Any, call: HeadCall, hidden: Tensor, targets: Tensor, *shards: Tensor
    ) -> Tensor:
        losses, norm, gathered, bias = call.forward(hidden, targets)
        ctx.call, ctx.versions = call, call.unit.group.versions
        ctx.save_for_backward(hidden, targets, norm, gathered, *bias)
        mark_constants(ctx, [losses], [True])
        return losses

    @staticmethod
    @differentiable_once(
        "LinearCrossEntropy computes its loss in a loop, whose backward is a program without a "
        "graph. Use nn.Linear and F.cross_entropy in its place"
    )
    def backward(ctx: Any, share: Tensor | None) -> tuple[Tensor | None, ...]:
        if share is None:
            return (None,) * len(ctx.needs_input_grad)
        refuse_changed(ctx.versions, ctx.call.unit.group.versions)
        hidden, shards = ctx.call.backward(
            ctx.saved_tensors, share, needs_hidden=ctx.needs_input_grad[1]
        )
        return (None, hidden, None, *shards)
