"""Trace the forward loop and the backward loop of a head that runs in chunks.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from xla_fsdp.nn.chunked.chunks import Chunks
from xla_fsdp.nn.chunked.softmax import OnlineCrossEntropy, logits_of
from xla_fsdp.nn.chunked.weights import ChunkedWeights
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import Loop, TensorSpec, trace_body


@dataclass(frozen=True)
class HeadConfig:
    """Everything that both loops depend on, besides the specs of their inputs."""

    chunks: Chunks
    smoothing: float  # label smoothing, from 0 to 1
    dtype: torch.dtype  # of matmuls
    keeps_chunks: bool  # whether forward saves the gathered chunks for backward

    def cross_entropy(self, targets: Tensor) -> OnlineCrossEntropy:
        return OnlineCrossEntropy(targets, self.chunks.num_classes, self.smoothing)

    def logits(
        self, hidden: Tensor, chunk: Tensor, number: Tensor, bias: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of a gathered chunk, [rows, classes] float32, and its classes."""
        of_chunk = bias[0].to(self.dtype) if bias else None
        logits = logits_of(hidden, chunk.to(self.dtype), of_chunk)
        return logits, self.chunks.classes(number)


@dataclass(frozen=True)
class NeededGrads:
    """Which gradients backward computes."""

    hidden: bool
    weight: bool
    bias: bool
    reduced: bool  # whether the loop reduces the gradient of the weight


def forward_loop(
    config: HeadConfig,
    weights: ChunkedWeights,
    xs: Sequence[Tensor],
    hidden: Tensor,
    targets: Tensor,
) -> Loop:
    """Trace the loop from (sums, gathered chunk, xs, hidden states, targets) to (sums, gathered
    chunk), and all gathered chunks if ``config.keeps_chunks``."""
    num_sums = config.cross_entropy(targets).num_sums

    def body(values: list[Tensor]) -> list[Tensor]:
        so_far, (chunk, sent, number, *bias) = values[:num_sums], values[num_sums:-2]
        hidden, targets = values[-2:]
        following = weights.gather(sent)
        logits, classes = config.logits(hidden, chunk, number, bias)
        sums = config.cross_entropy(targets).sums(so_far, logits, classes)
        return [*sums, following, chunk] if config.keeps_chunks else [*sums, following]

    specs = [
        *[TensorSpec((len(hidden),), torch.float32)] * num_sums,
        _gathered_spec(config, weights),
        *map(TensorSpec.slice_of, xs),
        TensorSpec.of(hidden),
        TensorSpec.of(targets),
    ]
    return Loop(
        trace_body(body, specs, "fsdp_head_forward"),
        config.chunks.count,
        num_sums + 1,
        len(xs),
        prefetched=[0],
        in_pairs=True,  # as the next chunk is gathered under the only product with this one
    )


def backward_loop(
    config: HeadConfig,
    weights: ChunkedWeights,
    needed: NeededGrads,
    xs: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> Loop:
    """Trace the loop from (gathered chunk unless ``config.keeps_chunks``, gradient of the hidden
    states, xs, constants) to the same two and the ``needed`` gradients of weight and bias."""
    num_prefetched = 0 if config.keeps_chunks else 1
    num_carry = num_prefetched + needed.hidden

    def body(values: list[Tensor]) -> list[Tensor]:
        gathered, so_far = values[:num_prefetched], values[num_prefetched:num_carry]
        sent, number, *bias = values[num_carry:-4]
        hidden, targets, norm, share = values[-4:]
        [chunk] = gathered or [sent]
        logits, classes = config.logits(hidden, chunk, number, bias)
        exact = config.cross_entropy(targets).gradient(logits, classes, norm, share)
        grad = exact.to(config.dtype)
        sums = [each + (grad @ chunk.to(config.dtype)) for each in so_far]
        # Gathered while this chunk is in use, the next one would be copied to where it is carried.
        next_sent = ops.barrier_after_(sums, [sent.clone() for _ in gathered])
        found = [*map(weights.gather, next_sent), *sums]
        if needed.weight:
            found.append(
                weights.reduce_product(grad, hidden)
                if needed.reduced
                else (grad.t() @ hidden).to(weights.dtype)
            )
        return [*found, exact.sum(0)] if needed.bias else found

    specs = [
        *[_gathered_spec(config, weights)] * num_prefetched,
        *[TensorSpec(tuple(constants[0].shape), torch.float32)] * needed.hidden,
        *map(TensorSpec.slice_of, xs),
        *map(TensorSpec.of, constants),
    ]
    return Loop(
        trace_body(body, specs, "fsdp_head_backward"),
        config.chunks.count,
        num_carry,
        len(xs),
        prefetched=range(num_prefetched),
        reverse=True,
    )


def _gathered_spec(config: HeadConfig, weights: ChunkedWeights) -> TensorSpec:
    return TensorSpec((weights.num_ranks * config.chunks.rows, weights.width), weights.dtype)
