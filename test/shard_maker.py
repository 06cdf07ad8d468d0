"""Shards in our format, made by hand from full tensors: what training would have saved.

Words: as in ``xla_fsdp.checkpoint.format``. ``FullModel`` says what is saved how.
Always true: no code of ``xla_fsdp.checkpoint.merge`` takes part, only the layout's arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.checkpoint import MemberRecord, ParamRecord, ShardMetadata
from xla_fsdp.layout import ShardLayout

Bits = tuple[torch.dtype, tuple[int, ...], bytes]


@dataclass
class FullModel:
    """Full tensors by name; ``flat`` maps a key to the parameters joined under it; ``casts`` maps
    a whole tensor to the dtype it is saved in."""

    params: dict[str, Tensor]
    flat: dict[str, list[str]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    casts: dict[str, torch.dtype] = field(default_factory=dict)
    multiple: int = 128

    def groups(self) -> dict[str, list[str]]:
        """State dict key to the names of its members."""
        flattened = {name for names in self.flat.values() for name in names}
        single = {name: [name] for name in self.params if name not in flattened}
        return {**single, **self.flat}

    def shard(self, rank: int, world_size: int) -> dict[str, Any]:
        """What one rank saves."""
        state_dict: dict[str, Tensor] = {}
        records = []
        for key, names in self.groups().items():
            joined = torch.cat([self.params[name].reshape(-1) for name in names])
            layout = ShardLayout(tuple(joined.shape), world_size, self.multiple)
            state_dict[key] = slice_of(joined, layout, rank)
            members = tuple(MemberRecord(n, tuple(self.params[n].shape)) for n in names)
            dtype = str(joined.dtype).removeprefix("torch.")
            records.append(ParamRecord(key, dtype, self.multiple, members))
        for alias, canonical in self.ties.items():
            if canonical in state_dict:
                state_dict[alias] = state_dict[canonical]
        for name, value in self.whole.items():
            state_dict[name] = value.to(self.casts.get(name, value.dtype))
        buffers = {n: str(self.whole[n].dtype).removeprefix("torch.") for n in self.casts}
        metadata = ShardMetadata(rank, world_size, tuple(records), dict(self.ties), buffers)
        return {"model": state_dict, "shard_metadata": metadata.to_dict()}

    def expected(self) -> dict[str, Tensor]:
        """The full state dict that merging must give."""
        whole = {n: v.to(self.casts.get(n, v.dtype)).to(v.dtype) for n, v in self.whole.items()}
        aliases = {alias: self.params[canonical] for alias, canonical in self.ties.items()}
        return {**self.params, **aliases, **whole}

    def save(self, directory: Path, world_size: int, **other: Any) -> list[Path]:
        """Write the files of all ranks and return their paths, in rank order."""
        paths = [file_of(directory, rank, world_size) for rank in range(world_size)]
        for rank, path in enumerate(paths):
            torch.save({**self.shard(rank, world_size), **other}, path)
        return paths


def file_of(directory: Path, rank: int, world_size: int) -> Path:
    """The usual name of a shard file."""
    return directory / f"mnist_rank-{rank:08d}-of-{world_size:08d}.pth"


def slice_of(joined: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """A rank's slice, padded with a value that must never come out of a merge."""
    held = joined[layout.slice_for(rank)]
    shard = torch.full((layout.shard_numel,), 77, dtype=joined.dtype)
    shard[: held.numel()] = held
    return shard


def every_kind() -> FullModel:
    """Uneven, scalar, empty and bfloat16 parameters, flat and tied ones, whole ones, buffers."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return FullModel(
        params={
            "embed.weight": random(37, 11),
            "scale": random(),
            "none": random(0, 3),
            "half": random(5, 3).bfloat16(),
            "layer.weight": random(7, 13),
            "layer.bias": random(7),
            "layer.gain": random(),
        },
        flat={"layer.flat_param_0": ["layer.weight", "layer.bias", "layer.gain"]},
        ties={"head.weight": "embed.weight", "copy.weight": "layer.weight"},
        whole={
            "ignored": random(3, 2),
            "bn.running_mean": random(4),
            "bn.num_batches_tracked": torch.tensor(5),
        },
        casts={"bn.running_mean": torch.bfloat16},
    )


def bits(state_dict: Mapping[str, Any]) -> dict[str, Bits]:
    """Dtype, shape and exact content of every tensor."""
    return {
        name: (
            value.dtype,
            tuple(value.shape),
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, value in state_dict.items()
    }


def snapshot(directory: Path) -> dict[str, bytes]:
    """Names and contents of all files of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
