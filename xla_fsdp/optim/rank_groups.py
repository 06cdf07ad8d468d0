"""Which ranks an optimizer or an averager works with.

Words: *groups* are lists of ranks, as in torch_xla's collectives; None stands for one of all ranks.
Always true: groups that passed ``check_groups`` are of one size, name every rank of the job once,
and hold the caller. Communication itself is left to ``collectives``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from xla_fsdp.distributed.collectives import Collectives, LocalCollectives, XlaCollectives
from xla_fsdp.distributed.placement import known_placement
from xla_fsdp.distributed.xla import ops

Groups = list[list[int]]


def check_groups(groups: Sequence[Sequence[int]] | None) -> Groups:
    """``groups`` spelled out.

    Raises:
        ValueError: with every problem, if they do not split the ranks of the job evenly.
    """
    world_size = ops.world_size()
    if groups is None:
        return [list(range(world_size))]
    spelled = [list(group) for group in groups]
    named = sorted(rank for group in spelled for rank in group)
    problems = []
    if len({len(group) for group in spelled}) != 1:
        problems.append("they differ in size; give every group as many ranks")
    if named != list(range(world_size)):
        problems.append(f"every rank of range({world_size}) must be in exactly one of them")
    if problems:
        raise ValueError(f"groups={spelled}: {'; '.join(problems)}")
    return spelled


def collectives_over(groups: Sequence[Sequence[int]] | None) -> Collectives:
    """Communication of the caller with the ranks of its group.

    Raises:
        ValueError: see ``check_groups``.
    """
    spelled = check_groups(groups)
    own = own_group(spelled)
    if len(own) == 1:
        return LocalCollectives()
    place = own.index(ops.rank())
    return XlaCollectives(spelled if groups is not None else None, place, len(own))


def own_group(groups: Groups) -> list[int]:
    """The group of the caller."""
    rank = ops.rank()
    return next(group for group in groups if rank in group)


def find_part_problems(param: Tensor, ranks: Sequence[int], what: str) -> Iterator[str]:
    """Why a parameter that these ranks are to treat as one is not: a line, if they hold different
    parts of a tensor-parallel one.

    Args:
        param: of the caller.
        ranks: a group.
        what: which parameter, for the message.
    """
    placement = known_placement(param)
    if placement is not None and placement.parts > 1 and not placement.is_same_on(ranks):
        yield (
            f"{what} is a part of a tensor-parallel one, of which ranks {list(ranks)} hold others; "
            f"give groups along another axis, as in groups=mesh['data'].groups()"
        )


def consecutive_groups(groups: Groups, size: int) -> Groups:
    """Every group cut into groups of ``size`` ranks that follow each other in it.

    Raises:
        ValueError: if ``size`` does not divide the groups' size.
    """
    if size < 1 or len(groups[0]) % size:
        raise ValueError(
            f"groups of {len(groups[0])} ranks cannot be cut into groups of {size}; give a size "
            f"that divides {len(groups[0])}"
        )
    return [group[at : at + size] for group in groups for at in range(0, len(group), size)]
