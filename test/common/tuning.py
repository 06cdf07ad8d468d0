"""A stand-in for tracing and for the TPU compiler's process: steps of known memory and time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from xla_fsdp import Recipe
from xla_fsdp.preflight import CompileError
from xla_fsdp.preflight.compile import compiler
from xla_fsdp.preflight.compile.compiler import Compiled
from xla_fsdp.preflight.search import trials, tuning
from xla_fsdp.preflight.topologies import Topology
from xla_fsdp.preflight.trace.program import Program, Traced

MIB = 2**20
CLOCK_HZ = 1.5e9  # of v5e

MODULE = """HloModule step, is_scheduled=true

%twice (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  ROOT %sum = f32[8] add(%x, %x)
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %done = f32[8] fusion(%p), kind=kLoop, calls=%twice, backend_config={{"estimated_cycles":"{cycles}"}}
}}
"""  # noqa: E501


@dataclass(frozen=True)
class Cost:
    """What a step needs: MiB and milliseconds, of layers and samples."""

    mib_fixed: float = 1000
    mib_per_layer: float = 100
    mib_per_layer_and_sample: float = 50
    host_mib_per_layer_and_sample: float = 0
    ms_fixed: float = 10
    ms_per_layer_and_sample: float = 1
    is_loop: bool = False
    mib_of_chip: float = float("inf")  # more is refused as too large, and made half as fast again
    refused: str = ""
    refused_from: int = 0  # layers
    raises: str = ""

    def mib(self, depth: int, batch: int) -> float:
        """Memory of a step."""
        per_layer = self.mib_per_layer + batch * self.mib_per_layer_and_sample
        return self.mib_fixed + depth * per_layer

    def host_mib(self, depth: int, batch: int) -> float:
        """Memory of the host that a step uses."""
        return depth * batch * self.host_mib_per_layer_and_sample

    def ms(self, depth: int, batch: int) -> float:
        """Time of a step."""
        return self.ms_fixed + depth * batch * self.ms_per_layer_and_sample


@dataclass
class FakeCompiler:
    """Traces and compiles what ``costs`` says of each recipe, and counts.

    Attributes:
        compiled: name of the recipe, depth and batch of what was compiled, in order.
        most_at_once: compilations that ran at the same time.
        now: seconds on the clock of the search, which compilations alone move on.

    Args:
        costs: by recipe.
        seconds: that a compilation takes on that clock.
        together: how many wait for each other.
    """

    costs: Callable[[Recipe], Cost]
    seconds: int = 0
    together: int = 1
    now: float = 0.0
    compiled: list[tuple[str, int, int]] = field(default_factory=list)
    most_at_once: int = 0
    _running: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def build_step(self, recipe: Recipe, batch: int = 1, depth: int = 32, length: int = 100) -> Any:
        """As the user's: the description of a step."""
        cost = self.costs(recipe)
        if cost.raises:
            raise ValueError(cost.raises)
        return lambda: (recipe, depth, batch, cost)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of tracing and of the compiler's process."""
        monkeypatch.setattr(trials, "traced_on", self._trace)
        monkeypatch.setattr(compiler, "_compile", self._compile)
        for module in (trials, tuning):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)

    def _trace(
        self, topology: Topology, build_step: Callable[..., Any], options: Mapping[str, Any]
    ) -> Traced:
        recipe, depth, batch, cost = build_step(**options)()
        facts = {
            "recipe": recipe.name, "depth": depth, "batch": batch, "all": repr(recipe),
            "mib": cost.mib(depth, batch), "mib_of_chip": cost.mib_of_chip,
            "host_mib": cost.host_mib(depth, batch),
            "ms": cost.ms(depth, batch),
            "refused": cost.refused if depth >= cost.refused_from else "",
        }  # fmt: skip
        words = json.dumps(facts).encode()
        length = 10_000 if cost.is_loop else 10_000 * depth
        return Traced((Program(words.ljust(length), (), ()),))

    def _compile(
        self,
        program: Program,
        topology: Topology,
        flags: str,
        max_host_mem: int,
        progress: Callable[[float], None],
    ) -> Compiled:
        facts = json.loads(program.hlo)
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            self._wait(progress)
        finally:
            with self._lock:
                self._running -= 1
        self.compiled.append((facts["recipe"], facts["depth"], facts["batch"]))
        if "killed" in facts["refused"]:
            raise CompileError("the TPU compiler ended with exit code -9")
        if facts["refused"]:
            refused = compiler._refusal(f"JaxRuntimeError: {facts['refused']}")
            raise compiler._FailsAgainError(refused)
        return _compiled(facts)

    def _wait(self, progress: Callable[[float], None]) -> None:
        for passed in range(self.seconds):
            self.now += 1
            progress(passed)
        limit = time.monotonic() + 60
        while self.most_at_once < self.together and time.monotonic() < limit:
            time.sleep(0.01)


def _compiled(facts: dict[str, Any]) -> Compiled:
    lacks = max(facts["mib"] - facts["mib_of_chip"], 0.0)
    cycles = round(facts["ms"] * (1.5 if lacks else 1.0) / 1e3 * CLOCK_HZ)
    size, on_host = (round(facts[name] * MIB) for name in ("mib", "host_mib"))
    return Compiled(
        arguments=0,
        outputs=size,
        temporaries=0,
        on_host=on_host,
        text=MODULE.format(cycles=cycles),
        code=0,
        too_large_by=round(lacks * MIB),
        seconds=0,
        cpu_seconds=0,
        peak_host_bytes=0,
    )
