"""One check of ``tools/tpu_smoke.sh`` on all ranks: ``python tools/tpu_smoke.py NAME``.

Rank 0 prints one line on what was found; a check that fails raises on every rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# isort: split
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814
from xla_fsdp import (
    compile_step,
    fully_shard,
    init_mesh,
    launch,
    load_checkpoint,
    one_rank_at_a_time,
    save_checkpoint,
    scan_blocks,
)

WIDTH, ROWS, STEPS = 256, 8, 4
CLOSE = 2e-2  # relative; a TPU multiplies fp32 matrices in bf16 unless told otherwise


def expect(found: float, wanted: float, what: str) -> None:
    """Raise ValueError unless the two are close."""
    if abs(found - wanted) > CLOSE * max(abs(wanted), 1e-3):
        raise ValueError(f"{what}: found {found:.6g}, expected {wanted:.6g}")


def make_model(blocks: int = 2) -> nn.Sequential:
    """The same values on every rank."""
    with one_rank_at_a_time():
        torch.manual_seed(0)
        return nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)]
        )


def rows_of(rank: int) -> Tensor:
    """One rank's batch, float32 [ROWS, WIDTH]."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def losses_on_host() -> list[float]:
    """Losses of the unsharded model on all ranks' rows, on the host."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    joined = torch.cat([rows_of(rank) for rank in range(xr.world_size())])
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(joined).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(model: nn.Module, step: Callable[..., Tensor] | None = None) -> list[float]:
    """Losses of a sharded model on this rank's rows, averaged over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = rows_of(xr.global_ordinal()).to(torch_xla.device())
    losses = []
    for _ in range(STEPS):
        loss = (step or train_step)(model, optimizer, rows)
        torch_xla.sync()
        mean = xm.all_reduce("sum", [loss.clone()], scale=1 / xr.world_size())[0]
        torch_xla.sync()
        losses.append(mean.item())
    return losses


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> Tensor:
    """Make one step; return its loss."""
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def check_losses(found: list[float]) -> str:
    """Compare with the unsharded model on the host."""
    for number, (ours, wanted) in enumerate(zip(found, losses_on_host(), strict=True)):
        expect(ours, wanted, f"loss of step {number}")
    return f"losses {found[0]:.5f} to {found[-1]:.5f}, as on the host"


# ---------------------------------------------------------------- the checks


def versions() -> str:
    """What is installed here."""
    found = [f"python {sys.version.split()[0]}"]
    for name in ("xla_fsdp", "torch", "torch_xla", "libtpu"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join([*found, f"{xr.world_size()} ranks on {torch_xla.device()}"])


def ranks() -> str:
    """Every rank is there once, and host data reach all."""
    world, rank = xr.world_size(), xr.global_ordinal()
    found = xm.rendezvous("smoke", payload=bytes([rank % 256]))
    if sorted(found) != sorted(bytes([each % 256]) for each in range(world)):
        raise ValueError(f"rendezvous found {found} on {world} ranks")
    return f"{world} ranks, {xr.process_count()} processes"


def topology() -> str:
    """The mesh stands on the torus."""
    attributes = xr.global_runtime_device_attributes()
    mesh = init_mesh((1, xr.world_size()), ("replica", "shard"))
    coordinates = [each.get("coords", "none") for each in attributes]
    return f"coordinates {coordinates[:8]}, mesh of {mesh.world_size}"


def collectives() -> str:
    """All-gather, reduce-scatter and all-reduce give the numbers that they should."""
    world, rank, device = xr.world_size(), xr.global_ordinal(), torch_xla.device()
    own = torch.full((world, 128), float(rank + 1), device=device)
    gathered = xm.all_gather(own[:1], pin_layout=False)
    scattered = xm.reduce_scatter("sum", own, 1.0, 0, world, pin_layout=False)
    reduced = xm.all_reduce("sum", [own[0].clone()])[0]
    torch_xla.sync()
    total = world * (world + 1) / 2
    expect(gathered.sum().item(), 128 * total, "all-gather")
    expect(scattered[0, 0].item(), total, "reduce-scatter")
    expect(reduced[0].item(), total, "all-reduce")
    return f"sums of {total:g}"


def wrapper() -> str:
    """Nested wrappers train as the unsharded model does."""
    model = make_model()
    for number, block in enumerate(model):
        model[number] = FSDP(block)
    return check_losses(losses_of(FSDP(model)))


def fully_sharded() -> str:
    """``fully_shard`` trains as the unsharded model does."""
    model = make_model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return check_losses(losses_of(model))


def scanned() -> str:
    """Blocks as one loop train as the unsharded model does."""
    model = make_model()
    for number, block in enumerate(model):
        model[number] = FSDP(block)
    scan_blocks(model)
    return check_losses(losses_of(FSDP(model)))


def replayed() -> str:
    """A step that is replayed trains as the unsharded model does."""
    return check_losses(losses_of(FSDP(make_model()), compile_step(train_step)))


def checkpoint() -> str:
    """A checkpoint that all ranks save is loaded again."""
    folder = shared_folder()
    model = FSDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    rows = rows_of(xr.global_ordinal()).to(torch_xla.device())
    train_step(model, optimizer, rows)
    torch_xla.sync()
    save_checkpoint(folder, model, optimizer, step=1)
    wanted = model(rows).sum().item()
    train_step(model, optimizer, rows)
    torch_xla.sync()
    load_checkpoint(folder, model, optimizer)
    expect(model(rows).sum().item(), wanted, "output after loading")
    return f"saved and loaded in {folder}"


def shared_folder() -> str:
    """``SMOKE_DIR``, or a new folder of rank 0's, which all ranks of one host see."""
    own = os.environ.get("SMOKE_DIR") or tempfile.mkdtemp(prefix="tpu_smoke-")
    first = min(xm.rendezvous("folder", payload=f"{xr.global_ordinal():06d} {own}".encode()))
    return str(Path(first.decode().partition(" ")[2], "checkpoint"))


CHECKS: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        *(versions, ranks, topology, collectives),
        *(wrapper, fully_sharded, scanned, replayed, checkpoint),
    )
}


def run_check(index: int, name: str) -> None:
    """Run a check on one rank."""
    found = CHECKS[name]()
    if xr.global_ordinal() == 0:
        print(found, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the check that is named, or list the names; returns the exit code."""
    if list(argv) == ["list"]:
        print("\n".join(CHECKS))
        return 0
    if len(argv) != 1 or argv[0] not in CHECKS:
        print(f"tpu_smoke.py: give one of {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    launch(run_check, tuple(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
