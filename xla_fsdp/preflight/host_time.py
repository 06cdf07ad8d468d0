"""How long the host takes to trace a step, of several models in turn.

Words: see ``tracing``. Always true: what is timed is the Python and C++ work from the start of a
step until it would first run something; nothing is compiled or executed. It is CPU time of this
process, which on an idle machine is the time that passes, as one thread works at a time; and models
take turns, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from xla_fsdp.distributed.xla.fake_rank import fake_rank
from xla_fsdp.preflight.tracing import Recorder, Step, use_one_cpu_device

WARM_UP = 2

"""Steps before the first that counts: they make the optimizer's state."""


def trace_seconds(
    builders: Mapping[str, Callable[[], Step]], coords: Sequence[Sequence[int]], rounds: int
) -> dict[str, list[float]]:
    """CPU seconds of each of ``rounds`` steps, by name.

    Args:
        builders: build a model and its optimizer, and return a function that makes one step.
        coords: place on the torus of every pretended rank.
        rounds: steps of each model.
    """
    use_one_cpu_device()
    clock = _Clock()
    seconds: dict[str, list[float]] = {name: [] for name in builders}
    with fake_rank(0, coords, clock.stop):
        steps = {}
        for name, build in builders.items():
            steps[name] = build()
            clock.recorder.cut()
        for _ in range(WARM_UP + rounds):
            for name, step in steps.items():
                seconds[name].append(clock.time(step))
    return {name: found[WARM_UP:] for name, found in seconds.items()}


class _Clock:
    def __init__(self) -> None:
        self.recorder = Recorder()
        self._stopped: float | None = None

    def stop(self) -> None:
        """The step would run what it has traced."""
        if self._stopped is None:
            self._stopped = time.process_time()
        self.recorder.cut()

    def time(self, step: Step) -> float:
        self._stopped, started = None, time.process_time()
        step()
        stopped = self._stopped or time.process_time()
        self.recorder.cut()
        return stopped - started
