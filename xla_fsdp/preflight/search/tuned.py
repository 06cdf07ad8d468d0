"""What a search has tried: the winner, and why each of the others lost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from xla_fsdp.preflight.read.report import Report, aligned, full_text
from xla_fsdp.preflight.search.candidates import Way
from xla_fsdp.preflight.search.prediction import Figures
from xla_fsdp.preflight.topologies import MIB, Chip
from xla_fsdp.recipe.options import Recipe

SHOWN = 10
"""Rows of the table."""

LONGEST_REASON = 160

UNTRIED = "the search ended before it was compiled"

HEADINGS = (
    "recipe and mesh", "batch", "needs MiB", "left MiB", "est. step ms", "per second", "by",
    "lost because",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A step that was compiled, predicted, or could not be.

    Args:
        way: its recipe, and swept options.
        batch: samples of each rank that has its own.
        figures: what it needs; None if that is not known.
        rate: samples per second of all ranks, 0.0 if not known.
        report: on the step as it is to run; None if it is predicted.
        failed: why it has no figures.
    """

    way: Way
    batch: int
    figures: Figures | None = None
    rate: float = 0.0
    report: Report | None = None
    failed: str = ""

    def fits(self, chip: Chip) -> bool:
        """Return whether it is known to fit into the memory of such a chip and of its host."""
        return self.figures is not None and self.figures.fits(chip)


