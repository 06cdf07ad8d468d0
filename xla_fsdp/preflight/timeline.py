"""One program laid out over its estimated time: memory held, and collectives on their way.

Always true: instructions follow each other as in the schedule, with the times of ``estimate``, so
the length is the estimated time of the step. Of many moments in a row the fullest is kept. A loop
is one instruction here; what goes on inside it is not laid out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xla_fsdp.preflight.estimate import clock
from xla_fsdp.preflight.hlo import Module
from xla_fsdp.preflight.liveness import GATHERED, OTHER, Level, levels
from xla_fsdp.preflight.report import Moment, Span, Timeline
from xla_fsdp.preflight.topologies import Topology
from xla_fsdp.preflight.traffic import Collective

MOST_MOMENTS = 500


def timeline(module: Module, collectives: Sequence[Collective], topology: Topology) -> Timeline:
    """The timeline of a module and the collectives found in it."""
    at = clock(module, collectives, topology)
    return Timeline(
        seconds=at[-1],
        moments=tuple(_moments(levels(module), at)),
        spans=tuple(_span(each, at) for each in collectives),
    )


def _moments(found: Sequence[Level], at: Sequence[float]) -> Iterator[Moment]:
    step = -(-len(found) // MOST_MOMENTS)
    for start in range(0, len(found), step):
        some = found[start : start + step]
        _, fullest = max(some, key=lambda level: sum(level[1].values()))
        index = min(some[0][0], len(at) - 1)
        yield Moment(at[index], fullest.get(GATHERED, 0), fullest.get(OTHER, 0))


def _span(each: Collective, at: Sequence[float]) -> Span:
    start, end = each.places
    return Span(
        kind=each.kind,
        dtype=each.dtype,
        overlapped=each.overlapped,
        start=at[start],
        end=at[end + 1],
        times=each.times,
        wire_bytes=each.total_bytes,
    )
