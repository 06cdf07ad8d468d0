"""The leaf parameter that stands for a rank's shard, and how it is cut out of full tensors.

Always true: what is made here is an ordinary parameter to every function of torch, in copies of a
model and in pickles, too; one that has memory and no values yet acts as the full parameter for
whoever gives it some (``deferred_init``).
What else is known of a shard is said by ``sharded_param``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.deferred_init import call_in_full, close_all
from xla_fsdp.layout import ShardLayout
from xla_fsdp.shard_cut import slice_of
from xla_fsdp.shard_view import ShardView


class ShardParameter(ShardView, nn.Parameter):
    """The leaf parameter that a rank keeps and its optimizer sees.

    A class of its own, so that copies of a model know their shards, too. Lightning and code written
    for upstream look for ``_is_sharded``.

    Attributes:
        shard_rank: place of this rank among those that hold other shards of the same parameter.
    """

    _is_sharded = True
    shard_rank = 0

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled as what it is; nn.Parameter would come back as one of its own class."""
        kind = ShardParameter if isinstance(self, UninitializedShard) else type(self)
        return _restored_shard, (kind, self.detach(), self.requires_grad, vars(self))


class UninitializedShard(ShardParameter):
    """A shard that has got memory, and no values yet: see ``deferred_init``."""

    was_open = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_in_full(func, args, kwargs or {})

    def settle(self) -> None:
        """The values are complete; from now on it is a shard like others."""
        close_all()
        self.__class__ = ShardParameter  # type: ignore[assignment]


def make_shard(
    tensors: Sequence[Tensor],
    layout: ShardLayout,
    rank: int,
    device: torch.device,
    row_shape: Sequence[int] = (),
    dim: int = 0,
) -> nn.Parameter:
    """Cut ``rank``'s shard, [rows, *row_shape], out of full tensors joined end to end; of a single
    one along ``dim``, where the rows then are.

    Only the slice moves to ``device``: a parameter in host memory never exists there in full. What
    is on the meta device stays there.
    """
    flat = slice_of([t.movedim(dim, 0) if dim else t for t in tensors], layout, rank)
    rows = flat.reshape(-1, *row_shape).movedim(0, dim).contiguous()
    shard = ShardParameter(
        rows if rows.is_meta else rows.to(device),
        requires_grad=any(tensor.requires_grad for tensor in tensors),
    )
    shard.shard_rank = rank
    if len(tensors) == 1:  # such as a mark that an optimizer's grouping looks for
        vars(shard).update(vars(tensors[0]))
    return shard


def _restored_shard(
    kind: type[ShardParameter], data: Tensor, requires_grad: bool, marks: dict[str, Any]
) -> ShardParameter:
    shard = kind(data, requires_grad=requires_grad)
    vars(shard).update(marks)
    return shard


def is_sharded(param: Tensor) -> bool:
    """Whether ``param`` is a shard made by this package (or by upstream's)."""
    return getattr(param, "_is_sharded", False)