@dataclass(frozen=True)
class Tuned:
    """The result of ``tune``.

    Args:
        topology: name of the slice.
        chip: the kind of its chips.
        candidates: all that were tried, by way.
        length: tokens of a sample; None if ``build_step`` does not say.
    """

    topology: str
    chip: Chip
    candidates: tuple[Candidate, ...]
    length: int | None = None

    @property
    def capacity(self) -> int:
        """Bytes of a chip's memory that a program may use."""
        return self.chip.usable_bytes

    @property
    def best(self) -> Candidate | None:
        """The fastest by estimate of those that were compiled as they are to run and fit."""
        compiled = [each for each in self.candidates if each.report and each.fits(self.chip)]
        return max(compiled, key=lambda each: each.rate, default=None)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the best, with its mesh.

        Raises:
            ValueError: if nothing that was compiled fits.
        """
        if self.best is None:
            raise ValueError(f"there is no best recipe for {self.topology}:\n{self.text()}")
        return self.best.way.recipe

    def save(self, path: str | Path) -> None:
        """Write the best recipe to a file, which ``Recipe.load`` and ``parallelize`` read."""
        self.recipe.save(path)

    @property
    def unit(self) -> str:
        """What rates count."""
        return "samples" if self.length is None else "tokens"

    def rate(self, candidate: Candidate) -> float:
        """Return tokens per second of all ranks, or samples."""
        return candidate.rate * (self.length or 1)

    def ranking(self) -> list[Candidate]:
        """Return the fastest of each way that fits; then those of which none fits; then those that
        failed."""
        best, foremost = self.best, []
        for way in dict.fromkeys(each.way for each in self.candidates):
            own = [each for each in self.candidates if each.way == way]
            fitting = [each for each in own if each.fits(self.chip)]
            fastest = max(fitting, key=lambda each: each.rate, default=own[0])
            foremost.append(best if best is not None and best.way == way else fastest)

        def rank(candidate: Candidate) -> tuple[bool, bool, bool, float]:
            is_known, fits = candidate.figures is not None, candidate.fits(self.chip)
            return candidate != best, not is_known, not fits, -candidate.rate

        return sorted(foremost, key=rank)

    def reason(self, candidate: Candidate) -> str:
        """Return why a candidate is not the best; empty for the best."""
        if candidate.figures is None:
            return candidate.failed
        if not candidate.fits(self.chip):
            return f"lacks {candidate.figures.shortage(self.chip)}"
        if self.best is None or candidate.rate > self.best.rate:
            return f"{UNTRIED} in full"
        return "" if candidate == self.best else self._slower(candidate, self.best)

    def _slower(self, candidate: Candidate, best: Candidate) -> str:
        """Return by how much, and whether computing or waiting takes longer for each sample."""
        own, least = candidate.figures, best.figures
        assert own is not None  # ``reason`` asks for those that are known,
        assert least is not None  # and the best was compiled
        # Seconds of all ranks for a sample, and the part of the step in which a rank computes.
        seconds, shortest = 1 / candidate.rate, 1 / best.rate
        computing = seconds * own.compute / own.seconds - shortest * least.compute / least.seconds
        hidden = max(own.compute, own.overlapped)
        others = "the host's memory" if own.offloading - hidden > own.blocking else "collectives"
        what = "compute" if 2 * computing > seconds - shortest else f"waiting for {others}"
        return f"{seconds / shortest - 1:.1%} more time for each sample, of it most in {what}"

    def cells(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the row of a candidate under ``HEADINGS``."""
        figures, reason = candidate.figures, _cut(self.reason(candidate))
        if figures is None:
            return str(candidate.way), "", "", "", "", "", "", reason
        return (
            str(candidate.way),
            str(candidate.batch),
            f"{figures.needed / MIB:,.0f}",
            f"{(self.capacity - figures.needed) / MIB:,.0f}",
            f"{figures.seconds * 1e3:,.1f}",
            f"{self.rate(candidate):,.0f} {self.unit}",
            "compiled" if candidate.report else "predicted",
            reason,
        )

    def text(self) -> str:
        """Return a table of the best, why the others lost, and the report on the best."""
        ranking = self.ranking()
        known = [each for each in ranking if each.figures is not None][:SHOWN]
        lines = aligned([HEADINGS, *map(self.cells, known)], left=(0, 6, 7)) if known else []
        by_reason: dict[str, list[str]] = {}
        for each in ranking:
            if each not in known:
                by_reason.setdefault(self.reason(each), []).append(str(each.way))
        for why, ways in by_reason.items():
            lines += ["", f"{why}:", *(f"  {way}" for way in ways)]
        return "\n".join([*lines, "", *self._answer()]).lstrip("\n")

    def _answer(self) -> list[str]:
        best = self.best
        if best is None or best.report is None:
            return [f"Nothing that was compiled in full runs on {self.topology}; see why above."]
        lines = [f"Fastest that fits: {self._named(best)} by estimate"]
        fitting = [each for each in self.candidates if each.fits(self.chip)]
        first = max(fitting, key=lambda each: each.rate)
        if first.rate > best.rate:
            lines.append(
                f"Predicted to be faster: {self._named(first)}. The search ended before it was "
                f"compiled in full; the same command again goes on"
            )
        own = [each for each in self.candidates if each.way == best.way and each != best]
        others = [f"{each.batch}: {self._rate(each)}" for each in own if each in fitting]
        failing = [each for each in own if each not in fitting]
        others += [f"{each.batch}: {_cut(self.reason(each))}" for each in failing[:1]]
        if others:
            lines.append(f"Other batches of it: {'; '.join(others)}")
        return [*lines, "", full_text(best.report)]

    def _named(self, candidate: Candidate) -> str:
        return f"{candidate.way}, batch {candidate.batch}, {self._rate(candidate)}"

    def _rate(self, candidate: Candidate) -> str:
        return f"{self.rate(candidate):,.0f} {self.unit}/s"

    def to_json(self) -> str:
        """Return all that was tried as JSON, and the report on the best in full."""
        report = self.best.report if self.best else None
        candidates = [
            {
                "way": str(each.way),
                "batch": each.batch,
                "fits": each.fits(self.chip),
                "rate": self.rate(each),
                "compiled": each.report is not None,
                "reason": self.reason(each),
                **(asdict(each.figures) if each.figures else {}),
            }
            for each in self.candidates
        ]
        facts = {
            "topology": self.topology,
            "capacity": self.capacity,
            "unit": self.unit,
            "candidates": candidates,
            "best": json.loads(report.to_json()) if report else None,
        }
        return json.dumps(facts, indent=1, default=str)


def _cut(reason: str) -> str:
    return f"{reason[:LONGEST_REASON]}..." if len(reason) > LONGEST_REASON else reason
