"""What a full checkpoint is written as: names, dtypes, files, and what goes into which.

One torch file; one safetensors file ``x.safetensors``, with the optimizer beside it in
``x.optimizer.safetensors``; or a directory as Hugging Face's ``from_pretrained`` reads it:
``model.safetensors``, or parts of it with ``model.safetensors.index.json``, and
``optimizer.safetensors`` likewise.

Invariants: a safetensors file holds a tied tensor once, under its canonical name, and says in its
metadata what else it is called (``alias: canonical``, as the safetensors library writes it), unless
copies are asked for; optimizer state goes by FSDP2's names, ``state.<parameter>.<state>``. Renaming
gives model and optimizer the same names, and never makes one name of two.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from xla_fsdp.checkpoint.errors import CheckpointError, raise_if
from xla_fsdp.checkpoint.format import GroupRecord, OptimizerState, StateKind
from xla_fsdp.checkpoint.full_tensors import FullCheckpoint
from xla_fsdp.checkpoint.outputs import (
    BytesOutput,
    Checksums,
    Output,
    SafetensorsOutput,
    TorchOutput,
)
from xla_fsdp.checkpoint.shard_files import SAFETENSORS
from xla_fsdp.checkpoint.tensor_source import TensorSource

# Keys of a merged file's metadata; their values are JSON.
CHECKSUMS = "xla_fsdp_fingerprints"
OPTIMIZER = "xla_fsdp_optimizer"

DEFAULT_SHARD_SIZE = 5_000_000_000

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


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
    """Return the bytes that ``"5GB"``, ``"200 MiB"`` or ``"1000"`` means.

    Raises:
        CheckpointError: if it is not of this form, or zero.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise CheckpointError(f"--max_shard_size {text!r} must be a size such as 5GB or 200MiB")
    return size


def kind_of(path: str) -> Kind:
    """Return what a path asks for: ``x.safetensors``; a directory, if there is one or it ends in a
    slash; else a torch file, whatever its name."""
    if path.endswith(SAFETENSORS):
        return Kind.SAFETENSORS
    return Kind.DIRECTORY if path.endswith(os.sep) or os.path.isdir(path) else Kind.TORCH


def model_outputs(full: FullCheckpoint, path: str, kind: Kind, layout: Layout) -> list[Output]:
    """Return the files for ``full`` at ``path``, in the order in which they should appear.

    Raises:
        CheckpointError: if the kind of file cannot hold something of it.
    """
    if kind is Kind.TORCH:
        return [TorchOutput(path, _torch_content(full))]
    raise_if(
        [
            f"{name} is a {type(value).__name__}, no tensor: safetensors cannot hold it. Write a "
            f".pth"
            for name, value in full.model.items()
            if not isinstance(value, TensorSource)
        ]
    )
    if kind is Kind.SAFETENSORS:
        base, parts = path.removesuffix(SAFETENSORS), Layout(1 << 62, layout.copy_ties)
        return list(_all_parts(full, base, f"{base}.optimizer", parts))
    names = [os.path.join(path, name) for name in ("model", "optimizer")]
    return list(_all_parts(full, names[0], names[1], layout))


def _torch_content(full: FullCheckpoint) -> dict[str, Any]:
    content: dict[str, Any] = {"model": dict(full.model)}
    if full.optimizer is not None:
        content["optimizer"] = optimizer_content(full.optimizer)
    return content


def optimizer_content(optimizer: OptimizerState) -> dict[str, Any]:
    """Return an optimizer's state dict as FSDP2's ``get_optimizer_state_dict`` does: with names of
    parameters in place of numbers."""
    return {
        "state": {
            name: {what: entry.value for what, entry in state.items()}
            for name, state in optimizer.states.items()
        },
        "param_groups": [
            {**group.options, "params": list(group.params)} for group in optimizer.groups
        ],
    }


