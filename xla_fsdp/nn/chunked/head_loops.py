"""The forward loop and the backward loop of a head that runs in chunks.

Each iteration computes one chunk. Terms are those of ``xla.loop``:

forward    carry      sums per row so far, the gathered chunk (at first chunk 0)
           xs         sent tensor of the next chunk, index of the chunk, its bias if there is one
           constants  hidden states, targets
           ys         the gathered chunk, if ``keeps_chunks``
backward   carry      the gathered chunk (at first the last one), gradient of the hidden states in
                      float32
           xs         as in forward
           constants  as in forward, then norms and the gradient of the losses
           ys         gradient of the chunk's weight (reduced, unless gradients are not reduced
                      yet), unreduced gradient of its bias

With ``keeps_chunks``, the saved gathered chunks are the first xs of backward, and none is carried.

Invariants: each iteration gathers the chunk of the next one, so that compute hides the gather; the
last iteration gathers its own chunk again, which is the first one of backward. Matmuls run in one
dtype, everything else in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.higher_order import differentiable_once
from xla_fsdp.fsdp.engine.autograd import mark_constants, on_device, refuse_changed
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.nn.chunked.chunks import Chunks
from xla_fsdp.nn.chunked.hooks import end_backward, shards_for_forward, start_backward
from xla_fsdp.nn.chunked.softmax import OnlineCrossEntropy, logits_of
from xla_fsdp.nn.chunked.weights import BIAS, WEIGHT, ChunkedWeights
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import LoopCache, TensorSpec, traced_loop


@dataclass(frozen=True)
class HeadCall:
    """One forward of a head."""

    unit: FSDPState
    weights: ChunkedWeights
    loops: LoopCache
    chunks: Chunks
    smoothing: float  # label smoothing, from 0 to 1
    dtype: torch.dtype  # of matmuls
    keeps_chunks: bool  # whether forward saves the gathered chunks for backward

    def losses(self, hidden: Tensor, goal: Tensor) -> Tensor:
        """Return the losses, [rows] float32, of hidden states, [rows, width], and classes, [rows]
        int64."""
        if torch.is_autocast_enabled("xla"):
            hidden = hidden.to(self.dtype)
        self._check(hidden, goal)
        targets, shards = goal.to(torch.int32), self.unit.group.shards
        if torch.is_grad_enabled() and any(each.requires_grad for each in (hidden, *shards)):
            return _Losses.apply(self, hidden, targets, *shards)
        return replace(self, keeps_chunks=False).forward(hidden, targets)[0]

    def _check(self, hidden: Tensor, goal: Tensor) -> None:
        problems = [
            f"the {what} is in host memory; move it to the XLA device"
            for what, tensor in (("input", hidden), ("target", goal))
            if not on_device(tensor)
        ]
        if hidden.dtype != self.dtype:
            problems.append(
                f"the input is {hidden.dtype}, and the weight is gathered as {self.dtype}; cast "
                f"the input, or give the unit a compute_dtype"
            )
        if problems:
            raise ValueError("LinearCrossEntropy: " + "; ".join(problems))

    def forward(
        self, hidden: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return losses and norms, [rows] float32 each, the last gathered chunk (all of them if
        ``keeps_chunks``), and the bias in chunks."""
        weights, chunks, start = self.weights, self.chunks, self._goal(targets).no_sums()

        def body(values: list[Tensor]) -> list[Tensor]:
            so_far, (chunk, sent, number, *bias) = values[: len(start)], values[len(start) : -2]
            hidden, targets = values[-2:]
            following = weights.gather(sent)
            logits = self._logits(hidden, chunk, bias)
            sums = self._goal(targets).sums(so_far, logits, chunks.classes(number))
            return [*sums, following, chunk] if self.keeps_chunks else [*sums, following]

        with torch.no_grad():
            shards = shards_for_forward(self.unit, [hidden])
            bias = weights.bias(shards, chunks)
            xs = [weights.sent(shards, chunks), chunks.numbers(shards[0].device), *bias]
            carry, constants = [*start, weights.gather(xs[0][0])], [hidden, targets]
            loop = self.loops.get(
                self._key("forward", constants),
                lambda: traced_loop(
                    body,
                    "fsdp_head_forward",
                    chunks.count,
                    carry,
                    xs,
                    constants,
                    prefetched=[0],
                    # As the next chunk is gathered under the only product with this one.
                    in_pairs=True,
                ),
            )
            results = loop.run([*carry, *xs, *constants], None)
            losses, norm = self._goal(targets).losses(results[: len(start)])
            self.unit.schedule.after_loop([losses])
        return losses, norm, results[-1], bias

    def backward(
        self, saved: Sequence[Tensor], share: Tensor, *, needs_hidden: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return gradients of the hidden states, if these need one, and of the unit's shards, from
        that of the losses, [rows], and from hidden states, targets and the results of ``forward``
        except losses."""
        weights, chunks, unit = self.weights, self.chunks, self.unit
        share, *shards = start_backward(unit, share, *unit.group.shards)
        hidden, targets, norm, gathered, *bias = saved
        trains = weights.trains(WEIGHT), weights.trains(BIAS)
        reduced = unit.reduces_plainly  # whether the loop reduces the gradient of the weight
        num_first = 0 if self.keeps_chunks else 1

        def body(values: list[Tensor]) -> list[Tensor]:
            gathered, so_far = values[:num_first], values[num_first : num_first + needs_hidden]
            sent, number, *bias = values[num_first + needs_hidden : -4]
            hidden, targets, norm, share = values[-4:]
            [chunk] = gathered or [sent]
            logits = self._logits(hidden, chunk, bias)
            exact = self._goal(targets).gradient(logits, chunks.classes(number), norm, share)
            grad = exact.to(self.dtype)
            sums = [each + (grad @ chunk.to(self.dtype)) for each in so_far]
            # Gathered while this chunk is in use, the next one would be copied to where it is
            # carried.
            next_sent = ops.barrier_after_(sums, [sent.clone() for _ in gathered])
            found = [*map(weights.gather, next_sent), *sums]
            if trains[0] and reduced:
                found.append(weights.reduce_product(grad, hidden))
            elif trains[0]:
                found.append((grad.t() @ hidden).to(weights.dtype))
            return [*found, exact.sum(0)] if trains[1] else found

        sent = gathered if self.keeps_chunks else weights.sent(shards, chunks)
        xs = [sent, chunks.numbers(shards[0].device), *bias]
        carry = [] if self.keeps_chunks else [gathered]
        carry += [torch.zeros_like(hidden, dtype=torch.float32)] if needs_hidden else []
        constants = [hidden, targets, norm, share]
        predivide = unit.group.reduction.predivide  # a constant of the program
        loop = self.loops.get(
            (*self._key("backward", constants), needs_hidden, trains, reduced, predivide),
            lambda: traced_loop(
                body,
                "fsdp_head_backward",
                chunks.count,
                carry,
                xs,
                constants,
                prefetched=range(num_first),
                reverse=True,
            ),
        )
        results = iter(loop.run([*carry, *xs, *constants], None)[num_first:])
        of_hidden = next(results) if needs_hidden else None
        of_weight = next(results) if trains[0] else None
        of_bias = next(results) if trains[1] else None
        of_shards = self._shard_grads(of_weight, of_bias, reduced=reduced)
        end_backward(unit, of_hidden, of_shards)
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_shards

    def _shard_grads(
        self, weight: Tensor | None, bias: Tensor | None, *, reduced: bool
    ) -> list[Tensor | None]:
        """Return the gradients of the unit's shards from those of the bias, [chunks, ranks * rows],
        and of the weight, [chunks, rows, width] if the loop has ``reduced`` it, else of all ranks'
        rows."""
        weights, chunks = self.weights, self.chunks
        unsharded: dict[str, Tensor] = {}
        if bias is not None:
            unsharded[BIAS] = weights.in_order(bias, chunks).to(weights.dtype)
        if reduced:
            return weights.finished(weight, unsharded.get(BIAS))
        if weight is not None:
            unsharded[WEIGHT] = weights.in_order(weight, chunks)
        return weights.reduce_by_unit(self.unit, unsharded)

    def _goal(self, targets: Tensor) -> OnlineCrossEntropy:
        return OnlineCrossEntropy(targets, self.chunks.num_classes, self.smoothing)

    def _logits(self, hidden: Tensor, chunk: Tensor, bias: Sequence[Tensor]) -> Tensor:
        """Return the logits of a gathered chunk, [rows, classes] float32."""
        of_chunk = bias[0].to(self.dtype) if bias else None
        return logits_of(hidden, chunk.to(self.dtype), of_chunk)

    def _key(self, name: str, constants: Sequence[Tensor]) -> tuple[Any, ...]:
        how = self.chunks, self.smoothing, self.dtype, self.keeps_chunks
        return name, *how, *map(TensorSpec.of, constants)


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
