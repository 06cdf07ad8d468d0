"""How a weight of rows, and a head's bias, travel piece by piece.

Words: see ``pieces``, and ``param_group`` for what is *sent*. The bias is small: it is gathered
whole before a loop and cut into pieces like the weight; its gradient is reduced after the loop.
Always true: a piece's gradient is divided and reduced as any gradient of the unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.chunked.chunks import Pieces, cut_by_size, cut_into
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup

WEIGHT, BIAS = "weight", "bias"


class StreamedWeights:
    """The parameters of a head or an embedding.

    Args:
        group: its unit's; see ``why_whole`` for which will do.
        rings: reduce gradients in rings, which products of a round hide.
    """

    def __init__(self, group: FSDPParamGroup, *, rings: bool) -> None:
        self.group = group
        self._numbers = _numbers(group)
        self._by = group.collectives.in_rings() if rings else group.collectives

    @property
    def num_ranks(self) -> int:
        """How many ranks share the parameters."""
        return self.group.collectives.num_shards

    @property
    def width(self) -> int:
        """Of a row of the weight."""
        return self._param(WEIGHT).packing.row_numel

    @property
    def num_classes(self) -> int:
        """Number of rows of the weight."""
        return self._param(WEIGHT).members[0].shape[0]

    @property
    def shard_rows(self) -> int:
        """Rows of a shard of the weight."""
        return self._param(WEIGHT).packing.layout.shard_numel // self.width

    @property
    def dtype(self) -> torch.dtype:
        """What the weight is gathered in."""
        param = self._param(WEIGHT)
        return param.compute_dtype or param.shard.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients of the weight are reduced in."""
        return self.group.reduction.dtype or self.dtype

    @property
    def has_bias(self) -> bool:
        """Whether logits have one."""
        return BIAS in self._numbers

    def trains(self, name: str) -> bool:
        """Whether a parameter of that name is there and needs gradients."""
        return name in self._numbers and self._param(name).leaf.requires_grad

    def cut(self, count: int | None, num_rows: int, dtype: torch.dtype) -> Pieces:
        """At most ``count`` pieces; None for a number that fits ``num_rows`` rows of logits."""
        sizes = (self.num_classes, self.num_ranks, self.shard_rows)
        if count is not None:
            return cut_into(*sizes, count)
        return cut_by_size(*sizes, (self.width + num_rows) * dtype.itemsize)

    def sent(self, shards: Sequence[Tensor], pieces: Pieces) -> Tensor:
        """[pieces, rows, width]: what is sent of this rank's ``shards`` of the group."""
        padded = _padded(self.sent_rows(shards), pieces.padded_rows)
        return ops.shaped(padded, (pieces.count, pieces.rows, self.width))

    def sent_rows(self, shards: Sequence[Tensor]) -> Tensor:
        """[shard rows, width], not cut into pieces."""
        number = self._numbers[WEIGHT]
        [sent] = self.group.gather.sent([self.group.params[number]], [shards[number]])
        return ops.shaped(sent, (self.shard_rows, self.width))

    def gather(self, piece: Tensor) -> Tensor:
        """[ranks * rows, width], from [rows, width] of every rank."""
        [stack] = self.group.gather.gather_tensors([piece])
        return stack.reshape(-1, self.width)

    def reduce(self, grad: Tensor) -> Tensor:
        """The inverse for a piece's gradient: this rank's rows of the sum, as they travel."""
        stack = grad.reshape(self.num_ranks, -1, self.width)
        [rows] = self.group.reduction.scatter_tensors([stack], self._by)
        return rows.reshape(-1, self.width)

    def bias(self, shards: Sequence[Tensor], pieces: Pieces) -> list[Tensor]:
        """[pieces, ranks * rows] of the bias, if there is one."""
        if not self.has_bias:
            return []
        number = self._numbers[BIAS]
        params = [self.group.params[number]]
        [whole] = self.group.gather.unshard_sent(
            params, self.group.gather.sent(params, [shards[number]])
        )
        by_rank = _padded(whole, self.num_ranks * self.shard_rows).reshape(self.num_ranks, -1)
        cut = F.pad(by_rank, (0, pieces.padded_rows - self.shard_rows))
        by_piece = cut.reshape(self.num_ranks, pieces.count, pieces.rows).transpose(0, 1)
        return [by_piece.reshape(pieces.count, -1)]

    def whole(self, stack: Tensor, pieces: Pieces) -> Tensor:
        """The classes in order, from pieces [pieces, ranks * rows, ...]."""
        rest = stack.shape[2:]
        split = stack.reshape(pieces.count, self.num_ranks, pieces.rows, *rest).transpose(0, 1)
        by_rank = split.reshape(self.num_ranks, pieces.padded_rows, *rest)
        rows = by_rank[:, : self.shard_rows].reshape(-1, *rest)
        return rows[: self.num_classes]

    def members(self, grads: dict[str, Tensor]) -> list[Tensor | None]:
        """Whole gradients, by name, in the order of the group's members."""
        return [grads.get(name) for name in self._numbers]

    def finished(self, weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
        """Gradients of the shards.

        Args:
            weight: of the rows, reduced, [..., width]; further ones are padding.
            bias: of the whole.
        """
        reduction, sums = self.group.reduction, dict[int, Tensor]()
        if weight is not None:
            sums[self._numbers[WEIGHT]] = weight.reshape(-1, self.width)[: self.shard_rows]
        if bias is not None:
            number = self._numbers[BIAS]  # of its one member, too
            sums.update(reduction.unpack(reduction.scatter({number: bias}, [number])))
        added = reduction.sum_replicas_of(sums)
        return [
            reduction.finish_one(added[at], param) if at in added else None
            for at, param in enumerate(self.group.params)
        ]

    def _param(self, name: str) -> FSDPParam:
        return self.group.params[self._numbers[name]]


def why_whole(group: FSDPParamGroup) -> str:
    """What keeps a module with these parameters from being streamed; empty if nothing does."""
    names = _numbers(group)
    if WEIGHT not in names or set(names) - {WEIGHT, BIAS}:
        found = ", ".join(names) or "none"
        return f"its unit should have a weight, and may have a bias, but has: {found}"
    weight = group.params[names[WEIGHT]]
    if len(weight.members) > 1 or weight.packing.layout.shard_numel % weight.packing.row_numel:
        return (
            "its shards are no whole rows of the weight; wrap it with flatten_parameters=False "
            "and shard_param_on_dim_0=True"
        )
    if weight.packing.dim:
        return f"its weight is cut along dim {weight.packing.dim}; let dim 0 be cut"
    return ""


def _numbers(group: FSDPParamGroup) -> dict[str, int]:
    """Numbers of the parameters, by the name of their first member."""
    return {param.members[0].names[0]: at for at, param in enumerate(group.params)}


def _padded(tensor: Tensor, length: int) -> Tensor:
    """With zeros after the first dim's end."""
    missing = length - len(tensor)
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor
