"""Steps per second of the MNIST job on CPU ranks: this package, torch_xla's FSDP, data parallel.

    python benchmarks/mnist.py                      # the table, on 8 ranks
    python benchmarks/mnist.py --steps 40 --ways replayed "data parallel replayed"

All ways train the network of ``examples/mnist`` in one launch, in turns, so that a change in the
machine's load meets all of them. ``upstream`` is torch_xla's own FSDP, nested in the same way.
Goals: 2.5 times upstream, and 0.85 of data parallel replayed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "mnist"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "shared"))

import xla_fsdp  # noqa: F401  (first: torch_xla then does not remark that there is no TPU)

# isort: split
import torch_xla.core.xla_model as xm

from compare import steps_per_second
from evaluate import load_digits
from job import Options, parse_options
from ranks import this_place, zeros
from train import build_model, make_batches, make_optimizer, make_step, shard_model
from xla_fsdp import launch

WAYS = ("replayed", "traced", "upstream", "data parallel replayed", "data parallel traced")


def make_way(way: str, options: Options, batch: Any) -> Callable[[], None]:
    """Return a function that takes one step of the way."""
    place = this_place()
    model: Any = build_model(options.seed)
    if way == "upstream":
        model = _upstream(model)
    elif way.startswith("data parallel"):
        model = model.to(place.device)
    else:
        model = shard_model(model, options)
    optimizer = make_optimizer(model, options)
    take = make_step(options if way.endswith("replayed") else _traced(options))
    update = [xm.optimizer_step] if way.startswith("data parallel") else []
    correct = zeros(place)
    model.train()

    def step() -> None:
        nonlocal correct
        _, correct = take(model, optimizer, batch, correct, *update)

    return step


def _traced(options: Options) -> Options:
    return Options(**{**vars(options), "compile_step": False})


def _upstream(model: Any) -> Any:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Upstream

    for name in ("conv1", "conv2", "fc1", "fc2"):
        setattr(model, name, Upstream(getattr(model, name)))
    return Upstream(model)


def measure(rank: int, ways: Sequence[str], steps: int) -> dict[str, float]:
    """Return steps per second by way."""
    options = parse_options([])
    digits = load_digits(options.data_dir, True)
    batch = next(make_batches(digits, this_place(), options).epoch(0))
    return steps_per_second({way: make_way(way, options, batch) for way in ways}, steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    given = parser.parse_args(argv)
    os.environ["XLA_FSDP_NUM_RANKS"] = str(given.ranks)
    rates = launch(measure, (given.ways, given.steps), num_ranks=given.ranks)[0]
    print("| way | steps/s | of upstream | of data parallel replayed |\n|---|---|---|---|")
    others = [rates.get("upstream"), rates.get("data parallel replayed")]
    for way, rate in rates.items():
        ratios = [f"{rate / other:.2f}" if other else "" for other in others]
        print(f"| {way} | {rate:.1f} | {' | '.join(ratios)} |")
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
