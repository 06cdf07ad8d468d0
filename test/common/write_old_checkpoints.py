"""Writes small checkpoints to be read by every later version: ``test/data/checkpoints``.

    python test/common/write_old_checkpoints.py adamw hybrid  # by the xla_fsdp that is imported

Each gets a directory: what was saved, and ``expected.safetensors``, the full tensors that the job
held then: ``model/<name>`` and ``optim/<name>/<state>``. What is there already is never replaced.
Every rank trains on the same rows, so the buffers of all ranks are equal. Only names that old
versions have are imported, and only where a case needs them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CHECKPOINTS = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
WIDTH, FEATURES = 10, 5
STEPS = 2
EXTRA = {"epoch": 3, "names": ("a", "b"), "noise": torch.arange(3)}


class Block(nn.Module):
    """Residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, statistics that are not at their defaults, tied layers, a scalar, a frozen layer."""

    def __init__(self, *, scalar: bool = True) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        for buffer in (self.norm.running_mean, self.norm.running_var):
            assert buffer is not None
            nn.init.uniform_(buffer)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.left, self.right = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.right.weight = self.left.weight
        self.frozen = nn.Linear(WIDTH, 3, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7)) if scalar else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inp(x))
        for block in self.blocks:
            x = block(x)
        x = self.frozen(self.right(torch.tanh(self.left(x))))
        return x if self.scale is None else x * self.scale


def make(seed: int = 3, **options: Any) -> Any:
    """A model with the same values on every rank."""
    from xla_fsdp import one_rank_at_a_time

    with one_rank_at_a_time(), torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**options)


def rows() -> Tensor:
    """A small batch on this rank's device, the same on every rank."""
    import torch_xla

    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, FEATURES, generator=generator).to(torch_xla.device())


# ---------------------------------------------------------------- ways to shard


