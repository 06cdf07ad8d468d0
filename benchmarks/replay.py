"""Host time of a training step, traced and replayed.

    python benchmarks/replay.py                              # the table, on two CPU ranks
    python benchmarks/replay.py --width 1024 --blocks 4 24   # slow on a CPU: the ranks compute, too
    python benchmarks/replay.py --ranks 1 --width 768 --blocks 48 --steps 10   # in 7 GB

Tracing and replaying cost the same for any width. The default is narrow, so that what the CPU ranks
compute is small; ``process`` counts it, as well as autograd's threads. ``median`` and ``least`` are
the CPU time of one rank's own thread, and of the one that makes its results: all of a replay, but
without backward for a traced step. ``torch_xla`` is the least that ``_run_cached_graph`` takes of
it: the same program, run again with its own results as inputs, which are then freed. ``goal`` is
5 ms and 10 us for each input of the program, 3 ms for stacked blocks.

``upstream`` is torch_xla's own FSDP without rematerialization, which fails on CPU ranks there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks import gpt
from xla_fsdp import compile_step, launch, one_rank_at_a_time, scan_blocks

WARM_UP, STEPS = 5, 21
WAYS = ("upstream", "traced", "replayed", "stacked traced", "stacked replayed")


@dataclass(frozen=True)
class Measured:
    """Milliseconds of CPU of a step, and what a replayed one has.

    Args:
        rank: median of this rank's thread and the one that makes its results.
        least: of the same.
        process: mean of the whole process, divided by the ranks.
        torch_xla: least of ``_run_cached_graph``; 0.0 if the step is traced.
        inputs: of the program; 0 if the step is traced.
    """

    rank: float
    least: float
    process: float
    torch_xla: float = 0.0
    inputs: int = 0


def build(way: str, shape: gpt.Shape) -> Callable[[], Any]:
    """Return a step (without a sync) of the model that ``way`` names."""
    import torch_xla

    with one_rank_at_a_time():
        torch.manual_seed(0)
        model: Any = gpt.GPT(shape)
    wrap, remat = _wrappers(way)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(remat(block))
    model = wrap(model)
    if way.startswith("stacked"):
        scan_blocks(model.blocks, stacked=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    size = (shape.batch, shape.length)
    tokens = torch.zeros(size, dtype=torch.long).to(torch_xla.device())

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    state = [model, optimizer, tokens]
    return compile_step(step, state=state) if way.endswith("replayed") else step


def _wrappers(way: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what wraps modules, and what makes them rematerialized."""
    if way == "upstream":
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Upstream

        return Upstream, lambda block: block
    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

    return XlaFullyShardedDataParallel, checkpoint_module


def measure(rank: int, way: str, shape: gpt.Shape, num_ranks: int, steps: int) -> Measured:
    """Return what a step costs the host, on one rank."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    step: Any = build(way, shape)
    replays = way.endswith("replayed")

    def take() -> None:
        step()
        if not replays:
            torch_xla.sync()

    for _ in range(WARM_UP):
        take()
    threads = [threading.current_thread()]
    if replays:
        threads.append(step._own._replayer.thread)
    xm.wait_device_ops()
    xm.rendezvous("all ranks are warm")
    began, taken = time.process_time(), []
    for _ in range(steps):
        before = _cpu_time(threads)
        take()
        taken.append(_cpu_time(threads) - before)
        xm.wait_device_ops()
    process = (time.process_time() - began) / steps / num_ranks * 1e3
    xm.rendezvous("all ranks are done")
    found = Measured(statistics.median(taken) * 1e3, min(taken) * 1e3, process)
    if not replays:
        return found
    [[*_, program]] = step._own._programs.values()
    alone = _runs_alone(program, step._own._replayer, steps)
    return replace(found, torch_xla=alone * 1e3, inputs=len(program.inputs))


def _cpu_time(threads: Sequence[threading.Thread]) -> float:
    """Return the seconds of CPU that some living threads have used."""
    clocks = (time.pthread_getcpuclockid(thread.ident or 0) for thread in threads)
    return sum(map(time.clock_gettime, clocks))


def _runs_alone(program: Any, worker: Any, steps: int) -> float:
    """Return the least seconds of a program of a step without arguments, run again and again with
    its own results in the places of the inputs that they replace."""
    import torch_xla.core.xla_model as xm

    from xla_fsdp.xla import ops, programs

    pool, seeds = program._pool(program.held(), []), program._seeds()
    inputs = [pool[at] if at >= 0 else seeds[at] for at in program._read_at]
    replaced = dict(program._changed_at)
    pairs = [(n, replaced[at]) for n, at in enumerate(program._read_at) if at in replaced]

    def run() -> float:
        began = time.thread_time()
        results = programs.run_again(program.code, inputs)
        for position, number in pairs:
            inputs[position] = results[number]
        del results
        return time.thread_time() - began

    taken = []
    for _ in range(steps):
        ops.runtime().repeat_collectives(program.collectives)
        taken.append(worker.call(run))
        xm.wait_device_ops()
    values = {program._read_at[n]: inputs[n] for n, _ in pairs}
    programs.put([pool[at] for at in values], [*values.values()])
    return min(taken)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 24, 48])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args(argv)
    flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)
    print("| blocks | way | median, ms | least | torch_xla | process | inputs | goal |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for blocks in options.blocks:
        shape = gpt.Shape(options.width, blocks, length=8, vocabulary=256)
        for way in options.ways:
            given = (way, shape, options.ranks, options.steps)
            found = launch(measure, given, num_ranks=options.ranks)[0]
            print(_row(blocks, way, found), flush=True)
    return 0


def _row(blocks: int, way: str, found: Measured) -> str:
    times = [f"{each:.1f}" for each in (found.rank, found.least, found.process)]
    cells = [blocks, way, *times[:2], "", times[2], "", ""]
    if found.inputs:
        goal = 3.0 if way.startswith("stacked") else 5 + found.inputs / 100
        cells[4], cells[6:] = f"{found.torch_xla:.1f}", [found.inputs, f"{goal:.1f}"]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
