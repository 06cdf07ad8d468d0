"""Check groups of ranks that hold replicas: lists of ranks, of one size, that split the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from xla_fsdp.distributed.placement import known_placement
from xla_fsdp.xla import ops

Groups = list[list[int]]


def check_groups(groups: Sequence[Sequence[int]] | None) -> Groups:
    """Return ``groups`` as lists; for None, one group of all ranks.

    Raises:
        ValueError: with every problem, if they do not split the ranks of the job evenly.
    """
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