def nested(model: Any, wrap: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Each block a unit, and the rest the root."""
    if wrap is None:
        from xla_fsdp import XlaFullyShardedDataParallel

        wrap = XlaFullyShardedDataParallel
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block, **options)
    return wrap(model, **options)


def in_place(model: Any) -> Any:
    """The same by ``fully_shard``."""
    from xla_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def stacked(model: Any) -> Any:
    """With all blocks' parameters in stacks."""
    from xla_fsdp import scan_blocks

    model = nested(model)
    scan_blocks(model.blocks, stacked=True)
    return model


def hybrid(model: Any) -> Any:
    """Two replicas of two shards."""
    from xla_fsdp import init_mesh

    return nested(model, mesh=init_mesh((2, 2), ("replica", "shard")))


def tensor_parallel(model: Any) -> Any:
    """Two shards of two tensor-parallel parts."""
    from xla_fsdp import init_mesh
    from xla_fsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_mesh((2, 2), ("shard", "tensor"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return nested(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["shard"])


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One job.

    Args:
        num_ranks: how many saved it.
        shard: how.
        optimizer: makes its optimizer; None for one that was never trained.
        saved: a "run", or "shards" in a file per rank.
        options: of ``save_checkpoint``.
        shards_fit: whether this version makes the same shards; others have to be merged to load.
    """

    num_ranks: int
    shard: Callable[[Any], Any]
    optimizer: Callable[[Any], Any] | None = None
    saved: str = "run"
    options: dict[str, Any] = field(default_factory=dict)
    shards_fit: bool = True


def adamw(params: Any) -> torch.optim.Optimizer:
    """With two states per parameter."""
    return torch.optim.AdamW(params, lr=0.01)


def momentum(params: Any) -> torch.optim.Optimizer:
    """With one."""
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


FLAT = partial(nested, flatten_parameters=True)
CASES = {
    "adamw": Case(3, nested, adamw),
    "momentum_flat_pth": Case(2, FLAT, momentum, options={"file_format": "pth"}),
    "in_place": Case(2, in_place, adamw),
    "rows": Case(3, partial(nested, shard_param_on_dim_0=True), momentum),
    "stacked": Case(2, stacked, adamw),
    "hybrid": Case(4, hybrid, adamw),
    "tensor_parallel": Case(4, tensor_parallel, adamw),
    "shards": Case(2, nested, saved="shards"),
    "shards_flat": Case(2, FLAT, saved="shards"),
    "upstream": Case(3, nested, saved="shards"),
    "upstream_flat": Case(3, FLAT, saved="shards"),
    "version_1": Case(2, nested, saved="shards"),
    "version_1_flat": Case(2, FLAT, saved="shards", shards_fit=False),
    "version_2": Case(2, nested, adamw),
    "version_2_flat_pth": Case(3, FLAT, momentum, options={"file_format": "pth"}),
    "version_4": Case(3, nested, adamw),
    "version_4_flat_pth": Case(2, FLAT, momentum, options={"file_format": "pth"}),
}
"""By name of its directory."""


def shard_file(directory: Path, rank: int, num_ranks: int) -> Path:
    """Of one rank."""
    return directory / "shards" / f"rank-{rank}-of-{num_ranks}.pth"


# ---------------------------------------------------------------- writing


def write(rank: int, name: str, directory: Path) -> None:
    """Train, and save; on every rank."""
    import torch_xla

    case = CASES[name]
    model = case.shard(make())
    if case.saved == "shards":
        checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
        _save_shard(checkpoint, shard_file(directory, rank, case.num_ranks))
        if not rank:
            write_expected(directory, make().state_dict())
        return
    from xla_fsdp import full_state_dict, optim_state_dict, save_checkpoint

    assert case.optimizer is not None
    optimizer = case.optimizer(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(rows()).square().sum().backward()
        optimizer.step()
        torch_xla.sync()
    save_checkpoint(directory / "run", model, optimizer, extra=EXTRA, step=STEPS, **case.options)
    state, optim = full_state_dict(model), optim_state_dict(model, optimizer)
    if not rank:
        write_expected(directory, state, optim["state"])


def write_upstream(name: str, directory: Path) -> None:
    """By torch_xla's own FSDP, every rank in turn on one device: a rank's parameters are its slices
    from construction on."""
    import torch_xla
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    case = CASES[name]
    for rank in range(case.num_ranks):
        torch.manual_seed(3)
        net = Net()
        if not rank:
            state = net.state_dict()
            # Not in upstream's files: the second name of a weight tied inside one unit.
            del state["right.weight"]
            write_expected(directory, state)
        for module in net.modules():  # buffers there before wrapping keep their dtype
            for buffer_name, buffer in module.named_buffers(recurse=False):
                setattr(module, buffer_name, buffer.to(torch_xla.device()))
        wrap = partial(
            XlaFullyShardedDataParallel,
            sharding_groups=[list(range(case.num_ranks))],
            sharding_rank=rank,
            sharding_world_size=case.num_ranks,
            execute_sharding_on_init=False,
            pin_layout_in_collective_ops=False,
        )
        model = case.shard(net, wrap=wrap)
        checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
        _save_shard(checkpoint, shard_file(directory, rank, case.num_ranks))


def _save_shard(checkpoint: dict[str, Any], path: Path) -> None:
    import torch_xla.core.xla_model as xm

    path.parent.mkdir(exist_ok=True)
    xm.save(checkpoint, str(path), master_only=False)


def write_expected(directory: Path, model: Any, states: Any = None) -> None:
    """What merging has to give."""
    from safetensors.torch import save_file

    found = {f"model/{name}": value for name, value in model.items()}
    for name, own in (states or {}).items():
        found |= {f"optim/{name}/{state}": value for state, value in own.items()}
    save_file(
        {name: value.detach().cpu().clone().contiguous() for name, value in found.items()},
        directory / "expected.safetensors",
    )


def _write_case(name: str, directory: Path) -> None:
    """In a process of its own."""
    from xla_fsdp import launch

    directory.mkdir()
    if name.startswith("upstream"):
        write_upstream(name, directory)
    else:
        launch(write, (name, directory), num_ranks=CASES[name].num_ranks)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the cases that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--directory", type=Path, default=CHECKPOINTS)
    options = parser.parse_args(argv)
    os.environ["PJRT_DEVICE"] = "CPU"
    for name in options.cases:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(_write_case, name, options.directory / name).result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
