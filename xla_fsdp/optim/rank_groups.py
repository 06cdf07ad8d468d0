"""Groups of ranks that hold replicas, lists of ranks of one size that split the job, and averages
over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from xla_fsdp.distributed.packing import buckets_for
from xla_fsdp.distributed.placement import known_placement
from xla_fsdp.fsdp.engine.param import held_shape
from xla_fsdp.xla import ops

Groups = list[list[int]]

# Tensors of fewer elements share one all-reduce: below some 100 KB the start of a collective costs
# more than its bytes. Larger ones are reduced by themselves, which saves the copy.
BUCKETED_BELOW = 2**15


def check_groups(groups: Sequence[Sequence[int]] | None) -> Groups:
    """Return ``groups``, which must split the job evenly, as lists; for None, one of all ranks."""
    world_size = ops.world_size()
    if groups is None:
        return [list(range(world_size))]
    lists = [list(group) for group in groups]
    problems = []
    if len({len(group) for group in lists}) != 1:
        problems.append("they differ in size; give every group as many ranks")
    if sorted(rank for group in lists for rank in group) != list(range(world_size)):
        problems.append(f"every rank of range({world_size}) must be in exactly one of them")
    if problems:
        raise ValueError(f"groups={lists}: {'; '.join(problems)}")
    return lists


def own_group(groups: Groups) -> list[int]:
    rank = ops.rank()
    return next(group for group in groups if rank in group)


def find_slice_problems(param: Tensor, ranks: Sequence[int], what: str) -> Iterator[str]:
    """Yield an error message about ``what`` if these ranks hold different parts of ``param``, which
    tensor parallelism has cut."""
    placement = known_placement(param)
    if placement is not None and placement.parts > 1 and not placement.is_same_on(ranks):
        yield (
            f"{what} is a part of a tensor-parallel one, of which ranks {list(ranks)} hold others; "
            f"give groups along another axis, as in groups=mesh['data'].groups()"
        )


def average_(tensors: Sequence[Tensor], groups: Groups) -> None:
    """Set every tensor to its average over the ranks of the caller's group.

    As in torch, values are divided before they are summed, in the tensors' own dtype.
    """
    size = len(groups[0])
    if size == 1:
        return
    small = {}
    for number, tensor in enumerate(tensors):
        numel = held_shape(tensor).numel()
        if numel >= BUCKETED_BELOW:
            tensor.copy_(ops.all_reduce("sum", tensor / size, groups))
        elif numel:
            small[number] = tensor.reshape(-1)
    for bucket in buckets_for(small):
        average = bucket.unpack(ops.all_reduce("sum", bucket.pack(small) / size, groups))
        for number, value in zip(bucket.numbers, average, strict=True):
            tensors[number].copy_(value.reshape(held_shape(tensors[number])))
