"""Run a function on every virtual chip of a slice, as the programs that a TPU would get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xla_fsdp.preflight.virtual_chips import VirtualChips


def run_on_chips(
    fn: Callable[..., Any],
    coords: Sequence[Sequence[int]],
    chips: VirtualChips,
    args: Sequence[Any] = (),
) -> list[Any]:
    """Call ``fn(rank, *args)`` on every rank of a slice that is not there.

    Ranks run one after the other, until each needs the others.

    Args:
        fn: as for ``launch``; it should return host values.
        coords: coordinates of every rank on the torus.
        chips: where programs run.
        args: further arguments of ``fn``, shared by all ranks.

    Returns:
        What ``fn`` has returned, in rank order.

    Raises:
        RankError: if a rank failed.
        RuntimeError: if torch_xla has started in this process with fewer CPU devices than ranks.
    """
    from xla_fsdp.distributed.launcher import supervise
    from xla_fsdp.distributed.turns import TurnRun
    from xla_fsdp.distributed.xla.virtual_ranks import VirtualRanks, prepare_devices

    prepare_devices(len(coords))
    run = TurnRun(len(coords))
    ranks = VirtualRanks(run, coords, chips.execute)
    with ranks.installed():
        supervise(run, lambda: run.start(fn, tuple(args), ranks.enter, ranks.leave), float("inf"))
    return [run.results.get(rank) for rank in range(len(coords))]
