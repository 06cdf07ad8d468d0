"""What the scripts of large models share: a training step, building one rank.

Words: a *pretended* job is one rank with the others left out, as ``LocalCollectives`` allows.
Always true: what ``report_building`` builds is what that rank would build; memory is the peak of
this process above what it took to start torch_xla. On CPU that holds the device's memory, too,
which is named apart: on a TPU it is the chip's. Models, their units and sizes are the scripts' own.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch_xla
from torch import Tensor, nn

from xla_fsdp import LocalCollectives
from xla_fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814

GIB = 2**30


def optimizer_of(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a step for preflight."""
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1)


def training_step(
    optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]
) -> Callable[[], None]:
    """One step on what ``loss()`` returns, as preflight wants it."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()  # before the sync: else gradients are results of the program
        torch_xla.sync()

    return step


def leave_alone(module: nn.Module) -> None:
    """No values: for preflight they do not matter, and memory that nobody wrote to takes none."""


def fill(module: nn.Module) -> None:
    """The same value everywhere: takes the memory of real ones, and less time."""
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.fill_(0.01)


def build_one_rank(
    description: str,
    ranks: int,
    sizes: Mapping[str, int],
    build: Callable[..., nn.Module],
    argv: Sequence[str] | None,
) -> int:
    """The command line of a script: build one rank's shards, and say what that took.

    Args:
        description: for ``--help``.
        ranks: default of ``--ranks``.
        sizes: flags and their defaults.
        build: makes the sharded model; called with sizes, and options for the wrapper.
        argv: the command line.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=ranks, help="how many there are to be")
    parser.add_argument("--optimizer", action="store_true", help="with AdamW's two moments")
    parser.add_argument("--quick", action="store_true", help="fill in one value, not random ones")
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    given = vars(parser.parse_args(argv))
    options = {"param_init_fn": fill} if given.pop("quick") else {}
    count, moments = given.pop("ranks"), given.pop("optimizer")
    print(report_building(lambda **more: build(given, **{**options, **more}), count, moments))
    return 0


def report_building(build: Callable[..., nn.Module], ranks: int, moments: bool = False) -> str:
    """Build the model as rank 0 of ``ranks``; returns a line on its size, memory and time.

    Args:
        build: makes the sharded model; called with options for the wrapper.
        ranks: how many there are to be.
        moments: whether to make the optimizer's state, too.
    """
    options = {"collectives": LocalCollectives(0, ranks)}
    FSDP(nn.Linear(8, 8), **options)  # what torch_xla sets up at its first use
    before, start = _peak_bytes(), time.perf_counter()
    model = build(**options)
    torch_xla.sync()
    kept = [*model.parameters(), *(_moments(model) if moments else [])]
    torch_xla.sync(wait=True)
    seconds, peak = time.perf_counter() - start, _peak_bytes() - before
    elements = sum(param.numel() for param in model.parameters())
    return (
        f"rank 0 of {ranks}: {elements / 1e6:.1f} million elements in its shards, built in "
        f"{seconds:.0f} s with a peak of {peak / GIB:.2f} GiB of memory, "
        f"{sum(each.nbytes for each in kept) / GIB:.2f} GiB of it {_what(moments)}"
    )


def _what(moments: bool) -> str:
    return "shards and two moments in fp32" if moments else "shards in fp32"


def _moments(model: nn.Module) -> list[Tensor]:
    """What AdamW makes for every shard, as it makes it: on the device."""
    return [torch.zeros_like(param) for param in model.parameters() for _ in range(2)]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
