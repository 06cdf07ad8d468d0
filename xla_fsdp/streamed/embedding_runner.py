"""Runs an embedding that is a unit of its own, and whose table is large, without the whole table.

Always true: only how rows are looked up is replaced (``turns``): of the two ways in
``embedding_ways`` it takes the one that sends less, unless the user has said in how many pieces to
stream. How autograd sees them is in ``embedding_node``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from xla_fsdp.graph_nodes import on_device
from xla_fsdp.streamed import turns
from xla_fsdp.streamed.embedding import StreamedEmbedding
from xla_fsdp.streamed.embedding_node import Job, rows_of
from xla_fsdp.streamed.embedding_ways import Exchanging, Streaming, Way
from xla_fsdp.streamed.kept import Kept
from xla_fsdp.streamed.weights import StreamedWeights
from xla_fsdp.tensor_placement import placement_in
from xla_fsdp.unit import Unit

ROWS_BYTES = 2**26
"""What the rows that all ranks ask for may take to be sent in place of a table."""


class EmbeddingRunner:
    """See ``unit_host.Runner``. It keeps no module alive and can be copied with its host."""

    def __init__(self) -> None:
        self._kept = Kept()

    def run(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The embedding's call.

        Raises:
            ValueError: for inputs in host memory.
        """
        job = self._job(unit, *args, **kwargs)
        if job is None:
            return unit.run(forward, args, kwargs)
        return turns.run(unit, partial(_rows, job), forward, args, kwargs)

    def _job(self, unit: Unit, input: Any = None, **_: Any) -> Job | None:
        """For these arguments of the embedding's forward; None if there is nothing to stream: no
        numbers, or a table of one piece."""
        embedding = cast(StreamedEmbedding, turns.module_of(unit))
        weights = StreamedWeights(unit.group, rings=False)
        pieces = weights.cut(embedding.pieces, 0, weights.dtype)
        if not isinstance(input, Tensor) or pieces.count == 1:
            return None
        sends_rows = embedding.pieces is None and _pays(weights, input.numel())
        way: Way = (
            Exchanging(weights, self._kept)
            if sends_rows
            else Streaming(weights, pieces, self._kept)
        )
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        return Job(unit, weights, way, padding)


def _pays(weights: StreamedWeights, num_rows: int) -> bool:
    """Whether to send so many rows and their gradients takes less than the table and its gradient,
    and little memory."""
    sent = weights.dtype.itemsize
    less = num_rows * 2 * sent < weights.shard_rows * (sent + weights.reduce_dtype.itemsize)
    return less and weights.num_ranks * num_rows * weights.width * sent <= ROWS_BYTES


def _rows(job: Job, numbers: Tensor) -> Tensor:
    if not on_device(numbers):
        raise ValueError(
            "StreamedEmbedding: the input is in host memory; move it to the XLA device"
        )
    is_row = (numbers >= 0) & (numbers < job.weights.num_classes)
    found = rows_of(job, torch.where(is_row, numbers, -1).reshape(-1).to(torch.int32))
    return found.reshape(*numbers.shape, job.weights.width)


def why_not(embedding: StreamedEmbedding) -> str:
    """What about the module keeps it from being streamed; empty if nothing does."""
    if placement_in(embedding, "weight") is not None:
        return "tensor parallelism has cut its table"
    if type(embedding).forward is not StreamedEmbedding.forward:
        return f"{type(embedding).__name__} has a forward of its own"
    wanted = {
        "max_norm": embedding.max_norm is not None,
        "scale_grad_by_freq": embedding.scale_grad_by_freq,
        "sparse": embedding.sparse,
    }
    found = [name for name, is_set in wanted.items() if is_set]
    return f"it has {' and '.join(found)}" if found else ""
