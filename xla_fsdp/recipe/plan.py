"""What ``parallelize`` has done of a recipe, and what it has left out, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from xla_fsdp.recipe.options import SWITCHES, Recipe
from xla_fsdp.xla import ops

FEATURES = tuple(each for each in SWITCHES if each != "compile_step")
"""What is done to the model; steps are compiled by ``Recipe.compile``."""
LOOPS = ("scan", "offload_activations")
"""What ends if blocks cannot run as a loop; stacks are then used slice by slice."""

_logger = logging.getLogger("xla_fsdp")


@dataclass
class Plan:
    """What becomes of a recipe for a model."""

    recipe: Recipe  # as it was asked for
    kind: str  # class of the model
    done: dict[str, list[str]] = field(default_factory=dict)  # where each feature is
    left_out: list[str] = field(default_factory=list)  # a line for each that there cannot be
    title: str = ""
    report: list[str] = field(default_factory=list)  # what ``explain`` prints

    def wants(self, feature: str) -> bool:
        return self.recipe.wants(feature)

    def has(self, feature: str) -> bool:
        return feature in self.done

    @property
    def remat(self) -> str | tuple[str, ...]:
        return self.recipe.remat or "full"

    def do(self, feature: str, where: str) -> None:
        self.done.setdefault(feature, []).append(where)

    def leave_out(self, feature: str, where: str, why: str) -> None:
        line = f"{feature}: left out for {where or self.kind}: {why}"
        if line not in self.left_out:
            self.left_out.append(line)

    def leave_out_late(self, feature: str, where: str, why: str) -> None:
        """Leave out what a forward has shown to be impossible."""
        self.leave_out(feature, where, why)
        _say(self.left_out[-1])
        self._write_report()

    def give_up_loops(self, why: str) -> None:
        """Leave out loops, as a forward has shown that blocks have to run one by one."""
        where = ", ".join(self.done["scan"])
        self.done = {name: each for name, each in self.done.items() if name not in LOOPS}
        self.leave_out_late("scan", where, why)

    def refuse_impossible(self) -> None:
        """Raise ValueError for what the recipe sets and nothing could be done of."""
        features = [name for name in FEATURES if getattr(self.recipe, name) is True]
        missing = [name for name in features if not self.has(name)]
        for name in missing:
            if name in ("stacked", "offload_activations") and not self.has("scan"):
                self.leave_out(name, "", "nothing runs as a loop")
        if missing:
            why = [each for each in self.left_out if each.split(":")[0] in missing]
            raise ValueError(
                f"the recipe sets {', '.join(missing)}, which {self.kind} does not allow. "
                + "; ".join(why)
            )

    def finished(self, num_units: int, model: Any, optimizer: Any) -> Recipe:
        """Return the recipe with what was chosen; say what was left out."""
        self.title = (
            f"recipe {self.recipe.name!r} for {self.kind}: {num_units} units on "
            f"{model.world_size} shards"
        )
        self._write_report()
        for line in self.left_out:
            _say(line)
        values: dict[str, Any] = {name: self.has(name) for name in FEATURES}
        values["compile_step"] = self.wants("compile_step") and self.recipe.compile_step
        return self.recipe.applied((model, optimizer), self.report, remat=self.remat, **values)

    def _write_report(self) -> None:
        done = {name: ", ".join(each) for name, each in self.done.items()}
        if self.wants("compile_step"):
            done["compile_step"] = "by compile(step)"
        self.report[:] = [self.title, *(f"  {name}: {each}" for name, each in done.items())]
        self.report += self.left_out


def _say(line: str) -> None:
    if ops.rank() == 0:
        _logger.info("parallelize: %s", line)
