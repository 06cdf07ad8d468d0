"""Gather the weight of a head or an embedding chunk by chunk, and reduce its gradient.

The bias of a head is small: all of it is gathered before a loop, and its gradient is reduced after
the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.packing import shaped
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.nn.chunked.chunks import Chunks, cut_by_size, cut_into

WEIGHT, BIAS = "weight", "bias"


class ChunkedWeights:
    """The parameters of a head or an embedding.

    Args:
        group: the parameters, for which ``why_whole`` returns nothing, or a larger unit's.
        rings: reduce gradients by rings of point-to-point sends, which the matmuls of an iteration
            can hide.
        numbers: numbers of the parameters in ``group``, by "weight" and "bias" (default: by name).
    """

    def __init__(
        self, group: FSDPParamGroup, *, rings: bool, numbers: dict[str, int] | None = None
    ) -> None:
        self.group = group
        self._numbers = _numbers(group) if numbers is None else numbers
        self._reduce_by = group.collectives.in_rings() if rings else group.collectives

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which parameters are sharded."""
        return self.group.collectives.num_shards

    @property
    def width(self) -> int:
        """Elements in a row of the weight."""
        return self._param(WEIGHT).packing.row_numel

    @property
    def num_classes(self) -> int:
        return self._param(WEIGHT).originals[0].shape[0]

    @property
    def shard_rows(self) -> int:
        """Rows of a shard of the weight."""
        return self._param(WEIGHT).packing.layout.shard_numel // self.width

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the weight is gathered."""
        param = self._param(WEIGHT)
        return param.compute_dtype or param.shard.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients of the weight are reduced."""
        return self.group.reduction.dtype or self.dtype

    def trains(self, name: str) -> bool:
        return name in self._numbers and self._param(name).leaf.requires_grad

    def cut(self, count: int | None, num_rows: int, dtype: torch.dtype) -> Chunks:
        """Return at most ``count`` chunks; for None, as many as ``cut_by_size`` says with
        ``num_rows`` rows of logits, all in ``dtype``."""
        sizes = (self.num_classes, self.num_ranks, self.shard_rows)
        if count is not None:
            return cut_into(*sizes, count)
        return cut_by_size(*sizes, self.width, num_rows, dtype.itemsize)

    def sent(self, shards: Sequence[Tensor], chunks: Chunks) -> Tensor:
        """Return the weight's shard as it is gathered, in chunks: [chunks, rows, width]."""
        padded = _pad(self.sent_rows(shards), chunks.padded_rows)
        return shaped(padded, (chunks.count, chunks.rows, self.width))

    def sent_rows(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the weight's shard as it is gathered, [shard rows, width]."""
        number = self._numbers[WEIGHT]
        [sent] = self.group.gather.sent([self.group.params[number]], [shards[number]])
        return shaped(sent, (self.shard_rows, self.width))

    def gather(self, chunk: Tensor) -> Tensor:
        """All-gather a chunk: [rows, width] on every rank to [ranks * rows, width]."""
        [stack] = self.group.gather.gather_tensors([chunk])
        return stack.reshape(-1, self.width)

    def reduce(self, grad: Tensor) -> Tensor:
        """Reduce-scatter the gradient of a chunk: [ranks * rows, width] to [rows, width]."""
        stack = grad.reshape(self.num_ranks, -1, self.width)
        [rows] = self.group.reduction.scatter_tensors([stack], self._reduce_by)
        return rows.reshape(-1, self.width)

    def reduce_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Reduce-scatter the gradient of a chunk, ``left.t() @ right``: [rows, width]."""
        to_sum = self.group.reduction.to_sum
        return self._reduce_by.reduce_scatter_product(
            left, right, lambda grad: to_sum(grad.to(self.dtype))
        )

    def bias(self, shards: Sequence[Tensor], chunks: Chunks) -> list[Tensor]:
        """Gather the bias in chunks, [chunks, ranks * rows]; an empty list without a bias."""
        if BIAS not in self._numbers:
            return []
        number = self._numbers[BIAS]
        params = [self.group.params[number]]
        [bias] = self.group.gather.unshard_sent(
            params, self.group.gather.sent(params, [shards[number]])
        )
        by_rank = _pad(bias, self.num_ranks * self.shard_rows).reshape(self.num_ranks, -1)
        cut = F.pad(by_rank, (0, chunks.padded_rows - self.shard_rows))
        by_chunk = cut.reshape(self.num_ranks, chunks.count, chunks.rows).transpose(0, 1)
        return [by_chunk.reshape(chunks.count, -1)]

    def in_order(self, stack: Tensor, chunks: Chunks) -> Tensor:
        """Reorder gathered chunks [chunks, ranks * rows, ...] by class: [classes, ...]."""
        rest = stack.shape[2:]
        split = stack.reshape(chunks.count, self.num_ranks, chunks.rows, *rest).transpose(0, 1)
        by_rank = split.reshape(self.num_ranks, chunks.padded_rows, *rest)
        rows = by_rank[:, : self.shard_rows].reshape(-1, *rest)
        return rows[: self.num_classes]

    def reduce_by_unit(self, unit: FSDPState, grads: dict[str, Tensor]) -> list[Tensor | None]:
        """Hand unsharded gradients, by name, to the FSDP state, which reduces or accumulates them;
        return the gradients of the shards."""
        return unit.reduce_grads([grads.get(name) for name in self._numbers])

    def finished(self, weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of the shards from that of the weight, reduced, [..., width], this
        rank's rows, then padding; and that of the bias, unsharded, [classes]."""
        reduction, sums = self.group.reduction, dict[int, Tensor]()
        if weight is not None:
            sums[self._numbers[WEIGHT]] = weight.reshape(-1, self.width)[: self.shard_rows]
        if bias is not None:
            number = self._numbers[BIAS]  # also the index of the original: each parameter has one
            sums.update(reduction.unpack(reduction.scatter({number: bias}, [number])))
        added = reduction.sum_replicas_of(sums)
        return [
            reduction.finish_one(added[at], param) if at in added else None
            for at, param in enumerate(self.group.params)
        ]

    def _param(self, name: str) -> FSDPParam:
        return self.group.params[self._numbers[name]]


def why_whole(group: FSDPParamGroup) -> str:
    """Return why a module with these parameters cannot run in chunks; empty if it can."""
    names = _numbers(group)
    if WEIGHT not in names or set(names) - {WEIGHT, BIAS}:
        found = ", ".join(names) or "none"
        return f"its unit should have a weight, and may have a bias, but has: {found}"
    weight = group.params[names[WEIGHT]]
    if len(weight.originals) > 1 or weight.packing.layout.shard_numel % weight.packing.row_numel:
        return (
            "its shards are no whole rows of the weight; wrap it with flatten_parameters=False "
            "and shard_param_on_dim_0=True"
        )
    if weight.packing.dim:
        return f"its weight is cut along dim {weight.packing.dim}; let dim 0 be cut"
    return ""


def _numbers(group: FSDPParamGroup) -> dict[str, int]:
    """Return the index of each parameter by the name of its first original."""
    return {param.originals[0].names[0]: at for at, param in enumerate(group.params)}


def _pad(tensor: Tensor, length: int) -> Tensor:
    missing = length - len(tensor)
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor
