"""``explain``: what the units of a model gather and send in a step, and which run as a loop.

Everything is read from the units; nothing is traced. Bytes are those of a rank in one step, by ring
accounting, of units one by one: a loop gathers small parameters once, a head in pieces its own
twice, and an embedding may send rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

from torch import nn

from xla_fsdp.distributed.packing import Bucket
from xla_fsdp.fsdp.engine.module_state import named_fsdp_modules
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import joined
from xla_fsdp.scan.api import holds_blocks
from xla_fsdp.scan.automatic import AutomaticScan, why_one_by_one
from xla_fsdp.scan.block_scan import BlockScan
from xla_fsdp.scan.checks import are_stacked, find_problems, plan_of

HEADER = ("unit", "parameters", "gathered", "when", "over", "reduced", "sends")


def explain(model: nn.Module) -> None:
    """Print a table of the units in ``model``; ``Recipe.explain`` prints why ``parallelize`` made
    them so.

    Equal units of one list have one line. ``gathered`` and ``reduced`` are whole parameters and
    gradients in MB, with their dtype and the number of collectives; ``sends`` is what a rank sends
    in a step. Below are the lists of units that run as a loop, or why they do not.

    Raises:
        ValueError: if the model has no units.
    """
    # With its end in one write: several ranks may print.
    print("\n".join(lines_of(model)) + "\n", end="", flush=True)


def lines_of(model: nn.Module) -> list[str]:
    """Return what ``explain`` prints."""
    first: dict[FSDPState, str] = {}
    for name, module in named_fsdp_modules(model):
        first.setdefault(module._fsdp_unit, name)
    if not first:
        raise ValueError(
            "the model has no FSDP units to explain. Wrap it, call fully_shard, or give "
            "parallelize's model"
        )
    units = [_Unit(name or "root", unit) for unit, name in first.items()]
    rows: list[tuple[str, ...]] = [HEADER]
    for (_, cells), alike in groupby(units, lambda each: (each.container, each.cells)):
        names = [each.name for each in alike]
        times = f" ({len(names)})" if names[1:] else ""
        rows.append((joined(names) + times, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    total = sum(each.sent for each in units)
    return [
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        f"A rank sends {_mb(total)} in a step.",
        *_loops(model),
    ]


@dataclass(frozen=True)
class _Unit:
    """One line of the table, before equal ones are joined."""

    name: str
    unit: FSDPState

    @property
    def container(self) -> str:
        """Name of the list that the unit is in; its own if it is in none."""
        outer, _, last = self.name.rpartition(".")
        return outer if last.isdecimal() else self.name

    @property
    def cells(self) -> tuple[str, ...]:
        group = self.unit.group
        ranks = group.collectives.num_shards
        axes = zip(group.mesh.axis_names, group.mesh.shape, strict=True)
        over = ", ".join(f"{name} {size}" for name, size in axes)
        numel = sum(each.shape.numel() for each in group.originals)
        return (
            f"{len(group.originals)}: {numel:,}",
            _shown(group.gather.buckets, ranks) if ranks > 1 else "-",
            self._when,
            over,
            _shown(self._reduced, ranks) if ranks > 1 else "-",
            _mb(self.sent),
        )

    @property
    def _when(self) -> str:
        settings = self.unit.settings
        if not self.unit.group.params or self.unit.group.collectives.num_shards == 1:
            return "-"
        if settings.keeps_larger_shards:
            return "both, then in groups"
        return "both" if settings.reshards_after_forward else "forward, kept"

    @property
    def _reduced(self) -> Sequence[Bucket]:
        params = enumerate(self.unit.group.params)
        trained = {
            at: each.compute_dtype or each.slots.shard.dtype
            for at, each in params
            if each.slots.shard.requires_grad
        }
        return self.unit.group.reduction.plan(trained)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        group = self.unit.group
        sent = 0.0
        for number, param in enumerate(group.params):
            gathered, reduced = shards_sent(self.unit, param)
            sent += gathered * _bytes(group.gather.buckets, number)
            sent += reduced * _bytes(self._reduced, number)
        return sent


def shards_sent(unit: FSDPState, param: FSDPParam) -> tuple[int, float]:
    """Return how many shards of a parameter, and of its gradient, a rank sends in a step: gathered
    for forward, and for backward if it is resharded between; reduce-scattered, and all-reduced over
    replicas."""
    group, settings = unit.group, unit.settings
    others, replicas = param.collectives.num_shards - 1, group.replicas.num_shards
    again = others if settings.gathers_in_backward else 0
    if settings.keeps_larger_shards and group.smaller is not None:
        within = group.smaller.within.num_shards
        again = (within - 1) * (others + 1) // within
    return others + again, others + 2 * (replicas - 1) / replicas


def _bytes(buckets: Iterable[Bucket], number: int | None = None) -> int:
    """Return the bytes of one rank's shards in buckets, of one parameter if ``number`` is given."""
    return sum(
        each.dtype.itemsize * prod(shape)
        for each in buckets
        for at, shape in zip(each.numbers, each.shapes, strict=True)
        if number in (None, at)
    )


def _shown(buckets: Sequence[Bucket], ranks: int) -> str:
    """Return size, dtypes and number of collectives, such as "1.6 MB bfloat16 in 3"."""
    dtypes = "/".join(sorted({str(each.dtype).removeprefix("torch.") for each in buckets}))
    return f"{_mb(_bytes(buckets) * ranks)} {dtypes} in {len(buckets)}" if buckets else "-"


def _mb(count: float) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def _loops(model: nn.Module) -> Iterator[str]:
    """Yield of each list of units whether it runs as a loop, and why not."""
    for name, container in model.named_modules():
        if not holds_blocks(container):
            continue
        blocks: list[Any] = list(container.children())
        overrides = [each._fsdp_module_state.forward_override for each in blocks]
        scanned = [isinstance(each, BlockScan) for each in overrides]
        in_loop = [block for block, own in zip(blocks, scanned, strict=True) if own]
        if any(isinstance(each, AutomaticScan) for each in overrides) and (
            why := why_one_by_one(in_loop)
        ):
            yield f"{name}: no loop, as {why.rstrip('.')}."
        elif any(scanned):
            stacked = ", stacked" if are_stacked([blocks[scanned.index(True)]._fsdp_unit]) else ""
            yield f"{name}: {sum(scanned)} of {len(blocks)} run as a loop{stacked}."
        elif problems := find_problems(blocks, plan_of(blocks), stacked=False):
            yield f"{name}: no loop, as {problems[0].rstrip('.')}."
        else:
            yield f"{name}: may run as a loop (scan_blocks)."
