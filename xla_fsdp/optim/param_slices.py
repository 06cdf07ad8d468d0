"""Slices of replicated parameters: a rank's part of each, to be stepped in place of the parameter.

Invariants: which slice a rank takes is an input of the program, not a constant, so all ranks run
the same program. Slices have no values between steps; the parameters have them.
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

# Slices of fewer elements are not padded to whole lanes each: they travel in one bucket.
UNPADDED_BELOW = 8 * LANES


class ParamSlices:
    """The slices of a list of parameters. Each is a shard, as FSDP has it, that no module owns.

    Args:
        collectives: communication among the ranks that hold the same parameters.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._sharded: dict[nn.Parameter, FSDPParam] = {}
        self._rank_on_device: Tensor | None = None

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """Return the slice of ``param``, an optimizer's parameter in its place."""
        if param not in self._sharded:
            self._sharded[param] = self._make(param, str(len(self._sharded)))
        return self._sharded[param].leaf

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order in which they were sliced."""
        return list(self._sharded)

    @property
    def group(self) -> FSDPParamGroup:
        """All slices, in the order of ``params``."""
        return self._group_of(self.params)

    def keys(self) -> dict[str, Tensor]:
        """Return the slices by their numbers, as text."""
        return {each.key: each.leaf for each in self._sharded.values()}

    def shapes(self) -> list[list[int]]:
        """Return the parameters' shapes, in the order of ``params``."""
        return [list(each.members[0].shape) for each in self._sharded.values()]

    def reduce_scatter_grads(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return slices of the gradients of ``params``, averaged over the ranks."""
        with self.filled(params):  # gradients get the shapes and dtypes of their shards
            reduced = self._group_of(params).reduce([param.grad for param in params])
        return present(reduced.grads)

    def all_gather(self, params: Sequence[nn.Parameter], slices: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the shapes of ``params``, made of all ranks' ``slices``."""
        group = self._group_of(params)
        return group.gather.as_stored(group.params, slices)

    def cut(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's slices of ``values``, each of the shape of its parameter."""
        return [
            self._cut(self._sharded[param], value)
            for param, value in zip(params, values, strict=True)
        ]

    @contextlib.contextmanager
    def filled(
        self, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None] | None = None
    ) -> Iterator[None]:
        """Give the slices of ``params`` their values, and the gradients ``grads``, inside."""
        values = self.cut(params, params)
        for param, value, grad in zip(params, values, grads or [None] * len(params), strict=True):
            self.of(param).data = value
            self.of(param).grad = grad
        try:
            yield
        finally:
            for param in params:
                _free(self.of(param))

    def free(self) -> None:
        """Drop the values that slices are made with."""
        for each in self._sharded.values():
            _free(each.leaf)

    def _group_of(self, params: Sequence[nn.Parameter]) -> FSDPParamGroup:
        sharded = [self._sharded[param] for param in params]
        return FSDPParamGroup(sharded, self.collectives, FSDPConfig())

    def _make(self, param: nn.Parameter, key: str) -> FSDPParam:
        layout, _ = slice_layout(param.shape, self.collectives.num_shards)
        member = OriginalParam((key,), param.shape, ())
        shard = ShardParameter(param.new_empty(0), requires_grad=param.requires_grad)
        shard.shard_rank = self.collectives.rank
        made = FSDPParam(key, [member], shard, layout, None)
        shard.data = self._cut(made, param)
        return made

    def _cut(self, sharded: FSDPParam, value: Tensor) -> Tensor:
        _, row_shape = slice_layout(sharded.members[0].shape, self.collectives.num_shards)
        stack = sharded.packing.stack([value.detach()])
        stack = stack.reshape(self.collectives.num_shards, -1, *row_shape)
        own = torch.index_select(stack, 0, self._rank_on(value.device))
        return own.reshape(own.shape[1:])

    def _rank_on(self, device: torch.device) -> Tensor:
        if self._rank_on_device is None:
            self._rank_on_device = torch.tensor([self.collectives.rank], dtype=torch.int32)
            if device.type == "xla":
                self._rank_on_device = ops.upload(self._rank_on_device)
        return self._rank_on_device


def slice_layout(shape: Sequence[int], num_slices: int) -> tuple[ShardLayout, tuple[int, ...]]:
    """Return how a parameter is sliced, and what follows dim 0 in the shape of a slice.

    A large matrix is sliced into whole rows, so that it need not be laid out anew to be sent;
    anything else into vectors.
    """
    size = torch.Size(shape)
    width = size[1:].numel() if len(size) > 1 else 0
    per_rank = -(-size.numel() // num_slices)
    if width and width % LANES == 0:
        by_rows = ShardLayout((size.numel(),), num_slices, width * ROWS)
        if by_rows.shard_numel >= LARGE and by_rows.padded_numel <= 1.125 * size.numel():
            return by_rows, (width,)
    multiple = LANES if per_rank >= UNPADDED_BELOW else 1
    return ShardLayout((size.numel(),), num_slices, multiple), ()


def _free(shard: nn.Parameter) -> None:
    shard.grad = None
    shard.data = shard.new_empty(0)
