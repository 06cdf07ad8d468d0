"""Slices of whole parameters, one for every rank, and how gradients and values become them.

Words: a *slice* is this rank's part of a parameter that all ranks hold whole. It is a shard, as of
a unit, whose parameter no module owns; *cut* is to take it out of the parameter.
Always true: every parameter is sliced, and which slice is taken is an input of the program, so that
all ranks run the same one; between steps a slice holds nothing, as the parameter holds its values.
Communication is ``param_group``'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.distributed.shard_layout import LANES, LARGE, ROWS, ShardLayout
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam, OriginalParam
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.shard_parameter import ShardParameter

UNPADDED_BELOW = 8 * LANES

"""Slices of fewer elements are not padded to whole lanes each: they travel joined."""


class Slices:
    """The slices of a list of parameters.

    Args:
        collectives: communication among the ranks that hold the same parameters.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._sharded: dict[nn.Parameter, FSDPParam] = {}
        self._place: Tensor | None = None

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """The slice of ``param``: what is an optimizer's parameter in its place."""
        if param not in self._sharded:
            self._sharded[param] = self._made(param, str(len(self._sharded)))
        return self._sharded[param].leaf

    @property
    def group(self) -> FSDPParamGroup:
        """All slices, in the order in which they were made."""
        return self._group_of(self.params)

    def keys(self) -> dict[str, Tensor]:
        """The slices by their numbers, as text."""
        return {each.key: each.leaf for each in self._sharded.values()}

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order in which they were sliced."""
        return list(self._sharded)

    def shapes(self) -> list[list[int]]:
        """Of the parameters, in the order of ``params``."""
        return [list(each.members[0].shape) for each in self._sharded.values()]

    def reduced(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """Slices of the averages over the ranks of the gradients of ``params``."""
        with self.filled(params):  # a group makes gradients of the shape and dtype of its shards
            reduced = self._group_of(params).reduce([param.grad for param in params])
        return present(reduced.grads)

    def cut(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> list[Tensor]:
        """This rank's slices of ``values``, each of the shape of its parameter."""
        return [
            self._cut(self._sharded[param], value)
            for param, value in zip(params, values, strict=True)
        ]

    def gathered(self, params: Sequence[nn.Parameter], slices: Sequence[Tensor]) -> list[Tensor]:
        """The whole of what every rank has ``slices`` of."""
        group = self._group_of(params)
        return group.gather.as_stored(group.params, slices)

    @contextlib.contextmanager
    def filled(
        self, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None] | None = None
    ) -> Iterator[None]:
        """Inside, the slices of ``params`` hold what those hold, and have the gradients ``grads``;
        afterwards they hold nothing."""
        values = self.cut(params, params)
        for param, value, grad in zip(params, values, grads or [None] * len(params), strict=True):
            self.of(param).data = value
            self.of(param).grad = grad
        try:
            yield
        finally:
            for param in params:
                _empty(self.of(param))

    def empty(self) -> None:
        """Let go of the values that slices are made with."""
        for each in self._sharded.values():
            _empty(each.leaf)

    def _group_of(self, params: Sequence[nn.Parameter]) -> FSDPParamGroup:
        sharded = [self._sharded[param] for param in params]
        return FSDPParamGroup(sharded, self.collectives, FSDPConfig())

    def _made(self, param: nn.Parameter, key: str) -> FSDPParam:
        layout, _ = slice_layout(param.shape, self.collectives.num_shards)
        member = OriginalParam((key,), param.shape, ())
        shard = ShardParameter(param.new_empty(0), requires_grad=param.requires_grad)
        shard.shard_rank = self.collectives.rank
        made = FSDPParam(key, [member], shard, layout, None)
        shard.data = self._cut(made, param)
        return made

    def _cut(self, sharded: FSDPParam, value: Tensor) -> Tensor:
        _, row_shape = slice_layout(sharded.members[0].shape, self.collectives.num_shards)
        stack = sharded.packing.pack([value.detach()])
        stack = stack.reshape(self.collectives.num_shards, -1, *row_shape)
        own = torch.index_select(stack, 0, self._own_place(value.device))
        return own.reshape(own.shape[1:])

    def _own_place(self, device: torch.device) -> Tensor:
        if self._place is None:
            self._place = torch.tensor([self.collectives.rank], dtype=torch.int32)
            if device.type == "xla":
                self._place = ops.upload(self._place)
        return self._place


def slice_layout(shape: Sequence[int], num_slices: int) -> tuple[ShardLayout, tuple[int, ...]]:
    """How a parameter is sliced, and what follows dim 0 in the shape of a slice: whole rows of a
    large matrix, so that nothing is laid out anew on its way; else a vector."""
    full = torch.Size(shape)
    width = full[1:].numel() if len(full) > 1 else 0
    per_rank = -(-full.numel() // num_slices)
    if width and width % LANES == 0:
        by_rows = ShardLayout((full.numel(),), num_slices, width * ROWS)
        if by_rows.shard_numel >= LARGE and by_rows.padded_numel <= 1.125 * full.numel():
            return by_rows, (width,)
    multiple = LANES if per_rank >= UNPADDED_BELOW else 1
    return ShardLayout((full.numel(),), num_slices, multiple), ()


def _empty(shard: nn.Parameter) -> None:
    shard.grad = None
    shard.data = shard.new_empty(0)