def _all_parts(
    full: FullCheckpoint, model: str, optimizer: str, layout: Layout
) -> Iterator[Output]:
    # Copies too are read again from their source, so they cost no memory.
    stored = {n: t for n, t in full.model.items() if layout.copy_ties or n not in full.ties}
    aliases = {} if layout.copy_ties else _aliases(full)
    yield from _parts(model, stored, aliases, layout.max_shard_size)
    if full.optimizer is not None:
        tensors = {
            f"state.{name}.{what}": tensor
            for name, tensors in full.optimizer.tensors().items()
            for what, tensor in tensors.items()
        }
        own = {OPTIMIZER: json.dumps(_described(full.optimizer))}
        yield from _parts(optimizer, tensors, own, layout.max_shard_size)


def _aliases(full: FullCheckpoint) -> dict[str, str]:
    own = ("format", CHECKSUMS, OPTIMIZER)  # keys of the metadata, which no alias may take
    return {alias: name for alias, name in full.ties.items() if alias not in own}


def _described(optimizer: OptimizerState) -> dict[str, Any]:
    """Return all but the tensors, of which the names are given."""
    record = optimizer.record()
    return {
        "param_groups": optimizer_content(optimizer)["param_groups"],
        "state": {
            name: {
                "tensors": [w for w, e in state.items() if e.kind is not StateKind.VALUE],
                "values": record.states[name].values,
            }
            for name, state in optimizer.states.items()
        },
    }


def _parts(
    base: str, tensors: Mapping[str, TensorSource], metadata: Mapping[str, str], limit: int
) -> Iterator[Output]:
    """Return one file, or several and their index, as ``huggingface_hub`` names them."""
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


def _metadata(own: Mapping[str, str], checksums: Checksums) -> dict[str, str]:
    return {**own, "format": "pt", CHECKSUMS: json.dumps(dict(checksums))}


# ---------------------------------------------------------------- other names and dtypes


@dataclass(frozen=True)
class Rule:
    """Names that begin with ``old`` begin with ``new`` instead."""

    old: str
    new: str


def parse_rule(text: str) -> Rule:
    """Return the rule that ``"OLD=NEW"`` means; NEW may be empty.

    Raises:
        CheckpointError: if it is not of this form.
    """
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise CheckpointError(f"--key_map {text!r} must be OLD=NEW, such as module.= or a.=b.")
    return Rule(old, new)


def renamed(full: FullCheckpoint, rules: Sequence[Rule]) -> FullCheckpoint:
    """Return the same checkpoint under other names; of the rules, the first that fits is used.

    Raises:
        CheckpointError: if two names become one, one becomes empty, or a rule fits no name.
    """
    names = {name: _renamed(name, rules) for name in full.model}
    problems = [
        f"key_map: {rule.old}={rule.new} fits no name of the model"
        for rule in rules
        if not any(name.startswith(rule.old) for name in names)
    ]
    problems += [
        f"key_map: {count} names become {name!r}" if name else "key_map: a name becomes empty"
        for name, count in Counter(names.values()).items()
        if count > 1 or not name
    ]
    raise_if(problems)
    return FullCheckpoint(
        model={names[name]: value for name, value in full.model.items()},
        ties={names[alias]: names[canonical] for alias, canonical in full.ties.items()},
        optimizer=full.optimizer and _renamed_optimizer(full.optimizer, names),
    )


def in_dtype(full: FullCheckpoint, dtype: torch.dtype) -> FullCheckpoint:
    """Cast the model's floating-point tensors; the optimizer's stay as they are."""
    known: dict[int, TensorSource] = {}  # a tied tensor stays one object

    def cast(value: Any) -> Any:
        if not isinstance(value, TensorSource) or not value.dtype.is_floating_point:
            return value
        return known.setdefault(id(value), value.cast(dtype))

    return replace(full, model={name: cast(value) for name, value in full.model.items()})


def _renamed(name: str, rules: Sequence[Rule]) -> str:
    rule = next((rule for rule in rules if name.startswith(rule.old)), None)
    return name if rule is None else rule.new + name.removeprefix(rule.old)


def _renamed_optimizer(optimizer: OptimizerState, names: Mapping[str, str]) -> OptimizerState:
    return OptimizerState(
        groups=tuple(
            GroupRecord(tuple(names[name] for name in group.params), group.options)
            for group in optimizer.groups
        ),
        states={names[name]: state for name, state in optimizer.states.items()},
    )
