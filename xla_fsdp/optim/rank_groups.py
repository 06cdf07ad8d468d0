"""Which ranks an optimizer or an averager works with.

Words: *groups* are lists of ranks, as in torch_xla's collectives; None stands for one of all ranks.
Always true: groups that passed ``check_groups`` are of one size, name every rank of the job once,
and hold the caller. Communication itself is left to ``collectives``.
"""

from __future__ import annotations

from collections.abc import Sequence

from xla_fsdp import xla_ops
from xla_fsdp.collectives import Collectives, LocalCollectives, XlaCollectives

Groups = list[list[int]]


def check_groups(groups: Sequence[Sequence[int]] | None) -> Groups:
    """``groups`` spelled out.

    Raises:
        ValueError: with every problem, if they do not split the ranks of the job evenly.
    """
    world_size = xla_ops.world_size()
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
    spelled, rank = check_groups(groups), xla_ops.rank()
    own = next(group for group in spelled if rank in group)
    if len(own) == 1:
        return LocalCollectives()
    return XlaCollectives(spelled if groups is not None else None, own.index(rank), len(own))


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
