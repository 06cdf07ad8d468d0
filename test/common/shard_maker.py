"""Shard files made by hand from the full tensors of a ``FullModel``, as training would save them.

Only the arithmetic of the shard layout is shared with the code under test.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from xla_fsdp.checkpoint import (
    GroupRecord,
    MemberRecord,
    OptimizerRecord,
    ParamRecord,
    ShardMetadata,
    StateRecord,
)
from xla_fsdp.consolidate_sharded_ckpts import main
from xla_fsdp.distributed.shard_layout import ShardLayout

Bits = tuple[torch.dtype, tuple[int, ...], bytes]


@dataclass
class FullModel:
    """Full tensors by name; ``flat`` maps a key to the parameters joined under it; ``casts`` maps
    a whole tensor to the dtype it is saved in; ``rows`` are sharded by rows; ``states`` are the
    optimizer's tensors of a parameter's shape, and ``steps`` a number it keeps by key."""

    params: dict[str, Tensor]
    flat: dict[str, list[str]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    casts: dict[str, torch.dtype] = field(default_factory=dict)
    multiple: int = 128
    rows: frozenset[str] = frozenset()
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)

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
            state_dict[key] = self._cut(names, self.params, rank, world_size)
            members = tuple(MemberRecord(n, tuple(self.params[n].shape)) for n in names)
            by_rows = names[0] in self.rows
            multiple = max(1, self.params[names[0]][:1].numel()) if by_rows else self.multiple
            records.append(ParamRecord(key, _name(state_dict[key]), multiple, members, by_rows))
        for alias, canonical in self.ties.items():
            if canonical in state_dict:
                state_dict[alias] = state_dict[canonical]
        for name, value in self.whole.items():
            state_dict[name] = value.to(self.casts.get(name, value.dtype))
        buffers = {n: _name(self.whole[n]) for n in self.casts}
        optimizer = self._optimizer(rank, world_size)
        metadata = ShardMetadata(
            rank,
            world_size,
            tuple(records),
            dict(self.ties),
            buffers,
            optimizer=self._record() if self.states or self.steps else None,
        )
        content = {"model": state_dict, "shard_metadata": metadata.to_dict()}
        return {**content, "optimizer": {"state": optimizer}} if optimizer else content

    def _cut(
        self, names: list[str], full: Mapping[str, Tensor], rank: int, world_size: int
    ) -> Tensor:
        if names[0] in self.rows:
            tensor = full[names[0]]
            layout = ShardLayout(tuple(tensor.shape[:1]), world_size, multiple=1)
            return slice_of(tensor, layout, rank)
        joined = torch.cat([full[name].reshape(-1) for name in names])
        return slice_of(joined, ShardLayout(tuple(joined.shape), world_size, self.multiple), rank)

    def _optimizer(self, rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
        states: dict[str, dict[str, Tensor]] = {}
        for key, names in self.groups().items():
            for what in self.states.get(names[0], {}):
                full = {name: self.states[name][what] for name in names}
                states.setdefault(key, {})[what] = self._cut(names, full, rank, world_size)
        for key, step in self.steps.items():
            states.setdefault(key, {})["step"] = step
        return states

    def _record(self) -> OptimizerRecord:
        keys = {key: names[0] for key, names in self.groups().items()}
        keys |= {key: key for key in self.steps if key not in keys}
        records = {
            key: StateRecord(
                tuple(self.states.get(name, ())),
                ("step",) if key in self.steps else (),
                {"scale": 1.5},
            )
            for key, name in keys.items()
        }
        options = {"lr": 0.1, "betas": [0.9, 0.99]}
        return OptimizerRecord((GroupRecord(tuple(keys), options),), records)

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

    def save_safetensors(self, directory: Path, world_size: int) -> list[Path]:
        """As ``save``, in the default format; written by the safetensors library itself."""
        paths = [
            file_of(directory, rank, world_size).with_suffix(".safetensors")
            for rank in range(world_size)
        ]
        for rank, path in enumerate(paths):
            content = self.shard(rank, world_size)
            model = {k: v for k, v in content["model"].items() if k not in self.ties}
            tensors = {f"model/{key}": tensor for key, tensor in model.items()}
            for key, states in content.get("optimizer", {"state": {}})["state"].items():
                tensors |= {f"optim/{key}/{name}": each for name, each in states.items()}
            prints = {name: f"crc32:{_crc(tensor):08x}" for name, tensor in tensors.items()}
            metadata = {**content["shard_metadata"], "fingerprints": prints}
            save_file(tensors, path, {"format": "pt", "xla_fsdp": json.dumps(metadata)})
        return paths


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(bits({"": tensor})[""][2])


def file_of(directory: Path, rank: int, world_size: int) -> Path:
    """The usual name of a shard file."""
    return directory / f"mnist_rank-{rank:08d}-of-{world_size:08d}.pth"


def slice_of(joined: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """A rank's slice of dim 0, padded with a value that must never come out of a merge."""
    held = joined[layout.slice_for(rank)]
    shard = torch.full((layout.shard_numel, *joined.shape[1:]), 77, dtype=joined.dtype)
    shard[: held.shape[0]] = held
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


def with_optimizer() -> FullModel:
    """``every_kind`` and one parameter sharded by rows, with optimizer state of all."""
    generator = torch.Generator().manual_seed(2)
    model = every_kind()
    model.params["rows"] = torch.randn((7, 3), generator=generator)
    model.rows = frozenset({"rows"})
    model.states = {
        name: {what: torch.randn(value.shape, generator=generator) for what in ("m", "v")}
        for name, value in model.params.items()
    }
    model.steps = {key: torch.tensor(3.0) for key in (*model.groups(), "ignored")}
    return model


def run(*arguments: object) -> int:
    """Run the command line of consolidation in this process; returns its exit code."""
    return main([str(each) for each in arguments])


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
