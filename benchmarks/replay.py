"""Host time of a training step, traced and replayed.

    python benchmarks/replay.py                              # the table, on two CPU ranks
    python benchmarks/replay.py --width 1024 --blocks 4 24   # slow on a CPU: the ranks compute, too

Tracing and replaying cost the same for any width. The default is narrow, so that what the CPU ranks
compute is small; ``process`` counts it, as well as autograd's threads. ``rank`` is the CPU time of
one rank's own thread: all of a replay, but without backward for a traced step. ``goal`` is 5 ms
and 10 us for each input of the program, 3 ms for stacked blocks.

``upstream`` is torch_xla's own FSDP without rematerialization, which fails on CPU ranks there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks import gpt
from xla_fsdp import compile_step, launch, one_rank_at_a_time, scan_blocks

RANKS = 2
WARM_UP, STEPS = 4, 10
WAYS = ("upstream", "traced", "replayed", "stacked traced", "stacked replayed")

Measured = tuple[float, float, int]


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

    return compile_step(step) if way.endswith("replayed") else step


def _wrappers(way: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what wraps modules, and what makes them rematerialized."""
    if way == "upstream":
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Upstream

        return Upstream, lambda block: block
    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

    return XlaFullyShardedDataParallel, checkpoint_module


def measure(rank: int, way: str, shape: gpt.Shape) -> Measured:
    """Return milliseconds of CPU per step of this rank's thread and, divided by the ranks, of the
    process; and the number of the program's inputs, if it is replayed."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    step = build(way, shape)

    def take(count: int) -> None:
        for _ in range(count):
            step()
            if not way.endswith("replayed"):
                torch_xla.sync()
        xm.wait_device_ops()

    take(WARM_UP)
    xm.rendezvous("all ranks are warm")
    thread, process = time.thread_time(), time.process_time()
    take(STEPS)
    spent = time.thread_time() - thread, time.process_time() - process
    xm.rendezvous("all ranks are done")
    inputs = 0
    if way.endswith("replayed"):
        [[*_, program]] = step._own._programs.values()  # type: ignore[attr-defined]
        inputs = len(program.inputs)
    return spent[0] / STEPS * 1e3, spent[1] / STEPS / RANKS * 1e3, inputs


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 24, 48])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args(argv)
    flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)
    print("| blocks | way | rank, ms | process, ms per rank | inputs | goal, ms |")
    print("|---|---|---|---|---|---|")
    for blocks in options.blocks:
        shape = gpt.Shape(options.width, blocks, length=8, vocabulary=256)
        for way in options.ways:
            rank, process, inputs = launch(measure, (way, shape), num_ranks=RANKS)[0]
            goal = 3.0 if way.startswith("stacked") else 5 + inputs / 100
            row = f"{blocks} | {way} | {rank:.1f} | {process:.1f} | {inputs or ''}"
            print(f"| {row} | {f'{goal:.1f}' if inputs else ''} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
