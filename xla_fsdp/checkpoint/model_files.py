"""The files that a full checkpoint is written to: names, and what goes into which.

Words: the *kinds* of output are one torch file; one safetensors file ``x.safetensors``, with the
optimizer beside it in ``x.optimizer.safetensors``; and a directory as Hugging Face's
``from_pretrained`` reads it: ``model.safetensors``, or parts of it with
``model.safetensors.index.json``, and ``optimizer.safetensors`` likewise.
Always true: a safetensors file holds a tied tensor once, under its canonical name, and says in its
metadata what else it is called (``alias: canonical``, as the safetensors library writes it), unless
copies are asked for; optimizer state goes by FSDP2's names, ``state.<parameter>.<state>``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.full_tensors import FullCheckpoint, FullOptimizer
from xla_fsdp.checkpoint.outputs import (
    BytesOutput,
    Fingerprints,
    Output,
    SafetensorsOutput,
    TorchOutput,
)
from xla_fsdp.checkpoint.tensor_source import TensorSource

SAFETENSORS = ".safetensors"

FINGERPRINTS = "xla_fsdp_fingerprints"

OPTIMIZER = "xla_fsdp_optimizer"

"""Keys of a merged file's metadata; their values are JSON."""

DEFAULT_SHARD_SIZE = 5_000_000_000

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Kind(Enum):
    """What a full checkpoint is written as."""

    TORCH = "one torch file"
    SAFETENSORS = "one safetensors file"
    DIRECTORY = "a directory of safetensors files"
    DCP = "a directory of torch.distributed.checkpoint"


@dataclass(frozen=True)
class Layout:
    """How full checkpoints are divided into files.

    Args:
        max_shard_size: in bytes, of each safetensors file in a directory; a tensor that is larger
            gets a file of its own.
        copy_ties: whether every name of a tied tensor gets its own copy in safetensors files.
    """

    max_shard_size: int = DEFAULT_SHARD_SIZE
    copy_ties: bool = False


def parse_size(text: str) -> int:
    """Bytes, from ``"5GB"``, ``"200 MiB"`` or ``"1000"``.

    Raises:
        CheckpointError: if it is not of this form, or zero.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise CheckpointError(f"--max_shard_size {text!r} must be a size such as 5GB or 200MiB")
    return size


def kind_of(path: str) -> Kind:
    """What a path asks for: ``x.safetensors``; a directory, if there is one or it ends in a slash;
    else a torch file, whatever its name."""
    if path.endswith(SAFETENSORS):
        return Kind.SAFETENSORS
    return Kind.DIRECTORY if path.endswith(os.sep) or os.path.isdir(path) else Kind.TORCH


def model_outputs(full: FullCheckpoint, path: str, kind: Kind, layout: Layout) -> list[Output]:
    """The files for ``full`` at ``path``, in the order in which they should appear.

    Raises:
        CheckpointError: if the kind of file cannot hold something of it.
    """
    if kind is Kind.TORCH:
        return [TorchOutput(path, torch_content(full))]
    problems = [
        f"{name} is a {type(value).__name__}, no tensor: safetensors cannot hold it. Write a .pth"
        for name, value in full.model.items()
        if not isinstance(value, TensorSource)
    ]
    if problems:
        raise CheckpointError(problems)
    if kind is Kind.SAFETENSORS:
        base, parts = path.removesuffix(SAFETENSORS), Layout(1 << 62, layout.copy_ties)
        return list(_all_parts(full, base, f"{base}.optimizer", parts))
    names = [os.path.join(path, name) for name in ("model", "optimizer")]
    return list(_all_parts(full, names[0], names[1], layout))


def torch_content(full: FullCheckpoint) -> dict[str, Any]:
    """``{"model": ..., "optimizer": ...}``, the latter as FSDP2's ``get_optimizer_state_dict``."""
    content: dict[str, Any] = {"model": dict(full.model)}
    if full.optimizer is not None:
        content["optimizer"] = optimizer_content(full.optimizer)
    return content


def optimizer_content(optimizer: FullOptimizer) -> dict[str, Any]:
    """An optimizer's state dict with names of parameters in place of numbers."""
    return {
        "state": {name: dict(state) for name, state in optimizer.states.items()},
        "param_groups": [
            {**group.options, "params": list(group.params)} for group in optimizer.groups
        ],
    }


# ---------------------------------------------------------------- safetensors


def _all_parts(
    full: FullCheckpoint, model: str, optimizer: str, layout: Layout
) -> Iterator[Output]:
    # Copies too are read again from their source, so they cost no memory.
    stored = {n: t for n, t in full.model.items() if layout.copy_ties or n not in full.ties}
    aliases = {} if layout.copy_ties else _aliases(full)
    yield from _parts(model, stored, aliases, layout.max_shard_size)
    if full.optimizer is not None:
        tensors = {
            f"state.{name}.{what}": value
            for name, state in full.optimizer.states.items()
            for what, value in state.items()
            if isinstance(value, TensorSource)
        }
        own = {OPTIMIZER: json.dumps(_described(full.optimizer))}
        yield from _parts(optimizer, tensors, own, layout.max_shard_size)


def _aliases(full: FullCheckpoint) -> dict[str, str]:
    """Alias to canonical name, except for names that are the metadata's own."""
    own = ("format", FINGERPRINTS, OPTIMIZER)
    return {alias: name for alias, name in full.ties.items() if alias not in own}


def _described(optimizer: FullOptimizer) -> dict[str, Any]:
    """All but the tensors, of which the names are given."""
    return {
        "param_groups": optimizer_content(optimizer)["param_groups"],
        "state": {
            name: {
                "tensors": [w for w, v in state.items() if isinstance(v, TensorSource)],
                "values": {w: v for w, v in state.items() if not isinstance(v, TensorSource)},
            }
            for name, state in optimizer.states.items()
        },
    }


def _parts(
    base: str, tensors: Mapping[str, TensorSource], metadata: Mapping[str, str], limit: int
) -> Iterator[Output]:
    """One file, or several and their index, as ``huggingface_hub`` names them."""
    groups = list(_grouped(tensors, limit))
    paths = [_part_path(base, i, len(groups)) for i in range(len(groups))]
    for path, group in zip(paths, groups, strict=True):
        yield SafetensorsOutput(path, group, partial(_metadata, metadata))
    if len(groups) > 1:
        places = {
            name: os.path.basename(path)
            for path, group in zip(paths, groups, strict=True)
            for name in group
        }
        total = sum(source.spec.nbytes for source in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        yield BytesOutput(f"{base}{SAFETENSORS}.index.json", json.dumps(index, indent=1).encode())


def _grouped(tensors: Mapping[str, TensorSource], limit: int) -> Iterator[dict[str, TensorSource]]:
    group: dict[str, TensorSource] = {}
    size = 0
    for name, source in tensors.items():
        if group and size + source.spec.nbytes > limit:
            yield group
            group, size = {}, 0
        group[name] = source
        size += source.spec.nbytes
    yield group


def _part_path(base: str, index: int, count: int) -> str:
    return (
        f"{base}{SAFETENSORS}"
        if count == 1
        else f"{base}-{index + 1:05d}-of-{count:05d}{SAFETENSORS}"
    )


def _metadata(own: Mapping[str, str], fingerprints: Fingerprints) -> dict[str, str]:
    return {**own, "format": "pt", FINGERPRINTS: json.dumps(dict(fingerprints))}
