"""A model wrapped in every way on any number of ranks, saved and loaded by all others.

``save_all`` and ``load_all`` run on ranks. What was saved is kept as a plain file too, with which
all that is loaded is compared, bit for bit. Rank 0 tells what it found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from test.common.scenarios import fsdp, make, nested
from test.common.tensor_models import Gpt, plan_of

WRAPPINGS = ("nested", "flat", "rows", "scan", "fully_shard", "tensor", "adapters")


def fits(wrapping: str, ranks: int) -> bool:
    """Whether there is such a model: two parts of a tensor need an even number of ranks."""
    return wrapping != "tensor" or ranks % 2 == 0


def pairs(kinds: tuple[str, ...], sizes: tuple[int, ...]) -> list[tuple[str, int, str, int]]:
    """What is saved, on how many ranks, and as what on how many it is loaded. Adapters have names
    of their own."""
    saved = [(each, ranks) for ranks in sizes for each in kinds if fits(each, ranks)]
    return [
        (*one, *other)
        for one in saved
        for other in saved
        if (one[0] == "adapters") == (other[0] == "adapters")
    ]


def build() -> Any:
    model = make(Gpt)
    model.positions.weight.requires_grad_(False)
    return model


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["norm"])
    return get_peft_model(model, config)


def wrapped(wrapping: str, ranks: int) -> Any:
    """The model in one way."""
    from xla_fsdp import fully_shard, init_mesh
    from xla_fsdp.scan import scan_blocks
    from xla_fsdp.tensor_parallel import parallelize_module

    model = build()
    if wrapping == "flat":
        return nested(model, flatten_parameters=True)
    if wrapping == "rows":
        return nested(model, shard_param_on_dim_0=True)
    if wrapping == "fully_shard":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if wrapping == "tensor":
        mesh = init_mesh([ranks // 2, 2], ["shard", "tensor"])
        model = parallelize_module(
            model, mesh["tensor"], plan_of("Gpt", sequence=False, loss=False)
        )
        return nested(model, mesh=mesh["shard"])
    if wrapping == "adapters":
        return fsdp(make(lambda: with_adapters(Gpt())))
    model = nested(model)
    if wrapping == "scan":
        scan_blocks(model.blocks, stacked=True)
    return model


def job(wrapping: str, ranks: int) -> tuple[Any, Any]:
    """Model and optimizer."""
    model = wrapped(wrapping, ranks)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def contents(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Every whole tensor, by name; on other ranks than 0 they are not of use."""
    from xla_fsdp import full_state_dict, optim_state_dict

    states = optim_state_dict(model, optimizer)["state"]
    found = {f"{name} {what}": v for name, own in states.items() for what, v in own.items()}
    return {k: v.cpu() for k, v in {**full_state_dict(model), **found}.items()}


def step(model: Any, optimizer: Any) -> None:
    """A step whose gradients follow from the parameters."""
    import torch_xla

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.3
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()


def manager(folder: str, wrapping: str, ranks: int) -> Any:
    """Of two tiers."""
    from xla_fsdp import CheckpointManager

    where = f"{folder}/{wrapping}-{ranks}"
    return CheckpointManager(where, local_directory=f"{where}-disk", local_interval_steps=1)


def save_all(rank: int, folder: str, kinds: tuple[str, ...], ranks: int) -> None:
    """Save every wrapping; the one of ``nested`` by a manager of two tiers."""
    from xla_fsdp import save_checkpoint

    for wrapping in kinds:
        if not fits(wrapping, ranks):
            continue
        model, optimizer = job(wrapping, ranks)
        step(model, optimizer)
        if wrapping == "nested":
            with manager(folder, wrapping, ranks) as keeper:
                keeper.save(1, model, optimizer, metrics={"loss": ranks / 2}, force=True)
        else:
            save_checkpoint(f"{folder}/{wrapping}-{ranks}", model, optimizer, step=1)
        found = contents(model, optimizer)
        if rank == 0:
            torch.save(found, f"{folder}/{wrapping}-{ranks}.pt")


def load_all(
    rank: int, folder: str, kinds: tuple[str, ...], sizes: tuple[int, ...], ranks: int
) -> list[Any]:
    """Load what all have saved as every wrapping; what was compared, and what differs."""
    told: list[Any] = []
    for wrapping in kinds:
        if not fits(wrapping, ranks):
            continue
        model, optimizer = job(wrapping, ranks)
        for saved, size, as_what, on in pairs(kinds, sizes):
            if (as_what, on) == (wrapping, ranks):
                load(folder, saved, size, model, optimizer)
                expected = torch.load(f"{folder}/{saved}-{size}.pt") if rank == 0 else {}
                found = contents(model, optimizer)
                told.append((saved, size, as_what, on, rank == 0 and differences(found, expected)))
                clear(model, optimizer)
    return told


def load(folder: str, saved: str, size: int, model: Any, optimizer: Any) -> None:
    from xla_fsdp import load_checkpoint

    if saved == "nested":
        restored = manager(folder, saved, size).restore(model, optimizer)
        assert (restored.step, restored.metrics) == (1, {"loss": size / 2})
    else:
        load_checkpoint(f"{folder}/{saved}-{size}", model, optimizer)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    names = sorted(found.keys() ^ expected.keys())
    return names + [n for n in found.keys() & expected.keys() if not same(found[n], expected[n])]


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def clear(model: Any, optimizer: Any) -> None:
    """Nothing of what was loaded is left."""
    import torch_xla

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    optimizer.state.clear()
    torch_xla.sync()


def merged(folder: Path, saved: str, size: int) -> list[str]:
    """How the merged file of a run differs from what was saved, without torch_xla."""
    from xla_fsdp.consolidate_sharded_ckpts import main

    out = folder / f"{saved}-{size}-merged.pth"
    assert main(["--ckpt_prefix", f"{folder}/{saved}-{size}", "--save_path", str(out)]) == 0
    content = torch.load(out, weights_only=True)
    states = content["optimizer"]["state"].items()
    own = {f"{name} {what}": v for name, state in states for what, v in state.items()}
    return differences({**content["model"], **own}, torch.load(folder / f"{saved}-{size}.pt"))
